"""Numerical guards: loss spikes, what data was really seen, and whether the replicas still agree."""

import hashlib
import statistics
from collections import deque
from collections.abc import Iterable

from megatron_tlt import device

import torch
import torch.distributed as dist

_MASK = (1 << 64) - 1
_HISTORY = 100
_ENOUGH = 20


class SpikeDetector:
    """Tells a loss that stands out from the last hundred; pure arithmetic on Python numbers.

    A loss is spiky when it is above their median by more than `threshold` times their typical distance from
    it (median absolute deviation, scaled to a standard deviation, at least 1 % of the median). Spikes do not
    enter the history. None before 20 losses are known. (Megatron's check compares with the largest of the
    first hundred losses, which a falling loss never reaches again.)
    """

    def __init__(self, threshold: float) -> None:
        self._threshold = threshold
        self._losses: deque[float] = deque(maxlen=_HISTORY)

    def check(self, loss: float) -> str | None:
        """What is unusual about this loss (nats), in words; None when nothing is. Not for NaN."""
        if len(self._losses) < _ENOUGH:
            self._losses.append(loss)
            return None
        median = statistics.median(self._losses)
        deviation = 1.4826 * statistics.median(abs(x - median) for x in self._losses)
        scale = max(deviation, 0.01 * abs(median))
        if loss > median + self._threshold * scale:
            return (
                f"loss {loss:.6f} is {(loss - median) / scale:.1f} deviations above the median "
                f"{median:.6f} of the last {len(self._losses)}"
            )
        self._losses.append(loss)
        return None


class DataDigest:
    """A number that two runs share iff they saw the same samples at the same iterations.

    It is the sum, modulo 2**64, of a hash of (iteration, sample id) over all samples: the same for any
    number of data-parallel ranks and micro-batches, and a resumed run goes on from the saved value.
    """

    def __init__(self, value: int = 0) -> None:
        self._agreed = value
        self._own = 0

    def add(self, iteration: int, sample_ids: Iterable[int]) -> None:
        """Count samples of this rank; ids name a sample's content."""
        for sample_id in sample_ids:
            self._own = (self._own + _hash(iteration, sample_id)) & _MASK

    def value(self, dp_group: dist.ProcessGroup) -> int:
        """The digest over all replicas so far, below 2**64; a collective over `dp_group`."""
        own = self._own - (1 << 64) if self._own >> 63 else self._own
        total = torch.tensor([own], dtype=torch.int64, device=device.device())
        dist.all_reduce(total, group=dp_group)  # int64 sums wrap, as the digest's do
        self._agreed, self._own = (self._agreed + int(total)) & _MASK, 0
        return self._agreed


def _hash(iteration: int, sample_id: int) -> int:
    data = iteration.to_bytes(8, "little") + sample_id.to_bytes(8, "little", signed=True)
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


def diverged_replicas(
    parameters: Iterable[torch.Tensor], dp_group: dist.ProcessGroup
) -> list[int]:
    """Global ranks of `dp_group` whose parameters differ from the majority's; [] when all agree bit by bit.

    A collective over `dp_group`; each rank hashes its own parameters with SHA-256. With a tie the larger
    half is the one that holds the lowest rank.
    """
    digest = hashlib.sha256()
    for parameter in parameters:
        plain = parameter.detach().contiguous().view(torch.uint8).cpu()
        digest.update(plain.numpy().data)
    hashes: list = [None] * dist.get_world_size(dp_group)
    dist.all_gather_object(hashes, digest.hexdigest(), group=dp_group)
    right = max(hashes, key=lambda value: (hashes.count(value), -hashes.index(value)))
    ranks = dist.get_process_group_ranks(dp_group)
    return [rank for rank, value in zip(ranks, hashes) if value != right]


class RunGuards:
    """The guards of one training run, in the order in which a step meets them."""

    def __init__(
        self,
        *,
        dp_group: dist.ProcessGroup,
        data_digest: int,
        spike_threshold: float,
        weight_hash_interval: int | None,
    ) -> None:
        self._group, self._interval = dp_group, weight_hash_interval
        self._digest, self._spikes = DataDigest(data_digest), SpikeDetector(spike_threshold)

    def data(self, iteration: int, batches: Iterable[dict[str, torch.Tensor]]) -> None:
        """Count the samples of the step that comes after `iteration`."""
        for batch in batches:
            self._digest.add(iteration, batch["sample_id"].tolist())

    def digest(self) -> int:
        """Of all data so far; a collective over the replicas."""
        return self._digest.value(self._group)

    def step(
        self, iteration: int, loss: float, parameters: Iterable[torch.Tensor]
    ) -> str | None:
        """What is unusual about the finite `loss`; compares the replicas' weights when it is time to.

        Raises RuntimeError, on all ranks of the group, naming the ranks whose weights differ.
        """
        if self._interval is not None and iteration % self._interval == 0:
            diverged = diverged_replicas(parameters, self._group)
            if diverged:
                raise RuntimeError(
                    f"iteration {iteration}: the weights of rank {', '.join(map(str, diverged))} differ from "
                    "those of its data-parallel replicas: suspect that device; resume from a checkpoint "
                    "without it"
                )
        return self._spikes.check(loss)
