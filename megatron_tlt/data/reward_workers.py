"""Rewards off the critical path, in worker processes that a wall clock can kill.

`RewardWorkers.submit` returns at once; a thread feeds the workers, and `collect` waits for what is missing.
A worker that runs past the limit, dies, or takes too much memory is killed and replaced, and its request
comes back as a verifier error, never as a wrong answer. Requests and answers are JSON lines over pipes.
"""

import json
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Protocol

from megatron_tlt.data.rewards import (
    INLINE_REWARDS,
    RewardConfig,
    RewardRequest,
    RewardResult,
    resolve_reward,
    score_response,
)

_START_LIMIT_S = 120.0  # imports of a worker: sympy and friends on a loaded machine
_EXIT_GRACE_S = 0.5  # from a worker's last word, its closed pipe, to its exit code


class RewardScorer(Protocol):
    """Scores responses: submitted as they finish, collected later."""

    def submit(self, request: RewardRequest) -> int:
        """Hand in one response; returns its ticket."""
        ...

    def collect(self, tickets: Sequence[int]) -> list[RewardResult]:
        """The results of `tickets`, in their order; waits until all are there. Each ticket once."""
        ...

    def close(self) -> None: ...


def build_scorer(config: RewardConfig, rewards: Iterable[str]) -> RewardScorer:
    """A scorer for the rewards named in `rewards`. Raises ValueError for one that cannot be loaded."""
    names = sorted(set(rewards))
    return InlineRewards(config, names) if config.num_workers == 0 else RewardWorkers(config, names)


class InlineRewards:
    """Scores in the caller's process: for rewards that cannot hang or crash, and the slow twin in tests."""

    def __init__(self, config: RewardConfig, rewards: Iterable[str]) -> None:
        others = sorted(set(rewards) - INLINE_REWARDS)
        if others:
            raise ValueError(
                f"num_workers 0 is for {sorted(INLINE_REWARDS)} only, not for {others}, which may hang: "
                "set num_workers to 1 or more"
            )
        self._config = config
        self._functions = {name: resolve_reward(name) for name in rewards}
        self._results: dict[int, RewardResult] = {}
        self._submitted = 0

    def submit(self, request: RewardRequest) -> int:
        self._submitted += 1
        self._results[self._submitted] = score_response(
            self._functions[request.reward],
            request,
            format_pattern=self._config.format_pattern,
            format_coef=self._config.format_coef,
        )
        return self._submitted

    def collect(self, tickets: Sequence[int]) -> list[RewardResult]:
        return [self._results.pop(ticket) for ticket in tickets]

    def close(self) -> None:
        self._results.clear()


