"""The file work of a save, without a collective: each function may run in a thread beside training."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from megatron_tlt.files import delete_folder, fsync_path, publish_folder, write_json, write_text
from megatron_tlt.train.checkpoint_format import (
    FORMAT_VERSION,
    STATE_FILE,
    TRACKER,
    iteration_folder,
    published_iterations,
)
from megatron_tlt.train.manifest import Manifest, file_record, problems_in, write_manifest

import torch
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from safetensors.torch import save_file
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.storage import WriteResult


class SaveStrategy(TorchDistSaveShardedStrategy):
    """megatron-core's torch_dist writer, one file a rank, whose index is written by `describe`.

    Its own finalisation gathers and writes inside one call on the training thread.
    """

    def __init__(self) -> None:
        super().__init__("torch_dist", 1, thread_count=1)
        self.writer = None
        self.index: Metadata | None = None
        """On rank 0: which tensor is where, but for the offsets in the files."""

    def _get_save_and_finalize_callbacks(self, writer, save_state_dict_ret) -> AsyncRequest:
        self.writer, self.index, _ = save_state_dict_ret
        return super()._get_save_and_finalize_callbacks(writer, save_state_dict_ret)


@dataclass(frozen=True, kw_only=True, slots=True)
class Written:
    """What one rank has made durable: its files, and where in them its tensors are."""

    files: Manifest
    results: list[WriteResult]


def write_files(
    strategy: SaveStrategy, request: AsyncRequest, buckets: list,
    extra: Mapping[Path, Mapping[str, torch.Tensor]],
) -> Written:  # fmt: skip
    """Write and fsync this rank's tensors, and its `extra` files. Raises OSError, e.g. on a full disk."""
    if request.async_fn is not None:
        rank, _, queue = request.async_fn_args
        request.async_fn(rank, buckets, queue)
    files = {name: file_record(Path(path)) for path, name, _ in buckets}
    for path, tensors in extra.items():
        save_file(dict(tensors), path)
        fsync_path(path)
        files[path.name] = file_record(path)
    return Written(files=files, results=strategy.writer.retrieve_write_results())


def describe(
    partial: Path, strategy: SaveStrategy, written: list[Written], state: dict[str, object]
) -> Manifest:
    """Rank 0: write index, format and state beside the tensors; the manifest of all files."""
    manifest = {name: record for part in written for name, record in part.files.items()}
    strategy.writer.finish(strategy.index, [part.results for part in written])
    save_config(CheckpointingConfig(strategy.backend, strategy.version), str(partial))
    write_json(partial / STATE_FILE, {"format_version": FORMAT_VERSION, **state})
    for path in partial.iterdir():
        if path.name not in manifest:
            manifest[path.name] = file_record(path)
    return manifest


def publish(partial: Path, final: Path, manifest: Manifest, *, iteration: int) -> None:
    """Write the manifest, make everything durable and give the folder its name."""
    write_manifest(partial, manifest, iteration=iteration)
    publish_folder(partial, final)


def move_tracker(root: Path, iteration: int, *, keep_last: int | None, shared: bool) -> None:
    """Let the tracker name `iteration`, then delete all but the newest `keep_last` complete checkpoints.

    Incomplete ones count for nothing and stay for inspection, so the last complete one is never deleted.
    Without `shared`, this node holds and judges only what its own ranks have written.
    """
    write_text(root / TRACKER, str(iteration))
    if keep_last is None:
        return
    complete = [n for n in published_iterations(root) if _has_right_sizes(root, n, shared=shared)]
    for old in complete[:-keep_last]:
        delete_folder(iteration_folder(root, old))


def _has_right_sizes(root: Path, iteration: int, *, shared: bool) -> bool:
    folder = iteration_folder(root, iteration)
    names = None if shared else [path.name for path in folder.glob("*.distcp")]
    return not problems_in(folder, checksum=False, names=names)


def clean_leftovers(root: Path) -> None:
    """Remove what a killed process left half-written or half-deleted, and put back a checkpoint that it
    had set aside for one which never came."""
    for path in root.glob(".iter_*"):
        retired = re.fullmatch(r"\.(iter_\d+)\.retired", path.name)
        if retired and not (root / retired[1]).exists():
            os.replace(path, root / retired[1])
            fsync_path(root)
        elif re.fullmatch(r"\.iter_\d+(\.\w+)?\.(partial|deleted|retired)", path.name):
            delete_folder(path)
