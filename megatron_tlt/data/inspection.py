"""What is in a token file, and whether it is fit for training."""

import hashlib
import itertools
from dataclasses import asdict, dataclass

import numpy as np

from megatron_tlt.data.indexed import IndexedDataset
from megatron_tlt.data.provenance import read_provenance
from megatron_tlt.data.tokenizer import Tokenizer

_QUANTILES = (0.0, 0.01, 0.1, 0.5, 0.9, 0.99, 1.0)
_BLOCK = 1 << 24
_SAMPLE_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that must hold, and the numbers it was judged by."""

    name: str
    passed: bool
    detail: str


def inspect_dataset(
    prefix: str, *, tokenizer: Tokenizer | None = None, num_samples: int = 3
) -> dict[str, object]:
    """Facts, checks and decoded samples of one token file, ready for JSON.

    `checks` is a list of {name, passed, detail}; the file's own consistency comes first, and the
    only one when it fails. What needs a tokenizer is left out without one.
    """
    try:
        data = IndexedDataset(prefix)
    except ValueError as error:
        return {
            "prefix": prefix,
            "checks": [asdict(Check("files are consistent", False, str(error)))],
        }
    documents = _documents(data)
    lengths = np.array([len(document) for document in documents], np.int64)
    checks = [
        Check("files are consistent", True, f"{len(data.tokens)} tokens of {data.dtype}"),
        _check_not_empty(lengths),
    ]
    report = {
        "prefix": prefix,
        "documents": len(documents),
        "sequences": len(data),
        "tokens": len(data.tokens),
        "dtype": str(data.dtype),
        "duplicate_documents": _count_duplicates(documents),
        "document_length_quantiles": _quantiles(lengths),
    }
    if tokenizer is not None:
        checks += [
            _check_range(data, tokenizer),
            _check_tokenizer(prefix, tokenizer),
            _check_eod(documents, tokenizer),
        ]
        report["samples"] = [
            tokenizer.detokenize(document[:_SAMPLE_TOKENS].tolist())
            for document in documents[:num_samples]
        ]
    return report | {"checks": [asdict(check) for check in checks]}


def _documents(data: IndexedDataset) -> list[np.ndarray]:
    """Views of the tokens of each document."""
    ends = np.concatenate([[0], np.cumsum(data.sequence_lengths, dtype=np.int64)])
    bounds = ends[data.document_indices].tolist()
    return [data.tokens[first:last] for first, last in itertools.pairwise(bounds)]


def _count_duplicates(documents: list[np.ndarray]) -> int:
    """Documents equal to an earlier one."""
    digests = {hashlib.blake2b(document, digest_size=16).digest() for document in documents}
    return len(documents) - len(digests)


def _quantiles(lengths: np.ndarray) -> dict[str, int]:
    if not len(lengths):
        return {}
    values = np.quantile(lengths, _QUANTILES, method="nearest").tolist()
    return {f"{100 * q:g}%": int(value) for q, value in zip(_QUANTILES, values, strict=True)}


def _check_not_empty(lengths: np.ndarray) -> Check:
    empty = int((lengths == 0).sum())
    return Check(
        "there are documents, none of them empty",
        len(lengths) > 0 and empty == 0,
        f"{empty} of {len(lengths)} documents are empty",
    )


def _check_range(data: IndexedDataset, tokenizer: Tokenizer) -> Check:
    outside, largest = 0, -1
    for start in range(0, len(data.tokens), _BLOCK):
        block = data.tokens[start : start + _BLOCK].astype(np.int64)
        outside += int(((block < 0) | (block >= tokenizer.vocab_size)).sum())
        largest = max(largest, int(block.max()))
    return Check(
        "ids are in the vocabulary",
        outside == 0,
        f"{outside} tokens outside 0..{tokenizer.vocab_size - 1}, the largest is {largest}",
    )


def _check_tokenizer(prefix: str, tokenizer: Tokenizer) -> Check:
    made_by, given = read_provenance(prefix).get("tokenizer"), tokenizer.identity()
    return Check(
        "tokenizer is the one that made the file",
        made_by in (None, given),
        f"made by {made_by or 'an unknown tokenizer'}, given {given}",
    )


def _check_eod(documents: list[np.ndarray], tokenizer: Tokenizer) -> Check:
    ended = sum(len(document) > 0 and document[-1] == tokenizer.eod for document in documents)
    return Check(
        "all documents end with the end-of-document token, or none does",
        ended in (0, len(documents)),
        f"{ended} of {len(documents)} end with id {tokenizer.eod}",
    )
