"""Warm a drafter up on a model's own answers: generate, capture the states on the way, train.

The answers come from the embedded engine, which hands out the hidden states that it computed anyway; no
further forward of the target is run. Prints what a chain of drafts would bring on answers held out.

Example: python -m tools.train_drafter --model MODEL --prompts prompts.jsonl --output DRAFTER
"""

import argparse
import json
import random
from collections import Counter
from pathlib import Path

import torch
from safetensors.torch import save_file
from tqdm import tqdm
from transformers import AutoTokenizer

from megatron_tlt.draft.batch import collate, pack
from megatron_tlt.draft.buffer import DraftBuffer
from megatron_tlt.draft.state import DRAFTER_FILE, files_to_save, load_trainer
from megatron_tlt.draft.trainer import DrafterTrainer, DrafterTrainerConfig
from megatron_tlt.files import delete_folder, publish_folder, write_json
from megatron_tlt.models.drafter import Drafter, DrafterConfig
from megatron_tlt.rollout.native.engine import NativeEngine, NativeEngineConfig
from megatron_tlt.types import FeatureSample, Prompt, SamplingParams
from tools.native_engine import config_of, engine_of, prompts_of, save_drafter, weights

_PROGRESS, _SAVE_INTERVAL = "progress.json", 100


def build_drafter(folder: Path, config: DrafterConfig) -> Drafter:
    """A fresh drafter on the tables of the model in `folder`."""
    tables = {}
    for name, tensor in weights(folder):
        short = name.removeprefix("model.").removeprefix("transformer.")
        if short in ("embed_tokens.weight", "wte.weight", "lm_head.weight"):
            tables["head" if short == "lm_head.weight" else "embedding"] = tensor.float()
    drafter = Drafter(config)
    drafter.share(tables["embedding"], tables.get("head", tables["embedding"]))
    return drafter


def capture(
    engine: NativeEngine, prompts: list[Prompt], params: SamplingParams, *, max_rows: int
) -> list[FeatureSample]:
    """Features of the target's answers, at most `max_rows` rows."""
    longest = max(len(p.tokens) for p in prompts)
    engine.capture_features(max_rows, context_rows=longest)
    engine.submit(prompts, params)
    with tqdm(total=len(prompts) * params.n, desc="answers", unit="answer") as bar:
        for _ in engine.stream():
            bar.update()
    samples = engine.take_features()
    if len(samples) < 2:
        raise ValueError(f"{len(samples)} answers fit into max_rows={max_rows}: raise it")
    return samples


def frequent_tokens(samples: list[FeatureSample], *, size: int) -> list[int]:
    """The `size` tokens that the answers use most; filled up with the lowest numbers."""
    counts = Counter(token for sample in samples for token in sample.tokens)
    chosen = [token for token, _ in counts.most_common(size)]
    rest = (token for token in range(size + len(chosen)) if token not in counts)
    return chosen + [next(rest) for _ in range(size - len(chosen))]


