"""Persistent gloo workers: real processes, real collectives, and a hang is a failed test.

One pool per world size lives for the whole pytest session, because starting a worker costs seconds of
imports. A task is a module-level function; it runs on every rank and the list of its results comes back.
"""

import atexit
import ctypes
import faulthandler
import gc
import multiprocessing
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait

_POOLS: dict[int, "GlooPool"] = {}
_START_METHOD = "spawn"  # fork would copy torch's threads and locks


def run_distributed(
    function: Callable, world_size: int, *args: object, timeout: float = 120.0
) -> list:
    """Run `function(*args)` on `world_size` ranks and return the results in rank order.

    The ranks have torchrun's environment variables and share one default process group, which a task
    joins through `init_parallel` and must leave as it is. Raises AssertionError with the first failed
    rank's traceback, or when a rank has not answered within `timeout` seconds; the pool is then ended.
    """
    pool = _POOLS.get(world_size)
    if pool is None:
        pool = _POOLS[world_size] = GlooPool(world_size)
    try:
        return pool.run(function, args, timeout=timeout)
    except BaseException:
        pool.close()
        del _POOLS[world_size]
        raise


def close_pools() -> None:
    for world_size in list(_POOLS):
        _POOLS.pop(world_size).close()


atexit.register(close_pools)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class GlooPool:
    """`world_size` spawned processes that wait for tasks."""

    def __init__(self, world_size: int) -> None:
        context = multiprocessing.get_context(_START_METHOD)
        port = free_port()
        self.pipes: list[Connection] = []
        self.processes = []
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(theirs, rank, world_size, port), daemon=True
            )
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def run(self, function: Callable, args: tuple, *, timeout: float) -> list:
        for pipe in self.pipes:
            pipe.send((function, args))
        results: dict[int, object] = {}
        deadline = time.monotonic() + timeout
        while len(results) < len(self.pipes):
            waiting = [p for rank, p in enumerate(self.pipes) if rank not in results]
            ready = wait(waiting, timeout=max(0.0, deadline - time.monotonic()))
            late = [rank for rank in range(len(self.pipes)) if rank not in results]
            assert ready, f"ranks {late} have not answered within {timeout} s: a hang"
            for pipe in ready:
                rank = self.pipes.index(pipe)
                try:
                    ok, value = pipe.recv()
                except EOFError:
                    self.processes[rank].join(timeout=5)
                    ok, value = False, f"process ended, exit code {self.processes[rank].exitcode}"
                assert ok, f"rank {rank} failed:\n{value}"
                results[rank] = value
        return [results[rank] for rank in range(len(self.pipes))]

    def close(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join(timeout=10)


def _die_with_parent() -> None:
    """Linux: a worker in the middle of a collective must not outlive a killed pytest."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


def _serve(pipe: Connection, rank: int, world_size: int, port: int) -> None:
    _die_with_parent()
    faulthandler.enable()  # a crash in C++ shows the Python line that led to it
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        OMP_NUM_THREADS="1",
    )
    while True:
        try:
            function, args = pipe.recv()
        except EOFError:
            return
        gc.collect()  # what the last task left in cycles holds process groups, hence threads
        try:
            pipe.send((True, function(*args)))
        except Exception:  # the process boundary: the traceback goes to the test
            pipe.send((False, traceback.format_exc()))
