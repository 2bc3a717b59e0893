"""Index arrays on disk, built once and shared by the ranks of a job, and by jobs.

A cache entry is a folder named by the SHA-256 of everything that its arrays depend on, so it is
never rewritten and any number of jobs may share a cache folder. It is written under a temporary
name and published by one rename; whoever comes second throws its own copy away. Readers check types
and shapes.

Protocol, for shared and for node-local file systems alike: the job's builder (global rank 0) builds
what is missing; barrier; on a node that does not see it, the node's builder builds; barrier; a rank
that still does not see it raises ValueError naming path and host. A builder that fails raises its
own error and leaves the barrier to the others: the process group's time limit, or the launcher,
ends them.
"""

import hashlib
import json
import os
import shutil
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from megatron_tlt.data.files import temporary_name
from megatron_tlt.files import fsync_path

_FORMAT = 1
_SECONDS_FOR_VISIBILITY = 10.0
"""Network file systems show a new folder late: how long a reader waits before it gives up."""


class CacheSync(Protocol):
    """Who builds: `is_builder` one rank of the job, `is_local_builder` one of each node."""

    is_builder: bool
    is_local_builder: bool

    def barrier(self) -> None:
        """Return when all ranks of the job have called it."""
        ...


@dataclass(frozen=True, slots=True)
class SingleProcess:
    """The CacheSync of a job of one process."""

    is_builder: bool = True
    is_local_builder: bool = True

    def barrier(self) -> None:
        pass


@dataclass(frozen=True, kw_only=True, slots=True)
class IndexRequest:
    """Arrays wanted: what they depend on, how to make them, what they must look like.

    Example: key={"kind": "gpt", "seed": 1, ...}, shapes={"document_index": (20,)}.
    """

    key: Mapping[str, object]
    build: Callable[[], dict[str, np.ndarray]]
    shapes: Mapping[str, tuple[int, ...]]

    def folder_name(self) -> str:
        text = json.dumps({"format": _FORMAT, **self.key}, sort_keys=True)
        return f"{self.key['kind']}-{hashlib.sha256(text.encode()).hexdigest()[:32]}"


def load_indices(
    requests: Sequence[IndexRequest], *, cache_path: str | Path | None, sync: CacheSync
) -> list[dict[str, np.ndarray]]:
    """The arrays of each request, memory-mapped from `cache_path`.

    With `cache_path` None every rank builds them in memory. A collective: all ranks of `sync` call
    it with the same requests. Raises ValueError when the folder cannot be written, when an entry is
    damaged, or when a rank cannot see it.
    """
    if cache_path is None:
        return [request.build() for request in requests]
    folder = Path(cache_path)
    for builds in (sync.is_builder, sync.is_local_builder):
        if builds:
            for request in requests:
                _build_if_missing(folder / request.folder_name(), request)
        sync.barrier()
    return [_read(folder / request.folder_name(), request) for request in requests]


def _build_if_missing(path: Path, request: IndexRequest) -> None:
    if path.is_dir():
        return
    arrays = request.build()
    temporary = temporary_name(path)
    try:
        temporary.mkdir(parents=True, exist_ok=True)
        for name, array in arrays.items():
            np.save(temporary / f"{name}.npy", array, allow_pickle=False)
        (temporary / "key.json").write_text(json.dumps(request.key, indent=1, sort_keys=True))
        _publish_folder(temporary, path)
    except OSError as error:
        raise ValueError(
            f"cannot write the index cache {path} on {socket.gethostname()} ({error}): give "
            "--data-cache-path a folder that every rank can write, or that is already filled"
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _publish_folder(temporary: Path, path: Path) -> None:
    """Rename; an entry that another process published first is as good (same key, same content)."""
    for file in temporary.iterdir():
        fsync_path(file)
    try:
        os.rename(temporary, path)
    except OSError:
        if not path.is_dir():
            raise


def _read(path: Path, request: IndexRequest) -> dict[str, np.ndarray]:
    deadline = time.monotonic() + _SECONDS_FOR_VISIBILITY
    while not path.is_dir():
        if time.monotonic() > deadline:
            raise ValueError(
                f"index cache {path} was built, but {socket.gethostname()} does not see it: "
                "is --data-cache-path the same folder on every node?"
            )
        time.sleep(0.05)
    arrays = {}
    for name, shape in request.shapes.items():
        file = path / f"{name}.npy"
        try:
            array = np.load(file, mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError) as error:
            raise ValueError(f"index cache {file} is damaged ({error}): delete {path}") from error
        if array.shape != shape:
            raise ValueError(
                f"index cache {file} has shape {array.shape}, want {shape}: delete {path}"
            )
        arrays[name] = array.view(np.ndarray)
    return arrays
