"""The board on which ranks say where they are, kept in the job's key-value store; who is late, in words."""

import json
import time
from dataclasses import asdict, dataclass

import torch.distributed as dist

_VERDICT = "verdict"


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where a rank is. Example: Place(host="node1", phase="data", iteration=12, count=37, seconds=61.0)."""

    host: str
    phase: str
    iteration: int
    count: int
    """Phases entered so far; all ranks go through the same ones, so who counts fewer is behind."""
    seconds: float
    """In this phase, when it was posted."""

    def text(self) -> str:
        return f"in phase {self.phase} of iteration {self.iteration} for {self.seconds:.0f} s"


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """Why all ranks end, and with which exit code; posted once a run."""

    message: str
    code: int
    rank: int
    """Who posted it."""


class Board:
    """Places of all ranks and the verdict. `store` is used by one thread only; its calls may raise
    RuntimeError (torch's DistStoreError and DistNetworkError are such) when it cannot be reached."""

    def __init__(self, store: dist.Store, *, rank: int, world_size: int, attempt: str) -> None:
        self._store = dist.PrefixStore(f"watchdog/{attempt}", store)
        self._rank, self._size = rank, world_size
        self._last: dict[int, tuple[bytes, float]] = {}
        self._made = time.monotonic()

    def post(self, place: Place) -> None:
        """The text must differ from the last one: that is how a reader knows that this rank lives."""
        self._store.set(str(self._rank), json.dumps(asdict(place) | {"time": time.time()}))

    def verdict(self) -> Verdict | None:
        if not self._store.check([_VERDICT]):
            return None
        return Verdict(**json.loads(self._store.get(_VERDICT)))

    def post_verdict(self, verdict: Verdict) -> Verdict:
        """Post it unless another rank came first; returns the one that holds."""
        return Verdict(**json.loads(self._store.compare_set(_VERDICT, "", json.dumps(asdict(verdict)))))

    def read(self) -> tuple[dict[int, Place], dict[int, float]]:
        """(last place of every rank that has posted one, seconds since each rank's post last changed as seen
        by the calls of this method; for one that has not posted, since this object was made)."""
        known = [r for r in range(self._size) if r in self._last or self._store.check([str(r)])]
        raw = self._store.multi_get([str(rank) for rank in known]) if known else []
        now = time.monotonic()
        places, silent = {}, dict.fromkeys(range(self._size), now - self._made)
        for rank, text in zip(known, raw):
            fields = json.loads(text)
            fields.pop("time")
            places[rank] = Place(**fields)
            before, since = self._last.get(rank, (None, now))
            self._last[rank] = (text, since if text == before else now)
            silent[rank] = now - self._last[rank][1]
        return places, silent


def late_ranks(
    places: dict[int, Place], silent: dict[int, float], *, silent_after: float
) -> dict[int, str]:
    """Rank -> what it is late with. Those that say nothing; if all speak, those behind the others.

    Empty when all ranks are at the same place: then the work itself is slow, or all wait for each other.
    """
    late = {}
    for rank, seconds in silent.items():
        if seconds >= silent_after:
            last = f"last {places[rank].text()}" if rank in places else "not one so far"
            late[rank] = (
                f"no sign of life for {seconds:.0f} s, {last} "
                "(process stopped, or its machine or network link down)"
            )
    if late:
        return late
    ahead = max(place.count for place in places.values())
    return {rank: place.text() for rank, place in places.items() if place.count < ahead}


def late_text(late: dict[int, str], places: dict[int, Place]) -> str:
    """One clause naming every late rank with its host, at most eight of them."""
    if not late:
        return "all ranks are at the same place"
    named = [
        f"rank {rank} ({places[rank].host if rank in places else 'host unknown'}): {what}"
        for rank, what in sorted(late.items())
    ]
    more = f" and {len(named) - 8} more" if len(named) > 8 else ""
    return "late: " + "; ".join(named[:8]) + more
