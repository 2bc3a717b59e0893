"""Decode speed of the embedded engine against the real SGLang on the same CPU, without speculation.

    source launch/sglang_environment.sh; "$PYTHON" -m tools.bench.rollout_sglang --smollm2 FOLDER

Same model, prompts, number of tokens, temperature and dtype; one thread each (SGLang's scheduler is a process
of its own). The engines take turns and medians of wall-clock seconds are compared, so the machine should
have nothing else to do. SGLang runs with either of its attention backends for the CPU, without the hidden
states that RL asks for (but sleeping between requests: idle engines would take the cores from the others);
`vs_sglang` is against the faster backend. The small model has random weights: they do not change the time of
a given number of tokens. Writes rollout_sglang.json, from which `tools.bench.rollout --sglang` takes
its figure.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers

from megatron_tlt.models.hf_files import SafetensorsFolder, read_hf_config
from megatron_tlt.rollout.native.engine import NativeEngine, NativeEngineConfig
from megatron_tlt.rollout.sglang.config import SglangConfig
from megatron_tlt.rollout.sglang.engine import SglangEngine
from megatron_tlt.types import Prompt, SamplingParams
from tools import countdown_model
from tools.bench.common import RESULTS, command_line, write_result
from tools.bench.targets import DTYPES, add_decoding_arguments
from tools.native_engine import prompts_of

BACKENDS = ("torch_native", "intel_amx")


@dataclass(slots=True)
class Target:
    """A Hugging Face folder and prompts for it."""

    name: str
    folder: Path
    prompts: list[Prompt]


def small_target(folder: Path, args: argparse.Namespace) -> Target:
    """The shape of the small model in targets.py."""
    countdown_model.build(args.layers, args.hidden).save_pretrained(folder)
    return Target("countdown", folder, countdown_model.prompts(max(args.batches), seed=2))


def smollm2_target(args: argparse.Namespace) -> Target:
    tokenizer = transformers.AutoTokenizer.from_pretrained(args.smollm2)
    prompts = prompts_of(args.prompts, tokenizer, limit=max(args.batches), max_tokens=64)
    return Target("smollm2", args.smollm2, prompts)


def engines_of(
    target: Target, dtype: torch.dtype, args: argparse.Namespace
) -> dict[str, NativeEngine | SglangEngine]:
    """Ours, and SGLang with each backend, all with the target's weights."""
    config, weights = read_hf_config(target.folder), SafetensorsFolder(target.folder)
    length, batch = max(len(p.tokens) for p in target.prompts) + args.tokens, max(args.batches)
    engines: dict[str, NativeEngine | SglangEngine] = {
        "ours": NativeEngine(config, NativeEngineConfig(max_model_len=length, max_batch=batch, dtype=dtype))
    }
    for backend in args.backends:
        settings = SglangConfig(
            max_model_len=length, max_running_requests=batch, dtype=dtype,
            arguments={"attention_backend": backend, "enable_return_hidden_states": False},
        )  # fmt: skip
        engines[backend] = SglangEngine(config, settings)
    for engine in engines.values():
        tensors = ((name, weights[name][...].to(dtype)) for name in weights)
        engine.update_weights("target", tensors, version=0)
    return engines


def seconds_of(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def compare(
    target: Target, name: str, engines: dict[str, NativeEngine | SglangEngine], batch: int,
    args: argparse.Namespace,
) -> dict:  # fmt: skip
    """One row: tokens/s of every engine at this batch size."""
    prompts = target.prompts[:batch]
    params = SamplingParams(temperature=args.temperature, max_tokens=args.tokens)
    times: dict[str, list[float]] = {key: [] for key in engines}
    for run in range(args.runs + 1):
        for key, engine in engines.items():
            seconds = seconds_of(lambda e=engine: _generate(e, prompts, params))
            if run:  # the first is warm-up
                times[key].append(seconds)
    total = batch * args.tokens
    rates = {key: total / statistics.median(found) for key, found in times.items()}
    theirs = max(rates[backend] for backend in args.backends)
    return {
        "model": target.name, "dtype": name, "batch": batch,
        "tok_s": {key: round(rate, 1) for key, rate in rates.items()},
        "spread": {key: round(max(found) / min(found), 2) for key, found in times.items()},
        "vs_sglang": round(rates["ours"] / theirs, 2),
    }  # fmt: skip


def _generate(
    engine: NativeEngine | SglangEngine, prompts: list[Prompt], params: SamplingParams
) -> None:
    found = engine.generate(prompts, params)
    short = [len(r.tokens) for r in found if len(r.tokens) != params.max_tokens]
    if short:
        raise SystemExit(f"responses of {short} tokens, not {params.max_tokens}: times do not compare")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_decoding_arguments(parser)
    parser.add_argument("--backends", nargs="+", default=list(BACKENDS), choices=BACKENDS)
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of rollout_sglang.json")
    args = parser.parse_args()
    if args.toy:
        args.layers, args.hidden, args.batches, args.tokens, args.runs = 2, 128, [1, 4], 16, 1
        args.dtypes, args.backends = ["fp32"], ["torch_native"]
    return args


def main() -> None:
    args, rows = parse(), []
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        targets = [small_target(Path(folder), args)]
        if args.smollm2 is not None:
            targets.append(smollm2_target(args))
        for target in targets:
            for name in args.dtypes:
                engines = engines_of(target, DTYPES[name], args)
                try:
                    for batch in args.batches:
                        rows.append(compare(target, name, engines, batch, args))
                        print(rows[-1], flush=True)
                finally:
                    for backend in args.backends:
                        engines[backend].close()
    ratios = [row["vs_sglang"] for row in rows]
    summary = {
        "vs_sglang_min": min(ratios), "vs_sglang_median": statistics.median(ratios), "cells": len(rows)
    }  # fmt: skip
    print(summary)
    write_result(
        "rollout_sglang", command_line("tools.bench.rollout_sglang"), rows, summary, folder=args.output
    )


if __name__ == "__main__":
    main()
