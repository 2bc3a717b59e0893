"""A model to train further: where it comes from, and the same built, filled and wrapped for training.

SFT and RL take a checkpoint of any stage: one of their own stage is resumed with optimizer and counters; one
of another stage (pretraining before SFT, SFT before RL) or a Hugging Face folder gives weights alone.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from megatron_tlt.bridge.load import load_model, tokenizer_of
from megatron_tlt.data.tokenizer import TokenizerConfig
from megatron_tlt.models.gpt import GPT, ModelConfig, build_chunks, model_identity
from megatron_tlt.models.hf_config import model_config_from_hf
from megatron_tlt.models.hf_files import read_hf_config
from megatron_tlt.models.initialize import initialize_parameters
from megatron_tlt.parallel import Parallel
from megatron_tlt.train.checkpoint import (
    CheckpointConfig,
    TrainState,
    check_identity,
    find_checkpoint,
    load_checkpoint,
    read_train_state,
)
from megatron_tlt.train.optimizer import OptimizerConfig, build_optimizer, wrap_data_parallel
from megatron_tlt.train.packed import attach_packed_finalizer

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer.optimizer import MegatronOptimizer

Stage = Literal["sft", "rl"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """Where a policy comes from. `folder` None: random weights; `state` None: not a checkpoint of ours."""

    folder: Path | None
    model: ModelConfig
    tokenizer: TokenizerConfig | None
    """The one that the checkpoint names, or the one that was given."""
    state: TrainState | None
    resumes: bool
    """The checkpoint is of this stage: optimizer and counters go on from it."""


def find_source(
    checkpoint: CheckpointConfig,
    *,
    stage: Stage,
    model: ModelConfig | None,
    tokenizer: TokenizerConfig | None,
    pretrained: str | None,
) -> Source:
    """Decide from what to start; reads small files only.

    `checkpoint.load` comes first; while it is the still empty folder of `checkpoint.save`, the folder
    `pretrained` gives the weights (as Megatron's --pretrained-checkpoint), and without that `model` is drawn
    anew. Raises ValueError when nothing is there to start from, or the checkpoint is another model's.
    """
    found = None
    if checkpoint.load is not None:
        found = _open(checkpoint.load, checkpoint, tokenizer)
    loads = found is not None  # `pretrained` gives weights alone, whatever its stage
    if found is None and pretrained is not None:
        found = _open(pretrained, CheckpointConfig(load=pretrained), tokenizer)
    if found is None:
        if model is None:
            raise ValueError(
                "nothing to start from: give checkpoint.load or pretrained_checkpoint (a checkpoint or "
                "a Hugging Face folder), or a model to draw at random"
            )
        return Source(folder=None, model=model, tokenizer=tokenizer, state=None, resumes=False)
    if model is not None:
        check_identity("model", model_identity(found.model), model_identity(model))
    stored = {} if found.state is None else found.state.data
    own = loads and stored.get("stage") == stage and not checkpoint.finetune
    return replace(found, model=model or found.model, resumes=own)


def _open(
    path: str, checkpoint: CheckpointConfig, tokenizer: TokenizerConfig | None
) -> Source | None:
    if (Path(path) / "config.json").is_file():
        if tokenizer is None and (Path(path) / "tokenizer.json").is_file():
            tokenizer = TokenizerConfig(
                tokenizer_type="HuggingFaceTokenizer", tokenizer_model=path
            )
        return Source(
            folder=Path(path), model=model_config_from_hf(read_hf_config(path)),
            tokenizer=tokenizer, state=None, resumes=False,
        )  # fmt: skip
    folder = find_checkpoint(checkpoint)
    if folder is None:
        return None
    state = read_train_state(folder)
    tokenizer = tokenizer or tokenizer_of(state, folder)
    model = ModelConfig(**state.model, seq_length=state.model["max_position_embeddings"])
    return Source(folder=folder, model=model, tokenizer=tokenizer, state=state, resumes=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class Policy:
    """A model in training."""

    config: ModelConfig
    vocab_size: int
    """True vocabulary of the weights."""
    model: list[GPT]
    """Bare chunks: what a checkpoint holds and the engine is given."""
    chunks: list[DistributedDataParallel]
    """The same, wrapped: what a step runs."""
    optimizer: MegatronOptimizer


def build_policy(
    source: Source,
    parallel: Parallel,
    *,
    optimizer: OptimizerConfig,
    dtype: torch.dtype,
    seed: int,
    vocab_size: int,
) -> Policy:
    """Build, fill and wrap; collective over the world. `vocab_size` is the tokenizer's.

    Raises ValueError when the checkpoint has fewer ids than the tokenizer, or lacks tensors.
    """
    loaded = None
    if source.folder is not None and not source.resumes:
        loaded = load_model(source.folder, parallel, dtype=dtype, tokenizer=source.tokenizer)
        if loaded.vocab_size < vocab_size:
            raise ValueError(
                f"the tokenizer has {vocab_size} ids, the model of {source.folder} {loaded.vocab_size}: "
                "use the tokenizer that the model was trained with"
            )
        vocab_size = loaded.vocab_size
    elif source.state is not None:
        vocab_size = source.state.config.get("vocab_size", vocab_size)
    model = build_chunks(source.model, parallel, vocab_size=vocab_size, params_dtype=dtype)
    if loaded is not None:
        # Another object, for activation checkpointing and dtype are fixed when modules are made.
        for chunk, filled in zip(model, loaded.chunks, strict=True):
            chunk.load_state_dict(filled.state_dict())
        del loaded
    elif not source.resumes:
        initialize_parameters(model, seed=seed, vocab_size=vocab_size)
    chunks = wrap_data_parallel(model, optimizer, parallel)
    attach_packed_finalizer(chunks, parallel)
    policy = Policy(
        config=source.model,
        vocab_size=vocab_size,
        model=model,
        chunks=chunks,
        optimizer=build_optimizer(chunks, optimizer, parallel),
    )
    if source.resumes:
        load_checkpoint(source.folder, model, policy.optimizer, groups=parallel.groups)
    return policy
