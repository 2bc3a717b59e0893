"""Decode speed of the native engine: against transformers.generate, and with every kind of draft.

The target is a small Llama with an EAGLE drafter, both trained here (see targets.py), or `--model FOLDER`
with `--drafter FOLDER`; `--smollm2 FOLDER` adds SmolLM2-135M. All variants of a batch size alternate in one
process and medians are compared; a gain of speculation is stated against the fastest setting without it, fp32
or bf16. With one thread processor time is measured, which load from elsewhere hardly moves; with more,
wall-clock time.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

import torch

from megatron_tlt.rollout.native.engine import NativeEngine
from megatron_tlt.rollout.tuner import BanditTuner, FixedPolicy, StrategyPolicy
from megatron_tlt.types import OFF, Prompt, SamplingParams, Strategy
from tools.bench.common import RESULTS, command_line, write_result
from tools.bench.targets import (
    DTYPES, Target, add_decoding_arguments, add_training_arguments, folder_target, make_toy, small_target,
)  # fmt: skip

NGRAM = Strategy(drafter="ngram", num_steps=7, num_draft_tokens=8)
EAGLES = [
    Strategy(drafter="eagle", num_steps=3, num_draft_tokens=4),
    Strategy(drafter="eagle", num_steps=5, num_draft_tokens=6),
    Strategy(drafter="eagle", num_steps=4, topk=3, num_draft_tokens=10),
    Strategy(drafter="hybrid", num_steps=4, topk=3, num_draft_tokens=10),
]
def seconds_of(function) -> float:
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    start = clock()
    function()
    return clock() - start


def theirs(target: Target, prompts: list[Prompt], dtype: torch.dtype, args: argparse.Namespace):
    """transformers.generate with a cache on left-padded prompts, as many tokens for each."""
    model = target.model.to(dtype)
    width = max(len(p.tokens) for p in prompts)
    ids = torch.tensor([[0] * (width - len(p.tokens)) + list(p.tokens) for p in prompts])
    seen = torch.tensor([[0] * (width - len(p.tokens)) + [1] * len(p.tokens) for p in prompts])
    sampling = dict(do_sample=args.temperature > 0)
    if args.temperature > 0:
        sampling |= dict(temperature=args.temperature, top_k=0)
    with torch.inference_mode():
        model.generate(
            ids, attention_mask=seen, max_new_tokens=args.tokens, min_new_tokens=args.tokens,
            pad_token_id=0, **sampling,
        )  # fmt: skip


def variants(target: Target, *, sampled: bool) -> dict[str, tuple[StrategyPolicy, str]]:
    """(policy, rule of verification) of everything that is measured; chains by both rules when sampled."""
    arms = [NGRAM, *(EAGLES if target.drafter is not None else [])]
    found: dict[str, tuple[StrategyPolicy, str]] = {"off": (FixedPolicy(), "shared")}
    for arm in arms:
        found[str(arm)] = FixedPolicy(strategy=arm), "shared"
        if sampled and arm.drafter == "eagle" and arm.topk == 1:
            found[f"{arm} rejection"] = FixedPolicy(strategy=arm), "rejection"
    found["bandit"] = BanditTuner([OFF, *arms]), "rejection"
    return found


def compare(target: Target, batch: int, args: argparse.Namespace) -> dict:
    """One row: median tokens/s of everything at this batch size."""
    prompts = target.prompts[:batch]
    length = max(len(p.tokens) for p in prompts) + args.tokens
    params = SamplingParams(temperature=args.temperature, max_tokens=args.tokens)
    engines = {
        (dtype, name): target.engine(DTYPES[dtype], batch, length, policy, verification=rule)
        for dtype in args.dtypes
        for name, (policy, rule) in variants(target, sampled=args.temperature > 0).items()
    }
    times: dict[tuple[str, str], list[float]] = {}
    for run in range(args.runs + 1):
        for dtype in args.dtypes:
            target.model.to(DTYPES[dtype])
            found = {(dtype, "transformers"): seconds_of(
                lambda d=dtype: theirs(target, prompts, DTYPES[d], args)
            )}  # fmt: skip
            for key, engine in engines.items():
                if key[0] == dtype:
                    engine.forget_ngrams()
                    found[key] = seconds_of(lambda e=engine: e.generate(prompts, params))
            for key, value in found.items():
                if run:  # the first is warm-up
                    times.setdefault(key, []).append(value)
    target.model.to(torch.float32)
    total = batch * args.tokens
    rates = {key: total / statistics.median(values) for key, values in times.items()}
    return summarise(target.name, batch, rates, engines)


def summarise(
    name: str, batch: int, rates: dict[tuple[str, str], float], engines: dict[tuple[str, str], NativeEngine]
) -> dict:
    dtypes = list(dict.fromkeys(dtype for dtype, _ in rates))
    off = max(rates[dtype, "off"] for dtype in dtypes)

    def gain(part: str) -> float | None:
        found = [rate for (_, variant), rate in rates.items() if variant.startswith(part)]
        return round(max(found) / off, 3) if found else None

    eagle = [x for x in (gain("eagle"), gain("hybrid")) if x is not None]
    return {
        "model": name,
        "batch": batch,
        "tok_s": {f"{d} {v}": round(rate, 1) for (d, v), rate in rates.items()},
        "accept_length": {
            f"{d} {v}": round(e.stats().accept_length, 2) for (d, v), e in engines.items() if v != "off"
        },
        "off_vs_transformers": {
            d: round(rates[d, "off"] / rates[d, "transformers"], 2) for d in dtypes
        },
        "ngram_vs_off": gain("ngram"),
        "eagle_vs_off": max(eagle) if eagle else None,
        "bandit_vs_off": gain("bandit"),
    }


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    add_decoding_arguments(parser)
    add_training_arguments(parser)
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of rollout.json")
    parser.add_argument("--model", type=Path, help="Hugging Face folder instead of the countdown model")
    parser.add_argument("--drafter", type=Path, help="drafter of --model")
    parser.add_argument("--sglang", type=Path, help="rollout_sglang.json, for the figure against SGLang")
    args = parser.parse_args()
    if args.toy:
        args.batches, args.tokens, args.runs = [1, 4], 16, 1
        make_toy(args)
    return args


def _vs_sglang_min(path: Path) -> float:
    return json.loads(path.read_text(encoding="utf-8"))["summary"]["vs_sglang_min"]


def main() -> None:
    args = parse()
    targets = [small_target(args) if args.model is None else folder_target("model", args.model, args)]
    if args.smollm2 is not None:
        targets.append(folder_target("smollm2", args.smollm2, args))
    rows = []
    for target in targets:
        parameters = sum(p.numel() for p in target.model.parameters())
        print(f"{target.name}: {parameters / 1e6:.1f}M, {torch.get_num_threads()} threads", flush=True)
        for batch in args.batches:
            rows.append({"parameters": parameters} | compare(target, batch, args))
            print(rows[-1], flush=True)

    def worst(name: str) -> float | None:
        found = [min(r["off_vs_transformers"].values()) for r in rows if r["model"] == name]
        return min(found) if found else None

    small = [row for row in rows if row["model"] != "smollm2"]
    first = next((row for row in small if row["batch"] == 1), small[0])
    summary = {
        "threads": torch.get_num_threads(),
        "vs_transformers_small": worst(small[0]["model"]),
        "vs_transformers_smollm2": worst("smollm2"),
        "vs_sglang_min": None if args.sglang is None else _vs_sglang_min(args.sglang),
        "ngram_b1": first["ngram_vs_off"],
        "eagle_b1": first["eagle_vs_off"],
        "worst_vs_off": min(row["bandit_vs_off"] for row in rows),
    }
    print(summary)
    write_result("rollout", command_line("tools.bench.rollout"), rows, summary, folder=args.output)


if __name__ == "__main__":
    main()
