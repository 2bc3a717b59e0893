"""Compare speculation policies on one recorded trace, on one engine or a simulated cluster.

`record` runs a model under each strategy, and writes the trace and the measured costs of a step;
`simulate` replays them under every policy, so that all of them decode identical tokens.

Example: python -m tools.replay_rollout record --model MODEL --prompts prompts.jsonl --output TRACE
         python -m tools.replay_rollout simulate --trace TRACE --ranks 4 --sharing queue
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path

from transformers import AutoTokenizer

from megatron_tlt.files import write_json
from megatron_tlt.models.drafter import DrafterConfig
from megatron_tlt.rollout.contextual import ContextualTuner
from megatron_tlt.rollout.costs import CostTable
from megatron_tlt.rollout.native.engine import NativeEngineConfig
from megatron_tlt.rollout.replay import OraclePolicy, replay
from megatron_tlt.rollout.trace import read_trace, trace_of, write_trace
from megatron_tlt.rollout.tuner import BanditTuner, FixedPolicy, StrategyPolicy
from megatron_tlt.types import OFF, SamplingParams, Strategy
from tools.native_engine import config_of, engine_of, prompts_of, weights

ARMS = [
    Strategy(drafter="ngram", num_steps=7, num_draft_tokens=8),
    Strategy(drafter="ngram", num_steps=3, num_draft_tokens=4),
    Strategy(drafter="subnet", num_steps=3, num_draft_tokens=4),
]
TRAINED_ARMS = [
    Strategy(drafter="eagle", num_steps=3, num_draft_tokens=4),
    Strategy(drafter="eagle", num_steps=5, num_draft_tokens=6),
    Strategy(drafter="hybrid", num_steps=4, topk=3, num_draft_tokens=8),
]


def make_policies(
    strategies: list[Strategy], costs: CostTable, *, threshold: int
) -> dict[str, Callable[[], StrategyPolicy]]:
    """Static strategies, the elastic threshold, both bandits, and the oracle."""
    makers: dict[str, Callable[[], StrategyPolicy]] = {
        str(s): lambda s=s: FixedPolicy(strategy=s) for s in strategies
    }
    best = max((s for s in strategies if s != OFF), key=lambda s: s.num_draft_tokens)
    makers["threshold"] = lambda: FixedPolicy(strategy=best, max_batch=threshold)
    makers["bandit"] = lambda: BanditTuner(strategies)
    makers["contextual"] = lambda: ContextualTuner(strategies, costs)
    makers["oracle"] = lambda: OraclePolicy(strategies, costs)
    return makers


def strategy_of(name: str) -> Strategy:
    """The strategy that `str` wrote. Raises ValueError for another text."""
    drafter, *numbers = name.split("_")
    if drafter == "off" and not numbers:
        return OFF
    if len(numbers) != 3 or not all(number.isdigit() for number in numbers):
        raise ValueError(f"{name!r} is no strategy: expected DRAFTER_STEPS_TOPK_TOKENS, or off")
    steps, topk, tokens = map(int, numbers)
    return Strategy(drafter=drafter, num_steps=steps, topk=topk, num_draft_tokens=tokens)


def record(args: argparse.Namespace) -> None:
    drafter = None if args.drafter is None else DrafterConfig.from_hf(config_of(args.drafter))
    strategies = [OFF, *ARMS, *(TRAINED_ARMS if drafter else [])]
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    prompts = prompts_of(
        args.prompts, tokenizer, limit=args.num_prompts, max_tokens=args.max_prompt_tokens
    )
    ends = () if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)
    params = SamplingParams(
        n=args.n, temperature=args.temperature, max_tokens=args.max_tokens, stop_token_ids=ends
    )
    sizes = NativeEngineConfig(
        max_model_len=args.max_prompt_tokens + args.max_tokens, max_batch=args.max_batch
    )
    runs, records = {}, []
    for strategy in strategies:
        engine = engine_of(args.model, sizes, drafter=drafter)
        if drafter is not None:
            engine.update_weights("draft", weights(args.drafter), version=0)
        engine.policy = FixedPolicy(strategy=strategy)
        runs[strategy] = engine.generate(prompts, params)
        records += engine.stats().recent
        print(f"{strategy}: accept length {engine.stats().accept_length:.2f}", flush=True)
    args.output.mkdir(parents=True, exist_ok=True)
    write_trace(args.output / "trace.jsonl", trace_of(runs))
    write_json(args.output / "costs.json", CostTable.of_records(records).to_json())


def simulate(args: argparse.Namespace) -> None:
    trace = read_trace(args.trace / "trace.jsonl")
    costs = CostTable.from_json(json.loads((args.trace / "costs.json").read_text(encoding="utf-8")))
    names = [name for name in trace[0].accepts if name in costs.steps]
    strategies = [strategy_of(name) for name in names]
    for name, make in make_policies(strategies, costs, threshold=args.threshold).items():
        result = replay(
            trace, make, costs, max_batch=args.max_batch, ranks=args.ranks, sharing=args.sharing
        )
        print(
            f"{name:>16}: {result.seconds:8.3f} s, {result.tokens_per_second:9.1f} tokens/s, "
            f"bubble {result.bubble:.3f}, steps {result.strategy_steps}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(required=True)
    one = commands.add_parser("record", help="run a model and write trace and costs")
    one.add_argument("--model", type=Path, required=True)
    one.add_argument("--drafter", type=Path)
    one.add_argument("--prompts", type=Path, required=True)
    one.add_argument("--output", type=Path, required=True)
    one.add_argument("--num-prompts", type=int, default=16)
    one.add_argument("--n", type=int, default=4)
    one.add_argument("--temperature", type=float, default=1.0)
    one.add_argument("--max-tokens", type=int, default=128)
    one.add_argument("--max-prompt-tokens", type=int, default=256)
    one.set_defaults(run=record)
    two = commands.add_parser("simulate", help="replay under every policy")
    two.add_argument("--trace", type=Path, required=True)
    two.add_argument("--ranks", type=int, default=1)
    two.add_argument("--sharing", choices=("static", "queue"), default="static")
    two.add_argument("--threshold", type=int, default=8, help="elastic policy: speculate up to so many")
    two.set_defaults(run=simulate)
    for command in (one, two):
        command.add_argument("--max-batch", type=int, default=32)
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
