"""Writing checkpoints so that none is lost: write, make durable on every rank, publish, move the tracker.

A save begins with a collective part: it plans and, when asynchronous, copies the tensors to host memory. What
follows is file work (`train/publish.py`) in a thread, between short collectives in which all ranks agree that
the last piece is done:

    every rank writes its files (fsync, SHA-256) | rank 0 writes index, state and manifest, renames the folder
    to its final name and moves the tracker

On nodes with disks of their own one rank a node publishes that node's files, and the tracker waits for all:

    write | describe (rank 0) | publish (one rank a node) | move the tracker (one rank a node)

A process killed at any moment leaves the previous checkpoint as it was.
"""

import secrets
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from megatron_tlt import device
from megatron_tlt.parallel import local_rank_from_env
from megatron_tlt.train import publish
from megatron_tlt.train.checkpoint_format import TrainState, iteration_folder, sharded_state
from megatron_tlt.train.optimizer_state import optimizer_step
from megatron_tlt.train.publish import SaveStrategy, Written, clean_leftovers

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
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
    strategy: SaveStrategy
    stage: str
    """The piece of file work that `work` is: write, describe, publish or track."""
    work: Future

    @property
    def iteration(self) -> int:
        return self.state["iteration"]


class CheckpointSaver:
    """Writes the checkpoints of one run into `root`. All of its methods are collective over the world.

    With `async_save`, `save` returns once the tensors are copied; a thread writes the files, and `poll`
    (every step) or `finish` brings the save to its end. One save is in flight at most. The `keep_last` newest
    complete checkpoints are kept and older ones deleted; None keeps all. What fails on a rank is raised on
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
        self._publishes: bool | None = None
        self._shared = True
        self.published: Path | None = None
        """The newest checkpoint that this object has published."""

    def __enter__(self) -> "CheckpointSaver":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the thread after what it is writing; a save in flight stays unpublished."""
        self._thread.shutdown()

    @property
    def in_flight(self) -> bool:
        """Whether a save has begun that is not yet published."""
        return self._pending is not None

    def save(
        self,
        state: TrainState,
        chunks: list[GPTModel],
        optimizer: MegatronOptimizer | None,
        *,
        keep: Callable[[str], bool] | None = None,
        extra: Mapping[str, Mapping[str, torch.Tensor]] | None = None,
    ) -> Path:
        """Save weights and, unless `optimizer` is None, its state; returns the folder that it becomes.

        `keep` selects tensors by their name on disk ("decoder.layers.mlp.linear_fc1.weight",
        "optimizer.state.exp_avg.<that>"); such a checkpoint can be loaded with the same `keep` only.
        `extra`: safetensors files that this rank adds, by name, {tensor name: tensor on the host} each.
        """
        self.finish()
        self._pending = self._begin(state, chunks, optimizer, keep, extra or {})
        if not self._async:
            self.finish()
        return iteration_folder(self._root, state.iteration)

    def poll(self) -> None:
        """Go on with the save in flight, if there is one, as far as all ranks are done."""
        while self._pending is not None:
            busy = torch.tensor([int(not self._pending.work.done())], device=device.device())
            dist.all_reduce(busy)
            if int(busy):
                return
            self._advance()

    def finish(self) -> None:
        """Wait for the save in flight, if there is one, until it is published."""
        while self._pending is not None:
            self._advance()

    def _begin(
        self,
        state: TrainState,
        chunks: list[GPTModel],
        optimizer: MegatronOptimizer | None,
        keep: Callable[[str], bool] | None,
        extra: Mapping[str, Mapping[str, torch.Tensor]],
    ) -> _Pending:
        first = self._publishes is None
        final = iteration_folder(self._root, state.iteration)
        partial = self._make_partial(final)
        if optimizer is not None:
            step = torch.tensor(optimizer_step(optimizer), device=device.device())
            dist.all_reduce(step, op=dist.ReduceOp.MAX)  # a rank without parameters counts no steps
            state.optimizer_step = int(step)
        strategy = SaveStrategy()
        request = dist_checkpointing.save(
            sharded_state(chunks, optimizer, groups=self._groups, keep=keep),
            str(partial),
            strategy,
            validate_access_integrity=first,  # a gathering of all names, which do not change
            async_sharded_save=True,
        )
        staged = request.preload_fn() if request.preload_fn else []
        if self._async and not device.is_cuda():
            staged = [_copied(bucket) for bucket in staged]
        return _Pending(
            state=asdict(state),
            partial=partial,
            final=final,
            strategy=strategy,
            stage="write",
            work=self._thread.submit(
                publish.write_files, strategy, request, staged,
                {partial / name: tensors for name, tensors in extra.items()},
            ),
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

    def _advance(self) -> None:
        """Wait for this piece of file work on all ranks, and submit the next; collective."""
        pending = self._pending
        reports = _agree(pending)
        if pending.stage == "write":
            self._submit("describe", self._describe, reports, on=dist.get_rank() == 0)
        elif pending.stage == "describe" and not self._shared:
            self._submit("publish", self._publish, reports[0], on=self._publishes)
        elif pending.stage == "publish":
            self._submit("track", self._track, on=self._publishes)
        else:
            self._pending, self.published = None, pending.final

    def _submit(self, stage: str, work: Callable, *arguments: object, on: bool) -> None:
        function = (work, self._pending, *arguments) if on else (_nothing,)
        self._pending.stage = stage
        self._pending.work = self._thread.submit(*function)

    def _describe(self, pending: _Pending, written: list[Written]):
        manifest = publish.describe(pending.partial, pending.strategy, written, pending.state)
        if self._shared:  # nobody else has anything to publish
            self._publish(pending, manifest)
            self._track(pending)
        return manifest

    def _publish(self, pending: _Pending, manifest) -> None:
        publish.publish(pending.partial, pending.final, manifest, iteration=pending.iteration)

    def _track(self, pending: _Pending) -> None:
        publish.move_tracker(
            self._root, pending.iteration, keep_last=self._keep_last, shared=self._shared
        )


def save_checkpoint(
    root: str | Path,
    state: TrainState,
    chunks: list[GPTModel],
    optimizer: MegatronOptimizer | None,
    *,
    groups: ProcessGroupCollection,
    keep_last: int | None = None,
    extra: Mapping[str, Mapping[str, torch.Tensor]] | None = None,
) -> Path:
    """One synchronous save; see `CheckpointSaver`. Collective over the world."""
    with CheckpointSaver(root, groups=groups, keep_last=keep_last) as saver:
        return saver.save(state, chunks, optimizer, extra=extra)


def _nothing() -> None: ...


def _copied(bucket: tuple) -> tuple:
    """A write bucket whose CPU tensors are copies: training goes on to change the originals."""
    path, name, (binary, tensors) = bucket
    return path, name, (binary, [(item, tensor.clone()) for item, tensor in tensors])


def _agree(pending: _Pending) -> list:
    """What this piece of work gave on each rank, in rank order, once all have done it; of `write` on rank 0
    only. Raises RuntimeError on every rank when it failed on one."""
    failure = pending.work.exception()
    result = None if failure is not None else pending.work.result()
    errors: list = [None] * dist.get_world_size()
    dist.all_gather_object(errors, None if failure is None else repr(failure))
    for rank, error in enumerate(errors):
        if error is not None:
            raise RuntimeError(
                f"the checkpoint {pending.final} was not saved: rank {rank}: {error}"
            ) from failure
    if pending.stage == "describe":
        manifest = [result]
        dist.broadcast_object_list(manifest, src=0, device=device.device())
        return manifest
    gathered: list | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(result, gathered, dst=0)
    return gathered or []


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
