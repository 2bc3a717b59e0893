"""Any of our tokenizers as the files that transformers loads, checked to give the same ids."""

import json
import tempfile
from pathlib import Path

from megatron_tlt.data.tokenizer import TokenizerConfig, build_tokenizer
from megatron_tlt.data.tokenizer_huggingface import HuggingFaceTokenizer
from megatron_tlt.models.hf_files import read_tokenizer_files

import sentencepiece
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

_EOD = "<|endoftext|>"
_SPACE = "\u2581"
_SAMPLE = (
    "The year 1984: 12+30=42, naïve café — “quoted”,  two  spaces\n\n\tdef f(x):\n        return x**2\n"
    "東京 🙂 e\u0301 \u00a0<|endoftext|> it's   \n"
)


def export_tokenizer(config: TokenizerConfig) -> dict[str, bytes]:
    """Name -> content of the tokenizer's files. A Hugging Face folder is passed on as it is.

    Raises ValueError for a NullTokenizer, which has no text, and when the exported tokenizer cuts a
    sample text otherwise than the original.
    """
    if config.tokenizer_type == "HuggingFaceTokenizer":
        return _files_of_folder(config.tokenizer_model)
    builders = {
        "GPT2BPETokenizer": _from_gpt2,
        "SentencePieceTokenizer": _from_sentencepiece,
        "ByteLevelTokenizer": _from_bytes,
    }
    if config.tokenizer_type not in builders:
        raise ValueError(f"{config.tokenizer_type} has no Hugging Face form: give --tokenizer-model")
    tokenizer, special = builders[config.tokenizer_type](config)
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    files = {
        "tokenizer.json": tokenizer.to_str(pretty=True).encode(),
        "tokenizer_config.json": (json.dumps(settings | special, indent=1) + "\n").encode(),
    }
    _check_same_ids(config, files)
    return files


def _files_of_folder(name: str | None) -> dict[str, bytes]:
    folder = Path(name or "")
    files = read_tokenizer_files(folder if folder.is_dir() else folder.parent)
    if "tokenizer.json" not in files and "tokenizer.model" not in files:
        raise ValueError(f"tokenizer {name} is no local folder with a tokenizer.json")
    return files


def _check_same_ids(config: TokenizerConfig, files: dict[str, bytes]) -> None:
    original = build_tokenizer(config)
    with tempfile.TemporaryDirectory() as folder:
        for name, content in files.items():
            (Path(folder) / name).write_bytes(content)
        exported = HuggingFaceTokenizer(folder)
    ours, theirs = original.tokenize(_SAMPLE), exported.tokenize(_SAMPLE)
    if ours != theirs or original.eos != exported.eos:
        raise ValueError(
            f"the tokenizer cannot be exported: transformers would cut the sample text into {theirs} "
            f"(end {exported.eos}) instead of {ours} (end {original.eos})"
        )


def _from_gpt2(config: TokenizerConfig) -> tuple[Tokenizer, dict[str, str]]:
    tokenizer = Tokenizer(models.BPE.from_file(config.vocab_file, config.merge_file))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, _mark_eod(tokenizer)


def _from_bytes(config: TokenizerConfig) -> tuple[Tokenizer, dict[str, str]]:
    vocab = {_byte_character(i): i for i in range(256)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, _mark_eod(tokenizer)


def _byte_character(byte: int) -> str:
    """The character by which byte-level BPE writes a byte: itself if printable, else from 256 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    if byte in printable:
        return chr(byte)
    return chr(256 + [b for b in range(256) if b not in printable].index(byte))


def _mark_eod(tokenizer: Tokenizer) -> dict[str, str]:
    tokenizer.add_special_tokens([AddedToken(_EOD, special=True, normalized=False)])
    return {"bos_token": _EOD, "eos_token": _EOD}


def _from_sentencepiece(config: TokenizerConfig) -> tuple[Tokenizer, dict[str, str]]:
    """BPE merges out of piece scores: a pair merges where its join is a piece, best score first."""
    model = sentencepiece.SentencePieceProcessor(model_file=config.tokenizer_model)
    pieces = [model.id_to_piece(i) for i in range(model.vocab_size())]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    merges = []
    for i, piece in enumerate(pieces):
        if model.is_control(i) or model.is_byte(i) or model.is_unknown(i):
            continue
        cuts = ((piece[:k], piece[k:]) for k in range(1, len(piece)))
        found = [(a, b) for a, b in cuts if a in vocab and b in vocab]
        merges.extend((-model.get_score(i), vocab[a], vocab[b], a, b) for a, b in found)
    merges.sort()
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocab,
            merges=[(a, b) for *_, a, b in merges],
            unk_token=pieces[model.unk_id()],
            fuse_unk=True,
            byte_fallback=any(model.is_byte(i) for i in range(len(pieces))),
        )
    )
    spaces = [normalizers.Replace(" ", _SPACE)]
    text = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if model.encode("a", out_type=str)[0].startswith(_SPACE):  # a space is put before every text
        spaces.insert(0, normalizers.Prepend(_SPACE))
        text.append(decoders.Strip(content=" ", left=1))
    tokenizer.normalizer, tokenizer.decoder = normalizers.Sequence(spaces), decoders.Sequence(text)
    control = [p for i, p in enumerate(pieces) if model.is_control(i) or model.is_unknown(i)]
    tokenizer.add_special_tokens([AddedToken(p, special=True, normalized=False) for p in control])
    ids = {"bos_token": model.bos_id(), "eos_token": model.eos_id(), "pad_token": model.pad_id()}
    special = {name: pieces[i] for name, i in ids.items() if i >= 0}
    return tokenizer, special | {"unk_token": pieces[model.unk_id()]}
