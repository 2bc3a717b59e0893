#!/usr/bin/env python3
"""Plot an RL run and print figures before and after: tools/plot_rl.py --log-dir RUN/logs writes rl.png there.

`--json FILE` writes pass_before, pass_after and max_logprob_diff for tools/bench/rl.py --merge.
"""

import argparse
import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # no display needed
from matplotlib import pyplot

from megatron_tlt.files import write_json

_PANELS = (
    ("reward", ("rollout/raw_reward", "rollout/pass_rate")),
    ("response length (tokens)", ("rollout/response_len/mean", "rollout/response_len/p90",
                                  "rollout/response_len/max")),
    ("log-prob difference of trainer and engine", ("train/train_rollout_logprob_abs_diff",
                                                   "train/train_rollout_logprob_abs_diff_max")),
    ("seconds a step", ("perf/rollout_time", "perf/log_probs_time", "perf/actor_train_time")),
)  # fmt: skip


def read_records(path: Path, kind: str) -> list[dict]:
    """By iteration; of one that was run again after a resume, the last record."""
    records = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    latest = {record["iteration"]: record for record in records if record["kind"] == kind}
    return [latest[iteration] for iteration in sorted(latest)]


def plot(steps: list[dict], evaluations: list[dict], path: Path) -> None:
    """Four panels over the steps; pass@1 on held-out problems as points in the first."""
    figure, axes = pyplot.subplots(2, 2, figsize=(11, 7), layout="constrained")
    for ax, (title, names) in zip(axes.flat, _PANELS, strict=True):
        for name in names:
            ax.plot([r["iteration"] for r in steps], [r[name] for r in steps], label=name)
        ax.set(title=title, xlabel="step")
        ax.grid(alpha=0.3)
    axes[1, 0].set_yscale("log")
    for name in pass_names(evaluations):
        where = [r["iteration"] for r in evaluations]
        axes[0, 0].plot(where, [r[name] for r in evaluations], "o--", label=f"held out: {name}")
    for ax in axes.flat:
        ax.legend(fontsize=8)
    figure.savefig(path, dpi=120)


def pass_names(evaluations: list[dict]) -> list[str]:
    return [name for name in (evaluations or [{}])[-1] if name.endswith("-pass@1")]


def table(evaluations: list[dict]) -> str:
    """Every evaluation metric before and after."""
    first, last = evaluations[0], evaluations[-1]
    names = [name for name in last if name.startswith("eval/")]
    width = max(map(len, names))
    head = f"{'':{width}}  step {first['iteration']:>5}  step {last['iteration']:>5}"
    return "\n".join([head, *(f"{n:{width}}  {first[n]:10.4f}  {last[n]:10.4f}" for n in names)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--log-dir", type=Path, required=True)
    parser.add_argument("--json", type=Path, help="file for the figures")
    args = parser.parse_args()
    path = args.log_dir / "metrics.jsonl"
    steps, evaluations = read_records(path, "train"), read_records(path, "eval")
    plot(steps, evaluations, args.log_dir / "rl.png")
    if evaluations:
        print(table(evaluations))
    largest = max(record["train/train_rollout_logprob_abs_diff_max"] for record in steps)
    print(f"largest log-prob difference of trainer and engine: {largest:.2e}")
    print(f"wrote {args.log_dir / 'rl.png'}")
    if args.json is not None and evaluations:
        name = pass_names(evaluations)[0]
        figures = {
            "pass_before": evaluations[0][name], "pass_after": evaluations[-1][name],
            "max_logprob_diff": largest,
        }  # fmt: skip
        write_json(args.json, figures)


if __name__ == "__main__":
    main()
