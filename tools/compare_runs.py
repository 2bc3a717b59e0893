#!/usr/bin/env python3
"""Compare pretraining runs by their logs: validation loss, FLOPs, training time, each beside the first run's.

    python tools/compare_runs.py dense=runs/dense/logs EST=runs/est/logs
"""

import argparse
import json
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFigures:
    """What a run came to. Example: 300 iterations, validation loss 3.21, 1.2e15 FLOPs, 340 s."""

    iterations: int
    loss: float
    """Of the full model, after the last evaluation; nats per token."""
    flops: float
    """Of the work done, over all ranks."""
    seconds: float
    """In training steps: without evaluation, saving and start-up."""


def read_run(log_dir: Path) -> RunFigures:
    """Of an iteration that was run again after a resume, the last record counts.

    Raises ValueError when there is no training or no validation record.
    """
    path = log_dir / "metrics.jsonl"
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    steps = {record["iteration"]: record for record in records if record["kind"] == "train"}
    evaluations = [record for record in records if record["kind"] == "validation"]
    if not steps or not evaluations:
        raise ValueError(f"{path} has {len(steps)} training and {len(evaluations)} validation records")
    flops = seconds = 0.0
    done = 0
    for iteration, record in sorted(steps.items()):
        spent = (iteration - done) * record["iteration-time"]
        seconds += spent
        flops += spent * record["throughput"] * 1e12 * record["world-size"]
        done = iteration
    loss = float(evaluations[-1]["lm loss validation"])
    return RunFigures(iterations=done, loss=loss, flops=flops, seconds=seconds)


def table(runs: dict[str, RunFigures]) -> str:
    """One line a run; FLOPs and time also as shares of the first run's."""
    first = next(iter(runs.values()))
    width = max(map(len, runs))
    lines = [f"{'':{width}}  iterations  validation loss  FLOPs               training time"]
    for name, run in runs.items():
        lines.append(
            f"{name:{width}}  {run.iterations:10d}  {run.loss:15.4f}  "
            f"{run.flops:.3e} ({run.flops / first.flops:6.1%})  "
            f"{run.seconds:6.1f} s ({run.seconds / first.seconds:6.1%})"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("runs", nargs="+", metavar="NAME=LOG_DIR")
    pairs = [text.partition("=") for text in parser.parse_args().runs]
    print(table({name: read_run(Path(folder)) for name, _, folder in pairs}))


if __name__ == "__main__":
    main()
