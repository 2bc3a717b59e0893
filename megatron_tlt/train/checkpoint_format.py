"""What a checkpoint is: `iter_0000100/` in megatron-core's torch_dist format.

A directory holds `train_state.json` (iteration, data cursor, configuration, model and tokenizer identity),
the sharded weights and Adam moments, which load under any TP, PP, DP and with or without the distributed
optimizer, and `manifest.json` with the size and SHA-256 of every file. There is no RNG state to keep: every
step seeds its generators from (seed, iteration). `latest_checkpointed_iteration.txt` names the newest one, as
Megatron writes it.
"""

import json
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from pathlib import Path

from megatron_tlt import mcore  # noqa: F401  (before megatron.core)
from megatron_tlt.train.manifest import problems_in
from megatron_tlt.train.optimizer_state import (
    sharded_optimizer_state,
)

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.process_groups_config import ProcessGroupCollection

TRACKER = "latest_checkpointed_iteration.txt"
STATE_FILE = "train_state.json"
FORMAT_VERSION = 1


@dataclass(kw_only=True, slots=True)
class CheckpointConfig:
    """Where checkpoints go and come from (Megatron's spelling)."""

    save: str | None = None
    """Folder to write checkpoints into; none: nothing is saved."""
    load: str | None = None
    """Folder to resume from, or one iter_ folder in it; with nothing there the run ends with an error,
    unless it is the folder of `save` and still empty."""
    save_interval: int | None = None
    """Iterations between checkpoints; the last iteration is always saved."""
    keep_last: int | None = None
    """Keep this many newest complete checkpoints and delete older ones; default all."""
    async_save: bool = False
    """Write checkpoints in the background: training waits for the copy to host memory only."""
    ckpt_step: int | None = None
    """Load this iteration instead of the newest."""
    finetune: bool = False
    """Load the weights only: iteration, data cursor and optimizer start afresh."""
    no_load_optim: bool = False
    """Load weights and iteration, but start Adam's moments afresh."""

    def __post_init__(self) -> None:
        for name in ("save_interval", "keep_last"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"checkpoint.{name}={value} must be at least 1")
        for name in ("save_interval", "keep_last", "async_save"):
            if getattr(self, name) not in (None, False) and self.save is None:
                raise ValueError(
                    f"checkpoint.{name}={getattr(self, name)} needs checkpoint.save, the folder to write to"
                )
        for name in ("ckpt_step", "finetune", "no_load_optim"):
            if getattr(self, name) not in (None, False) and self.load is None:
                raise ValueError(f"checkpoint.{name} needs checkpoint.load")


@dataclass(kw_only=True, slots=True)
class TrainState:
    """All that a resume needs beside the tensors.

    Example: TrainState(iteration=100, consumed_train_samples=800, consumed_train_tokens=51200, ...).
    """

    iteration: int = 0
    consumed_train_samples: int = 0
    consumed_train_tokens: int = 0
    skipped_iterations: int = 0
    """Steps whose update was not made."""
    nan_iterations: int = 0
    """Steps whose loss was not finite."""
    nan_grad_norms: int = 0
    """Steps whose gradient norm was not finite."""
    data_digest: int = 0
    """Of all samples so far and their iterations; see `guards.DataDigest`."""
    optimizer_step: int = 0
    scheduler: dict[str, object] = field(default_factory=dict)
    model: dict[str, object] = field(default_factory=dict)
    tokenizer: dict[str, object] = field(default_factory=dict)
    data: dict[str, object] = field(default_factory=dict)
    est: dict[str, object] = field(default_factory=dict)
    """Subnet schedule and meters; empty for a dense run."""
    seed: int = 0
    config: dict[str, object] = field(default_factory=dict)


def check_save_folder(folder: str | None) -> None:
    """Make the folder of `checkpoint.save`. Raises ValueError when it cannot be written to."""
    if folder is None:
        return
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"checkpoint.save={folder} is not a folder and cannot be made: {error}") from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ValueError(f"checkpoint.save={folder} cannot be written to: check its permissions")


def iteration_folder(root: Path, iteration: int) -> Path:
    return root / f"iter_{iteration:07d}"


def published_iterations(root: Path) -> list[int]:
    """Iterations that have a folder of their own under `root`, ascending."""
    names = (re.fullmatch(r"iter_(\d{7,})", path.name) for path in root.glob("iter_*"))
    return sorted(int(match[1]) for match in names if match)


def complete_iterations(root: Path) -> list[int]:
    """Those of them whose files are all there in their right sizes (checksums are not read)."""
    return [
        n
        for n in published_iterations(root)
        if not problems_in(iteration_folder(root, n), checksum=False)
    ]


def read_train_state(folder: Path) -> TrainState:
    """The scalars of a checkpoint. Raises ValueError for a damaged file or another format version."""
    path = folder / STATE_FILE
    try:
        stored = json.loads(path.read_bytes())
        version = stored.pop("format_version", None)
    except (OSError, ValueError, AttributeError) as error:
        raise ValueError(f"{path} cannot be read ({error}): not a complete checkpoint") from error
    if version != FORMAT_VERSION:
        raise ValueError(
            f"{folder} has checkpoint format {version}; this release reads {FORMAT_VERSION}"
        )
    unknown = sorted(set(stored) - {field.name for field in fields(TrainState)})
    if unknown:
        raise ValueError(f"{path} has fields {unknown} that this release does not know")
    return TrainState(**stored)


def check_identity(kind: str, saved: dict[str, object], ours: dict[str, object]) -> None:
    """Raise ValueError listing every field in which the checkpoint's `kind` differs from ours."""
    differences = [
        f"{name}: checkpoint {saved.get(name)!r}, this run {ours.get(name)!r}"
        for name in sorted(set(saved) | set(ours))
        if saved.get(name) != ours.get(name)
    ]
    if differences:
        raise ValueError(f"the checkpoint holds another {kind}: " + "; ".join(differences))


def sharded_state(
    chunks: list[GPTModel],
    optimizer: MegatronOptimizer | None,
    *,
    groups: ProcessGroupCollection,
    keep: Callable[[str], bool] | None,
) -> dict[str, dict]:
    """What a save hands to megatron-core: the tensors of model and optimizer whose names `keep` accepts."""
    sharded, params = sharded_model(chunks, groups)
    if optimizer is not None:
        sharded["optimizer"] = sharded_optimizer_state(optimizer, params)
    return kept_tensors(sharded, keep)


def kept_tensors(sharded: dict[str, dict], keep: Callable[[str], bool] | None) -> dict[str, dict]:
    """The tensors whose names on disk `keep` accepts; all without it."""
    if keep is None:
        return sharded
    return {
        part: {name: tensor for name, tensor in tensors.items() if keep(tensor.key)}
        for part, tensors in sharded.items()
    }


def sharded_model(chunks: list[GPTModel], groups: ProcessGroupCollection):
    """(nested dict of sharded tensors by chunk, model parameter -> its sharded tensor)."""
    metadata = {"dp_cp_group": groups.dp_cp, "singleton_local_shards": False}
    sharded: dict[str, dict] = {}
    params: dict[torch.nn.Parameter, object] = {}
    for number, chunk in enumerate(chunks):
        part = chunk.sharded_state_dict(metadata=metadata)
        # `_extra_state` is Transformer Engine's place for FP8 metadata; ours has none to save.
        part = {k: v for k, v in part.items() if not isinstance(v, ShardedObject)}
        sharded[f"model{number}"] = part
        tensors, _ = extract_sharded_tensors_and_factories(part)
        params.update((t.data, t) for t in nested_values(tensors))
    return sharded, params
