"""Show on your own model that speculation does not change what is said.

Generates the same prompts without speculation and under each strategy, and compares token by token;
exits with 1 where any response differs. In float32 a difference means a near tie that rounding
decided, or a mistake.
"""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoTokenizer

from megatron_tlt.rollout.native.engine import NativeEngine, NativeEngineConfig
from megatron_tlt.rollout.tuner import NO_CONTEXT, FixedPolicy, StepContext
from megatron_tlt.types import OFF, Prompt, Rollout, SamplingParams, Strategy

STRATEGIES = [
    Strategy(drafter="ngram", num_steps=7, num_draft_tokens=8),
    Strategy(drafter="subnet", num_steps=3, num_draft_tokens=4),
]


class Mixed:
    """Another strategy at every step."""

    def __init__(self) -> None:
        self.steps = 0

    def select(self, batch: int, context: StepContext = NO_CONTEXT) -> Strategy:
        self.steps += 1
        return [OFF, *STRATEGIES][self.steps % 3]

    def record(self, strategy: Strategy, *, batch: int, tokens: int, seconds: float) -> None:
        """Nothing to learn."""


def weights(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ValueError(f"{folder} has no .safetensors file: give a Hugging Face model folder")
    for file in files:
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (not a dict)
                yield name, tensors.get_tensor(name)


def first_difference(a: Rollout, b: Rollout) -> int | None:
    if a.tokens == b.tokens:
        return None
    pairs = zip(a.tokens, b.tokens, strict=False)
    return next(
        (i for i, (x, y) in enumerate(pairs) if x != y), min(len(a.tokens), len(b.tokens))
    )


def compare(engine: NativeEngine, prompts: list[Prompt], params: SamplingParams) -> int:
    """Responses that differ from those without speculation, over all strategies."""
    engine.policy = FixedPolicy()
    plain = engine.generate(prompts, params)
    failures = 0
    for policy in (*(FixedPolicy(strategy=s) for s in STRATEGIES), Mixed()):
        engine.policy = policy
        before = engine.stats().drafted
        rollouts = engine.generate(prompts, params)
        parted = [
            (a.prompt_id, a.sample_index, at)
            for a, b in zip(plain, rollouts, strict=True)
            if (at := first_difference(a, b)) is not None
        ]
        failures += len(parted)
        tokens = sum(len(r.tokens) for r in rollouts)
        print(
            f"T={params.temperature} {getattr(policy, 'strategy', 'mixed')}: {tokens} tokens, "
            f"{engine.stats().drafted - before} drafted, {len(parted)} responses differ "
            f"(prompt, sample, position): {parted[:5]}"
        )
    return failures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="Hugging Face model folder")
    parser.add_argument("--prompt", action="append", help="may be given more than once")
    parser.add_argument("--n", type=int, default=4, help="samples per prompt")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    texts = args.prompt or ["1, 2, 3, 4, 5,", "The capital of France is"]
    prompts = [Prompt(prompt_id=i, tokens=tuple(tokenizer(t).input_ids)) for i, t in enumerate(texts)]
    longest = max(len(p.tokens) for p in prompts) + args.max_tokens
    engine = NativeEngine(
        AutoConfig.from_pretrained(args.model).to_dict(), NativeEngineConfig(max_model_len=longest)
    )
    engine.update_weights("target", weights(args.model), version=0)
    failures = 0
    for temperature in args.temperatures:
        params = SamplingParams(n=args.n, temperature=temperature, max_tokens=args.max_tokens)
        failures += compare(engine, prompts, params)
    print("lossless" if not failures else f"{failures} responses differ: near ties, or a mistake")
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
