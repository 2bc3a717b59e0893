"""Checkpoints: `iter_0000100/` in megatron-core's torch_dist format, published by rename.

A directory holds `train_state.json` (iteration, data cursor, configuration, model and tokenizer identity)
and the sharded weights and Adam moments, which load under any TP, PP, DP and with or without the
distributed optimizer. There is no RNG state to keep: every step seeds its generators from (seed,
iteration). `latest_checkpointed_iteration.txt` names the newest complete one, as Megatron writes it.
"""

import json
import re
import warnings
from dataclasses import asdict, dataclass, field
from pathlib import Path

from megatron_tlt import device
from megatron_tlt.files import delete_folder, publish_folder, write_json, write_text
from megatron_tlt.train.optimizer_state import (
    load_optimizer_state,
    optimizer_step,
    requested_optimizer_state,
    sharded_optimizer_state,
)

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
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
    """Keep this many newest checkpoints and delete older ones; default all."""
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
        if self.save_interval is not None and self.save is None:
            raise ValueError("checkpoint.save_interval needs checkpoint.save")
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
    optimizer_step: int = 0
    scheduler: dict[str, object] = field(default_factory=dict)
    model: dict[str, object] = field(default_factory=dict)
    tokenizer: dict[str, object] = field(default_factory=dict)
    data: dict[str, object] = field(default_factory=dict)
    est: dict[str, object] = field(default_factory=dict)
    """Subnet schedule and meters; empty for a dense run."""
    seed: int = 0
    config: dict[str, object] = field(default_factory=dict)


def iteration_folder(root: Path, iteration: int) -> Path:
    return root / f"iter_{iteration:07d}"


def save_checkpoint(
    root: str | Path,
    state: TrainState,
    chunks: list[GPTModel],
    optimizer: MegatronOptimizer | None,
    *,
    groups: ProcessGroupCollection,
    keep_last: int | None = None,
) -> Path:
    """Write `iter_*` under a temporary name, then publish it by rename; collective over the world.

    Every rank's files are fsynced before rank 0 renames the folder and then moves the tracker, so a
    killed save leaves the previous checkpoint current. Returns the published folder.
    """
    root = Path(root)
    final = iteration_folder(root, state.iteration)
    partial = root / f".{final.name}.partial"
    if dist.get_rank() == 0:
        delete_folder(partial)
        partial.mkdir(parents=True)
    dist.barrier()
    sharded, params = _sharded_model(chunks, groups)
    if optimizer is not None:
        step = torch.tensor(optimizer_step(optimizer), device=device.device())
        dist.all_reduce(step, op=dist.ReduceOp.MAX)  # a rank without parameters counts no steps
        state.optimizer_step = int(step)
        sharded["optimizer"] = sharded_optimizer_state(optimizer, params)
    dist_checkpointing.save(sharded, str(partial))
    dist.barrier()
    if dist.get_rank() == 0:
        write_json(partial / STATE_FILE, {"format_version": FORMAT_VERSION, **asdict(state)})
        publish_folder(partial, final)
        write_text(root / TRACKER, str(state.iteration))
        if keep_last is not None:
            for old in complete_iterations(root)[:-keep_last]:
                delete_folder(iteration_folder(root, old))
    dist.barrier()
    return final


def find_checkpoint(config: CheckpointConfig) -> Path | None:
    """The folder that `config.load` means; None when it is the (still empty) folder of `save`.

    Raises ValueError when there is nothing to load: a run that was asked to resume never starts anew.
    """
    if config.load is None:
        return None
    root = Path(config.load)
    if (root / STATE_FILE).is_file():
        return root
    if config.ckpt_step is not None:
        folder = iteration_folder(root, config.ckpt_step)
        if not (folder / STATE_FILE).is_file():
            raise ValueError(
                f"checkpoint.ckpt_step={config.ckpt_step}: {folder} is not a complete checkpoint; "
                f"complete ones: {complete_iterations(root)}"
            )
        return folder
    iterations = complete_iterations(root)
    if not iterations:
        if config.save is not None and root.absolute() == Path(config.save).absolute():
            return None
        raise ValueError(
            f"checkpoint.load={config.load} holds no complete checkpoint (iter_*/{STATE_FILE}): "
            "correct the folder, or leave checkpoint.load out to start anew"
        )
    tracker = root / TRACKER
    if tracker.is_file():
        named = tracker.read_text().strip()
        if not named.isdigit() or int(named) not in iterations:
            warnings.warn(
                f"{tracker} names iteration {named!r}, which is not complete here; "
                f"loading {iterations[-1]} instead",
                stacklevel=2,
            )
    return iteration_folder(root, iterations[-1])


def complete_iterations(root: Path) -> list[int]:
    """Published iterations under `root`, ascending; the rename makes a folder complete or absent."""
    names = (re.fullmatch(r"iter_(\d{7,})", p.name) for p in root.glob("iter_*"))
    found = sorted(int(m.group(1)) for m in names if m)
    return [n for n in found if (iteration_folder(root, n) / STATE_FILE).is_file()]


def read_train_state(folder: Path) -> TrainState:
    """The scalars of a checkpoint. Raises ValueError for another format version."""
    stored = json.loads((folder / STATE_FILE).read_text())
    version = stored.pop("format_version", None)
    if version != FORMAT_VERSION:
        raise ValueError(
            f"{folder} has checkpoint format {version}; this release reads {FORMAT_VERSION}"
        )
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


def load_checkpoint(
    folder: Path,
    chunks: list[GPTModel],
    optimizer: MegatronOptimizer | None,
    *,
    groups: ProcessGroupCollection,
) -> TrainState:
    """Fill `chunks`, and `optimizer` unless None, from `folder`; collective over the world.

    The caller compares identities first (`check_identity`). Raises ValueError when a tensor is missing.
    """
    state = read_train_state(folder)
    sharded, params = _sharded_model(chunks, groups)
    if optimizer is not None:
        if state.optimizer_step == 0 and state.iteration > 0:
            raise ValueError(f"{folder} holds no optimizer state: use checkpoint.no_load_optim=true")
        sharded["optimizer"] = requested_optimizer_state(optimizer, params)
    loaded = dist_checkpointing.load(sharded, str(folder))
    for number, chunk in enumerate(chunks):
        chunk.load_state_dict(loaded[f"model{number}"])
    if optimizer is not None:
        load_optimizer_state(optimizer, params, loaded["optimizer"], step=state.optimizer_step)
    return state


def _sharded_model(chunks: list[GPTModel], groups: ProcessGroupCollection):
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
