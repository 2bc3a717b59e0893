"""Looking at a run from inside: torch's profiler over a window of steps, and the allocator at an OOM."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from megatron_tlt import device

import torch


@dataclass(kw_only=True, slots=True)
class ProfilingConfig:
    """What to record of a run (Megatron's spelling)."""

    profile: bool = False
    """Record a torch profiler trace of iterations profile_step_start to profile_step_end (exclusive) into
    `profile` in the log folder; it opens in Perfetto or chrome://tracing."""
    profile_step_start: int = 10
    """First iteration of the trace, counted from 0."""
    profile_step_end: int = 12
    """The trace ends before this iteration."""
    profile_ranks: list[int] = field(default_factory=lambda: [0])
    """Ranks that record."""
    record_memory_history: bool = False
    """On a GPU, record every allocation, and when memory runs out write the allocator's snapshot to
    `memory` in the log folder; it opens at pytorch.org/memory_viz."""

    def __post_init__(self) -> None:
        if not 0 <= self.profile_step_start < self.profile_step_end:
            raise ValueError(
                f"profiling.profile_step_start={self.profile_step_start} must be at least 0 and below "
                f"profile_step_end={self.profile_step_end}"
            )
        if any(rank < 0 for rank in self.profile_ranks):
            raise ValueError(f"profiling.profile_ranks={self.profile_ranks} must not be negative")
        if self.record_memory_history and not device.is_cuda():
            raise ValueError(
                "profiling.record_memory_history=True needs a GPU: a CPU has no allocator history"
            )


class StepProfiler:
    """The profiler of this rank: `step` after each iteration; nothing when this rank does not record."""

    def __init__(self, config: ProfilingConfig, *, rank: int, folder: Path) -> None:
        self._config, self._path = config, folder / f"rank_{rank}.pt.trace.json"
        self._records = config.profile and rank in config.profile_ranks
        self._profiler: torch.profiler.profile | None = None

    def before_step(self, iteration: int) -> Path | None:
        """Start or end the trace before `iteration` (from 0); the path of a trace that was written."""
        if not self._records:
            return None
        inside = self._config.profile_step_start <= iteration < self._config.profile_step_end
        if inside and self._profiler is None:
            self._profiler = torch.profiler.profile(record_shapes=True, with_stack=False)
            self._profiler.start()
        return None if inside else self.close()

    def close(self) -> Path | None:
        """End a trace that is still open, and write it; its path."""
        if self._profiler is None:
            return None
        device.synchronize()
        profiler, self._profiler, self._records = self._profiler, None, False
        profiler.stop()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(self._path))
        return self._path


@contextmanager
def memory_snapshot_on_oom(config: ProfilingConfig, *, rank: int, folder: Path) -> Iterator[None]:
    """With `record_memory_history`: record allocations inside, and write a snapshot when memory runs out.

    The error goes on, with the snapshot's path added to its notes.
    """
    if not config.record_memory_history:
        yield
        return
    device.record_memory_history()
    try:
        yield
    except torch.OutOfMemoryError as error:
        path = folder / f"rank_{rank}.pickle"
        path.parent.mkdir(parents=True, exist_ok=True)
        device.dump_memory_snapshot(path)
        error.add_note(f"memory snapshot: {path}")
        raise
