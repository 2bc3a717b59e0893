"""The books corpus as token files for the studies: made once in a folder, with a tokenizer of their own."""

import os
from pathlib import Path

import numpy as np

from megatron_tlt.data.indexed import IndexedDataset, IndexedDatasetWriter, bin_path, idx_path
from megatron_tlt.data.prepare import prepare_corpus
from megatron_tlt.data.preprocess import PreprocessConfig, preprocess
from megatron_tlt.data.provenance import read_provenance, write_provenance
from megatron_tlt.data.tokenizer import TokenizerConfig
from megatron_tlt.data.tokenizer_training import train_sentencepiece

VOCAB = 2048
_TOKENIZER_BYTES = 20_000_000
_PIECE = 4096


def books_tokenizer(folder: Path) -> TokenizerConfig:
    return TokenizerConfig(
        tokenizer_type="SentencePieceTokenizer", tokenizer_model=str(folder / "books.model")
    )


def prepare_books(folder: Path) -> None:
    """Corpus, tokenizer and token files of the training and validation split; done parts are kept."""
    corpus = folder / "corpus"
    prepare_corpus("books", corpus, data_dir=os.environ.get("MEGATRON_TLT_DATA"))
    if not (folder / "books.model").exists():
        train_sentencepiece(
            [str(corpus / "train.jsonl")], str(folder / "books"), vocab_size=VOCAB,
            max_bytes=_TOKENIZER_BYTES,
        )  # fmt: skip
    for split in ("train", "valid"):
        if not idx_path(_prefix(folder, split)).exists():
            config = PreprocessConfig(
                input=[str(corpus / f"{split}.jsonl")], output_prefix=str(folder / split),
                append_eod=True,
            )  # fmt: skip
            preprocess(config, books_tokenizer(folder))


def train_prefix(folder: Path, limited_tokens: int | None) -> str:
    """Token files to train on: all, or about `limited_tokens` of them in pieces from everywhere."""
    whole = _prefix(folder, "train")
    if limited_tokens is None:
        return whole
    prefix = _prefix(folder, f"train_{limited_tokens}")
    if not (idx_path(prefix).exists() and bin_path(prefix).exists()):
        tokens = IndexedDataset(whole).tokens
        starts = np.random.default_rng(0).permutation(len(tokens) // _PIECE) * _PIECE
        with IndexedDatasetWriter(prefix, dtype=tokens.dtype) as writer:
            for start in sorted(starts[: -(-limited_tokens // _PIECE)].tolist()):
                writer.add_document(tokens[start : start + _PIECE])
        write_provenance(prefix, read_provenance(whole))
    return prefix


def valid_prefix(folder: Path) -> str:
    return _prefix(folder, "valid")


def _prefix(folder: Path, name: str) -> str:
    return str(folder / f"{name}_text_document")
