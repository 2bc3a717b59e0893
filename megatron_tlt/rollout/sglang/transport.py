"""How new weights reach a running engine: by their folder, by shared memory, or by a process group.

All of them hand over buckets of `bucket_bytes` between SGLang's begin_weight_update and end_weight_update, of
the target or of the drafter. With `folder` the engine reads files, from which a new engine starts, too; the
other two keep the newest weights in this process's memory and write files only for an engine that starts.
"""

import base64
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from itertools import count
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch.distributed import distributed_c10d as c10d
from torch.multiprocessing.reductions import reduce_tensor

from megatron_tlt.rollout.sglang.config import SglangConfig
from megatron_tlt.rollout.sglang.process import EngineDied, EngineProcess

Source = Path | Mapping[str, torch.Tensor]
_HOST = "127.0.0.1"  # an engine runs on its trainer's machine
_serial = count(1)


class Transport(ABC):
    """One way of the three."""

    def connect(self, process: EngineProcess) -> None:
        """Called once for every engine that was started. Raises EngineDied."""

    @abstractmethod
    def send(
        self, process: EngineProcess, selector: str, source: Source, *, version: str | None, paused: bool
    ) -> None:
        """Update the engine's target or draft. Raises EngineDied, EngineError."""

    def close(self) -> None:
        """Give up what `connect` made."""


def build_transport(config: SglangConfig, *, device: str) -> Transport:
    """The one that `config.weight_transport` names. Raises ValueError where the device cannot have it."""
    if config.weight_transport == "folder":
        return FolderTransport(config.bucket_bytes)
    if config.weight_transport == "tensor":
        return TensorTransport(config.bucket_bytes, device=device)
    if device == "cuda" and "base_gpu_id" not in config.arguments:
        raise ValueError(
            "weight_transport=group on a GPU: NCCL refuses two processes on one; name the engine's first GPU "
            "by base_gpu_id in arguments, or use tensor (CUDA IPC)"
        )
    return GroupTransport(
        config.bucket_bytes, device=device, tp_size=config.tp_size, timeout_s=config.timeout_s
    )


class FolderTransport(Transport):
    """The engine's process reads the safetensors files of a folder."""

    def __init__(self, bucket_bytes: int) -> None:
        self._bucket_bytes = bucket_bytes

    def send(
        self, process: EngineProcess, selector: str, source: Source, *, version: str | None, paused: bool
    ) -> None:
        process.call(
            "update", selector=selector, version=version, paused=paused, folder=str(source),
            bucket_bytes=self._bucket_bytes,
        )  # fmt: skip


class _BucketTransport(Transport):
    """Hands over this process's tensors, bucket by bucket."""

    def __init__(self, bucket_bytes: int, *, device: str) -> None:
        self._bucket_bytes, self._device = bucket_bytes, device

    def send(
        self, process: EngineProcess, selector: str, source: Source, *, version: str | None, paused: bool
    ) -> None:
        process.call("begin_update", selector=selector, paused=paused)
        for pairs in in_buckets(source.items(), self._bucket_bytes):
            flat = flatten(pairs, device=self._device)  # alive until the engine has copied it
            self._hand_over(process, flat, dict(selector=selector, version=version) | layout(pairs))
        process.call("end_update", paused=paused)

    @abstractmethod
    def _hand_over(self, process: EngineProcess, flat: torch.Tensor, facts: dict[str, Any]) -> None:
        """One bucket `[bytes]`, which the engine has when this returns."""


class TensorTransport(_BucketTransport):
    """The engine opens this process's memory: CUDA IPC on the same GPU or one that it reaches, else POSIX
    shared memory. No NCCL could do this, which refuses two processes on one GPU."""

    def _hand_over(self, process: EngineProcess, flat: torch.Tensor, facts: dict[str, Any]) -> None:
        process.call("load", handle=shared_handle(flat), **facts)


