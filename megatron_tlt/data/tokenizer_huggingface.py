"""Tokenizers that the `tokenizers` library runs: GPT-2's files, Hugging Face folders."""

import hashlib
import json
import re
from collections.abc import Sequence
from pathlib import Path

import tokenizers

from megatron_tlt.data.files import sha256_of_files
from megatron_tlt.data.tokenizer_plain import tokenize_with_special

_EOD = "<|endoftext|>"
_EOD_NAMES = (_EOD, "<|end_of_text|>", "</s>", "<eos>", "<eod>")
# GPT-2's pattern never joins a visible character to a line break after it, so this is a safe cut.
_GPT2_CUT = re.compile(r"(?<=\S)(?=\n)")
_CUT_EVERY = 4096


class GPT2BPETokenizer:
    """GPT-2's byte-level BPE from `vocab.json` and `merges.txt`; `<|endoftext|>` is the EOD."""

    def __init__(self, vocab_file: str | Path, merge_file: str | Path) -> None:
        self._paths = (Path(vocab_file), Path(merge_file))
        for flag, path in zip(("--vocab-file", "--merge-file"), self._paths, strict=True):
            if not path.is_file():
                raise ValueError(
                    f"{flag} {path} is no file: GPT2BPETokenizer needs vocab.json and merges.txt"
                )
        self._bpe = tokenizers.Tokenizer(
            tokenizers.models.BPE.from_file(str(vocab_file), str(merge_file))
        )
        self._bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        self._bpe.decoder = tokenizers.decoders.ByteLevel()
        self.vocab_size = self._bpe.get_vocab_size()
        self.eod = self.eos = self._bpe.token_to_id(_EOD)
        self.pad = self.bos = None

    def tokenize(self, text: str, *, parse_special: bool = False) -> list[int]:
        if parse_special and self.eod is not None:
            return tokenize_with_special(text, {_EOD: self.eod}, self.tokenize)
        encodings = self._bpe.encode_batch_fast(_cut(text))
        return [i for encoding in encodings for i in encoding.ids]

    def detokenize(self, ids: Sequence[int]) -> str:
        return self._bpe.decode(list(ids), skip_special_tokens=False)

    def identity(self) -> dict[str, str | int]:
        digest = sha256_of_files(*self._paths)
        return {"type": "GPT2BPETokenizer", "vocab_size": self.vocab_size, "sha256": digest}


class HuggingFaceTokenizer:
    """A `tokenizer.json`, or the folder of one; else a folder or hub name for `transformers`.

    bos, eos and pad come from the `tokenizer_config.json` or `special_tokens_map.json` beside it; a
    lone `tokenizer.json` names no eos, so its special token of `_EOD_NAMES` is taken. End of
    document is eos.
    """

    def __init__(self, tokenizer_model: str) -> None:
        path = Path(tokenizer_model)
        file = path / "tokenizer.json" if path.is_dir() else path
        if file.is_file():
            self._tokenizer = tokenizers.Tokenizer.from_file(str(file))
            names = _special_names(file.parent)
        else:
            self._tokenizer, names = _from_transformers(tokenizer_model)
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        special = {
            token.content
            for token in self._tokenizer.get_added_tokens_decoder().values()
            if token.special
        }
        names.setdefault("eos_token", next((name for name in _EOD_NAMES if name in special), None))
        self.bos, self.eos, self.pad = (
            self._tokenizer.token_to_id(names[key]) if names.get(key) else None
            for key in ("bos_token", "eos_token", "pad_token")
        )
        self.eod = self.eos
        self.vocab_size = max(self._tokenizer.get_vocab().values()) + 1

    def tokenize(self, text: str, *, parse_special: bool = False) -> list[int]:
        self._tokenizer.encode_special_tokens = not parse_special
        return self._tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids

    def detokenize(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)

    def identity(self) -> dict[str, str | int]:
        self._tokenizer.encode_special_tokens = False
        digest = hashlib.sha256(self._tokenizer.to_str().encode()).hexdigest()
        return {"type": "HuggingFaceTokenizer", "vocab_size": self.vocab_size, "sha256": digest}


def _cut(text: str) -> list[str]:
    """`text` in pieces of some thousand characters, cut where no token can reach over."""
    pieces, start = [], 0
    while cut := _GPT2_CUT.search(text, start + _CUT_EVERY):
        pieces.append(text[start : cut.start()])
        start = cut.start()
    pieces.append(text[start:])
    return pieces


def _special_names(folder: Path) -> dict[str, str | None]:
    """`bos_token`, `eos_token`, `pad_token` as the files in `folder` spell them, if they do."""
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        file = folder / name
        known = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
        if "eos_token" in known:
            return {
                key: value["content"] if isinstance(value := known.get(key), dict) else value
                for key in ("bos_token", "eos_token", "pad_token")
            }
    return {}


def _from_transformers(name: str) -> tuple[tokenizers.Tokenizer, dict[str, str | None]]:
    """Let `transformers` find or convert it. Raises ValueError when it cannot."""
    from transformers import AutoTokenizer  # 5 s to import, and only here needed

    try:
        loaded = AutoTokenizer.from_pretrained(name)
    except (OSError, KeyError, ValueError) as error:
        raise ValueError(
            f"--tokenizer-model {name} is no tokenizer.json, no folder with one, and no tokenizer "
            f"that transformers can load: {' '.join(str(error).split())[:200]}"
        ) from error
    if not loaded.is_fast:
        raise ValueError(
            f"--tokenizer-model {name} has no tokenizer.json form (a slow tokenizer): convert it"
        )
    names = {key: getattr(loaded, key) for key in ("bos_token", "eos_token", "pad_token")}
    return loaded.backend_tokenizer, names
