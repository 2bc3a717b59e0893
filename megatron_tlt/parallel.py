"""Process groups, and the only reader of megatron's `parallel_state`.

Everything else receives groups as arguments (`Parallel.groups`, a megatron `ProcessGroupCollection`).
"""

import datetime
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from megatron_tlt import device, mcore  # noqa: F401  (mcore before megatron.core)
from megatron_tlt.rendezvous import join_store

import torch.distributed as dist
from torch._C._distributed_c10d import _dump_fr_trace_json
from torch.distributed import distributed_c10d
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

_TRACED_COLLECTIVES = "2000"  # the newest ones, in PyTorch's flight recorder (NCCL and gloo)


@dataclass(kw_only=True, slots=True)
class ParallelConfig:
    """How the model and the batch are spread over the ranks (Megatron's spelling)."""

    tensor_model_parallel_size: int = 1
    """Ranks over which each layer's heads, MLP neurons and the vocabulary are split (TP)."""
    pipeline_model_parallel_size: int = 1
    """Ranks over which the layers are split (PP, 1F1B schedule)."""
    virtual_pipeline_model_parallel_size: int | None = None
    """Model chunks per pipeline rank (VPP, interleaved schedule); needs pipeline_model_parallel_size > 1."""
    sequence_parallel: bool = False
    """Split norms and dropout along the sequence over the TP ranks (SP); needs TP > 1."""
    context_parallel_size: int = 1
    """Refused unless 1: context parallelism is not supported."""
    expert_model_parallel_size: int = 1
    """Refused unless 1: expert parallelism is not supported."""
    overlap_p2p_comm: bool = False
    """Overlap pipeline sends with compute; the interleaved schedule needs it and sets it by default."""
    batch_p2p_comm: bool | None = None
    """Batch the sends and receives of a pipeline step; default: not overlap_p2p_comm."""
    distributed_timeout_minutes: float = 10.0
    """A collective that waits longer than this ends the run with an error."""

    def __post_init__(self) -> None:
        virtual = self.virtual_pipeline_model_parallel_size
        if virtual is not None and virtual > 1:
            self.overlap_p2p_comm = True if self.batch_p2p_comm is None else self.overlap_p2p_comm
        if self.batch_p2p_comm is None:
            self.batch_p2p_comm = not self.overlap_p2p_comm
        self._check()

    def _check(self) -> None:
        sizes = {
            "tensor_model_parallel_size": self.tensor_model_parallel_size,
            "pipeline_model_parallel_size": self.pipeline_model_parallel_size,
            "virtual_pipeline_model_parallel_size": self.virtual_pipeline_model_parallel_size or 1,
        }
        for name, size in sizes.items():
            if size < 1:
                raise ValueError(f"parallel.{name}={size} must be at least 1")
        for name, size in (
            ("context_parallel_size (CP)", self.context_parallel_size),
            ("expert_model_parallel_size (EP)", self.expert_model_parallel_size),
        ):
            if size != 1:
                raise ValueError(f"parallel.{name}={size} is not supported: leave it at 1")
        if not self.distributed_timeout_minutes > 0:
            raise ValueError(
                f"parallel.distributed_timeout_minutes={self.distributed_timeout_minutes} must be above 0"
            )
        if self.sequence_parallel and self.tensor_model_parallel_size == 1:
            raise ValueError(
                "parallel.sequence_parallel needs tensor_model_parallel_size > 1, got 1: "
                "raise it or turn sequence_parallel off"
            )
        self._check_virtual()

    def _check_virtual(self) -> None:
        virtual = self.virtual_pipeline_model_parallel_size
        if virtual is None or virtual == 1:
            if self.overlap_p2p_comm:
                raise ValueError(
                    "parallel.overlap_p2p_comm works with the interleaved schedule only: set "
                    "virtual_pipeline_model_parallel_size > 1 or turn it off"
                )
            return
        if self.pipeline_model_parallel_size < 2:
            raise ValueError(
                f"virtual_pipeline_model_parallel_size={virtual} needs "
                f"pipeline_model_parallel_size > 1, got {self.pipeline_model_parallel_size}"
            )
        # With two stages the next and the previous rank are one peer, and megatron-core pairs batched
        # sends and receives in order: the gradients are silently wrong.
        if not self.overlap_p2p_comm or self.batch_p2p_comm:
            raise ValueError(
                f"virtual_pipeline_model_parallel_size={virtual} is only right with "
                f"overlap_p2p_comm=true and batch_p2p_comm=false, got overlap_p2p_comm="
                f"{self.overlap_p2p_comm} and batch_p2p_comm={self.batch_p2p_comm}"
            )

    @property
    def num_model_chunks(self) -> int:
        return self.virtual_pipeline_model_parallel_size or 1

    def data_parallel_size(self, world_size: int) -> int:
        """Replicas that `world_size` ranks hold. Raises ValueError when they do not divide evenly."""
        model = self.tensor_model_parallel_size * self.pipeline_model_parallel_size
        if world_size % model:
            raise ValueError(
                f"{world_size} ranks cannot hold whole replicas of tensor_model_parallel_size="
                f"{self.tensor_model_parallel_size} x pipeline_model_parallel_size="
                f"{self.pipeline_model_parallel_size} = {model} ranks each: start a multiple of {model}"
            )
        return world_size // model


