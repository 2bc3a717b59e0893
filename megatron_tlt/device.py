"""The one place that knows CUDA from CPU.

Every other module asks here for the device, the collective backend, memory and peak speed, so the same
code runs on a laptop (CPU, gloo) and on a cluster (CUDA, NCCL). On CUDA nothing is changed. On CPU the
few `torch.cuda` names that megatron-core calls without asking are given their CPU meaning; what has to be
changed inside megatron-core itself is in `mcore.py`, which imports this module first.
"""

import functools
import os
import resource
import time
from pathlib import Path

import torch

DEVICE_TYPE = "cuda" if torch.cuda.is_available() else "cpu"
_CPU = torch.device("cpu")

# Dense bf16 peaks in FLOP/s from the vendors' data sheets, by a part of the device's name.
_PEAK_BF16_FLOPS = {
    "B200": 2.25e15, "H200": 989e12, "H100 PCIe": 756e12, "H100": 989e12, "A100": 312e12,
    "L40S": 362e12, "L4": 121e12, "4090": 165e12, "3090": 71e12,
}  # fmt: skip


def device() -> torch.device:
    """The device of this process: `cuda:<current>` or `cpu`."""
    return torch.device("cuda", torch.cuda.current_device()) if is_cuda() else _CPU


def is_cuda() -> bool:
    return DEVICE_TYPE == "cuda"


def backend() -> str:
    """Collective backend for `torch.distributed.init_process_group`."""
    return "nccl" if is_cuda() else "gloo"


def set_local_device(local_rank: int) -> None:
    """Bind this process to its GPU. Raises ValueError when the node has fewer GPUs than ranks."""
    if not is_cuda():
        return
    count = torch.cuda.device_count()
    if local_rank >= count:
        raise ValueError(
            f"local rank {local_rank} needs a GPU of its own but this node shows {count}: "
            f"start at most {count} processes per node (torchrun --nproc_per_node {count})"
        )
    torch.cuda.set_device(local_rank)


def synchronize() -> None:
    if is_cuda():
        torch.cuda.synchronize()


def manual_seed(seed: int) -> None:
    """Seed the default generators of CPU and of the device."""
    torch.manual_seed(seed)


def max_memory_bytes() -> int:
    """Peak memory of this process so far: allocator peak on CUDA, resident set on CPU."""
    if is_cuda():
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def reset_peak_memory() -> None:
    """Let the peak on CUDA start anew; a CPU process cannot forget its own."""
    if is_cuda():
        torch.cuda.reset_peak_memory_stats()


def total_memory_bytes() -> int:
    """Memory that this process may count on: the GPU's, or the machine's."""
    if is_cuda():
        return torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def record_memory_history() -> None:
    """Keep the stack of every allocation from now on (CUDA only), for `dump_memory_snapshot`."""
    torch.cuda.memory._record_memory_history(max_entries=100_000)


def dump_memory_snapshot(path: Path) -> None:
    """Write what the CUDA allocator holds, and its history, for pytorch.org/memory_viz."""
    torch.cuda.memory._dump_snapshot(str(path))


def has_fp8_gemm() -> bool:
    """Whether this process's GPU multiplies FP8 itself (Ada, Hopper and later)."""
    return is_cuda() and torch.cuda.get_device_capability() >= (8, 9)


def describe() -> str:
    """Human-readable name of the device, for logs and result files."""
    if is_cuda():
        return torch.cuda.get_device_name()
    model = ""
    if os.path.exists("/proc/cpuinfo"):
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            model = next((x.split(":", 1)[1].strip() for x in lines if "model name" in x), "")
    return f"CPU {model} ({torch.get_num_threads()} threads)".replace("CPU  (", "CPU (")


@functools.lru_cache(maxsize=4)
def peak_flops(dtype: torch.dtype = torch.float32) -> float:
    """Peak FLOP/s against which MFU is stated.

    On a known GPU the data sheet's dense bf16 figure; elsewhere the speed of the best of a few square
    GEMMs, measured here (about 0.2 s), so that MFU on a CPU means "share of what its own GEMM does".
    """
    if is_cuda():
        name = torch.cuda.get_device_name()
        for key, flops in _PEAK_BF16_FLOPS.items():
            if key in name:
                return flops
    size, best = 1024 if not is_cuda() else 4096, 0.0
    a = torch.ones(size, size, dtype=dtype, device=device())
    deadline = time.perf_counter() + 0.2
    while time.perf_counter() < deadline:
        start = time.perf_counter()
        a @ a
        synchronize()
        best = max(best, 2 * size**3 / (time.perf_counter() - start))
    return best


class _NullStream:
    """Stands for the one and only 'stream' of a CPU."""

    def wait_stream(self, *_: object) -> None: ...

    def wait_event(self, *_: object) -> None: ...

    def synchronize(self) -> None: ...

    def record_event(self, *_: object) -> None: ...


class _WallClockEvent:
    """`torch.cuda.Event` measured by the wall clock; everything on a CPU has finished when asked."""

    def __init__(self, *_: object, **__: object) -> None:
        self.seconds = 0.0

    def record(self, *_: object) -> None:
        self.seconds = time.perf_counter()

    def elapsed_time(self, other: "_WallClockEvent") -> float:
        return (other.seconds - self.seconds) * 1e3

    def synchronize(self) -> None: ...

    def wait(self, *_: object) -> None: ...

    def query(self) -> bool:
        return True


def _install_cpu_layer() -> None:
    """Give the `torch.cuda` names that megatron-core calls unconditionally their CPU meaning."""
    cuda, stream = torch.cuda, _NullStream()
    cuda.current_device = lambda: _CPU
    cuda.manual_seed = torch.manual_seed
    cuda.get_rng_state = cuda.random.get_rng_state = lambda *_, **__: torch.get_rng_state()
    cuda.Event = _WallClockEvent
    # One function object a name: torch.compile keeps its rules by object and refuses a shared one.
    for name in ("synchronize", "empty_cache", "set_device"):
        setattr(cuda, name, lambda *_, **__: None)
    for name in ("current_stream", "default_stream"):
        setattr(cuda, name, lambda *_: stream)
    for name in ("range_push", "range_pop"):
        setattr(cuda.nvtx, name, lambda *_, **__: None)
    torch.Tensor.cuda = lambda self, *_, **__: self
    # megatron-core decorates its autograd functions for "cuda" at import; on CPU that would turn
    # autocast off inside them.
    for name in ("custom_fwd", "custom_bwd"):
        setattr(torch.amp, name, _for_cpu(getattr(torch.amp, name)))


def _for_cpu(decorator):
    def decorate(function=None, *, device_type: str = "cpu", **options):
        if function is None:
            return functools.partial(decorate, **options)
        return decorator(function, device_type="cpu", **options)

    return decorate


if not is_cuda():
    _install_cpu_layer()
