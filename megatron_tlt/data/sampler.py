"""Which samples a data-parallel rank takes at each step, and the batches made of them."""

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch.utils.data import DataLoader

from megatron_tlt.data.gpt_dataset import Sample, SampleDataset


class PretrainSampler:
    """Yields the sample indices [b] of one micro-batch after the other, for one data-parallel rank.

    A step that begins after `c` consumed samples takes samples c .. c + g - 1, g being
    `global_batch_size(c)` (a function, so that the batch may ramp up; it must depend on c alone,
    because loader workers run ahead of training). Micro-batch m of rank r of d is the b samples
    from c + (m * d + r) * b (Megatron's MegatronPretrainingSampler). The samples of a step thus
    depend on neither d nor b, and a run resumed with `consumed_samples` goes on with the next one.

    Ends before the first step that the dataset cannot fill. Raises ValueError when that is the very
    first step, and at a step whose g is not a multiple of b * d.
    """

    def __init__(
        self,
        *,
        num_samples: int,
        consumed_samples: int,
        micro_batch_size: int,
        data_parallel_rank: int,
        data_parallel_size: int,
        global_batch_size: Callable[[int], int],
    ) -> None:
        first = consumed_samples + global_batch_size(consumed_samples)
        if first > num_samples:
            raise ValueError(
                f"no samples left: {consumed_samples} consumed, the next step needs {first}, the "
                f"dataset has {num_samples}: ask for more of them (--train-iters, --eval-iters)"
            )
        self._num_samples, self._consumed = num_samples, consumed_samples
        self._micro_batch_size = micro_batch_size
        self._rank, self._size = data_parallel_rank, data_parallel_size
        self._global_batch_size = global_batch_size

    def __iter__(self) -> Iterator[list[int]]:
        consumed = self._consumed
        across = self._micro_batch_size * self._size
        while True:
            batch = self._global_batch_size(consumed)
            if batch <= 0 or batch % across:
                raise ValueError(
                    f"global batch size {batch} (after {consumed} samples) is no multiple of micro "
                    f"batch size {self._micro_batch_size} times data-parallel size {self._size}"
                )
            if consumed + batch > self._num_samples:
                return
            first = consumed + self._rank * self._micro_batch_size
            for start in range(first, consumed + batch, across):
                yield list(range(start, start + self._micro_batch_size))
            consumed += batch


def collate(samples: Sequence[Sample]) -> dict[str, torch.Tensor]:
    """Samples of [s] -> tensors [b, s]; `sample_id` -> int64 [b]."""
    return {
        name: torch.from_numpy(np.stack([sample[name] for sample in samples]))
        for name in samples[0]
    }


def build_batch_iterator(
    dataset: SampleDataset,
    *,
    sampler: PretrainSampler,
    num_workers: int,
    pin_memory: bool = False,
) -> Iterator[dict[str, torch.Tensor]]:
    """Micro-batches of `sampler` in order, whatever `num_workers`.

    Training and validation each have their own sampler, hence their own cursor. Draws nothing from
    torch's global generator, so a resumed run keeps its random state.
    """
    loader = DataLoader(
        dataset,
        batch_sampler=sampler,
        collate_fn=collate,
        num_workers=num_workers,
        pin_memory=pin_memory,
        generator=torch.Generator(),
    )
    return iter(loader)
