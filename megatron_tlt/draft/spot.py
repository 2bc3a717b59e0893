"""When a rank trains the drafter: the pure state machine of spot training, over a counter that all ranks see.

    BUSY --own requests done--> IDLE --enough ranks idle, lessons there--> TRAINING --all ranks done--> READY

TLT (https://arxiv.org/abs/2511.16665, section on the spot trainer) has a controller on rank 0 that promotes
idle workers, forms a group of them and broadcasts a stop. Here there is nobody to ask: each rank adds one to
a counter when its requests are done, and reads it between two micro-updates. Training has no collective,
so a rank may come late or not at all and none can wait for it in vain; when the counter says that all are
done, every rank is READY within one micro-update.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Protocol


class SpotState(str, Enum):
    """Where a rank is in the rollout of a step."""

    BUSY = "busy"  # generating
    IDLE = "idle"  # waiting for the others
    TRAINING = "training"  # making micro-updates of its own replica
    READY = "ready"  # all ranks are done: merge, then go on


EDGES: dict[SpotState, frozenset[SpotState]] = {
    SpotState.READY: frozenset({SpotState.BUSY}),
    SpotState.BUSY: frozenset({SpotState.IDLE}),
    SpotState.IDLE: frozenset({SpotState.IDLE, SpotState.TRAINING, SpotState.READY}),
    SpotState.TRAINING: frozenset({SpotState.TRAINING, SpotState.IDLE, SpotState.READY}),
}
"""Which state may follow which; every other step is a fault."""


class CounterStore(Protocol):
    """What the machine needs of the process group's store."""

    def add(self, key: str, amount: int) -> int:
        """Add to a counter that starts at 0, and return its value; atomic over all ranks."""


def after_poll(*, idle: int, world_size: int, threshold: int, has_lessons: bool) -> SpotState:
    """The state of a rank whose own requests are done. Example: after_poll(idle=1, world_size=2,
    threshold=1, has_lessons=True) is TRAINING."""
    if idle >= world_size:
        return SpotState.READY
    return SpotState.TRAINING if has_lessons and idle >= threshold else SpotState.IDLE


@dataclass(kw_only=True, slots=True)
class SpotMachine:
    """One rank's states. `begin`, `finish`, then `poll` until READY, in every step on every rank.

    One counter serves the whole run: all ranks have added their one for step n before any begins step n + 1,
    so step n is over when the counter reaches n * world_size, even for a rank that looks late.
    """

    store: CounterStore
    key: str
    """Name of the counter, new for every run in the store."""
    world_size: int
    threshold: int
    """Idle ranks from which on they train."""
    timeout_s: float
    """Longest wait for the ranks that still generate; a dead one never comes."""
    clock: Callable[[], float] = time.monotonic
    state: SpotState = SpotState.READY
    step: int = 0
    """Rollouts begun."""
    finished_at: float = 0.0

    def begin(self) -> None:
        """A rollout begins."""
        self._go(SpotState.BUSY)
        self.step += 1

    def finish(self) -> None:
        """This rank's requests are done; the others hear of it."""
        self._go(SpotState.IDLE)
        self.store.add(self.key, 1)
        self.finished_at = self.clock()

    def poll(self, *, has_lessons: bool) -> SpotState:
        """Ask the counter once. Raises TimeoutError when the others have not come within `timeout_s`."""
        idle = self.store.add(self.key, 0) - (self.step - 1) * self.world_size
        state = after_poll(
            idle=idle, world_size=self.world_size, threshold=self.threshold, has_lessons=has_lessons
        )
        self._go(state)
        if state != SpotState.READY and self.clock() - self.finished_at > self.timeout_s:
            raise TimeoutError(
                f"{idle} of {self.world_size} ranks are done with their requests, the others have not come "
                f"within {self.timeout_s:.0f} s: a rank is dead, or raise "
                "parallel.distributed_timeout_minutes"
            )
        return state

    def _go(self, state: SpotState) -> None:
        assert state in EDGES[self.state], f"{self.state.value} -> {state.value} is no legal step"
        self.state = state
