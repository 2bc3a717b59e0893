"""What the command-line tools share: an embedded engine over a Hugging Face folder, prompts, a drafter's
folder.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from megatron_tlt.files import publish_folder, write_json
from megatron_tlt.models.drafter import Drafter, DrafterConfig
from megatron_tlt.rollout.native.engine import NativeEngine, NativeEngineConfig
from megatron_tlt.types import Prompt


def weights(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) of every safetensors file. Raises ValueError where there is none."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ValueError(f"{folder} has no .safetensors file: give a Hugging Face model folder")
    for file in files:
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (not a dict)
                yield name, tensors.get_tensor(name)


def config_of(folder: Path) -> dict:
    return json.loads((folder / "config.json").read_text(encoding="utf-8"))


def engine_of(
    folder: Path, sizes: NativeEngineConfig, *, drafter: DrafterConfig | None = None
) -> NativeEngine:
    """The engine with the folder's weights as version 0."""
    engine = NativeEngine(config_of(folder), sizes, drafter=drafter)
    engine.update_weights("target", weights(folder), version=0)
    return engine


def prompts_of(path: Path, tokenizer: object, *, limit: int, max_tokens: int) -> list[Prompt]:
    """Prompts of a JSONL file: "tokens", or a text under "prompt", "question" or "text".

    Prompts beyond `max_tokens` tokens are left out. Raises ValueError for a line with none of the keys.
    """
    prompts: list[Prompt] = []
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines):
            record = json.loads(line)
            tokens = record.get("tokens")
            if tokens is None:
                text = next((record[k] for k in ("prompt", "question", "text") if k in record), None)
                if text is None:
                    raise ValueError(f"{path} line {number + 1} has none of tokens, prompt, question, text")
                tokens = tokenizer(text).input_ids
            if 0 < len(tokens) <= max_tokens:
                prompts.append(Prompt(prompt_id=number, tokens=tuple(tokens)))
            if len(prompts) == limit:
                break
    if not prompts:
        raise ValueError(f"{path} has no prompt of at most {max_tokens} tokens")
    return prompts


def save_drafter(drafter: Drafter, folder: Path) -> None:
    """`config.json` and `model.safetensors`, published together."""
    partial = folder.with_name(f".{folder.name}.partial")
    partial.mkdir(parents=True)
    write_json(partial / "config.json", drafter.config.to_hf())
    tensors = {name: tensor.contiguous() for name, tensor in drafter.state_dict().items()}
    save_file(tensors, partial / "model.safetensors")
    publish_folder(partial, folder)