def train(
    drafter: Drafter, samples: list[FeatureSample], settings: DrafterTrainerConfig, *,
    iterations: int, rows: int, num_steps: int, state: Path | None = None,
) -> dict[str, float]:  # fmt: skip
    """Train on nine tenths of the answers, `rows` packed states a step, as in RL; what the drafter brings on
    the last tenth. With the folder `state` a run that was stopped goes on from its last hundred steps."""
    order = random.Random(settings.seed)
    order.shuffle(samples)
    held_out = samples[: max(1, len(samples) // 10)]
    trainer, lessons = DrafterTrainer(drafter, settings), DraftBuffer(1 << 40, seed=settings.seed)
    if state is not None and (state / _PROGRESS).is_file():
        progress = json.loads((state / _PROGRESS).read_text(encoding="utf-8"))
        load_trainer(trainer, state, iteration=progress["iteration"])
        lessons.draws = trainer.iteration
    lessons.add(samples[len(held_out) :] or held_out)
    with tqdm(total=iterations, initial=trainer.iteration, desc="drafter", unit="step") as bar:
        while trainer.iteration < iterations:
            metrics = trainer.step(pack(lessons.draw(rows)))
            bar.set_postfix(loss=f"{metrics['loss']:.3f}", accuracy=f"{metrics['accuracy']:.3f}")
            bar.update()
            if state is not None and trainer.iteration % _SAVE_INTERVAL == 0:
                save_state(trainer, state)
    return trainer.evaluate(collate(held_out), num_steps=num_steps)


def save_state(trainer: DrafterTrainer, folder: Path) -> None:
    """Drafter, optimizer and progress, published together."""
    partial = folder.with_name(f".{folder.name}.partial")
    delete_folder(partial)
    partial.mkdir(parents=True)
    tensors = files_to_save(trainer, DraftBuffer(2, seed=0), rank=0)[DRAFTER_FILE]
    save_file(tensors, partial / DRAFTER_FILE)
    write_json(partial / _PROGRESS, {"iteration": trainer.iteration})
    publish_folder(partial, folder)


def ends_of(folder: Path, tokenizer: object) -> tuple[int, ...]:
    """Tokens that end an answer: the tokenizer's, and those of `config.json`, for either may lack them.

    Without one a drafter would learn what the model says after its answers are over.
    """
    stated = config_of(folder).get("eos_token_id")
    listed = stated if isinstance(stated, list) else [stated]
    return tuple(sorted({t for t in (*listed, tokenizer.eos_token_id) if t is not None}))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="Hugging Face model folder")
    parser.add_argument("--prompts", type=Path, required=True, help="JSONL file")
    parser.add_argument("--output", type=Path, required=True, help="folder of the drafter")
    parser.add_argument("--layout", choices=("eagle", "eagle3"), default="eagle")
    parser.add_argument("--draft-vocab-size", type=int, default=0, help="eagle3; 0: all tokens")
    parser.add_argument("--num-prompts", type=int, default=256)
    parser.add_argument("--n", type=int, default=1, help="answers per prompt")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--max-prompt-tokens", type=int, default=256)
    parser.add_argument("--max-rows", type=int, default=200_000, help="bound on captured states")
    parser.add_argument("--iterations", type=int, default=500)
    parser.add_argument("--rows", type=int, default=1024, help="states a step")
    parser.add_argument("--state", type=Path, help="folder for progress: the same command goes on from it")
    parser.add_argument("--num-passes", type=int, default=3)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--num-steps", type=int, default=5, help="drafts of the simulated chain")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    args = parse()
    torch.manual_seed(args.seed)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    prompts = prompts_of(
        args.prompts, tokenizer, limit=args.num_prompts, max_tokens=args.max_prompt_tokens
    )
    config = DrafterConfig.for_target(
        config_of(args.model), layout=args.layout, draft_vocab_size=args.draft_vocab_size
    )
    sizes = NativeEngineConfig(max_model_len=args.max_prompt_tokens + args.max_tokens)
    engine = engine_of(args.model, sizes, drafter=config)
    ends = ends_of(args.model, tokenizer)
    params = SamplingParams(
        n=args.n, temperature=args.temperature, max_tokens=args.max_tokens, stop_token_ids=ends,
        seed=args.seed,
    )  # fmt: skip
    samples = capture(engine, prompts, params, max_rows=args.max_rows)
    drafter = build_drafter(args.model, config)
    if args.layout == "eagle3":
        drafter.draft_tokens(frequent_tokens(samples, size=config.head_size))
        head = drafter.head[drafter.target_tokens(torch.arange(config.head_size))]
        drafter.lm_head.weight.data.copy_(head)
    settings = DrafterTrainerConfig(lr=args.lr, num_passes=args.num_passes, seed=args.seed)
    result = train(
        drafter, samples, settings, iterations=args.iterations, rows=args.rows,
        num_steps=args.num_steps, state=args.state,
    )  # fmt: skip
    save_drafter(drafter, args.output)
    rows = sum(len(sample.hidden) for sample in samples)
    print(
        f"{len(samples)} answers, {rows} rows; held out: accuracy {result['accuracy']:.3f}, simulated accept "
        f"length {result['accept_length']:.2f} with {args.num_steps} drafts; drafter in {args.output}"
    )


if __name__ == "__main__":
    main()
