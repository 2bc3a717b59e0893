"""What every benchmark shares: the facts of the machine and the form of a result file."""

import platform
import shlex
import statistics
import sys
from importlib import metadata
from pathlib import Path

from megatron_tlt import device
from megatron_tlt.files import write_json
from megatron_tlt.ops.linear import native_bf16_gemm

import torch

RESULTS = Path(__file__).parent / "results"
_PACKAGES = ("torch", "megatron-core", "transformers", "numpy")


def machine_facts() -> dict[str, object]:
    """The machine that a figure belongs to."""
    return {
        "device": device.describe(),
        "cores": torch.multiprocessing.cpu_count(),
        "memory_gib": round(device.total_memory_bytes() / 2**30, 1),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "native_bf16_gemm": native_bf16_gemm(),
        "system": f"{platform.system()} {platform.machine()}",
    }


def versions() -> dict[str, str]:
    installed = {d.metadata["Name"] for d in metadata.distributions()}
    return {"python": platform.python_version()} | {
        name: metadata.version(name) for name in _PACKAGES if name in installed
    }


def command_line(module: str) -> str:
    """The command that runs this benchmark again."""
    return shlex.join(["python", "-m", module, *sys.argv[1:]])


def write_result(
    name: str, command: str, rows: list[dict], summary: dict, *, folder: Path = RESULTS
) -> Path:
    """Publish `{command, machine, versions, rows, summary}` as `<folder>/<name>.json`."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    write_json(
        path,
        {
            "command": command,
            "machine": machine_facts(),
            "versions": versions(),
            "rows": rows,
            "summary": summary,
        },
    )
    return path


def spread(seconds: list[float]) -> dict[str, float]:
    """Median, smallest and largest of `seconds`."""
    return {
        "median_s": round(statistics.median(seconds), 5),
        "min_s": round(min(seconds), 5),
        "max_s": round(max(seconds), 5),
    }


def peak_memory_mib() -> float:
    """Peak resident set of this process since it began to execute its program.

    Unlike `getrusage` it does not count what the parent held when it forked.
    """
    with open("/proc/self/status", encoding="ascii") as lines:
        kib = next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
    return round(kib / 1024, 1)
