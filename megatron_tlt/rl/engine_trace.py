"""Decode steps and requests of some rollouts, for the timeline: `<log_dir>/timeline/engine00000.jsonl`.

One file a rank, in the form of `rl/timeline.py` with further keys:

    {..., "phase": "generate", "strategy": "ngram_4_1_5", "batch": 8, "tokens": 13, "drafted": 32,
     "accepted_by_position": [3, 2]}
    {..., "phase": "generate", "request": "prompt 7 sample 0", "tokens": 120}

The engine's step records have durations, no times of day. A response is handed out right after the step that
finished it, so the newest record ends at that moment and the others lie before it, back to back. A request
began as many decode steps ago as gave it tokens (one that was preempted appears shorter by its pause). An
engine that does not tell its steps, such as SGLang, leaves nothing.
"""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from megatron_tlt.rollout.engine import RolloutEngine
from megatron_tlt.types import Rollout, StepRecord


def engine_trace_path(log_dir: Path, rank: int) -> Path:
    """The file of one rank."""
    return log_dir / "timeline" / f"engine{rank:05d}.jsonl"


class RolloutTrace(Protocol):
    """What a rollout calls."""

    def begin(self, step: int) -> None:
        """A rollout of `step` begins."""

    def observe(self, rollout: Rollout) -> None:
        """The engine has handed out `rollout`."""

    def end(self) -> None:
        """The rollout has ended."""


class NoTrace:
    """The null object: evaluations."""

    def begin(self, step: int) -> None: ...

    def observe(self, rollout: Rollout) -> None: ...

    def end(self) -> None: ...


class EngineTrace:
    """Watches an engine during every `interval`-th step; 0: never.

    Example: trace.begin(10); for rollout in responses: trace.observe(rollout); trace.end().
    """

    def __init__(
        self, engine: RolloutEngine, *, rank: int, path: Path, interval: int,
        clock: Callable[[], float] = time.time,
    ) -> None:  # fmt: skip
        self._engine, self._rank, self._path, self._interval = engine, rank, path, interval
        self._clock = clock
        self._step: int | None = None

    def begin(self, step: int) -> None:
        watched = self._interval > 0 and step % self._interval == 0
        self._step = step if watched else None
        if watched:
            self._events: list[dict] = []
            self._starts: list[float] = []
            self._seen, self._last = self._engine.stats().steps, self._clock()

    def observe(self, rollout: Rollout) -> None:
        if self._step is None:
            return
        now = self._clock()
        self._place_steps(now)
        decoded = len(rollout.step_tokens) - 1  # the first token is the prefill's
        if decoded < 0 or (decoded and not self._starts):
            return
        started = self._starts[-min(decoded, len(self._starts))] if decoded else now
        name = f"prompt {rollout.prompt_id} sample {rollout.sample_index}"
        self._add(started, now, request=name, tokens=len(rollout.tokens))

    def _place_steps(self, now: float) -> None:
        """The decode steps since the last call, the newest ending `now`."""
        stats = self._engine.stats()
        count, self._seen = stats.steps - self._seen, stats.steps
        records = stats.recent[-count:] if count else ()
        end, placed = now, []
        for record in reversed(records):
            start = max(end - _seconds(record), self._last)
            placed.append((start, end, record))
            end = start
        for start, end, record in reversed(placed):
            self._starts.append(start)
            self._add(
                start, end, strategy=str(record.strategy), batch=record.batch, tokens=record.tokens,
                drafted=record.drafted, accepted_by_position=list(record.accepted_by_position),
            )  # fmt: skip
        self._last = now

    def _add(self, start: float, end: float, **details: object) -> None:
        event = {"rank": self._rank, "step": self._step, "phase": "generate"}
        self._events.append(event | {"start": start, "end": end} | details)

    def end(self) -> None:
        """Append the rollout's events to the file."""
        if self._step is None:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with open(self._path, "a", encoding="utf-8") as file:
            file.write("".join(json.dumps(event) + "\n" for event in self._events))
        self._step = None


def _seconds(record: StepRecord) -> float:
    """The step's own time and that of the prefill before it."""
    return (record.target_ms + record.draft_ms + record.other_ms) / 1000
