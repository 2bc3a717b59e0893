"""The manifest of a checkpoint folder: the size and SHA-256 of every file, so that damage has a name.

`manifest.json` is the last file written before a checkpoint is published. A folder without one, or whose
files differ from it, is not loaded.
"""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from megatron_tlt.files import write_json

MANIFEST = "manifest.json"
FORMAT_VERSION = 1
_CHUNK = 1 << 22


@dataclass(frozen=True, kw_only=True, slots=True)
class FileRecord:
    """What a file must be. Example: FileRecord(bytes=1024, sha256="9f86d0...")."""

    bytes: int
    sha256: str


Manifest = dict[str, FileRecord]


def file_record(path: Path) -> FileRecord:
    """Size and digest of a file, read in chunks."""
    digest, size = hashlib.sha256(), 0
    with open(path, "rb") as stream:
        while chunk := stream.read(_CHUNK):
            digest.update(chunk)
            size += len(chunk)
    return FileRecord(bytes=size, sha256=digest.hexdigest())


def write_manifest(folder: Path, manifest: Manifest, *, iteration: int) -> None:
    """Publish `folder`/manifest.json (temporary name, fsync, rename)."""
    files = {name: asdict(manifest[name]) for name in sorted(manifest)}
    value = {"format_version": FORMAT_VERSION, "iteration": iteration, "files": files}
    write_json(folder / MANIFEST, value | {"sha256": _digest(value)})


def read_manifest(folder: Path) -> Manifest:
    """Raises ValueError, naming the file, when it is missing, damaged, or names a file elsewhere."""
    path = folder / MANIFEST
    if not path.is_file():
        raise ValueError(f"{path} is missing: the checkpoint was never completed")
    try:
        value = json.loads(path.read_bytes())
        claimed = value.pop("sha256")
        records = {
            name: FileRecord(bytes=record["bytes"], sha256=record["sha256"])
            for name, record in value["files"].items()
        }
        version = value["format_version"]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is damaged: {type(error).__name__} {error}") from error
    if claimed != _digest(value):
        raise ValueError(f"{path} is damaged: its own digest does not match its content")
    if version != FORMAT_VERSION:
        raise ValueError(f"{path} has format {version}; this release reads {FORMAT_VERSION}")
    for name in records:
        if not is_plain_name(name):
            raise ValueError(f"{path} names {name!r}, which is not a file in that folder: refused")
    return records


def is_plain_name(name: str) -> bool:
    """Whether `name` can only mean a file directly in the folder it is joined to."""
    return bool(name) and name not in (".", "..") and not set(name) & {"/", "\\", "\0"}


def problem_of(path: Path, record: FileRecord, *, checksum: bool = True) -> str | None:
    """What is wrong with a file, naming it; None when it is what the manifest says."""
    if not path.is_file():
        return f"{path} is missing"
    size = path.stat().st_size
    if size != record.bytes:
        return f"{path} has {size} bytes, its manifest says {record.bytes}"
    if checksum and file_record(path).sha256 != record.sha256:
        return f"{path} is damaged: its SHA-256 is not the manifest's"
    return None


def problems_in(
    folder: Path, *, checksum: bool = True, names: Iterable[str] | None = None
) -> list[str]:
    """Everything that is wrong with a checkpoint folder, or with `names` of it; [] when it is complete."""
    try:
        manifest = read_manifest(folder)
    except ValueError as error:
        return [str(error)]
    chosen = manifest if names is None else names
    found = (problem_of(folder / name, manifest[name], checksum=checksum) for name in chosen)
    return [problem for problem in found if problem is not None]


def _digest(value: dict) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
