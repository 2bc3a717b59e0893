"""Megatron's token files: `<prefix>.bin` (raw tokens), `<prefix>.idx` (where sequences lie).

Byte-compatible with `megatron.core.datasets.indexed_dataset` (tested), text only: the optional int8
modes of multimodal files are refused. Differences: the reader checks every size before it returns
(megatron asserts, or reads past a truncated file), the writer publishes by rename (`.bin` first,
`.idx` last), refuses ids that the type cannot hold, and holds 4 bytes per sequence instead of a
Python list.

`.idx`, little-endian: 9 bytes `MMIDIDX\\0\\0`; u64 version 1; u8 type code; u64 number of
sequences; u64 number of document boundaries; int32 lengths [sequences]; int64 byte offsets
[sequences]; int64 boundaries [documents + 1], the first 0.
"""

import functools
import hashlib
import os
import shutil
import struct
from array import array
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np

from megatron_tlt.data.files import temporary_name
from megatron_tlt.files import fsync_path

_MAGIC = b"MMIDIDX\x00\x00"
_VERSION = 1
_HEADER = struct.Struct("<9sQBQQ")
_DTYPES = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 6: np.float64,
           7: np.float32, 8: np.uint16}  # fmt: skip
_CODES = {np.dtype(dtype): code for code, dtype in _DTYPES.items()}
_MAX_UINT16_VOCAB = 65500


def bin_path(prefix: str | Path) -> Path:
    return Path(f"{prefix}.bin")


def idx_path(prefix: str | Path) -> Path:
    return Path(f"{prefix}.idx")


def token_dtype(vocab_size: int) -> np.dtype:
    """The type that Megatron's preprocessing picks: uint16 below 65500 ids, else int32."""
    return np.dtype(np.uint16 if vocab_size < _MAX_UINT16_VOCAB else np.int32)


class IndexedDataset:
    """Memory-mapped reader. Raises ValueError naming file and numbers where the files do not fit.

    `sequence_lengths` int32 [sequences], in tokens; `document_indices` int64 [documents + 1],
    sequence boundaries; `tokens` [all tokens], flat.
    """

    def __init__(self, prefix: str | Path) -> None:
        self.prefix = str(prefix)
        self._read_index(idx_path(prefix))
        self._map_tokens(bin_path(prefix))

    def __len__(self) -> int:
        return len(self.sequence_lengths)

    def __getitem__(self, index: int) -> np.ndarray:
        return self.get(index)

    def __reduce__(self) -> tuple:
        return IndexedDataset, (self.prefix,)

    @property
    def num_documents(self) -> int:
        return len(self.document_indices) - 1

    def get(self, index: int, offset: int = 0, length: int | None = None) -> np.ndarray:
        """`length` tokens (default: all) of sequence `index` from `offset`; a view, no copy."""
        if length is None:
            length = int(self.sequence_lengths[index]) - offset
        start = int(self._byte_offsets[index]) // self.dtype.itemsize + offset
        return self.tokens[start : start + length]

    @functools.cached_property
    def fingerprint(self) -> str:
        """SHA-256 over everything a sample order can depend on: type, lengths, documents."""
        digest = hashlib.sha256(str(self.dtype).encode())
        digest.update(np.ascontiguousarray(self.sequence_lengths))
        digest.update(np.ascontiguousarray(self.document_indices))
        return digest.hexdigest()

    def _read_index(self, path: Path) -> None:
        size = _size_of(path)
        if size < _HEADER.size:
            raise ValueError(f"{path}: {size} bytes, but the header alone has {_HEADER.size}")
        raw = np.memmap(path, mode="r", dtype=np.uint8)
        magic, version, code, sequences, boundaries = _HEADER.unpack(raw[: _HEADER.size].tobytes())
        if magic != _MAGIC or version != _VERSION or code not in _DTYPES:
            raise ValueError(
                f"{path}: not a token index: magic {magic!r} (want {_MAGIC!r}), version {version} "
                f"(want {_VERSION}), type code {code} (want one of {sorted(_DTYPES)})"
            )
        expected = _HEADER.size + 12 * sequences + 8 * boundaries
        if size != expected:
            kind = (
                "holds multimodal modes (not supported)"
                if size == expected + sequences
                else "is damaged"
            )
            raise ValueError(
                f"{path} {kind}: {size} bytes, but {sequences} sequences and {boundaries} document "
                f"boundaries take {expected}"
            )
        self.dtype = np.dtype(_DTYPES[code])
        lengths_end = _HEADER.size + 4 * sequences
        offsets_end = lengths_end + 8 * sequences
        raw = raw.view(np.ndarray)
        self.sequence_lengths = raw[_HEADER.size : lengths_end].view(np.int32)
        self._byte_offsets = raw[lengths_end:offsets_end].view(np.int64)
        self.document_indices = raw[offsets_end:].view(np.int64)
        self._check_index(path)

    def _check_index(self, path: Path) -> None:
        lengths, documents = self.sequence_lengths, self.document_indices
        ends = (documents[0], documents[-1]) if len(documents) else ()
        if ends != (0, len(lengths)) or (np.diff(documents) < 0).any():
            raise ValueError(
                f"{path} is damaged: document boundaries run over {ends}, want a rising list "
                f"from 0 to the number of sequences, {len(lengths)}"
            )
        if len(lengths) and lengths.min() < 0:
            worst = int(lengths.argmin())
            raise ValueError(f"{path} is damaged: sequence {worst} has length {lengths[worst]}")
        expected = _offsets(lengths, self.dtype)
        wrong = np.flatnonzero(self._byte_offsets != expected)
        if len(wrong):
            first = wrong[0]
            raise ValueError(
                f"{path} is damaged: sequence {first} is said to start at byte "
                f"{self._byte_offsets[first]}, the sequences before it end at {expected[first]}"
            )

    def _map_tokens(self, path: Path) -> None:
        count = int(self.sequence_lengths.sum(dtype=np.int64))
        size = _size_of(path)
        if size != count * self.dtype.itemsize:
            raise ValueError(
                f"{path}: {size} bytes, but {idx_path(self.prefix)} lists {count} {self.dtype} "
                f"tokens = {count * self.dtype.itemsize} bytes: truncated, or of another index"
            )
        mapped = np.memmap(path, mode="r", dtype=self.dtype) if count else np.empty(0, self.dtype)
        self.tokens = mapped.view(np.ndarray)