@dataclass(frozen=True, kw_only=True, slots=True)
class Parallel:
    """The facts of this rank, read once after the groups exist.

    Example: rank 3 of TP2 x PP2 has tp_rank 1, pp_rank 1, dp_rank 0, dp_size 1.
    """

    config: ParallelConfig
    groups: ProcessGroupCollection
    rank: int
    world_size: int
    tp_rank: int
    pp_rank: int
    dp_rank: int
    dp_size: int
    local_rank: int
    local_world_size: int

    @property
    def is_last_rank(self) -> bool:
        """The rank that logs, as in Megatron: the last one, since with PP it has the loss."""
        return self.rank == self.world_size - 1

    @property
    def is_first_stage(self) -> bool:
        return self.pp_rank == 0

    @property
    def is_last_stage(self) -> bool:
        return self.pp_rank == self.config.pipeline_model_parallel_size - 1


def world_size_from_env() -> int:
    """Number of ranks that torchrun announces; 1 for a plain `python` start."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def local_rank_from_env() -> int:
    """Number of this rank on its node, as torchrun announces it; 0 for a plain `python` start."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def init_parallel(
    config: ParallelConfig, *, seed: int, join_seconds: float | None = None
) -> Parallel:
    """Join the process group, build megatron's groups and seed the model-parallel RNG states.

    All ranks have to come within `join_seconds`; default distributed_timeout_minutes.
    A plain `python` start (no torchrun) becomes a world of one rank.
    Raises ValueError when the world does not fit the layout, TimeoutError or ConnectionError when not all
    ranks come together.
    """
    local_rank = local_rank_from_env()
    config.data_parallel_size(world_size_from_env())
    device.set_local_device(local_rank)
    timeout = datetime.timedelta(minutes=config.distributed_timeout_minutes)
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", _TRACED_COLLECTIVES)
    if not dist.is_initialized():
        if "RANK" in os.environ:
            store, rank, size = join_store(seconds=join_seconds or timeout.total_seconds())
            dist.init_process_group(
                device.backend(), store=store, rank=rank, world_size=size, timeout=timeout
            )
        else:
            store = dist.HashStore()
            dist.init_process_group(
                device.backend(), store=store, rank=0, world_size=1, timeout=timeout
            )
    release_model_parallel()
    with _shared_groups():
        parallel_state.initialize_model_parallel(
            config.tensor_model_parallel_size,
            config.pipeline_model_parallel_size,
            config.virtual_pipeline_model_parallel_size if config.num_model_chunks > 1 else None,
            distributed_timeout_minutes=config.distributed_timeout_minutes,
            create_gloo_process_groups=False,
        )
    seed_everything(seed)
    return _read_parallel(config, local_rank=local_rank)


def _read_parallel(config: ParallelConfig, *, local_rank: int) -> Parallel:
    return Parallel(
        config=config,
        groups=ProcessGroupCollection.use_mpu_process_groups(),
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        tp_rank=parallel_state.get_tensor_model_parallel_rank(),
        pp_rank=parallel_state.get_pipeline_model_parallel_rank(),
        dp_rank=parallel_state.get_data_parallel_rank(),
        dp_size=parallel_state.get_data_parallel_world_size(),
        local_rank=local_rank,
        local_world_size=int(os.environ.get("LOCAL_WORLD_SIZE", str(dist.get_world_size()))),
    )


def seed_everything(seed: int) -> None:
    """Seed the default generators alike on every rank and the model-parallel (dropout) state per TP
    and PP rank, as Megatron does (`seed + 100 * pp_rank`, plus 2718 + tp_rank inside the tracker)."""
    device.manual_seed(seed)
    model_parallel_cuda_manual_seed(
        seed + 100 * parallel_state.get_pipeline_model_parallel_rank(), force_reset_rng=True
    )


@contextmanager
def _shared_groups() -> Iterator[None]:
    """On gloo, make one group per set of ranks, where megatron makes one per purpose (some 25 a rank).

    Every gloo group keeps threads of its own that wake up all the time, and costs a rendezvous. Sharing is
    safe: a group's ranks issue their collectives in one order. NCCL keeps its separate communicators, which
    let transfers of different purposes overlap.
    """
    create, made = parallel_state.create_group, {}

    def create_once(ranks: list[int], *args: object, **options: object) -> dist.ProcessGroup:
        if tuple(ranks) not in made:
            made[tuple(ranks)] = create(ranks, *args, **options)
        return made[tuple(ranks)]

    if device.backend() == "gloo":
        parallel_state.create_group = create_once
    try:
        yield
    finally:
        parallel_state.create_group = create


def world_store() -> dist.Store:
    """The key-value store through which the ranks found one another; it lives as long as the world."""
    return distributed_c10d._get_default_store()


def collective_trace() -> bytes:
    """The newest collectives of this rank as PyTorch's flight recorder has them, in JSON."""
    return _dump_fr_trace_json()


def release_model_parallel() -> None:
    """End megatron's groups but stay in the world, so that another layout can be set up in it."""
    if not parallel_state.model_parallel_is_initialized():
        return
    parallel_state.destroy_model_parallel()  # forgets its groups, and leaves their threads running
    for group in list(distributed_c10d._world.pg_map):
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)


def shutdown_parallel() -> None:
    """Leave all process groups; safe to call twice."""
    release_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()


def is_local_builder(parallel: Parallel) -> bool:
    """One rank a node: builds what a node with its own disk lacks."""
    return parallel.local_rank == 0
