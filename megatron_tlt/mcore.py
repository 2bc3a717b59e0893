"""The seam to megatron-core 0.16.1: import this before any `megatron.core` module.

Six kinds of change, each with the place it mends:
1. CPU layer (only where there is no CUDA): megatron-core names `device="cuda"` literally in factory calls,
   asks `Tensor.type()` for a CUDA type, and keeps dropout state in CUDA generators.
2. Checkpoint writing: megatron-core starts a manager process that re-imports the program (seconds, and a
   hang where the program is not importable) and forks a writer per file. Here the saving rank writes its
   files itself.
3. Checkpoint reading: its reader unpickles a checkpoint's index; ours (`mcore_reader.py`) takes its place.
4. Start-up on CPU: its import does not load torch's compiler.
5. Without Transformer Engine: recomputing the norms alone asks it for its FP8 state (NameError).
6. Data-parallel collectives on gloo: issued one by one instead of coalesced, which corrupts the heap.
Its saving and loading of the distributed optimizer's state over torch's AdamW is wrong in four ways (a fresh
one cannot load, KeyError('step'), one step tensor shared by all parameters, moments of a buffer's last
parameter lost); `train/optimizer_state.py` does that instead.
"""

import contextlib
import functools
import importlib
import logging
import queue
import sys
import types
import warnings
from collections.abc import Iterator

from megatron_tlt import device
from megatron_tlt.mcore_reader import TrustedReader

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

# What megatron-core 0.16.1 says on every start about things that are as they should be.
for _message in (
    "Transformer Engine and Apex",
    "Apex is not installed",
    "script_method",
    "dynamic_context",
    "full scope is deprecated",
    "If you are using transformer_engine as the transformer implementation",
    "torch.distributed.*(_tensor|_base)` is deprecated",
    "The .grad attribute of a Tensor that is not a leaf",
    "`load_state_dict` is deprecated and will be removed in future versions. Please use `load`",
    "Please use DTensor instead and we are deprecating ShardedTensor",
):
    warnings.filterwarnings("ignore", message=f".*{_message}")
if not device.is_cuda():
    warnings.filterwarnings("ignore", message=".*CUDA_DEVICE_MAX_CONNECTIONS")
# It knows its own MLP class only; ours takes the same group from where megatron-core keeps it.
logging.getLogger("megatron.core.transformer.transformer_layer").addFilter(
    lambda record: "Unknown MLP type" not in record.getMessage()
)



@contextlib.contextmanager
def _without_compiler() -> Iterator[None]:
    """On CPU, take `torch.compile` away while megatron-core is imported.

    It decorates its fused functions at import, which loads torch's compiler (half of the start-up time) for
    functions that `transformer_config` keeps off: a first call would run a C++ compiler for half a minute.
    """
    compiler = torch.compile
    if not device.is_cuda():
        torch.compile = lambda function=None, **_: function or (lambda decorated: decorated)
    try:
        yield
    finally:
        torch.compile = compiler


with _without_compiler():
    from megatron.core.dist_checkpointing.strategies import filesystem_async
    from megatron.core.dist_checkpointing.strategies import torch as torch_strategy
    from megatron.core.tensor_parallel import random as tp_random

MEGATRON_CORE_VERSION = "0.16.1"

# Modules that spell device="cuda" in a factory call on a path that we use.
_CUDA_LITERAL_MODULES = (
    "dist_checkpointing.exchange_utils",
    "dist_checkpointing.strategies.state_dict_saver",
    "distributed.finalize_model_grads",
    "distributed.param_and_grad_buffer",
    "optimizer.clip_grads",
    "optimizer.distrib_optimizer",
    "optimizer.grad_scaler",
    "optimizer.optimizer",
    "pipeline_parallel.schedules",
    "pipeline_parallel.utils",
    "tensor_parallel.data",
    "transformer.utils",
    "utils",
)
_FACTORIES = "zeros ones empty full tensor arange zeros_like empty_like randint".split()


class _CpuTorch(types.ModuleType):
    """`torch` for the modules above: a factory asked for "cuda" makes its tensor on the CPU."""

    def __init__(self) -> None:
        super().__init__("torch")
        for name in _FACTORIES:
            setattr(self, name, self._on_cpu(getattr(torch, name)))

    @staticmethod
    def _on_cpu(factory):
        @functools.wraps(factory)
        def make(*args, **options):
            if str(options.get("device", "")).startswith("cuda"):
                options["device"] = "cpu"
                options.pop("pin_memory", None)
            return factory(*args, **options)

        return make

    def __getattr__(self, name: str) -> object:
        return getattr(torch, name)


