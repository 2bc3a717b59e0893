"""Nothing hangs: every phase has a time limit, and who is late is said by rank, host and phase.

A thread of each rank posts its place on a board (`watch_board.py`) once a second. A rank whose phase takes
longer than its limit reads the board, works out who is behind and posts a verdict; every rank that sees a
verdict says it, dumps the stacks of its threads and ends. Rank 0 watches that all ranks give signs of life.
The error of a failing rank takes the same road, so the others end with that error within seconds, on other
nodes too. A second thread, which never waits for the network, watches that the board answers. A process whose
interpreter cannot run any more (a C call that keeps its lock) is ended by faulthandler's own timer later.
"""

import faulthandler
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

from megatron_tlt.parallel import collective_trace
from megatron_tlt.train.watch_board import Board, Place, Verdict, late_ranks, late_text

import torch.distributed as dist

EXIT_LATE = 5
"""Exit code of all ranks when a phase took too long on one."""
EXIT_PEER_FAILED = 6
"""Exit code of a rank that ends because another one failed."""

_BEAT = 1.0
_LOOK = 2.5
"""Seconds between two looks at the board that tell who still posts."""
_GRACE = 30.0


@dataclass(kw_only=True, slots=True)
class TimeoutConfig:
    """Seconds that each phase of a run may take on any rank before all ranks end with a report."""

    init: float = 600.0
    """Joining the process group; and building model and data and loading a checkpoint."""
    data: float = 300.0
    """Waiting for the batches of a step."""
    step: float = 600.0
    """One training step after its data is there; and what is between the phases."""
    save: float = 1200.0
    """Writing or publishing a checkpoint."""
    eval: float = 600.0
    """One evaluation."""
    contact: float = 60.0
    """Without a sign of life from a rank: its process is stopped, or its node or network link is down."""

    def __post_init__(self) -> None:
        for name, seconds in asdict(self).items():
            if not seconds > 0:
                raise ValueError(f"timeouts.{name}={seconds} must be above 0 seconds")


