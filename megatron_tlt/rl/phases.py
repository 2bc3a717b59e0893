"""The phases of a step: their order, time and peak memory. Trainer and engine share one device.

A step walks generate -> reward -> log_probs -> update -> publish, with evaluate and save between steps.
Engine memory (KV cache) is in use in generate and evaluate only, activations and gradients in log_probs and
update only; no phase begins before the one before it has ended.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal, get_args

from megatron_tlt import device
from megatron_tlt.rl.timeline import Timeline

Phase = Literal["evaluate", "generate", "reward", "log_probs", "update", "publish", "save"]
PHASES: tuple[Phase, ...] = get_args(Phase)
# Which phases may follow one another; None: the beginning.
_AFTER: dict[Phase | None, set[Phase]] = {
    None: {"publish", "generate", "reward"},
    "publish": {"evaluate", "generate", "save", "reward"},
    "evaluate": {"generate", "save", "evaluate", "reward"},
    "generate": {"reward", "save"},  # save: a signal ended the rollout
    "reward": {"log_probs", "generate", "reward", "evaluate"},
    "log_probs": {"update"},
    "update": {"publish", "save", "reward"},
    "save": {"generate", "evaluate", "reward"},
}


class MemoryBudgetError(RuntimeError):
    """A phase used more memory than it was given."""


class PhaseClock:
    """Walks through the phases of a run and keeps seconds and peak memory of each.

    Example: with clock("generate"): ...; clock.take() -> {"generate": 1.2, ...} and starts anew.
    `budget_bytes` bounds the peak of every phase (0: no bound); `peak_bytes` and `reset_peak` read the
    allocator, so that a test can pass one of its own. `watch` is called as a phase begins, with its name;
    `timeline` records all phases.
    """

    def __init__(
        self,
        *,
        budget_bytes: float = 0.0,
        peak_bytes: Callable[[], float] = device.max_memory_bytes,
        reset_peak: Callable[[], None] = device.reset_peak_memory,
        watch: Callable[[Phase], None] | None = None,
        timeline: Timeline | None = None,
    ) -> None:
        self._budget, self._peak_bytes, self._reset = budget_bytes, peak_bytes, reset_peak
        self.watch, self.timeline = watch, timeline or Timeline(rank=0)
        self._last: Phase | None = None
        self._running: Phase | None = None
        self.seconds: dict[Phase, float] = {}
        self.peaks: dict[Phase, float] = {}

    @contextmanager
    def __call__(self, phase: Phase) -> Iterator[None]:
        """Everything inside belongs to `phase`. Raises MemoryBudgetError at its end, with both numbers."""
        assert self._running is None, f"{phase} begins inside {self._running}"
        assert phase in _AFTER[self._last], f"{phase} must not follow {self._last}"
        if self.watch is not None:
            self.watch(phase)
        self._reset()
        self._running, began = phase, time.perf_counter()
        with self.timeline.span(phase):
            yield
            device.synchronize()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - began
        self.peaks[phase] = max(self.peaks.get(phase, 0.0), self._peak_bytes())
        self._running, self._last = None, phase
        if self._budget and self.peaks[phase] > self._budget:
            raise MemoryBudgetError(
                f"phase {phase} used {self.peaks[phase] / 2**30:.2f} GiB, the budget is "
                f"{self._budget / 2**30:.2f} GiB: lower rollout.kv_cache_gib or "
                "training.max_tokens_per_gpu, or raise the budget"
            )

    def take(self) -> tuple[dict[Phase, float], dict[Phase, float]]:
        """(seconds, peak bytes) by phase since the last call."""
        taken = self.seconds, self.peaks
        self.seconds, self.peaks = {}, {}
        return taken
