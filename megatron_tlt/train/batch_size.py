"""The global batch size as a function of consumed samples: constant, or Megatron's ramp-up."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchSchedule:
    """Samples per step after `consumed` samples. Example: start 4, increment 4, final 16, ramp over 300
    samples: 4 for the first 100, 8 for the next 100, 12 for the next, then 16.

    As Megatron's `--rampup-batch-size START INCREMENT SAMPLES`, with one difference: a size that does not
    divide evenly over micro-batches is refused at once, where Megatron rounds it down.
    """

    final: int
    start: int
    increment: int
    ramp_samples: int

    def __call__(self, consumed: int) -> int:
        increments = (self.final - self.start) // self.increment if self.increment else 0
        if increments == 0 or consumed > self.ramp_samples:
            return self.final
        samples_per_increment = self.ramp_samples / increments
        size = self.start + int(consumed / samples_per_increment) * self.increment
        return min(size, self.final)

    def sizes(self) -> list[int]:
        """All sizes that occur, ascending."""
        if not self.increment:
            return [self.final]
        return [*range(self.start, self.final, self.increment), self.final]

    def samples_after(self, iterations: int) -> int:
        """Consumed samples after that many steps from the beginning."""
        consumed = 0
        for done in range(iterations):
            size = self(consumed)
            if size == self.final and consumed > self.ramp_samples:
                return consumed + (iterations - done) * size
            consumed += size
        return consumed


def build_batch_schedule(
    global_batch_size: int,
    rampup_batch_size: Sequence[int] | None,
    *,
    micro_batch_size: int,
    data_parallel_size: int,
) -> BatchSchedule:
    """Check every size against micro-batch x DP. Raises ValueError with the numbers."""
    if rampup_batch_size is None:
        schedule = BatchSchedule(
            final=global_batch_size, start=global_batch_size, increment=0, ramp_samples=0
        )
    else:
        schedule = _ramp(global_batch_size, rampup_batch_size)
    across = micro_batch_size * data_parallel_size
    for size in schedule.sizes():
        if size < 1 or size % across:
            raise ValueError(
                f"global batch size {size} is not divisible by micro_batch_size={micro_batch_size} x "
                f"data-parallel size {data_parallel_size} = {across}: the nearest that is, is "
                f"{max(1, round(size / across)) * across}"
            )
    return schedule


def _ramp(final: int, rampup: Sequence[int]) -> BatchSchedule:
    if len(rampup) != 3:
        raise ValueError(
            f"training.rampup_batch_size={list(rampup)}: want three numbers, start, increment, samples"
        )
    start, increment, samples = rampup
    if not 0 < start <= final or increment < 1 or samples < 1 or (final - start) % increment:
        raise ValueError(
            f"training.rampup_batch_size={list(rampup)}: start {start} must reach "
            f"global_batch_size={final} in whole increments of {increment} over {samples} >= 1 samples"
        )
    return BatchSchedule(final=final, start=start, increment=increment, ramp_samples=samples)
