"""Hugging Face model folders: lazy reading of sharded safetensors, and writing them as a stream."""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from megatron_tlt.files import delete_folder, publish_folder, write_json
from megatron_tlt.models.hf import Architecture, Weights

import torch
from safetensors import safe_open
from safetensors.torch import save_file

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "tokenizer.model",
    "vocab.json", "merges.txt", "added_tokens.json", "chat_template.jinja", "generation_config.json",
)  # fmt: skip


class _SafetensorsTensor:
    """One tensor of a file. The file is mapped only while it is read: kept mapped, every page once
    touched would count as memory of this process."""

    def __init__(self, path: Path, name: str) -> None:
        self.path, self.name = path, name
        with safe_open(path, framework="pt") as file:
            self.shape = tuple(file.get_slice(name).get_shape())

    def __getitem__(self, index: object) -> torch.Tensor:
        with safe_open(self.path, framework="pt") as file:
            return file.get_slice(self.name)[index].clone()


class SafetensorsFolder(Mapping):
    """name -> lazy tensor over a folder's `model.safetensors`, or the shards of its index."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        if (self.folder / INDEX).is_file():
            index = json.loads((self.folder / INDEX).read_text(encoding="utf-8"))
            self._files = {k: self.folder / v for k, v in index["weight_map"].items()}
        elif (self.folder / SINGLE).is_file():
            with safe_open(self.folder / SINGLE, framework="pt") as file:
                self._files = dict.fromkeys(file.keys(), self.folder / SINGLE)
        else:
            raise ValueError(
                f"{self.folder} holds neither {SINGLE} nor {INDEX}: save the model in safetensors "
                "format (transformers: save_pretrained)"
            )
        missing = sorted({str(p) for p in self._files.values() if not p.is_file()})
        if missing:
            raise ValueError(f"{self.folder / INDEX} names shards that are not there: {missing}")

    def __getitem__(self, name: str) -> _SafetensorsTensor:
        return _SafetensorsTensor(self._files[name], name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)


class PrefixedWeights(Mapping):
    """Weights under names with `prefix` whose files leave the prefix out (GPT-2 on the hub)."""

    def __init__(self, weights: Weights, prefix: str) -> None:
        self._weights, self._prefix = weights, prefix

    def __getitem__(self, name: str) -> object:
        return self._weights[name.removeprefix(self._prefix)]

    def __iter__(self) -> Iterator[str]:
        return (self._prefix + name for name in self._weights)

    def __len__(self) -> int:
        return len(self._weights)


def read_safetensors_dir(folder: str | Path, architecture: Architecture) -> Weights:
    """The lazy weights of `folder` under the architecture's full names."""
    weights = SafetensorsFolder(folder)
    if any(name.startswith(architecture.prefix) for name in weights):
        return weights
    return PrefixedWeights(weights, architecture.prefix)


def read_hf_config(folder: str | Path) -> dict[str, object]:
    """`config.json` of a model folder. Raises ValueError when there is none."""
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise ValueError(f"{folder} is no Hugging Face model folder: it has no config.json")
    return json.loads(path.read_text(encoding="utf-8"))


def read_tokenizer_files(folder: str | Path) -> dict[str, bytes]:
    """name -> content of the tokenizer's (and generation) files that `folder` has."""
    paths = (Path(folder) / name for name in TOKENIZER_FILES)
    return {path.name: path.read_bytes() for path in paths if path.is_file()}


class SafetensorsWriter:
    """Writes (name, tensor) pairs as they come into `model-0000i-of-0000n.safetensors` under a hidden
    folder name; `publish` renames it. At most one shard is held in memory.

    Usage: `writer = SafetensorsWriter(path); writer.write(pairs); writer.finish(config, files);
    writer.publish()`.
    """

    def __init__(self, folder: str | Path, *, max_shard_bytes: int = 2 * 1000**3) -> None:
        if max_shard_bytes < 1:
            raise ValueError(f"max_shard_bytes={max_shard_bytes} must be at least 1")
        self.check_free(folder)
        self.final = Path(folder)
        self.partial = self.partial_folder(folder)
        self.max_shard_bytes = max_shard_bytes
        self._shards: list[list[str]] = []
        self._total_bytes = 0
        delete_folder(self.partial)
        self.partial.mkdir(parents=True)

    @staticmethod
    def check_free(folder: str | Path) -> None:
        """Raise ValueError when there is something at `folder`."""
        if Path(folder).exists():
            raise ValueError(f"{folder} exists: choose another folder or delete it first")

    @staticmethod
    def partial_folder(folder: str | Path) -> Path:
        """Where the folder stands until it is published."""
        return Path(folder).with_name(f".{Path(folder).name}.partial")

    def write(self, pairs: Iterable[tuple[str, torch.Tensor]]) -> None:
        shard: dict[str, torch.Tensor] = {}
        size = 0
        for name, tensor in pairs:
            if shard and size + tensor.nbytes > self.max_shard_bytes:
                self._save(shard)
                shard, size = {}, 0
            shard[name] = tensor.cpu()
            size += tensor.nbytes
        if shard:
            self._save(shard)

    def _save(self, shard: dict[str, torch.Tensor]) -> None:
        path = self.partial / f"shard-{len(self._shards)}"
        save_file(shard, path, metadata={"format": "pt"})
        path.chmod(0o644)  # safetensors leaves it readable for its owner only
        self._shards.append(list(shard))
        self._total_bytes += sum(tensor.nbytes for tensor in shard.values())

    def finish(self, config: dict[str, object], files: Mapping[str, bytes]) -> None:
        """Give the shards their names and write index, `config.json` and the tokenizer's files."""
        count = len(self._shards)
        names = [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
        if count == 1:
            names = [SINGLE]
        for number, name in enumerate(names):
            (self.partial / f"shard-{number}").rename(self.partial / name)
        if count > 1:
            where = {t: name for name, shard in zip(names, self._shards, strict=True) for t in shard}
            total = {"total_size": self._total_bytes}
            write_json(self.partial / INDEX, {"metadata": total, "weight_map": where})
        write_json(self.partial / "config.json", config)
        for name, content in files.items():
            assert re.fullmatch(r"[\w.-]+", name), f"{name!r} is no plain file name"
            (self.partial / name).write_bytes(content)

    def publish(self) -> None:
        publish_folder(self.partial, self.final)


def write_safetensors_dir(
    pairs: Iterable[tuple[str, torch.Tensor]],
    folder: str | Path,
    *,
    config: dict[str, object],
    files: Mapping[str, bytes],
    max_shard_bytes: int = 2 * 1000**3,
) -> None:
    """Stream `pairs` into a complete Hugging Face folder, published by rename."""
    writer = SafetensorsWriter(folder, max_shard_bytes=max_shard_bytes)
    writer.write(pairs)
    writer.finish(config, files)
    writer.publish()
