"""Reading torch_dist checkpoints without trusting them.

torch's reader unpickles `.metadata` with everything that pickle can call, and joins the file names in it to
the folder unseen. Here only the classes that a torch_dist index consists of can be made, and only plain
names inside the folder can be opened. Tensors are read by torch with `weights_only`, and `common.pt` is.
"""

import json
import os
import pickle
from pathlib import Path

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

BACKEND = {"sharded_backend": "torch_dist", "common_backend": "torch"}

_DCP = "torch.distributed.checkpoint."
_ALLOWED = {
    _DCP + "metadata": {
        "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta",
        "TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
    },
    _DCP + "planner": {"SavePlan", "WriteItem", "WriteItemType", "TensorWriteData"},
    "torch": {
        "Size", "float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int64",
        "int32", "int16", "int8", "uint8", "bool", "strided",
    },
    "torch.serialization": {"_get_layout"},
    _DCP + "filesystem": {"_StorageInfo", "_StoragePrefix"},
    "megatron.core.dist_checkpointing.strategies.torch": {"MCoreMetadata", "MCoreSavePlan"},
    "collections": {"OrderedDict"},
    "pathlib": {"PosixPath"},
    "pathlib._local": {"PosixPath"},
}  # fmt: skip


class _IndexUnpickler(pickle.Unpickler):
    """Makes the records of a checkpoint index and refuses everything else."""

    def find_class(self, module: str, name: str) -> object:
        if name in _ALLOWED.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it asks for {module}.{name}")


class TrustedReader(FileSystemReader):
    """torch's reader of a checkpoint folder, with the index read once and by `_IndexUnpickler`."""

    def __init__(self, path: str | os.PathLike) -> None:
        super().__init__(path)
        self._index: Metadata | None = None

    def read_metadata(self) -> Metadata:
        """Raises ValueError when the index is damaged, foreign, or points outside the folder."""
        if self._index is None:
            self._index = read_index(Path(self.path))
            self._index.storage_meta.load_id = self.load_id
        return self._index


def read_index(folder: Path) -> Metadata:
    """The index of a torch_dist folder. Raises ValueError as `TrustedReader.read_metadata` does."""
    path = folder / ".metadata"
    try:
        with open(path, "rb") as stream:
            index = _IndexUnpickler(stream).load()
    except (pickle.UnpicklingError, EOFError, AttributeError, ValueError, IndexError) as error:
        raise ValueError(f"{path} is refused: it is no checkpoint index ({error})") from error
    if not isinstance(index, Metadata) or not isinstance(index.storage_data, dict):
        raise ValueError(f"{path} is refused: it holds a {type(index).__name__}, no checkpoint index")
    for info in index.storage_data.values():
        name = str(info.relative_path)
        if os.path.basename(name) != name or name in ("", ".", ".."):
            raise ValueError(f"{path} is refused: it points to {name!r}, outside its folder")
    if getattr(index, "storage_meta", None) is None:
        index.storage_meta = StorageMeta()
    return index


def check_common(folder: Path) -> None:
    """Raises ValueError when common.pt holds anything but tensors and plain containers."""
    path = folder / "common.pt"
    try:
        torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, OSError, ValueError) as error:
        what = " ".join(str(error).split())[:200]
        raise ValueError(f"{path} is refused: it is damaged, or holds foreign objects ({what})") from error


def check_backend(folder: Path) -> None:
    """Raises ValueError unless metadata.json names the two formats that are read safely."""
    path = folder / "metadata.json"
    try:
        named = json.loads(path.read_bytes())
        found = {name: named.get(name, "torch") for name in BACKEND}
    except (OSError, ValueError, AttributeError) as error:
        raise ValueError(f"{path} cannot be read ({error}): no torch_dist checkpoint") from error
    if found != BACKEND:
        raise ValueError(f"{path} names the formats {found}; only {BACKEND} can be read")
