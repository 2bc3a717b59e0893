"""Ranks of one machine without torchrun's start-up: forked from a server that has imported everything once.

A stand-in for torchrun where a run is started hundreds of times (fault campaigns, tests of what ends a run):
same environment variables, and when one rank fails the others are ended.
"""

import multiprocessing
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

_CONTEXT = multiprocessing.get_context("forkserver")
# The latter two are imported late by torch: by an optimizer's constructor, and by the metrics' sink.
_PRELOAD = ["megatron_tlt.pretrain", "tools.ranks", "torch._dynamo", "torch.utils.tensorboard"]
_SECONDS_AFTER_FAILURE = 10.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Ranks:
    """`world_size` processes that each call `function(*args)`; a returned int is the exit code.

    Their output goes to `log`, appended.
    """

    def __init__(
        self,
        function: Callable[..., int | None],
        args: Sequence[object],
        *,
        world_size: int,
        log: Path,
        environment: dict[str, str] | None = None,
    ) -> None:
        _CONTEXT.set_forkserver_preload(_PRELOAD)
        port, settings = str(free_port()), environment or {}
        self.processes = [
            _CONTEXT.Process(
                target=_rank_main,
                args=(function, tuple(args), log, _torchrun_variables(rank, world_size, port) | settings),
            )
            for rank in range(world_size)
        ]
        for process in self.processes:
            process.start()

    def running(self) -> bool:
        """Whether all ranks still run."""
        return all(process.is_alive() for process in self.processes)

    def send(self, rank: int, number: signal.Signals) -> None:
        if self.processes[rank].is_alive():
            os.kill(self.processes[rank].pid, number)

    def wait(self, timeout: float) -> list[int] | None:
        """Exit codes in rank order, a negative one being the signal that ended a rank; None when they are
        not all over within `timeout` seconds, and are then killed. When one fails, the others get ten seconds
        to end by themselves."""
        deadline = time.monotonic() + timeout
        failed_at = None
        while any(process.is_alive() for process in self.processes):
            now = time.monotonic()
            if now > deadline:
                self.kill()
                return None
            codes = [process.exitcode for process in self.processes]
            if failed_at is None and any(code not in (None, 0) for code in codes):
                failed_at = now
            if failed_at is not None and now - failed_at > _SECONDS_AFTER_FAILURE:
                self.kill()
            time.sleep(0.02)
        return [process.exitcode for process in self.processes]

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()


def _torchrun_variables(rank: int, world_size: int, port: str) -> dict[str, str]:
    return {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
        "OMP_NUM_THREADS": "1",
    }  # fmt: skip


def _rank_main(function: Callable, args: tuple, log: Path, environment: dict[str, str]) -> None:
    os.environ.update(environment)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.stdout.reconfigure(line_buffering=True)
    sys.exit(function(*args))
