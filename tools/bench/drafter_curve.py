"""A drafter's accept length over an RL run: from nothing, after each update of the policy and each bubble.

`python -m tools.bench.drafter_curve --checkpoint SFT --prompts rl.jsonl`: one GRPO run with speculation tlt
that starts without a drafter and keeps every checkpoint. Then, for the policy of each step, on the same
responses in chains of six: the drafter as the policy's update left it behind (`stale`), the same one after
the next rollout's bubble (`recovered`), and one warmed up on the first policy and never trained again
(`frozen`). A policy's recovered drafter is the next policy's stale one: the dip that an update makes lies
between the two.
"""

import argparse
import json
import statistics
import tempfile
from dataclasses import replace
from pathlib import Path

from megatron_tlt.bridge.convert import megatron_to_hf
from megatron_tlt.draft.export import import_drafter
from megatron_tlt.models.drafter import Drafter, DrafterConfig
from megatron_tlt.parallel import Parallel, ParallelConfig, init_parallel
from megatron_tlt.train.checkpoint import iteration_folder
from tools.bench.common import command_line, write_result
from tools.bench.tlt import Bench, acceptance, common_options, parsed, prepared, stored_drafter
from tools.native_engine import config_of

import torch
from tqdm import tqdm

_SEED = 0
# A drafter from nothing learns at a rate of its own; every policy is kept.
_OPTIONS = ("drafter.trainer.lr=1e-3", "checkpoint.save_interval=1", "checkpoint.keep_last=1000000")


def parse_arguments() -> argparse.Namespace:
    parser = common_options(__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--settled", type=int, default=20, help="steps after which dips are averaged")
    args = parsed(parser)
    if args.toy:
        args.steps, args.settled = 3, 1
    if args.settled + 2 > args.steps:
        parser.error(f"--settled {args.settled} leaves no two of --steps {args.steps}")
    args.set = [*_OPTIONS, *args.set]
    return args


def follow(bench: Bench, tokens: list[tuple[int, ...]], *, parallel: Parallel) -> list[dict]:
    """One row a policy: accept length and positions of the stale, the recovered and the frozen drafter."""
    checkpoints, rows = bench.work / f"tlt-{_SEED}" / "checkpoint", []
    torch.manual_seed(_SEED)
    nothing = Drafter(DrafterConfig.for_target(config_of(bench.checkpoint)))
    frozen = nothing if bench.drafter is None else import_drafter(bench.drafter).float()
    stale, hf = nothing, bench.checkpoint
    for step in tqdm(range(bench.args.steps), desc="policies", unit="policy"):
        checkpoint = iteration_folder(checkpoints, step + 1)
        recovered = stored_drafter(checkpoint, nothing)
        drafters = {"stale": stale, "recovered": recovered, "frozen": frozen}
        found = acceptance(hf, drafters, tokens, max_tokens=bench.args.max_tokens, seed=_SEED)
        rows.append({"policy": step} | {
            f"{name}{suffix}": one[key]
            for name, one in found.items()
            for suffix, key in (("", "accept_length"), ("_by_position", "positions"))
        })  # fmt: skip
        stale, hf = recovered, bench.work / f"policy-after-{step + 1}"
        if not hf.is_dir():
            megatron_to_hf(checkpoint, hf, parallel)
    return rows


def mean_and_error(values: list[float]) -> list[float]:
    """Mean and its standard error."""
    return [statistics.fmean(values), statistics.stdev(values) / len(values) ** 0.5]


def summarise(rows: list[dict], *, settled: int) -> dict:
    late = [(before, row) for before, row in zip(rows, rows[1:]) if row["policy"] >= settled]
    summary: dict = {"steps": len(rows), "settled": settled}
    for name in ("recovered", "frozen"):
        summary[f"accept_{name}_first"], summary[f"accept_{name}_last"] = rows[0][name], rows[-1][name]
        summary[f"accept_{name}_by_position"] = rows[-1][f"{name}_by_position"]
    summary["accept_nothing"] = rows[0]["stale"]
    summary["dip"], summary["dip_error"] = mean_and_error([b["recovered"] - r["stale"] for b, r in late])
    summary["recovery"], summary["recovery_error"] = mean_and_error(
        [r["recovered"] - r["stale"] for _, r in late]
    )
    summary["adapted_over_frozen"], summary["adapted_over_frozen_error"] = mean_and_error(
        [r["recovered"] - r["frozen"] for _, r in late]
    )
    return summary


def plot(rows: list[dict], path: Path) -> None:
    # Half a second to import, and needed here only.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.6, 3.6), layout="constrained")
    over_time, by_position = figure.subplots(1, 2, width_ratios=(2, 1))
    saw = [(row["policy"] + shift, row[name]) for row in rows
           for shift, name in ((0.0, "stale"), (0.7, "recovered"))]  # fmt: skip
    over_time.plot(*zip(*saw, strict=True), label="trained in the bubbles, from nothing")
    steps = [row["policy"] for row in rows]
    over_time.plot(steps, [row["stale"] for row in rows], ".", label="the same after the policy's update")
    over_time.plot(steps, [row["frozen"] for row in rows], "--", label="warmed up before, then frozen")
    over_time.set_xlabel("updates of the policy")
    over_time.set_ylabel("accept length, chains of six")
    over_time.legend(fontsize=8)
    for name, label in (("recovered", "trained"), ("frozen", "frozen")):
        rates = rows[-1][f"{name}_by_position"]
        by_position.plot(range(1, len(rates) + 1), rates, marker="o", label=label)
    by_position.set_xlabel("position of the draft, last policy")
    by_position.set_ylabel("share of drafts kept up to there")
    by_position.legend(fontsize=8)
    figure.savefig(path, dpi=120)


def main() -> None:
    args = parse_arguments()
    with tempfile.TemporaryDirectory() as scratch:
        bench, tokens = prepared(args, args.work or Path(scratch))
        replace(bench, drafter=None).turn("tlt", _SEED, last_step=args.steps)
        rows = follow(bench, tokens, parallel=init_parallel(ParallelConfig(), seed=1))
    summary = summarise(rows, settled=args.settled)
    print(json.dumps(summary, indent=1))
    command = command_line("tools.bench.drafter_curve")
    path = write_result("drafter_curve", command, rows, summary, folder=args.output)
    plot(rows, path.with_suffix(".png"))


if __name__ == "__main__":
    main()