class IndexedDatasetWriter:
    """Streams documents to `<prefix>.bin`, then publishes both files by rename.

    Use as a context manager: nothing appears under the final names when the block raises.
    """

    def __init__(self, prefix: str | Path, *, dtype: np.dtype) -> None:
        self.prefix, self.dtype = str(prefix), np.dtype(dtype)
        if self.dtype not in _CODES or self.dtype.kind == "f":
            raise ValueError(f"token type {self.dtype} is no integer type that .idx files know")
        self._lengths, self._boundaries = array("i"), array("q", [0])
        self._bin_temporary = temporary_name(bin_path(prefix))
        self._idx_temporary = temporary_name(idx_path(prefix))
        self._bin_temporary.parent.mkdir(parents=True, exist_ok=True)
        self._stream = open(self._bin_temporary, "wb")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if kind is None:
                self._publish()
        finally:
            self._stream.close()
            self._bin_temporary.unlink(missing_ok=True)
            self._idx_temporary.unlink(missing_ok=True)

    @property
    def num_documents(self) -> int:
        return len(self._boundaries) - 1

    @property
    def num_tokens(self) -> int:
        return self._stream.tell() // self.dtype.itemsize

    def add_document(self, tokens: Sequence[int] | np.ndarray, lengths: Sequence[int] = ()) -> None:
        """Append one document of `tokens`, cut into sequences of `lengths` (default: one sequence).

        Raises ValueError for ids that the type cannot hold and for lengths that do not sum up.
        """
        ids = np.asarray(tokens)
        limits = np.iinfo(self.dtype)
        if ids.size and (ids.min() < limits.min or ids.max() > limits.max):
            raise ValueError(
                f"token ids {ids.min()}..{ids.max()} do not fit {self.dtype} ({limits.min}.."
                f"{limits.max}) of {self.prefix}: give the tokenizer's vocab_size to token_dtype()"
            )
        lengths = lengths or (ids.size,)
        if sum(lengths) != ids.size:
            raise ValueError(
                f"sequence lengths sum to {sum(lengths)}, the document has {ids.size} tokens"
            )
        self._stream.write(ids.astype(self.dtype).tobytes())
        self._lengths.extend(lengths)
        self._boundaries.append(len(self._lengths))

    def add_documents(self, encoded: bytes, lengths: Sequence[int]) -> None:
        """Append documents of one sequence each, of `lengths` tokens, in this type's bytes."""
        assert len(encoded) == sum(lengths) * self.dtype.itemsize, (len(encoded), sum(lengths))
        first = len(self._lengths) + 1
        self._stream.write(encoded)
        self._lengths.extend(lengths)
        self._boundaries.extend(range(first, first + len(lengths)))

    def add_index(self, prefix: str | Path) -> None:
        """Append all documents of another file. Raises ValueError when the token types differ."""
        other = IndexedDataset(prefix)
        if other.dtype != self.dtype:
            raise ValueError(
                f"{prefix} holds {other.dtype} tokens, {self.prefix} {self.dtype}: preprocess both "
                "with one tokenizer"
            )
        shift = len(self._lengths)
        self._lengths.frombytes(other.sequence_lengths.tobytes())
        self._boundaries.frombytes((other.document_indices[1:] + shift).tobytes())
        with open(bin_path(prefix), "rb") as stream:
            shutil.copyfileobj(stream, self._stream, 1 << 22)

    def _publish(self) -> None:
        lengths = np.frombuffer(self._lengths, np.int32)
        boundaries = np.frombuffer(self._boundaries, np.int64)
        with open(self._idx_temporary, "wb") as stream:
            stream.write(
                _HEADER.pack(_MAGIC, _VERSION, _CODES[self.dtype], len(lengths), len(boundaries))
            )
            for part in (lengths, _offsets(lengths, self.dtype), boundaries):
                stream.write(part)
        self._stream.close()
        for temporary, final in (
            (self._bin_temporary, bin_path(self.prefix)),
            (self._idx_temporary, idx_path(self.prefix)),
        ):
            fsync_path(temporary)
            os.replace(temporary, final)


def _offsets(lengths: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Byte at which each sequence begins when they lie end to end, int64 [sequences]."""
    offsets = np.zeros(len(lengths), np.int64)
    np.cumsum(lengths[:-1], dtype=np.int64, out=offsets[1:])
    offsets *= dtype.itemsize
    return offsets


def _size_of(path: Path) -> int:
    if not path.is_file():
        raise ValueError(f"{path} does not exist: --data-path takes the prefix without .bin/.idx")
    return path.stat().st_size
