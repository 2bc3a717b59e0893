"""The idle-time ledger: where every second of every rank went, as JSON lines beside the run's logs.

`<log_dir>/timeline/rank00000.jsonl`, one file a rank, one line an event, in order and without gaps:

    {"rank": 0, "step": 3, "phase": "generate", "start": 1764680000.125, "end": 1764680001.5}

`step` counts from 1 (0: before the first step), times are seconds since the epoch by the rank's own clock,
and further keys belong to the phase (train_drafter: "updates", "tokens", "loss"). A span inside another one
cuts it in pieces, so that the seconds of all events add up to the time that the rank has lived.
"""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, get_args

TimelinePhase = Literal[
    "generate", "train_drafter", "wait", "reward", "log_probs", "update", "publish", "save", "evaluate",
    "other",
]  # fmt: skip
"""`wait`: for other ranks, in the tail of a rollout or in a collective; `other`: between the phases."""
TIMELINE_PHASES: tuple[TimelinePhase, ...] = get_args(TimelinePhase)


def timeline_path(log_dir: Path, rank: int) -> Path:
    """The ledger of one rank."""
    return log_dir / "timeline" / f"rank{rank:05d}.jsonl"


class Timeline:
    """Example: with timeline.span("generate"): ...; timeline.flush(). Without a `path` it keeps totals only.

    A run that goes on appends to the file of the run before it.
    """

    def __init__(
        self, *, rank: int, path: Path | None = None, clock: Callable[[], float] = time.time
    ) -> None:
        self._rank, self._path, self._clock = rank, path, clock
        self.step = 0
        self._open: list[tuple[TimelinePhase, dict]] = [("other", {})]
        self._since = clock()
        self._events: list[dict] = []
        self._seconds: dict[TimelinePhase, float] = {}
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)

    @contextmanager
    def span(self, phase: TimelinePhase) -> Iterator[dict]:
        """Everything inside belongs to `phase`, but for spans of its own. Yields the event's further keys."""
        self._cut()
        extra: dict = {}
        self._open.append((phase, extra))
        try:
            yield extra
        finally:
            self._cut()
            self._open.pop()

    def _cut(self) -> None:
        """End the piece under way; the phase that is open then begins its next one."""
        now = self._clock()
        phase, extra = self._open[-1]
        if now > self._since:
            self._seconds[phase] = self._seconds.get(phase, 0.0) + now - self._since
            event = {"rank": self._rank, "step": self.step, "phase": phase}
            self._events.append(event | {"start": self._since, "end": now} | extra)
        self._since = now

    def begin_step(self, step: int) -> None:
        """What follows belongs to `step`."""
        self._cut()
        self.step = step

    def take(self) -> dict[TimelinePhase, float]:
        """Seconds by phase since the last call."""
        self._cut()
        taken, self._seconds = self._seconds, {}
        return taken

    def flush(self) -> None:
        """Append the events so far to the file."""
        self._cut()
        events, self._events = self._events, []
        if self._path is not None and events:
            with open(self._path, "a", encoding="utf-8") as file:
                file.write("".join(json.dumps(event) + "\n" for event in events))


def read_timeline(folder: Path) -> list[dict]:
    """Events of all ranks in `folder`, by start. Raises ValueError for a line that is no event."""
    events = []
    for path in sorted(folder.glob("rank*.jsonl")):
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            event = json.loads(line)
            if not {"rank", "step", "phase", "start", "end"} <= set(event):
                raise ValueError(f"{path}:{number} is no event of a timeline: {line[:80]}")
            events.append(event)
    return sorted(events, key=lambda event: event["start"])