class Watchdog:
    """Watches the phases of this process and, once started, the signs of life of all.

    Before `start` its phases are not limited.
    """

    def __init__(self, limits: TimeoutConfig | None = None, *, stacks: Path | None = None) -> None:
        self._limits = limits or TimeoutConfig()
        self._stacks = stacks
        self._phase, self._iteration, self._count = "init", 0, 0
        self._entered = self._answered = time.monotonic()
        self._armed = 0.0
        self._rank, self._size = 0, 1
        self._store: dist.Store | None = None
        self._board: Board | None = None
        self._parent, self._failing = os.getppid(), False
        self._attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        self._stop = threading.Event()
        self._trouble = ""
        self._threads = [
            threading.Thread(target=work, name="watchdog", daemon=True) for work in (self._watch, self._talk)
        ]

    def start(self, store: dist.Store | None, *, rank: int, world_size: int) -> None:
        """Begin to post and to watch. `store` is cloned, so that a slow answer delays nobody else; None where
        there are no other ranks."""
        self._rank, self._size, self._store = rank, world_size, store
        self._connect()
        self._answered = time.monotonic()
        for thread in self._threads:
            thread.start()
        self._enter("init", 0)

    def close(self) -> None:
        """Stop watching; the process may take as long as it likes from here."""
        self._stop.set()
        faulthandler.cancel_dump_traceback_later()

    @contextmanager
    def phase(self, name: str, iteration: int) -> Iterator[None]:
        """Limit what is inside to the seconds that `timeouts.<name>` gives."""
        outer = self._phase
        self._enter(name, iteration)
        try:
            yield
        finally:
            self._enter(outer, iteration)

    def fail(self, error: BaseException) -> None:
        """Tell the other ranks why this one ends, and wait until they have ended for that reason.

        A RuntimeError may only be the echo of another rank's death: silent ranks are looked for first.
        """
        self._failing = True
        if self._store is None:
            return
        text = f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"
        board = self._new_board()
        if isinstance(error, RuntimeError):
            places, silent = self._look_twice(board)
            gone = late_ranks(places, silent, silent_after=_LOOK)
            gone.pop(self._rank, None)
            if gone:
                text += "; " + late_text(gone, places)
        who = f"rank {self._rank} ({socket.gethostname()}) failed: {text}"
        board.post_verdict(self._own_verdict(who, EXIT_PEER_FAILED))
        time.sleep(2 * _BEAT)

    def _enter(self, name: str, iteration: int) -> None:
        self._phase, self._iteration = name, iteration
        self._count += 1
        self._entered = time.monotonic()
        if self._threads[0].is_alive() and self._entered - self._armed > _BEAT:
            self._armed = self._entered
            # Not under Python's control: it ends the process although the interpreter is stuck. Setting it
            # starts a thread, so not at every step, and it has to be long enough for any phase.
            limit = max(asdict(self._limits).values()) + _GRACE
            faulthandler.dump_traceback_later(limit, exit=True, file=sys.__stderr__)

    def _place(self) -> Place:
        return Place(
            host=socket.gethostname(),
            phase=self._phase,
            iteration=self._iteration,
            count=self._count,
            seconds=time.monotonic() - self._entered,
        )

    def _talk(self) -> None:
        """The thread that talks to the board; a call of it may hang for as long as the network does."""
        while not self._stop.is_set():
            try:
                self._beat()
                self._answered = time.monotonic()
            except RuntimeError as error:
                self._trouble = " ".join(str(error).split())[:200]
                self._reconnect()
            self._stop.wait(_BEAT)

    def _watch(self) -> None:
        while not self._stop.wait(_BEAT):
            if os.getppid() != self._parent:
                self._end(self._own_verdict("the launcher of this process is gone", EXIT_PEER_FAILED))
            seconds = time.monotonic() - self._answered
            if seconds > self._limits.contact:
                self._end(self._own_verdict(self._lost_text(seconds), EXIT_LATE))

    def _beat(self) -> None:
        place, verdict = self._place(), None
        if self._board is not None:
            self._board.post(place)
            verdict = None if self._failing else self._board.verdict() or self._silence()
        if verdict is None and place.seconds > getattr(self._limits, place.phase):
            verdict = self._too_late(place)
        if verdict is not None:
            self._end(verdict)

    def _silence(self) -> Verdict | None:
        """Rank 0 alone reads all places, so that the board is asked little."""
        if self._rank != 0:
            return None
        places, silent = self._board.read()
        if max(silent.values()) < self._limits.contact:
            return None
        gone = late_ranks(places, silent, silent_after=self._limits.contact)
        return self._condemn(f"timeouts.contact={self._limits.contact} s is over; {late_text(gone, places)}")

    def _too_late(self, place: Place) -> Verdict:
        limit = f"timeouts.{place.phase}={getattr(self._limits, place.phase)} s is over at rank {self._rank}"
        limit += f" in iteration {place.iteration}"
        if self._board is None:
            return self._own_verdict(limit, EXIT_LATE)
        places, silent = self._look_twice(self._board)
        late = late_ranks(places, silent, silent_after=_LOOK)
        return self._condemn(f"{limit}; {late_text(late, places)}")

    def _condemn(self, message: str) -> Verdict:
        return self._board.post_verdict(self._own_verdict(message, EXIT_LATE))

    def _look_twice(self, board: Board) -> tuple[dict[int, Place], dict[int, float]]:
        board.read()
        time.sleep(_LOOK)
        board.post(self._place())
        return board.read()

    def _lost_text(self, seconds: float) -> str:
        """The store lives with node 0: under torchrun in its launcher, else in rank 0."""
        where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        return (
            f"timeouts.contact={self._limits.contact} s is over; late: rank 0's node: no answer from {where} "
            f"for {seconds:.0f} s: that machine, or the network link between it and {socket.gethostname()}, "
            f"is down {self._trouble}"
        )

    def _own_verdict(self, message: str, code: int) -> Verdict:
        return Verdict(message=message, code=code, rank=self._rank)

    def _reconnect(self) -> None:
        try:
            self._connect()
        except RuntimeError as error:  # the next beat tries again, and `_watch` keeps the time
            self._trouble = " ".join(str(error).split())[:200]

    def _connect(self) -> None:
        if self._store is not None:
            self._board = self._new_board()

    def _new_board(self) -> Board:
        store = self._store.clone()
        store.set_timeout(timedelta(seconds=5))
        return Board(store, rank=self._rank, world_size=self._size, attempt=self._attempt)

    def _end(self, verdict: Verdict) -> NoReturn:
        """Say why, dump all stacks, and leave without waiting for anything."""
        local_leader = os.environ.get("LOCAL_RANK", "0") == "0"
        if local_leader or verdict.rank == self._rank:
            print(f"error: [rank {self._rank}] {verdict.message}", file=sys.stderr, flush=True)
        self._dump_stacks()
        if verdict.rank == self._rank:
            time.sleep(2 * _BEAT)  # the others see the verdict and dump their stacks, too
        sys.stdout.flush()
        os._exit(verdict.code)

    def _dump_stacks(self) -> None:
        if self._stacks is None:
            faulthandler.dump_traceback(file=sys.__stderr__, all_threads=True)
            return
        self._stacks.mkdir(parents=True, exist_ok=True)
        with open(self._stacks / f"rank_{self._rank}.txt", "w", encoding="utf-8") as stream:
            faulthandler.dump_traceback(file=stream, all_threads=True)
        (self._stacks / f"rank_{self._rank}_collectives.json").write_bytes(collective_trace())
