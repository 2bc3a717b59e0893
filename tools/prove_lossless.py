"""Show on your own model, and drafter, that speculation does not change what is said.

Generates the same prompts without speculation and under each strategy, under a strategy that changes every
step, and in a cache so small that requests are preempted; compares token by token and exits with 1 where
any response differs. In float32 a difference means a near tie that rounding decided, or a mistake.
"""

import argparse
import sys
from pathlib import Path

from transformers import AutoTokenizer

from megatron_tlt.models.drafter import DrafterConfig
from megatron_tlt.rollout.native.engine import NativeEngine, NativeEngineConfig
from megatron_tlt.rollout.tuner import NO_CONTEXT, FixedPolicy, StepContext, StrategyPolicy
from megatron_tlt.types import OFF, Prompt, Rollout, SamplingParams, Strategy
from tools.native_engine import config_of, engine_of, weights

NGRAM = Strategy(drafter="ngram", num_steps=7, num_draft_tokens=8)
SUBNET = Strategy(drafter="subnet", num_steps=3, num_draft_tokens=4)
TRAINED = [
    Strategy(drafter="eagle", num_steps=5, num_draft_tokens=6),
    Strategy(drafter="eagle", num_steps=4, topk=4, num_draft_tokens=16),
    Strategy(drafter="hybrid", num_steps=4, topk=3, num_draft_tokens=12),
]


class Mixed:
    """Another strategy at every step, plain steps among them."""

    def __init__(self, strategies: list[Strategy]) -> None:
        self.strategies, self.steps = [OFF, *strategies], 0

    def select(self, batch: int, context: StepContext = NO_CONTEXT) -> Strategy:
        self.steps += 1
        return self.strategies[self.steps % len(self.strategies)]

    def record(self, strategy: Strategy, *, batch: int, tokens: int, seconds: float) -> None:
        """Nothing to learn."""

    def __str__(self) -> str:
        return "mixed"


def policies(strategies: list[Strategy]) -> list[tuple[str, StrategyPolicy]]:
    """Each strategy alone, and all in turn."""
    fixed = [(str(s), FixedPolicy(strategy=s)) for s in strategies]
    return [*fixed, ("mixed", Mixed(strategies))]


def first_difference(a: Rollout, b: Rollout) -> int | None:
    if a.tokens == b.tokens:
        return None
    pairs = zip(a.tokens, b.tokens, strict=False)
    return next(
        (i for i, (x, y) in enumerate(pairs) if x != y), min(len(a.tokens), len(b.tokens))
    )


def compare(
    plain: list[Rollout], engine: NativeEngine, prompts: list[Prompt], params: SamplingParams, *, name: str
) -> dict:
    """One row: tokens, drafts, preemptions, and the responses that differ from `plain`."""
    before = engine.stats()
    rollouts = engine.generate(prompts, params)
    after = engine.stats()
    parted = [
        (a.prompt_id, a.sample_index, at)
        for a, b in zip(plain, rollouts, strict=True)
        if (at := first_difference(a, b)) is not None
    ]
    calls = after.verify_ct - before.verify_ct
    speculated = after.speculated_tokens - before.speculated_tokens
    return {
        "case": name,
        "temperature": params.temperature,
        "responses": len(rollouts),
        "tokens": sum(len(r.tokens) for r in rollouts),
        "drafted": after.drafted - before.drafted,
        "accept_length": round(speculated / calls, 3) if calls else 0.0,
        "preemptions": after.preemptions - before.preemptions,
        "different": len(parted),
        "first": [list(x) for x in parted[:5]],
    }


def run(args: argparse.Namespace, prompts: list[Prompt], longest: int) -> int:
    """All cases on one model: responses that differ."""
    strategies, drafter = [NGRAM, SUBNET], None
    if args.drafter is not None:
        drafter = DrafterConfig.from_hf(config_of(args.drafter))
        strategies += TRAINED

    def make(bound: int | None) -> NativeEngine:
        sizes = NativeEngineConfig(max_model_len=longest, kv_cache_bytes=bound)
        engine = engine_of(args.model, sizes, drafter=drafter)
        if drafter is not None:
            engine.update_weights("draft", weights(args.drafter), version=0)
        return engine

    roomy = make(None)
    small = make(3 * roomy.cache.num_bytes // (2 * roomy.config.max_batch))
    failures = 0
    for temperature in args.temperatures:
        params = SamplingParams(n=args.n, temperature=temperature, max_tokens=args.max_tokens)
        roomy.policy = FixedPolicy()
        plain = roomy.generate(prompts, params)
        cases = [(roomy, name, policy) for name, policy in policies(strategies)]
        cases.append((small, "mixed, small cache", Mixed(strategies)))
        for engine, name, policy in cases:
            engine.policy = policy
            row = compare(plain, engine, prompts, params, name=name)
            failures += row["different"]
            print(row, flush=True)
    return failures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="Hugging Face model folder")
    parser.add_argument("--drafter", type=Path, help="folder of an EAGLE drafter")
    parser.add_argument("--prompt", action="append", help="may be given more than once")
    parser.add_argument("--n", type=int, default=4, help="samples per prompt")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    texts = args.prompt or ["1, 2, 3, 4, 5,", "The capital of France is"]
    prompts = [Prompt(prompt_id=i, tokens=tuple(tokenizer(t).input_ids)) for i, t in enumerate(texts)]
    failures = run(args, prompts, max(len(p.tokens) for p in prompts) + args.max_tokens)
    print("lossless" if not failures else f"{failures} responses differ: near ties, or a mistake")
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
