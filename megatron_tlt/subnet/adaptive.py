"""When to grow, decided by the loss: deterministic, because every rank sees the same global loss."""

from collections import deque
from dataclasses import dataclass, field


@dataclass(kw_only=True, slots=True)
class AdaptiveGrower:
    """Ends a stage when it has stopped paying.

    The loss is averaged over windows of `window` steps. A stage ends, after two windows at least, when a
    window gained less than `min_gain` nats over the one before, or less than `drop_ratio` of what the last
    growth gained at once (mean of the window before it minus mean of the window after it). Not in the
    paper, whose stage ends are fixed.
    """

    window: int
    min_gain: float
    drop_ratio: float
    num_stages: int
    grown_at: list[int] = field(default_factory=list)
    """First step of each stage after the first: the decisions."""
    last_drop: float | None = None
    """Nats that the last growth gained."""
    _losses: deque[float] = field(default_factory=deque)
    """Of the stage so far, at most two windows."""
    _before: float | None = None
    """Mean loss of the window before the last growth, until its drop is known."""

    @property
    def stage(self) -> int:
        return len(self.grown_at)

    def observe(self, loss: float, *, next_step: int, latest_end: int | None) -> bool:
        """Take the loss of the step before `next_step`; True when the next stage begins at `next_step`.

        `latest_end`: step by which the stage must end in any case; None in the last stage.
        """
        if self.stage + 1 >= self.num_stages:
            return False
        self._losses.append(loss)
        while len(self._losses) > 2 * self.window:
            self._losses.popleft()
        if self._before is not None and len(self._losses) == self.window:
            self.last_drop = self._before - self._mean(0)
            self._before = None
        if not (self._has_stalled() or (latest_end is not None and next_step >= latest_end)):
            return False
        self._before = self._mean(max(0, len(self._losses) - self.window))
        self._losses.clear()
        self.grown_at.append(next_step)
        return True

    def _mean(self, start: int) -> float:
        part = list(self._losses)[start : start + self.window]
        return sum(part) / len(part)

    def _has_stalled(self) -> bool:
        if len(self._losses) < 2 * self.window:
            return False
        gain = self._mean(0) - self._mean(self.window)
        drop = self.last_drop or 0.0
        return gain < max(self.min_gain, self.drop_ratio * drop)

    def state_dict(self) -> dict[str, object]:
        """Plain values for a checkpoint."""
        return {
            "grown_at": list(self.grown_at),
            "last_drop": self.last_drop,
            "losses": list(self._losses),
            "before": self._before,
        }

    def load_state_dict(self, state: dict[str, object]) -> None:
        self.grown_at = [int(step) for step in state["grown_at"]]
        self.last_drop = state["last_drop"]
        self._losses = deque(state["losses"])
        self._before = state["before"]
