"""Small file manners that the data modules share: expand names, publish by rename, digest."""

import contextlib
import glob
import hashlib
import os
import socket
from collections.abc import Iterable, Iterator
from pathlib import Path

from megatron_tlt.files import fsync_path


def temporary_name(path: Path) -> Path:
    """A name beside `path` that no other process uses: same folder, so that a rename is atomic."""
    return path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}.tmp")


@contextlib.contextmanager
def publish(path: Path) -> Iterator[Path]:
    """Yield a temporary path; on success rename it to `path`, on failure remove it.

    Readers of `path` see the old file or the whole new one, never a half-written one.
    """
    temporary = temporary_name(path)
    try:
        yield temporary
        fsync_path(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def expand_inputs(patterns: Iterable[str]) -> list[Path]:
    """Files and folders named by `patterns`, shell globs expanded in sorted order.

    Raises ValueError for a pattern that names nothing.
    """
    paths = []
    for pattern in patterns:
        found = [pattern] if os.path.exists(pattern) else sorted(glob.glob(pattern, recursive=True))
        if not found:
            raise ValueError(f"input {pattern!r} names no file or folder (from {os.getcwd()})")
        paths.extend(Path(name) for name in found)
    return paths


def sha256_of_files(*paths: Path) -> str:
    """Hex SHA-256 over the contents of `paths`, in order."""
    digest = hashlib.sha256()
    for path in paths:
        with open(path, "rb") as stream:
            while block := stream.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()
