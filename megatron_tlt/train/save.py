"""Writing checkpoints so that none is lost: write, make durable on every rank, publish, move the tracker.

A save has three parts. `begin` (collective) plans and, for an asynchronous save, copies the tensors to host
memory; training may go on after it. `write` is each rank's own: its files, their fsync, their SHA-256.
`complete` (collective) needs every rank's `write`: it writes the index and the manifest, renames the folder
to its final name, and then moves the tracker. A process killed at any moment leaves the previous checkpoint
as it was. On nodes with disks of their own one rank a node publishes that node's files.
"""

import os
import re
import secrets
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from megatron_tlt import device
from megatron_tlt.files import delete_folder, fsync_path, publish_folder, write_json, write_text
from megatron_tlt.parallel import local_rank_from_env
from megatron_tlt.train.checkpoint_format import (
    FORMAT_VERSION,
    STATE_FILE,
    TRACKER,
    TrainState,
    iteration_folder,
    published_iterations,
    sharded_state,
)
from megatron_tlt.train.manifest import Manifest, file_record, problems_in, write_manifest
from megatron_tlt.train.optimizer_state import optimizer_step

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.process_groups_config import ProcessGroupCollection

_SECONDS_FOR_VISIBILITY = 2.0
"""How long another node may take to show a new folder before its disk counts as its own."""


@dataclass(kw_only=True, slots=True)
class _Pending:
    """A save that has begun and is not yet published."""

    state: dict[str, object]
    partial: Path
    final: Path
    request: AsyncRequest
    written: Future[Manifest]


class CheckpointSaver:
    """Writes the checkpoints of one run into `root`. All of its methods are collective over the world.

    With `async_save`, `save` returns once the tensors are copied; the files are written by a thread, and
    `poll` (every step) or `finish` publishes them. One save is in flight at most. `keep_last` newest complete
    checkpoints are kept and older ones deleted; None keeps all. Errors of a writing rank are raised on
    every rank, with its number.
    """

    def __init__(
        self,
        root: str | Path,
        *,
        groups: ProcessGroupCollection,
        keep_last: int | None = None,
        async_save: bool = False,
    ) -> None:
        self._root, self._groups = Path(root), groups
        self._keep_last, self._async = keep_last, async_save
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._pending: _Pending | None = None
        self.published: Path | None = None
        """The newest checkpoint that this object has published."""
        self._publishes: bool | None = None
        self._shared = True

    def __enter__(self) -> "CheckpointSaver":
        return self

    def __exit__(self, *_: object) -> None:
        """End the writing thread, after what it writes; a save in flight stays unpublished."""
        self._thread.shutdown()

    def save(
        self,
        state: TrainState,
        chunks: list[GPTModel],
        optimizer: MegatronOptimizer | None,
        *,
        keep: Callable[[str], bool] | None = None,
    ) -> Path:
        """Save weights and, unless `optimizer` is None, its state; returns the folder that it becomes.

        `keep` selects tensors by their name on disk ("decoder.layers.mlp.linear_fc1.weight",
        "optimizer.state.exp_avg.<that>"); such a checkpoint can be loaded with the same `keep` only.
        """
        self.finish()
        self._pending = self._begin(state, chunks, optimizer, keep)
        if not self._async:
            self.finish()
        return iteration_folder(self._root, state.iteration)

    @property
    def in_flight(self) -> bool:
        """Whether a save has begun that is not yet published."""
        return self._pending is not None

    def poll(self) -> None:
        """Publish the save in flight, if there is one and every rank has written its files."""
        if self._pending is None:
            return
        busy = torch.tensor([int(not self._pending.written.done())], device=device.device())
        dist.all_reduce(busy)
        if int(busy) == 0:
            self.finish()

    def finish(self) -> None:
        """Wait for the save in flight, if there is one, and publish it."""
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        self._complete(pending)
        self.published = pending.final

    def _begin(
        self,
        state: TrainState,
        chunks: list[GPTModel],
        optimizer: MegatronOptimizer | None,
        keep: Callable[[str], bool] | None,
    ) -> _Pending:
        final = iteration_folder(self._root, state.iteration)
        partial = self._make_partial(final)
        if optimizer is not None:
            step = torch.tensor(optimizer_step(optimizer), device=device.device())
            dist.all_reduce(step, op=dist.ReduceOp.MAX)  # a rank without parameters counts no steps
            state.optimizer_step = int(step)
        request = dist_checkpointing.save(
            sharded_state(chunks, optimizer, groups=self._groups, keep=keep),
            str(partial),
            # One file a rank: two would be written one after the other, with two fsyncs.
            TorchDistSaveShardedStrategy("torch_dist", 1, thread_count=1),
            async_sharded_save=True,
        )
        staged = request.preload_fn() if request.preload_fn else []
        if self._async and not device.is_cuda():
            staged = [_copied(bucket) for bucket in staged]
        return _Pending(
            state=asdict(state),
            partial=partial,
            final=final,
            request=request,
            written=self._thread.submit(_write_files, request, staged),
        )

    def _make_partial(self, final: Path) -> Path:
        """A new hidden folder, of the same name on all ranks, that each of them can write into."""
        name = [f".{final.name}.{secrets.token_hex(4)}.partial"]
        dist.broadcast_object_list(name, src=0, device=device.device())
        partial = self._root / name[0]
        if dist.get_rank() == 0:
            if self._publishes is None:
                clean_leftovers(self._root)
            partial.mkdir(parents=True)
        dist.barrier()
        if self._publishes is None:
            self._publishes, self._shared = _who_publishes(partial)
            if self._publishes and dist.get_rank() != 0:
                clean_leftovers(self._root)
            dist.barrier()
        partial.mkdir(parents=True, exist_ok=True)
        return partial

    def _complete(self, pending: _Pending) -> None:
        own = _agree_on_files(pending)
        for finalize in pending.request.finalize_fns:
            finalize()
        manifest = [own]
        if dist.get_rank() == 0:
            # The state file is written last of the content; what else is here, rank 0 has written itself.
            state = {"format_version": FORMAT_VERSION, **pending.state}
            write_json(pending.partial / STATE_FILE, state)
            for path in pending.partial.iterdir():
                if path.name not in own:
                    own[path.name] = file_record(path)
        dist.broadcast_object_list(manifest, src=0, device=device.device())
        if self._publishes:
            iteration = pending.state["iteration"]
            write_manifest(pending.partial, manifest[0], iteration=iteration)
            publish_folder(pending.partial, pending.final)
        dist.barrier()  # the tracker moves when every node's files stand under their final name
        if self._publishes:
            write_text(self._root / TRACKER, str(pending.state["iteration"]))
            if self._keep_last is not None:
                self._retire()
        dist.barrier()

    def _retire(self) -> None:
        """Delete all but the newest `keep_last` complete checkpoints. Incomplete ones count for nothing
        and stay for inspection, so the last complete one is never among the deleted."""
        complete = [n for n in published_iterations(self._root) if self._has_right_sizes(n)]
        for old in complete[: -self._keep_last]:
            delete_folder(iteration_folder(self._root, old))

    def _has_right_sizes(self, iteration: int) -> bool:
        folder = iteration_folder(self._root, iteration)
        # A node with a disk of its own holds its own part.
        names = None if self._shared else [p.name for p in folder.glob("*.distcp")]
        return not problems_in(folder, checksum=False, names=names)


