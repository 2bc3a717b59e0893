"""Checkpoints: save, find and load; callers need this module alone.

What one is made of is in `train/checkpoint_format.py`, how it is written in `train/save.py`, how one is
chosen and verified in `train/resume.py`.
"""

import sys
from collections.abc import Callable
from pathlib import Path

from megatron_tlt.mcore_reader import check_backend, check_common, read_index
from megatron_tlt.models.fp8_linear import DELAYED_STATE
from megatron_tlt.train.checkpoint_format import (
    STATE_FILE,
    TRACKER,
    CheckpointConfig,
    TrainState,
    check_identity,
    check_save_folder,
    complete_iterations,
    iteration_folder,
    kept_tensors,
    published_iterations,
    read_train_state,
    sharded_model,
)
from megatron_tlt.train.optimizer_state import load_optimizer_state, requested_optimizer_state
from megatron_tlt.train.resume import find_checkpoint
from megatron_tlt.train.save import CheckpointSaver, save_checkpoint

import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.process_groups_config import ProcessGroupCollection

__all__ = [
    "STATE_FILE", "TRACKER", "CheckpointConfig", "CheckpointSaver", "TrainState", "check_identity",
    "check_save_folder", "complete_iterations", "find_checkpoint", "iteration_folder", "load_checkpoint",
    "published_iterations", "read_train_state", "save_checkpoint",
]  # fmt: skip


def load_checkpoint(
    folder: Path,
    chunks: list[GPTModel],
    optimizer: MegatronOptimizer | None,
    *,
    groups: ProcessGroupCollection,
    keep: Callable[[str], bool] | None = None,
) -> TrainState:
    """Fill `chunks`, and `optimizer` unless None, from `folder`; collective over the world.

    With `keep` only the tensors that were saved with it are filled. The caller compares identities first
    (`check_identity`). Raises ValueError when a tensor is missing, and for an index that is not one.
    """
    state = read_train_state(folder)
    check_backend(folder)
    check_common(folder)
    sharded, params = sharded_model(chunks, groups)
    if optimizer is not None:
        if state.optimizer_step == 0 and state.iteration > 0:
            raise ValueError(f"{folder} holds no optimizer state: use checkpoint.no_load_optim=true")
        sharded["optimizer"] = requested_optimizer_state(optimizer, params)
    wanted = _without_new_scales(folder, kept_tensors(sharded, keep))
    _check_present(folder, wanted)
    loaded = dist_checkpointing.load(wanted, str(folder))
    for number, chunk in enumerate(chunks):
        chunk.load_state_dict(loaded.get(f"model{number}", {}), strict=keep is None)
    if optimizer is not None:
        moments = loaded.get("optimizer", {})
        load_optimizer_state(optimizer, params, moments, step=state.optimizer_step)
    return state


def _without_new_scales(folder: Path, wanted: dict[str, dict]) -> dict[str, dict]:
    """Without the state of delayed scaling that the checkpoint lacks, or has for another window: a run may go
    on in FP8, or with another window, and those layers begin with fresh scales or an empty history."""
    stored = read_index(folder).state_dict_metadata
    fresh = {
        tensor.key
        for part in wanted.values()
        for tensor in part.values()
        if tensor.key.endswith(DELAYED_STATE)
        and (tensor.key not in stored or tuple(stored[tensor.key].size) != tensor.global_shape)
    }
    if fresh and dist.get_rank() == 0:
        print(
            f" warning: {folder} lacks {len(fresh)} tensors of FP8 scaling state, e.g. {min(fresh)}: they "
            "begin afresh",
            file=sys.stderr,
            flush=True,
        )
    return {
        name: {key: tensor for key, tensor in part.items() if tensor.key not in fresh}
        for name, part in wanted.items()
    }


def _check_present(folder: Path, sharded: dict[str, dict]) -> None:
    """Raises ValueError naming a tensor that the checkpoint lacks."""
    stored = read_index(folder).state_dict_metadata
    wanted = {tensor.key for part in sharded.values() for tensor in part.values()}
    missing = sorted(wanted - set(stored))
    if missing:
        raise ValueError(
            f"{folder} lacks {len(missing)} of the {len(wanted)} tensors wanted, e.g. {missing[0]}: "
            "it was saved from another model, or with a selection"
        )