def _tensor_type(self, dtype=None, *args, _original=torch.Tensor.type, **options):
    """`Tensor.type()`, answering "torch.cuda.*" to megatron-core, which accepts no other."""
    if dtype is not None:
        return _original(self, dtype, *args, **options)
    name = _original(self)
    if sys._getframe(1).f_globals.get("__name__", "").startswith("megatron.core"):
        return name.replace("torch.", "torch.cuda.", 1)
    return name


class _CpuRngStatesTracker(tp_random.CudaRNGStatesTracker):
    """The model-parallel RNG tracker over CPU generators: dropout differs per TP rank as on CUDA."""

    def add(self, name: str, seed: int) -> None:
        self._is_initialized = True
        if seed in self.seeds_ or name in self.states_:
            raise ValueError(f"RNG state {name!r} or seed {seed} is already tracked")
        self.seeds_.add(seed)
        self.states_[name] = torch.Generator().manual_seed(seed).get_state()

    @contextlib.contextmanager
    def fork(self, name: str = tp_random._MODEL_PARALLEL_RNG_TRACKER_NAME) -> Iterator[None]:
        outside = torch.get_rng_state()
        torch.set_rng_state(self.states_[name])
        try:
            yield
        finally:
            self.states_[name] = torch.get_rng_state()
            torch.set_rng_state(outside)


@contextlib.contextmanager
def _one_by_one(
    group: dist.ProcessGroup, async_ops: bool = False
) -> Iterator[distributed_c10d._CoalescingManager]:
    """torch's `_coalescing_manager` for gloo: the block's collectives are issued one after the other.

    gloo's coalesced all-gather races with other collectives of its group and corrupts the heap (torch 2.13:
    "malloc(): unaligned tcache chunk detected" within seconds of four ranks' traffic). It would also gain
    nothing: it copies the tensors together and apart again.
    """
    queued = distributed_c10d._world.pg_coalesce_state.setdefault(group, [])
    works = distributed_c10d._CoalescingManager()
    try:
        yield works
    finally:
        distributed_c10d._world.pg_coalesce_state.pop(group)
    for collective in queued:
        works.append(_issue(collective, group))
    if not async_ops:
        works.wait()


def _issue(collective: distributed_c10d._CollOp, group: dist.ProcessGroup) -> dist.Work:
    reduction = {} if collective.redop is None else {"op": collective.redop}
    tensors = [t for t in (collective.dst_tensor, collective.tensor) if t is not None]
    return collective.op(*tensors, group=group, async_op=True, **reduction)


def _install_cpu_layer() -> None:
    torch.Tensor.type = _tensor_type
    tp_random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    tp_random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    tp_random.CudaRNGStatesTracker = _CpuRngStatesTracker
    cpu_torch = _CpuTorch()
    for name in _CUDA_LITERAL_MODULES:
        importlib.import_module("megatron.core." + name).torch = cpu_torch
    importlib.import_module(
        "megatron.core.distributed.param_and_grad_buffer"
    )._coalescing_manager = _one_by_one


def ensure_adam_state(optimizer: torch.optim.Optimizer) -> None:
    """Give parameters that have not been stepped yet their zero Adam state (torch makes it lazily)."""
    if not isinstance(optimizer, torch.optim.AdamW):
        return
    for group in optimizer.param_groups:
        for param in group["params"]:
            if not optimizer.state[param]:
                optimizer.state[param].update(
                    step=torch.zeros((), dtype=torch.float32),
                    exp_avg=torch.zeros_like(param),
                    exp_avg_sq=torch.zeros_like(param),
                )


class _NoCount:
    """Stands for the queue by which forked writers report that they are done."""

    def get(self) -> None: ...

    def task_done(self) -> None: ...


def _write_in_process(transforms, use_msc, rank, write_buckets, results_queue) -> None:
    """Write this rank's buckets one after the other, each fsynced. Raises the first error."""
    local, written = queue.Queue(), {}
    for number, bucket in enumerate(write_buckets):
        filesystem_async.FileSystemWriterAsync.write_preloaded_data(
            transforms, number, bucket, local, _NoCount(), True, use_msc=use_msc
        )
        _, result = local.get_nowait()
        if isinstance(result, Exception):
            raise result
        written[number] = result
    results_queue.put(written)


def _write_checkpoints_in_process() -> None:
    filesystem_async._get_write_results_queue = queue.Queue
    filesystem_async.FileSystemWriterAsync.write_preloaded_data_multiproc = staticmethod(
        _write_in_process
    )


if not device.is_cuda():
    _install_cpu_layer()
if not hasattr(tp_random, "FP8GlobalStateManager"):  # named there when Transformer Engine is installed
    tp_random.CheckpointWithoutOutput.__init__.__defaults__ = (None,)  # its `fp8`, asked by `is not None`
_write_checkpoints_in_process()
torch_strategy._get_filesystem_reader = lambda folder, cache_metadata=False: TrustedReader(folder)
