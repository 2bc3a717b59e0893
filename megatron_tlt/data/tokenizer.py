"""Text <-> token ids behind one Protocol, chosen by Megatron's `--tokenizer-type` names.

Plain text never yields a special token: a document that spells `<|endoftext|>` is cut into ordinary
pieces, so no corpus can fake a document end. Only `parse_special=True` (for text that a chat
template made) reads special tokens. Megatron's HuggingFaceTokenizer parses them always.
"""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Literal, Protocol, get_args

from megatron_tlt.data.tokenizer_huggingface import GPT2BPETokenizer, HuggingFaceTokenizer
from megatron_tlt.data.tokenizer_plain import ByteLevelTokenizer, NullTokenizer
from megatron_tlt.data.tokenizer_sentencepiece import SentencePieceTokenizer

TokenizerType = Literal[
    "SentencePieceTokenizer",
    "HuggingFaceTokenizer",
    "GPT2BPETokenizer",
    "ByteLevelTokenizer",
    "NullTokenizer",
]


@dataclass(kw_only=True, slots=True)
class TokenizerConfig:
    """Which tokenizer, and its files."""

    tokenizer_type: TokenizerType = "ByteLevelTokenizer"
    """Kind of tokenizer; ByteLevelTokenizer needs no files, NullTokenizer reads numbers as text."""
    tokenizer_model: str | None = None
    """SentencePiece .model file, or Hugging Face folder, tokenizer.json file or hub name."""
    vocab_file: str | None = None
    """GPT-2 BPE vocab.json."""
    merge_file: str | None = None
    """GPT-2 BPE merges.txt."""
    vocab_size: int | None = None
    """Number of ids of a NullTokenizer; its end of document is one more."""


class Tokenizer(Protocol):
    """What the rest of the project asks of a tokenizer. An id that does not exist is None.

    `vocab_size` is the number of ids (largest + 1). `eod` ends a document in pretraining data.
    """

    vocab_size: int
    eod: int | None
    pad: int | None
    bos: int | None
    eos: int | None

    def tokenize(self, text: str, *, parse_special: bool = False) -> list[int]:
        """Ids of `text`; no begin or end token is added."""
        ...

    def detokenize(self, ids: Sequence[int]) -> str: ...

    def identity(self) -> dict[str, str | int]:
        """`type`, `vocab_size`, `sha256` over the tokenizer's files: equal iff ids mean the
        same."""
        ...


def require_eod(tokenizer: Tokenizer) -> int:
    """The end-of-document id. Raises ValueError naming the tokenizer when it has none."""
    if tokenizer.eod is None:
        raise ValueError(
            f"{tokenizer.identity()['type']} has no end-of-document token (eos, <|endoftext|> "
            "or <eod>): leave --append-eod away, or use a tokenizer that has one"
        )
    return tokenizer.eod


# For each type: its class and the config fields that its constructor takes.
_TYPES = {
    "SentencePieceTokenizer": (SentencePieceTokenizer, ("tokenizer_model",)),
    "HuggingFaceTokenizer": (HuggingFaceTokenizer, ("tokenizer_model",)),
    "GPT2BPETokenizer": (GPT2BPETokenizer, ("vocab_file", "merge_file")),
    "ByteLevelTokenizer": (ByteLevelTokenizer, ()),
    "NullTokenizer": (NullTokenizer, ("vocab_size",)),
}


def build_tokenizer(config: TokenizerConfig) -> Tokenizer:
    """Raises ValueError for an unknown type, a missing setting or a missing file."""
    if config.tokenizer_type not in _TYPES:
        raise ValueError(f"--tokenizer-type {config.tokenizer_type} is none of {', '.join(_TYPES)}")
    tokenizer_class, names = _TYPES[config.tokenizer_type]
    missing = [name for name in names if getattr(config, name) is None]
    if missing:
        flags = " and ".join("--" + name.replace("_", "-") for name in missing)
        raise ValueError(f"--tokenizer-type {config.tokenizer_type} needs {flags}")
    return tokenizer_class(*(getattr(config, name) for name in names))


def add_tokenizer_arguments(parser: argparse.ArgumentParser, *, required: bool = True) -> None:
    """Megatron's tokenizer flags, for the command-line tools."""
    group = parser.add_argument_group("tokenizer")
    group.add_argument("--tokenizer-type", choices=get_args(TokenizerType), required=required)
    group.add_argument(
        "--tokenizer-model", help="SentencePiece .model; HF folder, tokenizer.json or hub name"
    )
    group.add_argument("--vocab-file", help="GPT-2 vocab.json")
    group.add_argument("--merge-file", help="GPT-2 merges.txt")
    group.add_argument("--vocab-size", type=int, help="number of ids of a NullTokenizer")


def tokenizer_config(values: Mapping[str, object]) -> TokenizerConfig:
    """The config out of parsed arguments (`vars(args)`), other names ignored."""
    return TokenizerConfig(**{field.name: values[field.name] for field in fields(TokenizerConfig)})