class _Worker:
    """One child process, and what it is busy with."""

    def __init__(self, settings: str) -> None:
        paths = os.pathsep.join(path for path in sys.path if path)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "megatron_tlt.data.reward_worker", settings],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
            start_new_session=True,  # so that a kill also takes what the reward itself has started
        )
        self.ready = False
        self.ticket: int | None = None
        self.deadline = time.monotonic() + _START_LIMIT_S
        self._unread = b""

    @property
    def is_idle(self) -> bool:
        return self.ready and self.ticket is None

    def send(self, ticket: int, request: RewardRequest, *, timeout_s: float) -> bool:
        """False when the worker is dead."""
        self.ticket, self.deadline = ticket, time.monotonic() + timeout_s
        try:
            self.process.stdin.write(json.dumps(asdict(request)).encode() + b"\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            return False
        return True

    def read(self) -> list[dict[str, object]] | None:
        """Whole messages that have arrived; None when the worker is dead."""
        data = os.read(self.process.stdout.fileno(), 1 << 16)
        if not data:
            return None
        *lines, self._unread = (self._unread + data).split(b"\n")
        return [json.loads(line) for line in lines]

    def kill(self, *, grace_s: float = 0.0) -> int:
        """End the process, after `grace_s` in which it may end by itself, and its group; the exit code."""
        # Not reaped before the group is killed: till then no other process can bear the group's number.
        limit, flags = time.monotonic() + grace_s, os.WEXITED | os.WNOWAIT | os.WNOHANG
        while os.waitid(os.P_PID, self.process.pid, flags) is None and time.monotonic() < limit:
            time.sleep(0.005)
        os.killpg(self.process.pid, signal.SIGKILL)
        code = self.process.wait()
        self.process.stdout.close()
        try:
            self.process.stdin.close()
        except BrokenPipeError:  # closing flushes what a dead worker did not read
            pass
        return code


class RewardWorkers:
    """`num_workers` killable processes and the thread that feeds them.

    Example: workers = RewardWorkers(config, ["math"]); ticket = workers.submit(request);
    [result] = workers.collect([ticket]). Raises ValueError when a reward cannot be loaded.
    """

    def __init__(self, config: RewardConfig, rewards: Iterable[str]) -> None:
        self._config = config
        self._settings = json.dumps(
            {
                "rewards": sorted(set(rewards)),
                "format_pattern": config.format_pattern,
                "format_coef": config.format_coef,
                "memory_limit_mb": config.memory_limit_mb,
            }
        )
        self._lock = threading.Condition()
        self._pending: deque[tuple[int, RewardRequest]] = deque()
        self._results: dict[int, RewardResult] = {}
        self._submitted, self._closing, self._started = 0, False, 0
        self._fatal = ""
        self._wake_reader, self._wake_writer = os.pipe()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wake_reader, selectors.EVENT_READ, None)
        self._thread = threading.Thread(target=self._run, name="rewards", daemon=True)
        self._thread.start()
        with self._lock:
            self._lock.wait_for(lambda: self._fatal or self._started >= config.num_workers)
        if self._fatal:
            self.close()
            raise ValueError(f"reward workers cannot start: {self._fatal}")

    def submit(self, request: RewardRequest) -> int:
        """Hand in one response; returns its ticket at once."""
        with self._lock:
            self._submitted += 1
            self._pending.append((self._submitted, request))
            ticket = self._submitted
        os.write(self._wake_writer, b".")
        return ticket

    def collect(self, tickets: Sequence[int]) -> list[RewardResult]:
        """Results of `tickets` in their order; each wait is bounded by the wall-clock limits.

        Raises RuntimeError when the workers are gone.
        """
        with self._lock:
            self._lock.wait_for(
                lambda: self._fatal or all(ticket in self._results for ticket in tickets)
            )
            if self._fatal:
                raise RuntimeError(f"reward workers are gone: {self._fatal}")
            return [self._results.pop(ticket) for ticket in tickets]

    def close(self) -> None:
        """Kill the workers; what is pending is lost."""
        if self._closing:
            return
        self._closing = True
        os.write(self._wake_writer, b".")
        self._thread.join()
        os.close(self._wake_reader)
        os.close(self._wake_writer)
        self._selector.close()

    def _run(self) -> None:
        """The thread: all workers are started, watched and killed here."""
        workers: list[_Worker] = []
        try:
            workers += [self._start() for _ in range(self._config.num_workers)]
            while not self._closing and not self._fatal:
                self._feed(workers)
                limit = min((w.deadline for w in workers if not w.is_idle), default=None)
                wait = None if limit is None else max(0.0, limit - time.monotonic())
                for key, _ in self._selector.select(wait):
                    if key.data is None:
                        os.read(self._wake_reader, 1 << 16)
                    else:
                        self._receive(workers, key.data)
                self._kill_late(workers)
        finally:
            for worker in workers:
                worker.kill()
            with self._lock:
                self._fatal = self._fatal or "closed"
                self._lock.notify_all()

    def _start(self) -> _Worker:
        worker = _Worker(self._settings)
        self._selector.register(worker.process.stdout, selectors.EVENT_READ, worker)
        return worker

    def _feed(self, workers: list[_Worker]) -> None:
        for worker in list(workers):
            with self._lock:
                if not worker.is_idle or not self._pending:
                    continue
                ticket, request = self._pending.popleft()
            if not worker.send(ticket, request, timeout_s=self._config.timeout_s):
                self._replace(workers, worker, reason="died")

    def _receive(self, workers: list[_Worker], worker: _Worker) -> None:
        messages = worker.read()
        if messages is None:
            self._replace(workers, worker, reason="died")
            return
        for message in messages:
            if "fatal" in message:
                self._fatal = str(message["fatal"])
            elif "ready" in message:
                worker.ready = True
                with self._lock:
                    self._started += 1
                    self._lock.notify_all()
            else:
                leaves = message.pop("leaves")
                self._finish(worker, RewardResult(**message))
                if leaves:
                    self._replace(workers, worker, reason="left")
                    return

    def _kill_late(self, workers: list[_Worker]) -> None:
        now = time.monotonic()
        for worker in list(workers):
            if not worker.is_idle and worker.deadline <= now:
                limit = self._config.timeout_s if worker.ready else _START_LIMIT_S
                self._replace(workers, worker, reason=f"ran past {limit:g} s and was killed")

    def _replace(self, workers: list[_Worker], worker: _Worker, *, reason: str) -> None:
        """Kill a worker, fail what it was busy with, start another. One that never got ready is fatal."""
        self._selector.unregister(worker.process.stdout)
        code = worker.kill(grace_s=_EXIT_GRACE_S if reason == "died" else 0.0)
        workers.remove(worker)
        if not worker.ready:
            self._fatal = self._fatal or f"a worker {reason} (exit code {code}) before it was ready"
            return
        if worker.ticket is not None:
            self._finish(worker, RewardResult(error=f"reward worker {reason} (exit code {code})"))
        workers.append(self._start())

    def _finish(self, worker: _Worker, result: RewardResult) -> None:
        with self._lock:
            self._results[worker.ticket] = result
            self._lock.notify_all()
        worker.ticket = None
