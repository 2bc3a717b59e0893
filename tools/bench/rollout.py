"""Decode speed of the native engine: against transformers.generate, and with every kind of draft.

The target is a small Llama trained here for `--train-seconds` on countdown search traces (or `--model
FOLDER`), the drafter an EAGLE layer trained on the target's own answers (or `--drafter FOLDER`);
`--smollm2 FOLDER` adds SmolLM2-135M. All variants of a batch size alternate in one process and medians are
compared; a gain of speculation is stated against the fastest setting without it, fp32 or bf16. With one
thread processor time is measured, which load from elsewhere hardly moves; with more, wall-clock time.
"""

import argparse
import json
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers

from megatron_tlt.draft.trainer import DrafterTrainerConfig
from megatron_tlt.models.drafter import Drafter, DrafterConfig
from megatron_tlt.rollout.native.engine import NativeEngine, NativeEngineConfig
from megatron_tlt.rollout.tuner import BanditTuner, FixedPolicy, StrategyPolicy
from megatron_tlt.types import OFF, Prompt, SamplingParams, Strategy
from tools import countdown_model
from tools.bench.common import RESULTS, command_line, write_result
from tools.native_engine import config_of, prompts_of, weights
from tools.train_drafter import capture, train

NGRAM = Strategy(drafter="ngram", num_steps=7, num_draft_tokens=8)
EAGLES = [
    Strategy(drafter="eagle", num_steps=3, num_draft_tokens=4),
    Strategy(drafter="eagle", num_steps=5, num_draft_tokens=6),
    Strategy(drafter="eagle", num_steps=4, topk=3, num_draft_tokens=10),
    Strategy(drafter="hybrid", num_steps=4, topk=3, num_draft_tokens=10),
]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(slots=True)
class Target:
    """A model to measure, prompts for it, and a drafter (None: no EAGLE rows)."""

    name: str
    model: transformers.PreTrainedModel
    prompts: list[Prompt]
    drafter: Drafter | None
    eos: int | None

    def engine(
        self, dtype: torch.dtype, batch: int, length: int, policy: StrategyPolicy, *,
        verification: str = "shared",
    ) -> NativeEngine:  # fmt: skip
        sizes = NativeEngineConfig(
            max_model_len=length, max_batch=batch, dtype=dtype, verification=verification
        )
        drafter = None if self.drafter is None else self.drafter.config
        engine = NativeEngine(self.model.config.to_dict(), sizes, policy=policy, drafter=drafter)
        engine.update_weights("target", self.model.state_dict().items(), version=0)
        if self.drafter is not None:
            engine.update_weights("draft", self.drafter.state_dict().items(), version=0)
        return engine


def small_target(args: argparse.Namespace) -> Target:
    """Trained here, with a drafter trained on its answers to other prompts."""
    model = countdown_model.build(args.layers, args.hidden)
    countdown_model.train(model, seconds=args.train_seconds)
    drafter = Drafter(DrafterConfig.for_target(model.config.to_dict()))
    table = model.get_input_embeddings().weight.data
    drafter.share(table, table)
    target = Target(
        "countdown", model, countdown_model.prompts(64, seed=2), drafter, countdown_model.EOS
    )
    length = 64 + args.answer_tokens
    engine = target.engine(torch.float32, 32, length, FixedPolicy())
    params = SamplingParams(
        temperature=args.temperature, max_tokens=args.answer_tokens, stop_token_ids=(countdown_model.EOS,)
    )
    prompts = countdown_model.prompts(args.drafter_prompts, seed=3)
    samples = capture(engine, prompts, params, max_rows=200_000)
    settings = DrafterTrainerConfig(lr=2e-3, num_passes=3, token_weight=1.0)
    result = train(
        drafter, samples, settings, iterations=args.drafter_iterations, rows=1024, num_steps=5
    )
    print(f"drafter: {result}", flush=True)
    return target


def folder_target(name: str, folder: Path, args: argparse.Namespace) -> Target:
    """A Hugging Face folder with `--prompts`, and `--drafter` if it is the model in question."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    prompts = prompts_of(args.prompts, tokenizer, limit=64, max_tokens=64)
    drafter = None
    if args.drafter is not None and name == "model":
        drafter = Drafter(DrafterConfig.from_hf(config_of(args.drafter)))
        drafter.load_state_dict(dict(weights(args.drafter)))
    return Target(name, model, prompts, drafter, tokenizer.eos_token_id)


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


def add_common_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of what is decoded, which the comparison with SGLang has, too."""
    parser.add_argument("--toy", action="store_true", help="small and quick, for CI")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=320)
    parser.add_argument("--smollm2", type=Path, help="folder of SmolLM2-135M")
    parser.add_argument("--prompts", type=Path, help="JSONL file of prompts for it and for other folders")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--tokens", type=int, default=96, help="tokens to generate")
    parser.add_argument("--runs", type=int, default=3)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    add_common_arguments(parser)
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of rollout.json")
    parser.add_argument("--train-seconds", type=float, default=300.0)
    parser.add_argument("--answer-tokens", type=int, default=192, help="of the drafter's training answers")
    parser.add_argument("--drafter-prompts", type=int, default=256)
    parser.add_argument("--drafter-iterations", type=int, default=300)
    parser.add_argument("--model", type=Path, help="Hugging Face folder instead of the countdown model")
    parser.add_argument("--drafter", type=Path, help="drafter of --model")
    parser.add_argument("--sglang", type=Path, help="rollout_sglang.json, for the figure against SGLang")
    args = parser.parse_args()
    if args.toy:
        args.layers, args.hidden, args.batches, args.tokens, args.runs = 2, 128, [1, 4], 16, 1
        args.train_seconds, args.answer_tokens, args.drafter_prompts = 2.0, 24, 8
        args.drafter_iterations = 4
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
