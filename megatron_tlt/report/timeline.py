"""Where the time of every rank went, read from the timeline files of a run.

A run writes `timeline/*.jsonl` in its log folder, a JSON object a line: "rank", "step", "phase", "start" and
"end" (seconds of one clock), and what more is known. Three kinds of event are told apart by their fields:

- a phase of a rank (generate, train_drafter, wait, reward, log_probs, update, publish, save, ...);
- a decode step of its engine, with "strategy" and "batch", and "tokens", "drafted", "accepted_by_position";
- a request, with "request" (a name for it), lying beside others of its rank.
"""

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

FOLDER = "timeline"
REQUIRED = ("rank", "step", "phase", "start", "end")
# Phases in which a rank does nothing for the run.
WAITING = frozenset({"wait", "idle"})


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """Example: Event(rank=0, step=3, phase="generate", start=12.5, end=14.0)."""

    rank: int
    step: int
    phase: str
    start: float
    """Seconds."""
    end: float
    details: Mapping[str, object] = field(default_factory=dict)
    """All other fields of the line."""

    @property
    def seconds(self) -> float:
        return self.end - self.start

    @property
    def kind(self) -> str:
        """"phase", "decode" or "request"."""
        if "request" in self.details:
            return "request"
        return "decode" if "strategy" in self.details else "phase"

    @property
    def label(self) -> str:
        """What colours the event: the strategy of a decode step, else the phase."""
        return str(self.details["strategy"]) if self.kind == "decode" else self.phase


def read_timeline(log_dir: Path) -> list[Event]:
    """All events below `log_dir`, by start; empty when the run wrote none.

    A last line without its end (a killed or running rank) is left out. Raises ValueError for any other line
    that is no event, with its number.
    """
    events = []
    for path in sorted((log_dir / FOLDER).glob("*.jsonl")):
        lines = path.read_text(encoding="utf-8").split("\n")[:-1]
        events += [_event(line, f"{path} line {number}") for number, line in enumerate(lines, 1) if line]
    return sorted(events, key=lambda event: event.start)


def _event(line: str, where: str) -> Event:
    value = json.loads(line)
    missing = [name for name in REQUIRED if name not in value]
    if missing or not value["start"] <= value["end"]:
        raise ValueError(
            f"{where} is no timeline event: "
            + (f"it lacks {', '.join(missing)}" if missing else "it ends before it starts")
        )
    details = {name: x for name, x in value.items() if name not in REQUIRED}
    return Event(**{name: value[name] for name in REQUIRED}, details=details)


@dataclass(frozen=True, kw_only=True, slots=True)
class Lane:
    """A row of the picture: events that do not overlap."""

    rank: int
    kind: str
    name: str
    events: list[Event]


def lanes_of(events: Iterable[Event]) -> list[Lane]:
    """Phases and decode steps rank by rank, then the requests rank by rank. Events that overlap go to further
    lanes, the first that is free, so requests stand in as many lanes as were ever under way together."""
    by_place: dict[tuple[int, str], list[list[Event]]] = defaultdict(list)
    for event in sorted(events, key=lambda event: (event.start, event.end)):
        lanes = by_place[event.rank, event.kind]
        free = next((lane for lane in lanes if lane[-1].end <= event.start), None)
        if free is None:
            lanes.append([event])
        else:
            free.append(event)
    order = {"phase": 0, "decode": 1, "request": 2}
    names = {"phase": "phases", "decode": "strategy", "request": "request"}
    out = []
    for rank, kind in sorted(by_place, key=lambda place: (place[1] == "request", place[0], order[place[1]])):
        for number, lane in enumerate(by_place[rank, kind]):
            name = f"rank {rank} {names[kind]}" + f" {number + 1}" * (kind == "request" or number > 0)
            out.append(Lane(rank=rank, kind=kind, name=name, events=lane))
    return out


@dataclass(frozen=True, kw_only=True, slots=True)
class Ledger:
    """Seconds of each rank by phase. `wall` is the time from the first event of the run to its last."""

    wall: float
    seconds: dict[int, dict[str, float]]
    """Rank -> phase -> seconds; the phase "unaccounted" is what no event covers."""

    @property
    def phases(self) -> list[str]:
        return list(dict.fromkeys(phase for spent in self.seconds.values() for phase in spent))

    def share(self, phases: Iterable[str]) -> float:
        """Part of all ranks' time that `phases` took."""
        spent = sum(by_phase.get(phase, 0.0) for by_phase in self.seconds.values() for phase in phases)
        return spent / max(self.wall * len(self.seconds), 1e-12)


def ledger_of(events: Sequence[Event]) -> Ledger:
    """Where every second of every rank went. Of phases that overlap on a rank, as drafter training inside
    waiting, the one that began last counts, so that nothing counts twice."""
    phases = [event for event in events if event.kind == "phase"]
    if not phases:
        return Ledger(wall=0.0, seconds={})
    first, last = min(e.start for e in phases), max(e.end for e in phases)
    seconds = {}
    for rank in sorted({event.rank for event in phases}):
        spent = _exclusive([event for event in phases if event.rank == rank])
        spent["unaccounted"] = max(last - first - sum(spent.values()), 0.0)
        seconds[rank] = spent
    return Ledger(wall=last - first, seconds=seconds)


def _exclusive(events: Sequence[Event]) -> dict[str, float]:
    """Seconds by phase of one rank; where several run, the one that began last."""
    bounds = sorted({time for event in events for time in (event.start, event.end)})
    waiting = sorted(events, key=lambda event: event.start)
    spent: dict[str, float] = defaultdict(float)
    active: list[Event] = []
    place = 0
    for start, end in zip(bounds, bounds[1:]):
        while place < len(waiting) and waiting[place].start <= start:
            active.append(waiting[place])
            place += 1
        active = [event for event in active if event.end > start]
        if active:
            spent[active[-1].phase] += end - start
    return dict(spent)


@dataclass(frozen=True, kw_only=True, slots=True)
class Acceptance:
    """How speculation went, from decode steps."""

    by_position: dict[str, list[float]]
    """Strategy -> share of requests whose draft token at each position was accepted."""
    by_batch: dict[str, dict[int, float]]
    """Strategy -> batch size -> tokens emitted a request and step."""


def acceptance_of(events: Iterable[Event]) -> Acceptance:
    """From decode steps that drafted. Batch sizes are put together in powers of two (5 .. 8 count as 8)."""
    accepted: dict[str, list[int]] = defaultdict(list)
    requests: dict[str, int] = defaultdict(int)
    by_batch: dict[str, dict[int, list[int]]] = defaultdict(lambda: defaultdict(lambda: [0, 0]))
    for event in events:
        if event.kind != "decode" or not event.details.get("batch"):
            continue
        details, name = event.details, event.label
        batch = int(details["batch"])
        total = by_batch[name][1 << (batch - 1).bit_length()]
        total[0] += int(details.get("tokens", 0))
        total[1] += batch
        if not details.get("drafted"):
            continue
        requests[name] += batch
        counts = details.get("accepted_by_position", ())
        known = accepted[name]
        known += [0] * (len(counts) - len(known))
        for position, count in enumerate(counts):
            known[position] += count
    return Acceptance(
        by_position={name: [n / requests[name] for n in counts] for name, counts in accepted.items()},
        by_batch={
            name: {size: tokens / count for size, (tokens, count) in sorted(sizes.items())}
            for name, sizes in by_batch.items()
        },
    )
