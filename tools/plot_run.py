#!/usr/bin/env python3
"""Plot a run's training and validation loss: tools/plot_run.py --log-dir RUN/logs writes loss.png there."""

import argparse
import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # no display needed
from matplotlib import pyplot


def read_series(path: Path, kind: str, name: str) -> tuple[list[int], list[float]]:
    """Iterations and values; of an iteration that was run again after a resume, the last value."""
    values = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        if record["kind"] == kind:
            values[record["iteration"]] = float(record[name])
    return sorted(values), [values[iteration] for iteration in sorted(values)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--log-dir", type=Path, required=True)
    log_dir = parser.parse_args().log_dir
    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    path = log_dir / "metrics.jsonl"
    axes.plot(*read_series(path, "train", "lm loss"), label="training")
    axes.plot(*read_series(path, "validation", "lm loss validation"), "o-", label="validation")
    axes.set(xlabel="iteration", ylabel="loss (nats per token)")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(log_dir / "loss.png", dpi=120)
    print(f"wrote {log_dir / 'loss.png'}")


if __name__ == "__main__":
    main()
