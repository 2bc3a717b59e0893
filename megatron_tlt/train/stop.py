"""Ending a run early and in order: signals and a time limit, agreed by all ranks, polled in every loop."""

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from megatron_tlt import device

import torch
import torch.distributed as dist

EXIT_SAVED = 4
"""Exit code of a run that was asked to end, saved, and continues when the same command is run again."""

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
_TIME_IS_UP = 1  # below every signal's number, so that a signal is the reason given when both came


class Interrupted(Exception):
    """A signal came in the middle of work that is cheaper to repeat than to end; raised on every rank."""


class StopRequests:
    """What asks this run to end: SIGTERM or SIGUSR1 at any rank, or `exit_duration_in_mins`.

    The handler only notes the signal, so a second one during a save changes nothing. Loops ask `poll` at
    their steps. Times count from the making of this object, which an entry point does first of all.
    """

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._received = 0
        self._seconds: float | None = None
        self.reason: str | None = None
        """What `poll` came to."""

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Take over the signals for what is inside; main thread only."""
        before = {number: signal.signal(number, self._note) for number in SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def limit(self, exit_duration_in_mins: float | None) -> None:
        """End at the first poll after this many minutes; None: no limit."""
        self._seconds = None if exit_duration_in_mins is None else exit_duration_in_mins * 60

    def poll(self) -> str | None:
        """Why all ranks shall end now, the same on every rank; None: go on. A collective of one number.

        Once there is a reason it stays, without further collectives: a loop inside a loop may ask again.
        """
        if self.reason is None:
            self.reason = _text(_largest(self._code()))
        return self.reason

    def signalled(self, group: dist.ProcessGroup) -> bool:
        """Whether a signal came to any rank of the group; a collective over it, free for a single rank."""
        if group.size() == 1:
            return self._received > 0
        return _largest(self._received, group) > 0

    def interrupted(self) -> bool:
        """Whether a signal came to any rank, which is the `reason` then. A collective of one number.

        For phases that take long and leave no trace, such as a rollout: a time limit does not end them.
        """
        code = _largest(self._received)
        self.reason = self.reason or _text(code)
        return code > 0

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._received = max(self._received, number)

    def _code(self) -> int:
        if self._received:
            return self._received
        late = self._seconds is not None and time.monotonic() - self._began >= self._seconds
        return _TIME_IS_UP if late else 0


def _largest(code: int, group: dist.ProcessGroup | None = None) -> int:
    """The largest code of any rank of the group (default: the world)."""
    largest = torch.tensor([code], device=device.device())
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    return int(largest)


def _text(code: int) -> str | None:
    if code == 0:
        return None
    if code == _TIME_IS_UP:
        return "training.exit_duration_in_mins is over"
    return f"{signal.Signals(code).name} was received"
