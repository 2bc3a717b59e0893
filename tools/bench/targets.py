"""The models that decoding benchmarks measure, with prompts and drafters for them.

The small one is a Llama trained here on countdown search traces for `--train-seconds`, its drafter an EAGLE
layer trained on its own answers to other prompts. `--target FOLDER` keeps both, so that several benchmarks
measure the same; they are made where the folder lacks them.
"""

import argparse
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers

from megatron_tlt.draft.trainer import DrafterTrainerConfig
from megatron_tlt.files import publish_folder
from megatron_tlt.models.drafter import Drafter, DrafterConfig
from megatron_tlt.rollout.native.engine import NativeEngine, NativeEngineConfig
from megatron_tlt.rollout.tuner import FixedPolicy, StrategyPolicy
from megatron_tlt.types import Prompt, SamplingParams
from tools import countdown_model
from tools.native_engine import config_of, prompts_of, save_drafter, weights
from tools.train_drafter import capture, train

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
    """Trained here, or found in `--target`."""
    model, drafter = _small_model(args), None
    found = None if args.target is None else args.target / "drafter"
    if found is not None and found.is_dir():
        drafter = drafter_of(found)
    target = Target(
        "countdown", model, countdown_model.prompts(64, seed=2), drafter, countdown_model.EOS
    )
    if drafter is None:
        target.drafter = _small_drafter(target, args)
        if found is not None:
            save_drafter(target.drafter, found)
    return target


def _small_model(args: argparse.Namespace) -> transformers.PreTrainedModel:
    folder = None if args.target is None else args.target / "model"
    if folder is not None and folder.is_dir():
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        found = model.config.num_hidden_layers, model.config.hidden_size
        if found != (args.layers, args.hidden):
            raise SystemExit(
                f"{folder} has {found[0]} layers of width {found[1]}: give --layers and --hidden of these, "
                f"not {args.layers} and {args.hidden}, or another --target"
            )
        return model
    model = countdown_model.build(args.layers, args.hidden)
    countdown_model.train(model, seconds=args.train_seconds)
    if folder is not None:
        partial = folder.with_name(".model.partial")
        model.save_pretrained(partial)
        publish_folder(partial, folder)
    return model


def _small_drafter(target: Target, args: argparse.Namespace) -> Drafter:
    drafter = Drafter(DrafterConfig.for_target(target.model.config.to_dict()))
    table = target.model.get_input_embeddings().weight.data
    drafter.share(table, table)
    engine = target.engine(torch.float32, 32, 64 + args.answer_tokens, FixedPolicy())
    params = SamplingParams(
        temperature=args.temperature, max_tokens=args.answer_tokens, stop_token_ids=(countdown_model.EOS,)
    )
    prompts = countdown_model.prompts(args.drafter_prompts, seed=3)
    samples = capture(engine, prompts, params, max_rows=args.drafter_prompts * (64 + args.answer_tokens))
    settings = DrafterTrainerConfig(lr=2e-3, num_passes=3, token_weight=1.0)
    result = train(
        drafter, samples, settings, iterations=args.drafter_iterations, rows=1024, num_steps=5
    )
    print(f"drafter: {result}", flush=True)
    return drafter


def drafter_of(folder: Path) -> Drafter:
    """Of a folder that `save_drafter` wrote; its tables are the target's, which the engine has."""
    drafter = Drafter(DrafterConfig.from_hf(config_of(folder)))
    drafter.load_state_dict(dict(weights(folder)))
    return drafter


def folder_target(name: str, folder: Path, args: argparse.Namespace) -> Target:
    """A Hugging Face folder with `--prompts`, and `--drafter` if it is the model in question."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    prompts = prompts_of(args.prompts, tokenizer, limit=64, max_tokens=64)
    drafter = None
    if args.drafter is not None and name == "model":
        drafter = drafter_of(args.drafter)
    return Target(name, model, prompts, drafter, tokenizer.eos_token_id)


def add_decoding_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of what is decoded."""
    add_shape_arguments(parser)
    parser.add_argument("--smollm2", type=Path, help="folder of SmolLM2-135M")
    parser.add_argument("--prompts", type=Path, help="JSONL file of prompts for it and for other folders")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--tokens", type=int, default=96, help="tokens to generate")
    parser.add_argument("--runs", type=int, default=3)


def add_shape_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the small model's size, and the toy."""
    parser.add_argument("--toy", action="store_true", help="small and quick, for CI")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=320)


def add_training_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of how the small model and its drafter are trained."""
    parser.add_argument("--target", type=Path, help="folder that keeps the small model and its drafter")
    parser.add_argument("--train-seconds", type=float, default=300.0)
    parser.add_argument("--answer-tokens", type=int, default=192, help="of the drafter's training answers")
    parser.add_argument("--drafter-prompts", type=int, default=256)
    parser.add_argument("--drafter-iterations", type=int, default=300)


def make_toy(args: argparse.Namespace) -> None:
    """The sizes of `--toy`."""
    args.layers, args.hidden, args.train_seconds = 2, 128, 2.0
    args.answer_tokens, args.drafter_prompts, args.drafter_iterations = 24, 8, 4
