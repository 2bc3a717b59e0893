"""Which tokens form sample i: Megatron's three-level order, in NumPy, without a compiled helper.

All documents of a split, repeated over the epochs and shuffled, form one stream of tokens; sample k
is the `seq_length + 1` tokens from position `k * seq_length` of it (neighbours share one token); a
last shuffle says which sample is drawn when. With `data_order="megatron"` the three arrays equal
those of megatron.core.datasets.gpt_dataset.GPTDataset for the same seed (tested).

What the order depends on: document lengths, the split's document range, `seq_length`, `seed`, the
number of epochs, and whether the last epoch is shuffled by itself. Not on micro-batch, batch or
data-parallel size, and not on the number of samples as such. But Megatron shuffles all epochs
together: a run made longer, so that it needs another epoch, draws in another order from the start
(its dataset's `identity()` changes, so a checkpoint can refuse). `data_order="extendable"` shuffles
epoch e by (seed, e) alone: the order of a shorter run is a prefix of the order of a longer one.

Differs from Megatron: the number of samples of a validation set that keeps its last partial sample
is exact, where Megatron rounds through float32 (wrong above 2**24 tokens).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

DataOrder = Literal["megatron", "extendable"]

# Megatron: a last epoch that is used for less than this share is shuffled by itself, so that its
# unused part is not taken out of the earlier epochs.
_SEPARATE_BELOW = 0.80


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplePlan:
    """How many samples a stream of epochs gives; known before any array is built.

    Example: 10 documents of 100 tokens, seq_length 64, 20 samples wanted -> tokens_per_epoch=1000,
    num_epochs=2, num_samples=31, separate_final_epoch=True, num_samples_before_final=15.
    """

    seq_length: int
    tokens_per_epoch: int
    num_epochs: int
    num_samples: int
    """Length of the dataset: all that the epochs hold, at least what was asked for."""
    separate_final_epoch: bool
    num_samples_before_final: int
    """Samples that end before the last epoch does; 0 unless it is separate."""


def plan_samples(
    tokens_per_epoch: int, *, num_samples: int | None, seq_length: int, keep_partial: bool = False
) -> SamplePlan:
    """Epochs needed for `num_samples` (None: exactly one epoch).

    `keep_partial` counts a last sample that has fewer than `seq_length + 1` tokens.
    """
    assert tokens_per_epoch > 1, f"{tokens_per_epoch} tokens hold nothing to predict"
    epochs = 1
    if num_samples is not None:
        epochs = max(1, -(-(num_samples * seq_length + 1) // tokens_per_epoch))
    before = ((epochs - 1) * tokens_per_epoch - 1) // seq_length if epochs > 1 else 0
    separate = epochs > 1 and num_samples - before < int(
        _SEPARATE_BELOW * ((tokens_per_epoch - 1) // seq_length)
    )
    targets = epochs * tokens_per_epoch - 1
    return SamplePlan(
        seq_length=seq_length,
        tokens_per_epoch=tokens_per_epoch,
        num_epochs=epochs,
        num_samples=-(-targets // seq_length) if keep_partial else targets // seq_length,
        separate_final_epoch=separate,
        num_samples_before_final=before if separate else 0,
    )


def build_gpt_index(
    lengths: np.ndarray, documents: np.ndarray, plan: SamplePlan, *, seed: int, order: DataOrder
) -> dict[str, np.ndarray]:
    """The arrays of one split.

    `lengths` int32 [sequences of the file]; `documents` int32 [sequences of the split]. Returns
    `document_index` int32 [documents * epochs]; `sample_index` [samples + 1, 2], the place in
    `document_index` and the offset in that document at which a sample starts (int32, or int64 for
    very large files); `shuffle_index` uint32 or int64 [samples].
    """
    build_order = _megatron_order if order == "megatron" else _extendable_order
    document_index, shuffle_index = build_order(documents, plan, seed)
    return {
        "document_index": document_index,
        "sample_index": build_sample_index(lengths[document_index], plan),
        "shuffle_index": shuffle_index,
    }


def build_sample_index(lengths_in_order: np.ndarray, plan: SamplePlan) -> np.ndarray:
    """Start of each sample in a stream of documents, [samples + 1, 2]; see `build_gpt_index`."""
    ends = np.cumsum(lengths_in_order, dtype=np.int64)
    starts = np.arange(plan.num_samples + 1, dtype=np.int64) * plan.seq_length
    starts[-1] = min(starts[-1], ends[-1] - 1)
    places = np.searchsorted(ends, starts, side="right")
    offsets = starts - (ends[places] - lengths_in_order[places])
    places[0] = offsets[0] = 0  # Megatron starts at the first document, even at an empty one
    largest = max(len(lengths_in_order), int(lengths_in_order.max()))
    dtype = np.int32 if largest <= np.iinfo(np.int32).max else np.int64
    return np.stack([places, offsets], axis=1).astype(dtype)


def _megatron_order(
    documents: np.ndarray, plan: SamplePlan, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.RandomState(seed)
    document_index = np.tile(documents, plan.num_epochs)
    sample_order = _count(plan.num_samples)
    if plan.separate_final_epoch:
        final = len(document_index) - len(documents)
        document_bounds = [0, final, len(document_index)]
        sample_bounds = [0, plan.num_samples_before_final, plan.num_samples]
    else:
        document_bounds, sample_bounds = [0, len(document_index)], [0, plan.num_samples]
    _shuffle_blocks(document_index, document_bounds, [rng] * 2)
    _shuffle_blocks(sample_order, sample_bounds, [rng] * 2)
    return document_index, sample_order


def _extendable_order(
    documents: np.ndarray, plan: SamplePlan, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    rngs = [np.random.RandomState([seed, epoch]) for epoch in range(plan.num_epochs)]
    document_index = np.tile(documents, plan.num_epochs)
    sample_order = _count(plan.num_samples)
    epochs = np.arange(plan.num_epochs + 1)
    inside = np.maximum(epochs * plan.tokens_per_epoch - 1, 0) // plan.seq_length
    _shuffle_blocks(document_index, epochs * len(documents), rngs)
    _shuffle_blocks(sample_order, inside, rngs)
    return document_index, sample_order


def _count(stop: int) -> np.ndarray:
    return np.arange(stop, dtype=np.uint32 if stop < np.iinfo(np.uint32).max - 1 else np.int64)


def _shuffle_blocks(
    values: np.ndarray, bounds: Sequence[int], rngs: Sequence[np.random.RandomState]
) -> None:
    """Shuffle `values` in place between each two neighbours of `bounds`, in order."""
    for first, last, rng in zip(bounds[:-1], bounds[1:], rngs, strict=False):
        rng.shuffle(values[first:last])
