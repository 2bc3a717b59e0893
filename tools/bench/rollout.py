"""Decode speed of the native engine: against transformers.generate, and with n-gram drafts.

Random weights: the speed of a step does not depend on their values. A tied model drawn with standard
deviation 0.02 repeats itself greedily, so the n-gram column is a near-best case, not a gain on real
text. Runs alternate inside one process and medians are compared. With one thread processor time is
measured, which load from elsewhere hardly moves; with more, wall-clock time.
"""

import argparse
import statistics
import time
from pathlib import Path

import torch
import transformers

from megatron_tlt.rollout.native.engine import NativeEngine, NativeEngineConfig
from megatron_tlt.rollout.tuner import BanditTuner, FixedPolicy
from megatron_tlt.types import OFF, Prompt, SamplingParams, Strategy
from tools.bench.common import RESULTS, command_line, write_result

NGRAM = Strategy(drafter="ngram", num_steps=7, num_draft_tokens=8)
VOCAB = 8192


def build(layers: int, hidden: int) -> transformers.PreTrainedModel:
    config = transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=hidden, intermediate_size=hidden * 8 // 3 // 32 * 32,
        num_hidden_layers=layers, num_attention_heads=hidden // 64, num_key_value_heads=hidden // 128,
        max_position_embeddings=1024, tie_word_embeddings=True, initializer_range=0.02,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def engine_for(model: transformers.PreTrainedModel, batch: int, length: int, policy) -> NativeEngine:
    sizes = NativeEngineConfig(max_model_len=length, max_batch=batch)
    engine = NativeEngine(model.config.to_dict(), sizes, policy=policy)
    engine.update_weights("target", model.state_dict().items(), version=0)
    return engine


def seconds_of(function) -> float:
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    start = clock()
    function()
    return clock() - start


def compare(model, batch: int, args: argparse.Namespace) -> dict:
    """Median tokens/s of transformers, and of the engine off, with n-grams, and with the bandit."""
    generator = torch.Generator().manual_seed(batch)
    ids = torch.randint(0, VOCAB, (batch, args.prompt), generator=generator)
    prompts = [Prompt(prompt_id=i, tokens=tuple(row)) for i, row in enumerate(ids.tolist())]
    params = SamplingParams(temperature=0, max_tokens=args.tokens)
    policies = {
        "off": FixedPolicy(),
        "ngram": FixedPolicy(strategy=NGRAM),
        "bandit": BanditTuner([OFF, NGRAM]),
    }
    length = args.prompt + args.tokens
    engines = {name: engine_for(model, batch, length, p) for name, p in policies.items()}

    def theirs() -> None:
        with torch.inference_mode():
            model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=args.tokens,
                min_new_tokens=args.tokens, do_sample=False, pad_token_id=0,
            )  # fmt: skip

    def ours(engine: NativeEngine) -> None:
        engine.forget_ngrams()
        engine.generate(prompts, params)

    times: dict[str, list[float]] = {name: [] for name in ("transformers", *engines)}
    for run in range(args.runs + 1):
        found = {"transformers": seconds_of(theirs)}
        found |= {name: seconds_of(lambda e=e: ours(e)) for name, e in engines.items()}
        for name, value in found.items():
            if run:  # the first is warm-up
                times[name].append(value)
    total = batch * args.tokens
    rates = {name: total / statistics.median(values) for name, values in times.items()}
    row = {"batch": batch} | {f"{name}_tok_s": round(rate, 1) for name, rate in rates.items()}
    row["off_vs_transformers"] = round(rates["off"] / rates["transformers"], 2)
    row["ngram_vs_off"] = round(rates["ngram"] / rates["off"], 2)
    row["bandit_vs_off"] = round(rates["bandit"] / rates["off"], 2)
    row["ngram_accept_length"] = round(engines["ngram"].stats().accept_length, 2)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--toy", action="store_true", help="small and quick, for CI")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of rollout.json")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--prompt", type=int, default=32, help="prompt tokens")
    parser.add_argument("--tokens", type=int, default=64, help="tokens to generate")
    parser.add_argument("--runs", type=int, default=3)
    args = parser.parse_args()
    if args.toy:
        args.layers, args.hidden, args.batches, args.tokens, args.runs = 2, 128, [1, 4], 16, 1
    model = build(args.layers, args.hidden)
    parameters = sum(p.numel() for p in model.parameters())
    print(f"{parameters / 1e6:.1f}M parameters, fp32, {torch.get_num_threads()} threads")
    rows = []
    for batch in args.batches:
        rows.append(compare(model, batch, args))
        print(rows[-1], flush=True)
    summary = {
        "parameters": parameters,
        "threads": torch.get_num_threads(),
        "vs_transformers_small": min(row["off_vs_transformers"] for row in rows),
        "ngram_b1": next((r["ngram_vs_off"] for r in rows if r["batch"] == 1), None),
        "worst_vs_off": min(row["bandit_vs_off"] for row in rows),
    }
    print(summary)
    write_result("rollout", command_line("tools.bench.rollout"), rows, summary, folder=args.output)


if __name__ == "__main__":
    main()
