"""What each shape of EAGLE's draft tree brings: the sweeps of the TLT paper's Fig. 13, Table 1 and Table 4.

*depth*: number of levels against tokens to verify, one request, `--topk` branches. *topk*: branches a node,
one request, `--depth` levels, `--verify` tokens to verify. *batch*: tokens to verify against the batch size,
`--depth` levels, `--topk` branches. `speedup` is tokens/s over plain decoding of the same prompts at the same
batch size; all strategies of a batch size alternate on one engine, and medians are compared (processor time
of one thread). The paper's sweeps are of a 32B model on GPUs, where many tokens are verified for the price of
one; ours stop where a CPU stops gaining.
"""

import argparse
import statistics
from pathlib import Path

import torch

from megatron_tlt.rollout.tuner import FixedPolicy
from megatron_tlt.types import OFF, SamplingParams, Strategy
from tools import countdown_model
from tools.bench.common import RESULTS, command_line, write_result
from tools.bench.rollout import seconds_of
from tools.bench.targets import (
    DTYPES, Target, add_shape_arguments, add_training_arguments, make_toy, small_target,
)  # fmt: skip

from tqdm import tqdm

Cell = tuple[str, int]
"""(sweep, batch size)"""


def eagle(depth: int, topk: int, verify: int) -> Strategy | None:
    """None where a tree of that depth and breadth has fewer nodes than are to be verified, or where fewer
    are verified than a chain of that depth has."""
    nodes = 1 + topk + (depth - 1) * topk * topk
    if not depth < verify <= nodes:
        return None
    return Strategy(drafter="eagle", num_steps=depth, topk=topk, num_draft_tokens=verify)


def sweeps(args: argparse.Namespace) -> dict[Cell, list[Strategy]]:
    """The strategies of every sweep and batch size."""
    found: dict[Cell, list[Strategy | None]] = {
        ("depth", 1): [eagle(d, args.topk, v) for d in args.depths for v in args.verifies],
        ("topk", 1): [eagle(args.depth, k, args.verify if k > 1 else args.depth + 1) for k in args.topks],
    }
    for batch in args.batches:
        found["batch", batch] = [eagle(args.depth, args.topk, v) for v in args.verifies]
    return {cell: [s for s in strategies if s is not None] for cell, strategies in found.items()}


def measure(
    target: Target, batch: int, strategies: list[Strategy], args: argparse.Namespace
) -> dict[Strategy, dict]:
    """Tokens/s and tokens a verification of each strategy at this batch size, and of plain decoding."""
    prompts = target.prompts[: max(args.prompts, batch)]
    length = max(len(p.tokens) for p in prompts) + args.tokens
    engine = target.engine(DTYPES[args.dtype], batch, length, FixedPolicy())
    params = SamplingParams(
        temperature=args.temperature, max_tokens=args.tokens, stop_token_ids=(countdown_model.EOS,)
    )
    times: dict[Strategy, list[float]] = {strategy: [] for strategy in strategies}
    accepted = {}
    for run in tqdm(range(args.runs + 1), desc=f"batch {batch}", unit="round"):
        for strategy in strategies:
            engine.policy, before = FixedPolicy(strategy=strategy), engine.stats()
            found = []
            seconds = seconds_of(lambda out=found: out.extend(engine.generate(prompts, params)))
            if run:  # the first is warm-up
                times[strategy].append(seconds / sum(len(r.tokens) for r in found))
                after = engine.stats()
                verified = after.verify_ct - before.verify_ct
                accepted[strategy] = (
                    (after.speculated_tokens - before.speculated_tokens) / verified if verified else 1.0
                )
    return {
        s: {"tok_s": 1 / statistics.median(values), "spread": max(values) / min(values),
            "accept_length": accepted[s]}
        for s, values in times.items()
    }  # fmt: skip


def rows_of(
    cells: dict[Cell, list[Strategy]], measured: dict[int, dict[Strategy, dict]]
) -> list[dict]:
    """One row for each strategy of each sweep."""
    rows = []
    for (sweep, batch), strategies in cells.items():
        plain = measured[batch][OFF]["tok_s"]
        for strategy in strategies:
            found = measured[batch][strategy]
            rows.append(
                {
                    "sweep": sweep, "batch": batch, "depth": strategy.num_steps, "topk": strategy.topk,
                    "verify": strategy.num_draft_tokens,
                    "accept_length": round(found["accept_length"], 3),
                    "speedup": round(found["tok_s"] / plain, 3), "tok_s": round(found["tok_s"], 1),
                    "plain_tok_s": round(plain, 1), "spread": round(found["spread"], 2),
                }
            )  # fmt: skip
    return rows


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_shape_arguments(parser)
    add_training_arguments(parser)
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of strategies.json")
    parser.add_argument("--dtype", choices=DTYPES, default="fp32")
    parser.add_argument("--depths", type=int, nargs="+", default=[2, 3, 4, 6, 8])
    parser.add_argument("--verifies", type=int, nargs="+", default=[4, 8, 12, 16, 24])
    parser.add_argument("--topks", type=int, nargs="+", default=[1, 2, 3, 4, 6])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--topk", type=int, default=3)
    parser.add_argument("--verify", type=int, default=10)
    parser.add_argument("--prompts", type=int, default=8, help="prompts, or one a request where more")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--tokens", type=int, default=160, help="longest response")
    parser.add_argument("--runs", type=int, default=3)
    args = parser.parse_args()
    if args.toy:
        args.depths, args.verifies, args.topks, args.batches = [2, 3], [4, 6], [1, 2], [1, 2]
        args.depth, args.verify, args.prompts, args.tokens, args.runs = 2, 4, 2, 8, 1
        make_toy(args)
    return args


def main() -> None:
    args = parse()
    torch.set_num_threads(1)
    target, cells = small_target(args), sweeps(args)
    wanted: dict[int, dict[Strategy, None]] = {}
    for (_, batch), strategies in cells.items():
        wanted.setdefault(batch, {OFF: None}).update(dict.fromkeys(strategies))
    measured = {batch: measure(target, batch, list(some), args) for batch, some in wanted.items()}
    rows = rows_of(cells, measured)
    best = {sweep: max((r for r in rows if r["sweep"] == sweep), key=lambda r: r["speedup"])
            for sweep in ("depth", "topk", "batch")}  # fmt: skip
    longest = max((r for r in rows if r["sweep"] == "depth"), key=lambda r: r["accept_length"])
    summary = {
        "best_speedup": max(row["speedup"] for row in best.values()),
        "best_depth": best["depth"]["depth"], "best_verify": best["depth"]["verify"],
        "best_topk": best["topk"]["topk"],
        "longest_accept": longest["accept_length"], "longest_accept_speedup": longest["speedup"],
    }  # fmt: skip
    print(summary)
    write_result("strategies", command_line("tools.bench.strategies"), rows, summary, folder=args.output)


if __name__ == "__main__":
    main()
