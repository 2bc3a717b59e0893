"""One way to open a model: a Megatron checkpoint or a Hugging Face folder, under any TP and PP."""

from dataclasses import dataclass, fields
from pathlib import Path

from megatron_tlt.data.tokenizer import TokenizerConfig
from megatron_tlt.models.gpt import GPT, ModelConfig, build_chunks
from megatron_tlt.models.hf_config import architecture_of_hf, model_config_from_hf
from megatron_tlt.models.hf_files import read_hf_config, read_safetensors_dir
from megatron_tlt.models.hf_stream import import_hf
from megatron_tlt.parallel import Parallel
from megatron_tlt.train.checkpoint import (
    CheckpointConfig,
    TrainState,
    find_checkpoint,
    load_checkpoint,
    read_train_state,
)

import torch
from megatron.core import dist_checkpointing

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedModel:
    """A model's part on this rank, and what it was found with."""

    chunks: list[GPT]
    model: ModelConfig
    vocab_size: int
    """True vocabulary of the weights; the tokenizer may have fewer ids."""
    tokenizer: TokenizerConfig | None
    state: TrainState | None
    """None for a Hugging Face folder."""


def dtype_of(name: str) -> torch.dtype:
    """Raises ValueError for another name than float32, bfloat16, float16."""
    if name not in _DTYPES:
        raise ValueError(f"dtype {name!r} is none of {', '.join(_DTYPES)}")
    return _DTYPES[name]


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def load_model(
    path: str | Path,
    parallel: Parallel,
    *,
    dtype: torch.dtype | None = None,
    tokenizer: TokenizerConfig | None = None,
) -> LoadedModel:
    """Open `path`, a folder with config.json or a checkpoint folder; collective over the world.

    `dtype` None keeps that of the stored weights. `tokenizer` overrides the one that the checkpoint
    names. Raises ValueError for what is neither, and for a layout that does not fit the model.
    """
    if (Path(path) / "config.json").is_file():
        return load_hf_folder(path, parallel, dtype=dtype, tokenizer=tokenizer)
    return load_megatron(path, parallel, dtype=dtype, tokenizer=tokenizer)


def load_hf_folder(
    path: str | Path,
    parallel: Parallel,
    *,
    dtype: torch.dtype | None = None,
    tokenizer: TokenizerConfig | None = None,
) -> LoadedModel:
    """A Hugging Face folder; each rank reads the rows that it holds."""
    config = read_hf_config(path)
    model, architecture = model_config_from_hf(config), architecture_of_hf(config)
    weights = read_safetensors_dir(path, architecture)
    dtype = weights[next(iter(weights))][:1].dtype if dtype is None else dtype
    vocab_size = config["vocab_size"]
    chunks = build_chunks(model, parallel, vocab_size=vocab_size, params_dtype=dtype)
    import_hf(chunks, parallel, weights, architecture=architecture)
    if tokenizer is None and (Path(path) / "tokenizer.json").is_file():
        tokenizer = TokenizerConfig(
            tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(path)
        )
    return LoadedModel(
        chunks=chunks, model=model, vocab_size=vocab_size, tokenizer=tokenizer, state=None
    )


def load_megatron(
    path: str | Path,
    parallel: Parallel,
    *,
    dtype: torch.dtype | None = None,
    tokenizer: TokenizerConfig | None = None,
) -> LoadedModel:
    """The newest checkpoint under `path`, or the `iter_*` folder itself; weights only."""
    folder = find_checkpoint(CheckpointConfig(load=str(path)))
    state = read_train_state(folder)
    model = ModelConfig(**state.model, seq_length=state.model["max_position_embeddings"])
    vocab_size = state.config.get("vocab_size", state.tokenizer["vocab_size"])
    stored = stored_dtype(folder)
    chunks = build_chunks(model, parallel, vocab_size=vocab_size, params_dtype=stored)
    load_checkpoint(folder, chunks, None, groups=parallel.groups)
    for chunk in chunks:
        chunk.to(stored if dtype is None else dtype)
    return LoadedModel(
        chunks=chunks,
        model=model,
        vocab_size=vocab_size,
        tokenizer=tokenizer or tokenizer_of(state, folder),
        state=state,
    )


def stored_dtype(folder: Path) -> torch.dtype:
    """Dtype of the weights in a checkpoint."""
    metadata = dist_checkpointing.load_tensors_metadata(str(folder))
    dtypes = {t.dtype for key, t in metadata.items() if key.endswith("final_layernorm.weight")}
    assert len(dtypes) == 1, f"{folder} holds weights of {dtypes}"
    return dtypes.pop()


def tokenizer_of(state: TrainState, folder: Path) -> TokenizerConfig | None:
    """The copy beside the checkpoint, else what the run's configuration names."""
    copy = folder.parent / "tokenizer"
    if (copy / "tokenizer.json").is_file():
        return TokenizerConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(copy))
    named = state.config.get("tokenizer")
    if not named:
        return None
    return TokenizerConfig(**{f.name: named[f.name] for f in fields(TokenizerConfig) if f.name in named})