def save_checkpoint(
    root: str | Path,
    state: TrainState,
    chunks: list[GPTModel],
    optimizer: MegatronOptimizer | None,
    *,
    groups: ProcessGroupCollection,
    keep_last: int | None = None,
) -> Path:
    """One synchronous save; see `CheckpointSaver`. Collective over the world."""
    with CheckpointSaver(root, groups=groups, keep_last=keep_last) as saver:
        return saver.save(state, chunks, optimizer)


def clean_leftovers(root: Path) -> None:
    """Remove what a killed process left half-written or half-deleted, and put back a checkpoint that it
    had set aside for one which never came."""
    for path in root.glob(".iter_*"):
        retired = re.fullmatch(r"\.(iter_\d+)\.retired", path.name)
        if retired and not (root / retired[1]).exists():
            os.replace(path, root / retired[1])
            fsync_path(root)
        elif re.fullmatch(r"\.iter_\d+(\.\w+)?\.(partial|deleted|retired)", path.name):
            delete_folder(path)


def _write_files(request: AsyncRequest, buckets: list) -> Manifest:
    """Write and fsync this rank's tensors; the records of its files. Raises OSError."""
    if request.async_fn is not None:
        rank, _, results = request.async_fn_args
        request.async_fn(rank, buckets, results)
    return {name: file_record(Path(path)) for path, name, _ in buckets}


def _copied(bucket: tuple) -> tuple:
    """A write bucket whose CPU tensors are copies: training goes on to change the originals."""
    path, name, (binary, tensors) = bucket
    return path, name, (binary, [(item, tensor.clone()) for item, tensor in tensors])


def _agree_on_files(pending: _Pending) -> Manifest:
    """The files of all ranks, once all are durable. Raises on every rank what failed on one."""
    failure = pending.written.exception()
    ours = {} if failure is not None else pending.written.result()
    reports: list = [None] * dist.get_world_size()
    dist.all_gather_object(reports, (repr(failure) if failure else None, ours))
    for rank, (error, _) in enumerate(reports):
        if error is not None:
            raise RuntimeError(
                f"the checkpoint {pending.final} was not written: rank {rank}: {error}"
            ) from failure
    return {name: record for _, files in reports for name, record in files.items()}


def _who_publishes(partial: Path) -> tuple[bool, bool]:
    """(whether this rank publishes, whether all nodes share one disk), once rank 0 has made `partial`."""
    is_leader = local_rank_from_env() == 0
    deadline = time.monotonic() + _SECONDS_FOR_VISIBILITY
    while not partial.is_dir() and is_leader and time.monotonic() < deadline:
        time.sleep(0.05)
    alone = is_leader and not partial.is_dir()
    separate = torch.tensor([int(alone)], device=device.device())
    dist.all_reduce(separate)
    return alone or dist.get_rank() == 0, int(separate) == 0
