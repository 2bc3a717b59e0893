"""One process a GPU for the tests of several: NCCL, and a bounded join."""

import os
import traceback
from collections.abc import Callable

from megatron_tlt import device
from tests.dist.workers import free_port

import torch


def gpus() -> int:
    return torch.accelerator.device_count() if device.is_cuda() else 0


def run_on_gpus(function: Callable, count: int, *args: object, timeout: float = 300.0, **options):
    """`function(*args, **options)` on `count` ranks; the results in rank order. Raises AssertionError with a
    rank's traceback, or when one is late."""
    context, port = torch.multiprocessing.get_context("spawn"), free_port()
    pipes, processes = [], []
    for rank in range(count):
        ours, theirs = context.Pipe()
        process = context.Process(
            target=_serve, args=(theirs, rank, count, port, function, args, options), daemon=True
        )
        process.start()
        pipes.append(ours)
        processes.append(process)
    try:
        results = []
        for rank, pipe in enumerate(pipes):
            assert pipe.poll(timeout), f"rank {rank} has not answered within {timeout} s: a hang"
            ok, value = pipe.recv()
            assert ok, f"rank {rank} failed:\n{value}"
            results.append(value)
        return results
    finally:
        for process in processes:
            process.kill()
            process.join(timeout=10)


def _serve(pipe, rank: int, count: int, port: int, function, args, options) -> None:
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(count), LOCAL_WORLD_SIZE=str(count),
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
    )  # fmt: skip
    try:
        pipe.send((True, function(*args, **options)))
    except Exception:  # the process boundary: the traceback goes to the test
        pipe.send((False, traceback.format_exc()))
