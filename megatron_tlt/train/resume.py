"""Which checkpoint to resume from: the newest that is whole, wherever its files lie.

Every file is compared with the manifest (size, SHA-256) before anything is loaded; on a shared file system
each rank reads its share. A checkpoint that is incomplete or damaged is skipped with a warning that names the
file. Where the nodes write to disks of their own, each holds only what its ranks wrote: the files that a node
lacks are sent to it here, so that any layout may load them.
"""

import re
import warnings
from pathlib import Path

from megatron_tlt import device
from megatron_tlt.files import fsync_path
from megatron_tlt.parallel import local_rank_from_env
from megatron_tlt.train.checkpoint_format import (
    TRACKER,
    CheckpointConfig,
    iteration_folder,
    published_iterations,
)
from megatron_tlt.train.manifest import (
    MANIFEST,
    Manifest,
    file_record,
    problem_of,
    read_manifest,
)

import torch
import torch.distributed as dist

_CHUNK = 64 << 20


def find_checkpoint(config: CheckpointConfig) -> Path | None:
    """The folder that `config.load` means; None when it is the (still empty) folder of `save`.

    Collective over the world, where there is one; the files are verified, and present on this node after
    it. Raises ValueError, on all ranks alike, when there is nothing to load: a run that was asked to resume
    never starts anew.
    """
    if config.load is None:
        return None
    root = Path(config.load)
    if any(_everyone((root / MANIFEST).is_file())) or re.fullmatch(r"iter_\d{7,}", root.name):
        return _insist(root, f"checkpoint.load={config.load}")
    if config.ckpt_step is not None:
        folder = iteration_folder(root, config.ckpt_step)
        return _insist(folder, f"checkpoint.ckpt_step={config.ckpt_step}")
    iterations = sorted({n for seen in _everyone(published_iterations(root)) for n in seen})
    skipped = []
    for iteration in reversed(iterations):
        folder = iteration_folder(root, iteration)
        problems = collect_checkpoint(folder)
        if not problems:
            _check_tracker(root, iteration)
            return folder
        skipped += problems[:1]
        _warn(f"{folder} is not resumed from: {problems[0]}")
    if not skipped and config.save is not None and root.absolute() == Path(config.save).absolute():
        return None
    raise ValueError(
        f"checkpoint.load={config.load} holds no complete checkpoint"
        + (f" ({'; '.join(skipped)})" if skipped else f" (iter_*/{MANIFEST})")
        + ": correct the folder, or leave checkpoint.load out to start anew"
    )


def _insist(folder: Path, what: str) -> Path:
    problems = collect_checkpoint(folder)
    if problems:
        others = {n for seen in _everyone(published_iterations(folder.parent)) for n in seen}
        raise ValueError(
            f"{what} is not a complete checkpoint: {problems[0]}; iterations there: {sorted(others)}"
        )
    return folder


def _check_tracker(root: Path, iteration: int) -> None:
    tracker = root / TRACKER
    if not tracker.is_file():
        return
    named = tracker.read_text(encoding="utf-8", errors="replace").strip()
    if not named.isdigit() or int(named) > iteration:
        _warn(f"{tracker} names iteration {named!r}, which is not complete here; loading {iteration}")


def collect_checkpoint(folder: Path) -> list[str]:
    """Verify a checkpoint folder and bring what this node lacks of it; collective.

    Returns what is wrong with it, the same on every rank: [] when every file is right somewhere, and then
    also here.
    """
    manifest, error = _common_manifest(folder)
    if manifest is None:
        return [error]
    names = sorted(manifest)
    share = names[_rank() :: _world_size()]
    problems = {name: problem_of(folder / name, manifest[name]) for name in share}
    leader = local_rank_from_env() == 0
    present = not leader or all((folder / name).is_file() for name in (*names, MANIFEST))
    seen = _everyone((present, any(problems.values())))
    if all(present and not damaged for present, damaged in seen):
        return []
    # Damaged, or not on every node: now one rank a node looks at all that its node has.
    if leader:
        problems = {name: problem_of(folder / name, manifest[name]) for name in names}
    reports = _everyone(problems if leader else None)
    holders, lost = {}, []
    for name in names:
        right = [rank for rank, report in enumerate(reports) if report and report[name] is None]
        if right:
            holders[name] = right[0]
        else:
            found = [report[name] for report in reports if report]
            lost.append(next((p for p in found if not p.endswith("is missing")), found[0]))
    if not lost:
        lacking = {name for report in reports if report for name in names if report[name]}
        _send_files(folder, {name: holders[name] for name in sorted(lacking)}, problems, manifest)
    return lost


def _common_manifest(folder: Path) -> tuple[Manifest | None, str]:
    """The one manifest of all ranks that have it, or why there is none."""
    try:
        ours, error = read_manifest(folder), ""
    except ValueError as problem:
        ours, error = None, str(problem)
    found = _everyone((ours, error))
    manifests = [manifest for manifest, _ in found if manifest is not None]
    if not manifests:
        errors = [text for _, text in found]
        return None, next((e for e in errors if "is missing" not in e), errors[0])
    if any(manifest != manifests[0] for manifest in manifests):
        return None, f"{folder / MANIFEST} differs between nodes: they hold different runs"
    return manifests[0], ""


def _send_files(
    folder: Path, holders: dict[str, int], problems: dict[str, str | None], manifest: Manifest
) -> None:
    """Broadcast each file from the rank that holds it; the ranks with a problem in it write it."""
    leader = local_rank_from_env() == 0
    if leader:
        folder.mkdir(parents=True, exist_ok=True)
    # The manifest goes last: without it the folder does not count as a checkpoint.
    has_manifest = _everyone((folder / MANIFEST).is_file())
    tasks = [(name, holder, leader and problems[name] is not None) for name, holder in holders.items()]
    tasks.append((MANIFEST, has_manifest.index(True), leader and not (folder / MANIFEST).is_file()))
    for name, holder, wanted in tasks:
        _send_file(folder / name, holder, writes=wanted)
        record = manifest.get(name)
        if wanted and record is not None and file_record(folder / name) != record:
            raise ValueError(f"{folder / name} arrived damaged from rank {holder}: check its disk")
    if leader:
        fsync_path(folder)
    if dist.is_initialized():
        dist.barrier()


def _send_file(path: Path, holder: int, *, writes: bool) -> None:
    here = _rank() == holder
    size = _everyone(path.stat().st_size if here else None)[holder]
    partial = path.with_name(f".{path.name}.fetched")
    source = open(path, "rb") if here else None
    target = open(partial, "wb") if writes else None
    try:
        for start in range(0, size, _CHUNK):
            count = min(_CHUNK, size - start)
            data = torch.empty(count, dtype=torch.uint8)
            if source is not None:
                data = torch.frombuffer(bytearray(source.read(count)), dtype=torch.uint8)
            data = data.to(device.device())
            dist.broadcast(data, src=holder)
            if target is not None:
                target.write(data.cpu().numpy().tobytes())
    finally:
        for stream in (source, target):
            if stream is not None:
                stream.close()
    if writes:
        fsync_path(partial)
        partial.replace(path)


def _everyone(value: object) -> list:
    """The values of all ranks in rank order; without a process group, this process's alone."""
    if not dist.is_initialized():
        return [value]
    gathered = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, value)
    return gathered


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def _warn(text: str) -> None:
    if _rank() == 0:
        warnings.warn(text, stacklevel=3)