class GroupTransport(_BucketTransport):
    """Broadcast from this rank to all ranks of its engine: gloo on a CPU, NCCL between different GPUs."""

    def __init__(self, bucket_bytes: int, *, device: str, tp_size: int, timeout_s: float) -> None:
        super().__init__(bucket_bytes, device=device)
        self._size, self._timeout = 1 + tp_size, timedelta(seconds=timeout_s)
        self._name, self._group, self._store = "", None, None

    def connect(self, process: EngineProcess) -> None:
        """A new group with a new engine. This rank's own store, so that no free port is guessed."""
        self.close()
        self._name = f"megatron_tlt_weights_{next(_serial)}"
        backend = "nccl" if self._device == "cuda" else "gloo"
        self._store = dist.TCPStore(
            _HOST, 0, self._size, is_master=True, timeout=self._timeout, wait_for_workers=False
        )
        number = process.ask(
            "join", address=_HOST, port=self._store.port, world_size=self._size, name=self._name,
            backend=backend,
        )  # fmt: skip
        with _death_of(process):
            # What SGLang's init_custom_process_group does on its side; torch has no public way to make a
            # group with ranks outside of the default one.
            self._group, _ = c10d._new_process_group_helper(
                self._size, 0, [], c10d.Backend(backend), c10d.PrefixStore(self._name, self._store),
                group_name=self._name, timeout=self._timeout,
            )  # fmt: skip
        c10d._world.pg_group_ranks[self._group] = {rank: rank for rank in range(self._size)}
        process.wait(number)

    def _hand_over(self, process: EngineProcess, flat: torch.Tensor, facts: dict[str, Any]) -> None:
        number = process.ask("receive", group=self._name, **facts)
        with _death_of(process):
            dist.broadcast(flat, group=self._group, group_src=0)
        process.wait(number)

    def close(self) -> None:
        if self._group is not None:
            dist.destroy_process_group(self._group)
        self._group = self._store = None


@contextmanager
def _death_of(process: EngineProcess) -> Iterator[None]:
    """A collective with an engine that has ended fails with RuntimeError: tell it as EngineDied."""
    try:
        yield
    except RuntimeError as error:
        raise EngineDied(f"a collective with the SGLang process {process.pid} failed: {error}") from error


def in_buckets(
    pairs: Iterable[tuple[str, torch.Tensor]], size: int
) -> Iterator[list[tuple[str, torch.Tensor]]]:
    """The pairs in lists of one type each and of about `size` bytes; a larger tensor stands alone."""
    held: list[tuple[str, torch.Tensor]] = []
    for name, tensor in pairs:
        full = sum(t.nbytes for _, t in held) + tensor.nbytes > size
        if held and (full or tensor.dtype != held[0][1].dtype):
            yield held
            held = []
        held.append((name, tensor))
    if held:
        yield held


def layout(pairs: list[tuple[str, torch.Tensor]]) -> dict[str, Any]:
    """What the engine needs to take a flat bucket apart."""
    return {
        "names": [name for name, _ in pairs],
        "dtypes": [str(tensor.dtype).removeprefix("torch.") for _, tensor in pairs],
        "shapes": [list(tensor.shape) for _, tensor in pairs],
    }


def flatten(pairs: list[tuple[str, torch.Tensor]], *, device: str) -> torch.Tensor:
    """All bytes of the bucket, one tensor after the other, `[bytes]`, as SGLang's FlattenedTensorBucket."""
    flat = torch.empty(sum(tensor.nbytes for _, tensor in pairs), dtype=torch.uint8, device=device)
    at = 0
    for _, tensor in pairs:
        flat[at : at + tensor.nbytes].copy_(tensor.contiguous().view(-1).view(torch.uint8))
        at += tensor.nbytes
    return flat


def shared_handle(flat: torch.Tensor) -> str:
    """What another process of this machine opens the tensor by: torch's recipe, a function and arguments."""
    with named_files():
        return base64.b64encode(ForkingPickler.dumps(reduce_tensor(flat))).decode()


@contextmanager
def named_files() -> Iterator[None]:
    """Share memory by name: a descriptor can be handed to one's own children only."""
    before = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy("file_system")
    try:
        yield
    finally:
        torch.multiprocessing.set_sharing_strategy(before)


class SharedTensor:
    """Stands for the tensor of a recipe that is passed on: who unpickles it has the tensor.

    On CUDA the process between must not open it, since torch does not share what it has been given.
    """

    def __init__(self, recipe: tuple) -> None:
        self._recipe = recipe

    def __reduce__(self) -> tuple:
        return self._recipe
