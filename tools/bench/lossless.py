"""Whether speculation changes anything: token identity over many tokens, distributions by exact enumeration.

Targets are small random models of each supported family, in float32, with a drafter trained on their own
answers for a moment, so that drafts are accepted and rejected all the time. Every case is compared token
by token with plain decoding: each strategy, all strategies in turn, preemption in a small cache, new
weights for target and drafter between two responses. The chi-square cases compare sampled tokens with
transformers' softmax, and a deliberately wrong acceptance rule must fail both checks.
"""

import argparse
import math
from pathlib import Path

import torch
import transformers

from megatron_tlt.draft.batch import collate
from megatron_tlt.draft.trainer import DrafterTrainer, DrafterTrainerConfig
from megatron_tlt.models.drafter import Drafter, DrafterConfig
from megatron_tlt.rollout.native import engine as native
from megatron_tlt.rollout.native.engine import NativeEngine, NativeEngineConfig
from megatron_tlt.rollout.tuner import FixedPolicy
from megatron_tlt.types import Prompt, Rollout, SamplingParams, Strategy
from tools.bench.common import RESULTS, command_line, write_result
from tools.prove_lossless import NGRAM, SUBNET, TRAINED, Mixed, compare, first_difference, policies

VOCAB, STRATEGIES = 61, [NGRAM, SUBNET, *TRAINED]
COMMON = dict(vocab_size=VOCAB, bos_token_id=0, eos_token_id=0)
LLAMA = dict(
    hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=512, **COMMON,
)  # fmt: skip


def target(kind: str) -> transformers.PreTrainedModel:
    if kind == "gpt2":
        config = transformers.GPT2Config(n_embd=32, n_layer=4, n_head=4, n_positions=512, **COMMON)
    else:
        config = {"llama": transformers.LlamaConfig, "qwen3": transformers.Qwen3Config}[kind](
            **LLAMA, **({"head_dim": 16} if kind == "qwen3" else {})
        )
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        parameter.data += torch.randn_like(parameter) * 0.1
    return model.eval()


