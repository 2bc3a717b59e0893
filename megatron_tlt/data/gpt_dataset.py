"""Datasets whose item i is the i-th training sample: one token file, or a blend of several."""

import hashlib
import json
from collections.abc import Sequence
from typing import Protocol

import numpy as np

Sample = dict[str, np.ndarray | int]


class TokenSource(Protocol):
    """What samples are cut from: an IndexedDataset, or mock data."""

    sequence_lengths: np.ndarray
    """int32 [sequences], in tokens."""
    fingerprint: str
    """Digest of all that the order of samples can depend on."""

    def get(self, index: int, offset: int = 0, length: int | None = None) -> np.ndarray: ...


class SampleDataset(Protocol):
    """Ordered samples.

    A Sample holds int64 `tokens`, `labels`, `position_ids` [s], float32 `loss_mask` [s] and
    `sample_id`, an int that names the sample's content whatever its place in the order.
    `loss_mask` and `position_ids` may be shared between samples: read-only.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Sample: ...

    def identity(self) -> dict[str, object]:
        """Equal iff the order of samples is, up to the shorter length."""
        ...


class GPTDataset:
    """Samples of `seq_length` tokens out of a stream of shuffled documents; see `gpt_index`.

    `labels` are the tokens one place later. A sample that the stream cannot fill is padded with id
    0 and its loss masked by position: an id that also serves as padding keeps its targets (Megatron
    masks by value). `mask_loss_after` is an id (end of document) from which predictions carry no
    loss, `reset_positions_after` one after which positions start at 0 again: Megatron's
    --eod-mask-loss and --reset-position-ids.
    """

    def __init__(
        self,
        source: TokenSource,
        index: dict[str, np.ndarray],
        *,
        seq_length: int,
        order_key: dict[str, object],
        mask_loss_after: int | None = None,
        reset_positions_after: int | None = None,
    ) -> None:
        self._source, self._order_key, self._seq_length = source, order_key, seq_length
        self._document_index = index["document_index"]
        self._sample_index = index["sample_index"]
        self._shuffle_index = index["shuffle_index"]
        self._mask_after, self._reset_after = mask_loss_after, reset_positions_after
        self._ones = _read_only(np.ones(seq_length, np.float32))
        self._positions = _read_only(np.arange(seq_length, dtype=np.int64))

    def __len__(self) -> int:
        return len(self._shuffle_index)

    def __getitem__(self, index: int) -> Sample:
        sample_id = int(self._shuffle_index[index])
        text, filled = self._read(sample_id)
        tokens = text[:-1]
        return {
            "tokens": tokens,
            "labels": text[1:],
            "loss_mask": self._loss_mask(tokens, filled - 1),
            "position_ids": self._position_ids(tokens),
            "sample_id": sample_id,
        }

    def identity(self) -> dict[str, object]:
        return self._order_key

    def _read(self, sample_id: int) -> tuple[np.ndarray, int]:
        """Tokens [s + 1] of a sample, and how many of them are real."""
        rows = self._sample_index[sample_id : sample_id + 2].tolist()
        (first, offset), (last, last_offset) = rows
        text = np.zeros(self._seq_length + 1, np.int64)
        filled = 0
        for place in range(first, last + 1):
            length = last_offset + 1 - offset if place == last else None
            part = self._source.get(int(self._document_index[place]), offset, length)
            text[filled : filled + len(part)] = part
            filled += len(part)
            offset = 0
        return text, filled

    def _loss_mask(self, tokens: np.ndarray, num_targets: int) -> np.ndarray:
        if num_targets == self._seq_length and self._mask_after is None:
            return self._ones
        mask = self._ones.copy()
        mask[num_targets:] = 0.0
        if self._mask_after is not None:
            mask[tokens == self._mask_after] = 0.0
        return mask

    def _position_ids(self, tokens: np.ndarray) -> np.ndarray:
        if self._reset_after is None:
            return self._positions
        starts = np.zeros_like(self._positions)
        starts[1:] = np.where(tokens[:-1] == self._reset_after, self._positions[1:], 0)
        return self._positions - np.maximum.accumulate(starts)


class BlendedDataset:
    """Samples of several datasets in the order of `build_blend_index`."""

    def __init__(
        self,
        datasets: Sequence[SampleDataset],
        index: dict[str, np.ndarray],
        *,
        weights: Sequence[float],
    ) -> None:
        self._datasets, self._weights = list(datasets), list(weights)
        self._dataset_index = index["dataset_index"]
        self._dataset_sample_index = index["dataset_sample_index"]

    def __len__(self) -> int:
        return len(self._dataset_index)

    def __getitem__(self, index: int) -> Sample:
        which = int(self._dataset_index[index])
        sample = self._datasets[which][int(self._dataset_sample_index[index])]
        sample["sample_id"] = sample["sample_id"] * len(self._datasets) + which
        return sample

    def identity(self) -> dict[str, object]:
        parts = [dataset.identity() for dataset in self._datasets]
        return {"kind": "blend", "weights": self._weights, "datasets": parts}


def order_digest(dataset: SampleDataset) -> str:
    """SHA-256 of the dataset's identity: one line to keep in a checkpoint and compare on resume."""
    text = json.dumps(dataset.identity(), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _read_only(array: np.ndarray) -> np.ndarray:
    array.flags.writeable = False
    return array
