"""Joining the job's key-value store, and saying who is being waited for."""

import os
import socket
import time
from datetime import timedelta

import torch.distributed as dist

_NOTICE_AFTER = 30.0
_POLL = 0.2


def join_store(*, seconds: float) -> tuple[dist.Store, int, int]:
    """Meet all ranks in the store that torchrun (or rank 0) hosts; (store, rank, world size).

    Reads RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT. From the 30th second on rank 0 says which ranks are
    missing. Raises TimeoutError naming them after `seconds`, and ConnectionError when the store's host
    cannot be reached.
    """
    where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    try:
        store, rank, size = next(dist.rendezvous("env://", timeout=timedelta(seconds=seconds)))
    except dist.DistError as error:
        raise ConnectionError(
            f"{socket.gethostname()} cannot reach rank 0 at {where} within {seconds:.0f} s ({error}): "
            "check MASTER_ADDR and the firewall; with several network cards set GLOO_SOCKET_IFNAME "
            "and NCCL_SOCKET_IFNAME to the one that reaches the other nodes"
        ) from error
    # torchrun keeps the store when it starts the ranks again: what the last ones left in it, their addresses
    # for one, must not be read.
    store = dist.PrefixStore(f"attempt/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    meeting = dist.PrefixStore("join", store)
    meeting.set(str(rank), socket.gethostname())
    if rank == 0:
        wait_for_all(meeting, size, seconds=seconds, what="ranks")
        meeting.set("all", "here")
    else:
        try:
            meeting.wait(["all"], timedelta(seconds=seconds + 10))
        except dist.DistError as error:
            raise TimeoutError(
                f"rank {rank} ({socket.gethostname()}): not all ranks have joined within {seconds:.0f} s; "
                "rank 0 says which are missing"
            ) from error
    return store, rank, size


def wait_for_all(store: dist.Store, count: int, *, seconds: float, what: str) -> None:
    """Return when the keys "0" .. "count - 1" are in `store`. Raises TimeoutError naming the missing."""
    began = noticed = time.monotonic()
    missing = list(range(count))
    while missing := [number for number in missing if not store.check([str(number)])]:
        now = time.monotonic()
        names = ", ".join(map(str, missing[:8])) + (" ..." if len(missing) > 8 else "")
        if now - began > seconds:
            raise TimeoutError(
                f"{what} {names} of {count} have not joined within {seconds:.0f} s: "
                "look for their logs; did they start, with the same address, port and count?"
            )
        if now - noticed > _NOTICE_AFTER:
            print(f" waiting for {what} {names} of {count} ({now - began:.0f} s)", flush=True)
            noticed = now
        time.sleep(_POLL)