class Bed:
    """One target, its drafter, and engines over them."""

    def __init__(self, kind: str, *, max_tokens: int) -> None:
        self.kind, self.model, self.max_tokens = kind, target(kind), max_tokens
        self.drafter = Drafter(DrafterConfig.for_target(self.model.config.to_dict()))
        head = self.model.get_output_embeddings().weight.data
        self.drafter.share(self.model.get_input_embeddings().weight.data, head)
        self.prompts = [
            Prompt(prompt_id=i, tokens=tuple((7 * i + 3 * j) % VOCAB for j in range(3 + 2 * i)))
            for i in range(8)
        ]

    def engine(self, **sizes) -> NativeEngine:
        config = NativeEngineConfig(
            **dict(max_model_len=20 + self.max_tokens, max_batch=64) | sizes
        )
        engine = NativeEngine(self.model.config.to_dict(), config, drafter=self.drafter.config)
        engine.update_weights("target", self.model.state_dict().items(), version=0)
        engine.update_weights("draft", self.drafter.state_dict().items(), version=0)
        return engine

    def train(self, iterations: int) -> None:
        engine = self.engine()
        engine.capture_features(20_000, context_rows=20)
        for temperature in (0.0, 0.7):
            engine.generate(
                self.prompts, SamplingParams(n=2, temperature=temperature, max_tokens=self.max_tokens)
            )
        batch = collate(engine.take_features())
        trainer = DrafterTrainer(
            self.drafter, DrafterTrainerConfig(lr=5e-3, num_passes=3, token_weight=1.0)
        )
        for _ in range(iterations):
            trainer.step(batch)

    def token_cases(self, *, n: int) -> list[dict]:
        """Every policy, a small cache, and updates on the way, greedy and sampled."""
        rows = []
        roomy = self.engine()
        small = self.engine(kv_cache_bytes=roomy.cache.num_bytes // 16)
        for temperature in (0.0, 0.8):
            params = SamplingParams(n=n, temperature=temperature, max_tokens=self.max_tokens)
            roomy.policy = FixedPolicy()
            plain = roomy.generate(self.prompts, params)
            for name, policy in policies(STRATEGIES):
                roomy.policy = policy
                rows.append(compare(plain, roomy, self.prompts, params, name=name))
            small.policy = Mixed(STRATEGIES)
            rows.append(compare(plain, small, self.prompts, params, name="mixed, small cache"))
        rows.append(self._updates(n=n))
        return [{"model": self.kind, "kind": "tokens"} | row for row in rows]

    def _updates(self, *, n: int) -> dict:
        """New weights on the way: responses before are the old model's, those that start later the new's."""
        params = SamplingParams(n=n, temperature=0.8, max_tokens=self.max_tokens)
        changed = {k: v * 1.1 for k, v in self.model.state_dict().items()}
        engine = self.engine(max_batch=n)
        engine.policy = Mixed(STRATEGIES)
        engine.submit(self.prompts, params)
        rollouts: list[Rollout] = []
        for rollout in engine.stream():
            rollouts.append(rollout)
            if len(rollouts) == 3 * n:
                engine.update_weights("target", changed.items(), version=1)
                engine.update_weights("draft", self.drafter.state_dict().items(), version=1)
        plain = self.engine(max_batch=n)
        whole = {0: self._all(plain, params)}
        plain.update_weights("target", changed.items(), version=1)
        whole[1] = self._all(plain, params)
        pure = [r for r in rollouts if len(set(r.weight_versions)) == 1]
        different = sum(
            first_difference(r, whole[r.weight_versions[0]][r.prompt_id, r.sample_index]) is not None
            for r in pure
        )
        stats = engine.stats()
        return {
            "case": "mixed, weight update", "temperature": 0.8, "responses": len(pure),
            "tokens": sum(len(r.tokens) for r in pure), "drafted": stats.drafted,
            "accept_length": round(stats.accept_length, 3), "preemptions": 0, "different": different,
            "first": [],
        }  # fmt: skip

    def _all(self, engine: NativeEngine, params: SamplingParams) -> dict[tuple[int, int], Rollout]:
        return {(r.prompt_id, r.sample_index): r for r in engine.generate(self.prompts, params)}

    def chi_square(self, strategy: Strategy, *, count: int, temperature: float, **cut) -> dict:
        """Second and third token given those before, over all frequent prefixes, against exact
        probabilities.
        """
        engine = self.engine(max_batch=500, max_model_len=60)
        engine.policy = FixedPolicy(strategy=strategy)
        params = SamplingParams(n=count, temperature=temperature, max_tokens=4, **cut)
        triples = [r.tokens[:3] for r in engine.generate(self.prompts[:1], params)]
        pairs = [(t[:i], t[i]) for t in triples for i in (1, 2)]
        statistic, freedom, variation = 0.0, 0, 0.0
        impossible = 0
        for prefix in sorted({prefix for prefix, _ in pairs}):
            drawn = torch.tensor([token for other, token in pairs if other == prefix])
            if len(drawn) < 40:
                continue
            exact = self._exact(prefix, temperature=temperature, **cut)
            expected = exact * len(drawn)
            observed = torch.bincount(drawn, minlength=VOCAB)
            impossible += int(observed[exact == 0].sum())
            big = expected > 5
            statistic += float(((observed - expected).square() / expected)[big].sum())
            freedom += max(int(big.sum()) - 1, 0)
            variation = max(variation, float((observed / len(drawn) - exact).abs().sum() / 2))
        excess = (statistic - freedom) / math.sqrt(2 * max(freedom, 1))
        return {
            "model": self.kind, "kind": "chi-square", "case": str(strategy),
            "temperature": temperature, **cut, "samples": count, "freedom": freedom,
            "excess_sigma": round(excess, 2), "largest_total_variation": round(variation, 4),
            "accept_length": round(engine.stats().accept_length, 3),
            "different": int(impossible > 0 or excess > 4),
        }  # fmt: skip

    def _exact(
        self, prefix: tuple[int, ...], *, temperature: float, top_k: int = 0, top_p: float = 1.0
    ) -> torch.Tensor:
        with torch.no_grad():
            logits = self.model(torch.tensor([self.prompts[0].tokens + prefix])).logits[0, -1]
        probs = torch.softmax(logits / temperature, 0)
        order = probs.argsort(descending=True)
        before = probs[order].cumsum(0) - probs[order]
        keep = order[(before < top_p) & (torch.arange(VOCAB) < (top_k or VOCAB))]
        kept = torch.zeros(VOCAB).scatter_(0, keep, probs[keep])
        return kept / kept.sum()


def mutation(bed: Bed, *, count: int) -> list[dict]:
    """With every first draft accepted unseen, both checks must fail."""
    exact = native.step

    def wrong(runner, running, draft):
        output = exact(runner, running, draft)
        if draft is not None:
            first = draft.tokens[:, 1]
            output.tokens[:, 0] = torch.where(first >= 0, first, output.tokens[:, 0])
        return output

    native.step = wrong
    row = bed.chi_square(TRAINED[0], count=count, temperature=1.0)
    params = SamplingParams(temperature=0, max_tokens=20)
    engine = bed.engine()
    engine.policy = FixedPolicy(strategy=SUBNET)
    broken = engine.generate(bed.prompts, params)
    native.step = exact
    plain = bed.engine().generate(bed.prompts, params)
    caught = any(first_difference(a, b) is not None for a, b in zip(plain, broken, strict=True))
    return [
        row | {"kind": "mutation", "different": int(not row["different"])},
        {"model": bed.kind, "kind": "mutation", "case": "tokens", "different": int(not caught)},
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--toy", action="store_true", help="small and quick, for CI")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of lossless.json")
    parser.add_argument("--kinds", nargs="+", default=["gpt2", "llama", "qwen3"])
    parser.add_argument("--n", type=int, default=8, help="samples a prompt")
    parser.add_argument("--max-tokens", type=int, default=80)
    parser.add_argument("--count", type=int, default=4000, help="samples of a chi-square case")
    args = parser.parse_args()
    if args.toy:
        args.kinds, args.n, args.max_tokens, args.count = ["llama"], 2, 24, 1000
    rows = []
    for kind in args.kinds:
        bed = Bed(kind, max_tokens=args.max_tokens)
        bed.train(20 if args.toy else 80)
        rows += bed.token_cases(n=args.n)
        if kind == "llama":
            cuts = [dict(temperature=0.7, top_k=6), dict(temperature=1.0, top_p=0.4)]
            for strategy in STRATEGIES if not args.toy else TRAINED[1:2]:
                rows += [bed.chi_square(strategy, count=args.count, **cut) for cut in cuts]
            rows += mutation(bed, count=args.count)
        for row in rows:
            print(row, flush=True)
    failed = [row for row in rows if row["different"]]
    summary = {
        "tests": len(rows),
        "failures": len(failed),
        "tokens_compared": sum(row.get("tokens", 0) for row in rows),
        "greedy_tokens_compared": sum(
            row.get("tokens", 0) for row in rows if row.get("temperature") == 0
        ),
    }
    print(summary)
    write_result("lossless", command_line("tools.bench.lossless"), rows, summary, folder=args.output)


if __name__ == "__main__":
    main()
