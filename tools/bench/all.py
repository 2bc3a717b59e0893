"""Runs the benchmarks and renders README's figures from their results.

    python -m tools.bench.all --size toy --output DIR        # minutes: shows that everything runs
    python -m tools.bench.all --size full [--only rl fp8]    # hours: what tools/bench/results holds
    python -m tools.bench.all --render                       # README's section from the results, runs nothing
    python -m tools.bench.all --size full --only cluster_replay --options cluster_replay "--model HF ..."

Each runs as a process of its own, one after the other, on a machine that must be otherwise idle. A benchmark
that fails does not keep the others from running; the exit code is then 1.
"""

import argparse
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from megatron_tlt.files import write_text
from tools.bench.readme import README, RESULTS, existing_plots, read_results, rendered

from tqdm import tqdm


@dataclass(frozen=True, kw_only=True, slots=True)
class Benchmark:
    """A result file and how to make it. Example: `python -m tools.bench.fp8 --controls 3`."""

    module: str
    full: tuple[str, ...] = ()
    """Options of the published result."""
    toy: tuple[str, ...] = ("--toy",)
    before: tuple[str, ...] | None = None
    """Options of a first command that makes what the full one sums up."""


_SIZES = ("--hidden", "128", "256", "384", "--steps", "250", "500", "1000")
BENCHMARKS = {
    "parity": Benchmark(module="tools.bench.parity"),
    "train": Benchmark(module="tools.bench.train"),
    "est_speed": Benchmark(module="tools.bench.est"),
    "est_curve": Benchmark(
        module="tools.bench.est", before=("curve",), full=("curve", "--summary"), toy=("curve", "--toy")
    ),
    "est_limited": Benchmark(
        module="tools.bench.est", before=("curve", "--name", "est_limited", "--regimes", "limited"),
        full=("curve", "--name", "est_limited", "--summary"),
        toy=("curve", "--name", "est_limited", "--toy"),
    ),
    "est_trend": Benchmark(
        module="tools.bench.est", before=("curve", "--name", "est_trend", *_SIZES),
        full=("curve", "--name", "est_trend", "--summary"),
        toy=("curve", "--name", "est_trend", "--toy"),
    ),
    "fp8": Benchmark(module="tools.bench.fp8"),
    "fp8_noise": Benchmark(
        module="tools.bench.fp8", full=("--controls", "3"), toy=("--toy", "--controls", "1")
    ),
    "durability": Benchmark(
        module="tools.prove_durability", full=("--kills", "100", "--corruptions", "50"),
        toy=("--kills", "1", "--corruptions", "1"),
    ),
    "checkpoint": Benchmark(module="tools.bench.checkpoint"),
    "lossless": Benchmark(module="tools.bench.lossless"),
    "rollout": Benchmark(module="tools.bench.rollout"),
    "rollout_sglang": Benchmark(module="tools.bench.rollout_sglang"),
    "strategies": Benchmark(module="tools.bench.strategies"),
    "bandit": Benchmark(module="tools.bench.bandit"),
    "rl": Benchmark(module="tools.bench.rl"),
    "tlt": Benchmark(module="tools.bench.tlt"),
    "drafter_curve": Benchmark(module="tools.bench.drafter_curve"),
    "cluster_replay": Benchmark(module="tools.bench.cluster_replay"),
    "sglang": Benchmark(module="tools.bench.sglang"),
    "bridge": Benchmark(module="tools.bench.bridge", full=("--bytes", "1500", "--one-billion")),
    "report": Benchmark(module="tools.bench.report"),
}  # fmt: skip


def commands(benchmark: Benchmark, size: str, output: Path, more: list[str]) -> list[list[str]]:
    """What to run, in order, each with the options `more`."""
    start = [sys.executable, "-m", benchmark.module]
    chosen = benchmark.toy if size == "toy" else benchmark.full
    parts = [chosen] if benchmark.before is None or size == "toy" else [benchmark.before, chosen]
    return [[*start, *part, *more, "--output", str(output)] for part in parts]


def run(names: list[str], size: str, output: Path, more: dict[str, list[str]]) -> list[str]:
    """Names of the benchmarks that failed; their output is shown as it comes."""
    failed = []
    for name in tqdm(names, desc=f"benchmarks ({size})", unit="benchmark"):
        for command in commands(BENCHMARKS[name], size, output, more.get(name, [])):
            if subprocess.run(command, check=False).returncode:
                failed.append(name)
                break
    return failed


def render() -> bool:
    """Renew README's section; whether it changed."""
    before = README.read_text(encoding="utf-8")
    after = rendered(before, read_results(), plots=existing_plots())
    if after != before:
        write_text(README, after)
    return after != before


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", choices=("toy", "full"))
    parser.add_argument("--only", nargs="+", choices=list(BENCHMARKS), default=list(BENCHMARKS))
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the results")
    parser.add_argument("--render", action="store_true", help="renew README's section of figures")
    parser.add_argument("--options", nargs=2, action="append", default=[], metavar=("NAME", "OPTIONS"),
                        help="further options of one benchmark, such as its files")  # fmt: skip
    args = parser.parse_args()
    more = {name: shlex.split(options) for name, options in args.options}
    if unknown := sorted(set(more) - set(BENCHMARKS)):
        parser.error(f"--options for {', '.join(unknown)}: known are {', '.join(BENCHMARKS)}")
    if args.size is None and not args.render:
        parser.error("give --size, --render or both")
    if args.size == "toy" and args.output == RESULTS:
        parser.error("--size toy needs --output: its figures are not worth publishing")
    failed = [] if args.size is None else run(args.only, args.size, args.output, more)
    if args.render:
        print(f"README.md: {'renewed' if render() else 'was up to date'}")
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
