"""What the bandits lose against the best static strategy in hindsight, on real timings, and under drift.

*real*: at each batch size (slots of the engine, refilled as responses finish) all static strategies and
policies alternate in one process on the same prompts, twice as many as the slots and at least `--prompts`.
*replay*: the same responses in the simulator, from the recorded trace and the measured costs of a step; says
how well its clock predicts the real one. *drift*: replayed; half-way the drafter goes stale (its drafts are
never accepted, and nobody says so), or a new one arrives, of which RL tells the policies. "released" is the
configuration that the TLT release ships: one strategy a bucket, the widest verification for the smallest
batch.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from megatron_tlt.rollout.contextual import ContextualTuner
from megatron_tlt.rollout.costs import CostTable
from megatron_tlt.rollout.native.engine import NativeEngine
from megatron_tlt.rollout.replay import replay
from megatron_tlt.rollout.trace import TraceResponse, trace_of
from megatron_tlt.rollout.tuner import BanditTuner, FixedPolicy, StrategyPolicy, forget_arms
from megatron_tlt.types import OFF, Prompt, Rollout, SamplingParams, StepRecord, Strategy
from tools import countdown_model
from tools.bench.common import RESULTS, command_line, write_result
from tools.bench.rollout import EAGLES, NGRAM
from tools.bench.targets import (
    Target, add_shape_arguments, add_training_arguments, make_toy, small_target,
)  # fmt: skip

STATIC = [OFF, NGRAM, *EAGLES]
TRAINED = ("eagle", "hybrid")
POLICIES = ("bandit", "contextual", "released")


def released() -> BanditTuner:
    """One strategy for each of the four buckets: nothing to explore, nothing to learn."""
    widest = sorted(EAGLES, key=lambda s: -s.num_draft_tokens)
    return BanditTuner(STATIC, arms=[[arm] for arm in widest])


def makers(costs: CostTable) -> dict[str, Callable[[], StrategyPolicy]]:
    return {
        "bandit": lambda: BanditTuner(STATIC),
        "contextual": lambda: ContextualTuner(STATIC, costs),
        "released": released,
    }


class Lane:
    """One engine at one batch size, with all that its runs showed."""

    def __init__(self, target: Target, batch: int, args: argparse.Namespace) -> None:
        self.prompts: list[Prompt] = target.prompts[: max(args.prompts, 2 * batch)]
        length = max(len(p.tokens) for p in self.prompts) + args.tokens
        self.engine: NativeEngine = target.engine(torch.float32, batch, length, FixedPolicy())
        self.params = SamplingParams(
            temperature=args.temperature, max_tokens=args.tokens, stop_token_ids=(countdown_model.EOS,)
        )
        self.seconds: dict[str, list[float]] = {}
        self.runs: dict[Strategy, list[Rollout]] = {}
        self.records: list[StepRecord] = []

    def run(self, name: str, policy: StrategyPolicy) -> None:
        self.engine.policy = policy
        self.engine.forget_ngrams()
        before = self.engine.stats().steps
        start = time.perf_counter()  # the clock that policies and step records see
        found = self.engine.generate(self.prompts, self.params)
        self.seconds.setdefault(name, []).append(time.perf_counter() - start)
        if isinstance(policy, FixedPolicy):
            stats = self.engine.stats()
            self.runs[policy.strategy] = found
            self.records += stats.recent[-min(stats.steps - before, len(stats.recent)) :]

    def median(self, name: str) -> float:
        """Without the first run, which warms up."""
        return statistics.median(self.seconds[name][1:])


def measure(
    target: Target, batch: int, args: argparse.Namespace
) -> tuple[list[dict], list[TraceResponse], CostTable]:
    """Real and replayed rows of one batch size; its trace and costs."""
    lane = Lane(target, batch, args)
    for strategy in STATIC:  # costs for the contextual bandit, and warm-up
        lane.run(str(strategy), FixedPolicy(strategy=strategy))
    lane.records.clear()
    for strategy in STATIC:
        lane.run(str(strategy), FixedPolicy(strategy=strategy))
    policies = {name: make() for name, make in makers(CostTable.of_records(lane.records)).items()}
    for run in range(args.runs + 1):
        for strategy in STATIC if run else ():
            lane.run(str(strategy), FixedPolicy(strategy=strategy))
        for name, policy in policies.items():
            lane.run(name, policy)
    static = {str(s): lane.median(str(s)) for s in STATIC}
    best = min(static, key=static.__getitem__)
    rows = [
        {
            "kind": "real", "batch": batch, "policy": name, "seconds": round(lane.median(name), 4),
            "best_static": best, "best_seconds": round(static[best], 4),
            "regret": round(lane.median(name) / static[best] - 1, 4),
        }
        for name in POLICIES
    ]  # fmt: skip
    trace, costs = trace_of(lane.runs), CostTable.of_records(lane.records)
    for strategy in STATIC:
        predicted = replay(
            trace, lambda s=strategy: FixedPolicy(strategy=s), costs, max_batch=batch
        ).seconds
        rows.append(
            {
                "kind": "replay", "batch": batch, "policy": str(strategy),
                "seconds": round(static[str(strategy)], 4), "predicted": round(predicted, 4),
                "error": round(predicted / static[str(strategy)] - 1, 4),
            }
        )  # fmt: skip
    return rows, trace, costs


def stale(trace: list[TraceResponse]) -> list[TraceResponse]:
    """The same responses with a drafter that is never right."""
    return [
        replace(
            r,
            accepts={
                name: (0,) * r.tokens if name.startswith(TRAINED) else counts
                for name, counts in r.accepts.items()
            },
        )
        for r in trace
    ]


def drift(trace: list[TraceResponse], costs: CostTable, *, batch: int, repeats: int) -> list[dict]:
    """A trained drafter that goes stale, and the other way round; regret against the best of each half."""
    phases = {"fresh, then stale": (trace, stale(trace)), "stale, then fresh": (stale(trace), trace)}
    rows = []
    for name, halves in phases.items():
        best = [
            min(
                replay(half, lambda s=s: FixedPolicy(strategy=s), costs, max_batch=batch).seconds
                for s in STATIC
            )
            for half in halves
        ]
        for policy, make in makers(costs).items():
            one, spent = make(), 0.0  # lives through both halves
            for version, half in enumerate(halves):
                arrives = version == 1 and half is trace
                if arrives and isinstance(one, BanditTuner):  # as rl.drafting does it
                    one.load_state_dict(forget_arms(one.state_dict(), TRAINED))
                spent += sum(
                    replay(half, lambda: one, costs, max_batch=batch, draft_version=int(arrives)).seconds
                    for _ in range(repeats)
                )
            rows.append(
                {"kind": "drift", "batch": batch, "case": name, "policy": policy,
                 "regret": round(spent / (repeats * sum(best)) - 1, 4)}
            )  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_shape_arguments(parser)
    add_training_arguments(parser)
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of bandit.json")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16, 32])
    parser.add_argument("--prompts", type=int, default=12, help="prompts of a run, or two a slot where more")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--runs", type=int, default=4)
    parser.add_argument("--drift-repeats", type=int, default=8, help="passes over the trace each half")
    args = parser.parse_args()
    if args.toy:
        args.batches, args.tokens, args.runs, args.drift_repeats = [2], 16, 1, 1
        make_toy(args)
    target = small_target(args)
    rows: list[dict] = []
    for batch in args.batches:
        found, trace, costs = measure(target, batch, args)
        rows += found + drift(trace, costs, batch=batch, repeats=args.drift_repeats)
        for row in rows[-len(found) - 6 :]:
            print(row, flush=True)

    def worst(policy: str, *kinds: str) -> float:
        return max(r["regret"] for r in rows if r["kind"] in kinds and r["policy"] == policy)

    summary = {
        "regret": min(worst(policy, "real", "drift") for policy in ("bandit", "contextual")),
        "regret_real": {policy: worst(policy, "real") for policy in POLICIES},
        "regret_drift": {policy: worst(policy, "drift") for policy in POLICIES},
        "replay_error": max(abs(r["error"]) for r in rows if r["kind"] == "replay"),
    }
    print(summary)
    write_result("bandit", command_line("tools.bench.bandit"), rows, summary, folder=args.output)


if __name__ == "__main__":
    main()
