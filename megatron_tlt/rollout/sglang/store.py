"""Weights that an engine starts from: checked as they come; kept in a folder or in memory, all or none."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from megatron_tlt.files import delete_folder
from megatron_tlt.models.drafter import DrafterConfig
from megatron_tlt.models.hf_files import SafetensorsFolder, SafetensorsWriter
from megatron_tlt.rollout.checksum import Checksum
from megatron_tlt.rollout.native.eagle import EagleModel
from megatron_tlt.rollout.native.model import NativeModel
from megatron_tlt.rollout.native.shape import ModelShape
from megatron_tlt.rollout.native.weights import DraftLoader, WeightLoader


class TargetTables:
    """The target's embedding and head `[v, h]` on the host, in storage that every update fills anew."""

    def __init__(self, shape: ModelShape) -> None:
        self.embedding, self.head = (torch.zeros(shape.vocab_size, shape.hidden_size) for _ in range(2))
        self._tied = shape.tied

    def wants(self, name: str) -> bool:
        """Whether the tensor of this name is one of the two."""
        return _is_embedding(name) or self._is_head(name)

    def take(self, name: str, tensor: torch.Tensor) -> None:
        """Keep the tensor if it is one of the two."""
        if _is_embedding(name):
            self.embedding.copy_(tensor)
        if self._is_head(name):
            self.head.copy_(tensor)

    def _is_head(self, name: str) -> bool:
        return _is_embedding(name) if self._tied else name == "lm_head.weight"

    def pair(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Embedding and head, `[v, h]` each."""
        return self.embedding, self.head


def _is_embedding(name: str) -> bool:
    return name == "model.embed_tokens.weight" or name.endswith("wte.weight")


class WeightStore:
    """Newest target and drafter as model folders under `root`, or in memory until an engine has to start.

    SGLang takes what it is given and leaves the rest as it was, so names and shapes are checked here, by the
    embedded engine's own tables over a model without memory.
    """

    def __init__(
        self, root: Path, hf_config: Mapping[str, Any], shape: ModelShape, drafter: DrafterConfig | None,
        *, bucket_bytes: int, in_memory: bool,
    ) -> None:  # fmt: skip
        self.root, self._serial = root, 0
        self._bucket_bytes, self._in_memory = bucket_bytes, in_memory
        meta = NativeModel(shape, dtype=torch.float32, device=torch.device("meta"))
        self._loaders: dict[str, WeightLoader] = {"target": WeightLoader(meta)}
        # Without an end token of the model's own, only the request's stop tokens end a response.
        self._configs = {"target": dict(hf_config) | {"eos_token_id": None}}
        self._eagle3 = drafter is not None and drafter.layout == "eagle3"
        if drafter is not None:
            self._loaders["draft"] = DraftLoader(EagleModel(drafter, meta))
            more = {"num_aux_hidden_states": 4} if self._eagle3 else {}  # see `_widened`
            self._configs["draft"] = drafter.to_hf() | more
        self._newest: dict[str, Path | dict[str, torch.Tensor]] = {}
        self._folders: dict[str, Path] = {}
        self.tables = TargetTables(shape)
        self._shapes: dict[str, dict[str, list[int]]] = {}
        self.versions = {"target": 0, "draft": 0}

    @property
    def kinds(self) -> list[str]:
        """What an engine needs to start."""
        return [*self._loaders]

    @property
    def present(self) -> list[str]:
        """What of it is here."""
        return [*self._newest]

    def shapes(self, which: str) -> dict[str, list[int]]:
        """Names and shapes of the newest weights."""
        return self._shapes[which]

    def folder(self, which: str) -> Path:
        """The newest weights as a model folder, for an engine to start from."""
        newest = self._newest[which]
        if isinstance(newest, dict) and which not in self._folders:
            self._folders[which] = self._write(which, newest.items(), check=lambda: None)
        return self._folders[which]

    def put(
        self, which: str, tensors: Iterable[tuple[str, torch.Tensor]], *, version: int,
        checksum: str | None,
    ) -> Path | dict[str, torch.Tensor]:  # fmt: skip
        """Take new weights for the old ones: a folder, or tensors of this process's own.

        ValueError, and the old ones stay, for bad weights.
        """
        if which not in self._loaders:
            raise ValueError(
                f"which={which!r}: the engine takes {sorted(self._loaders)} (a drafter needs drafter=...)"
            )
        seen: list[tuple[str, torch.Tensor]] = []
        total = None if checksum is None else Checksum()

        def check() -> None:
            self._loaders[which].load(seen)
            if total is not None and total.value() != checksum:
                raise ValueError(
                    f"the weights' checksum is {total.value()}, expected {checksum}: they changed on the way"
                )

        watched, old = _watched(tensors, seen, total, copy=self._in_memory), self._folders.get(which)
        if which == "draft" and self._eagle3:
            watched = map(_widened, watched)
        if self._in_memory:
            newest = dict(watched)
            check()
            self._folders.pop(which, None)
        else:
            newest = self._folders[which] = self._write(which, watched, check=check)
        if old is not None:
            delete_folder(old)
        self._newest[which], self.versions[which] = newest, version
        self._shapes[which] = {name: list(tensor.shape) for name, tensor in seen}
        if which == "target":
            self._fill_tables(newest)
        return newest

    def _write(
        self, which: str, pairs: Iterable[tuple[str, torch.Tensor]], *, check: Callable[[], None]
    ) -> Path:
        """A new model folder, if `check` raises nothing once all is written."""
        self._serial += 1
        folder = self.root / f"{which}-{self._serial}"
        writer, complete = SafetensorsWriter(folder, max_shard_bytes=self._bucket_bytes), False
        try:
            writer.write(pairs)
            check()
            complete = True
        finally:
            if not complete:
                delete_folder(writer.partial)
        writer.finish(self._configs[which], {})
        writer.publish()
        return folder

    def _fill_tables(self, newest: Path | dict[str, torch.Tensor]) -> None:
        weights = newest if isinstance(newest, dict) else SafetensorsFolder(newest)
        for name in filter(self.tables.wants, weights):
            self.tables.take(name, weights[name][...])


def _widened(pair: tuple[str, torch.Tensor]) -> tuple[str, torch.Tensor]:
    """EAGLE-3's input layer `[h, 3 h]` as `[h, 4 h]`: the final states, which our plugin adds, count 0."""
    name, tensor = pair
    if name != "fc.weight":
        return pair
    return name, torch.cat((tensor, torch.zeros_like(tensor[:, : len(tensor)])), dim=1)


def _watched(
    tensors: Iterable[tuple[str, torch.Tensor]], seen: list[tuple[str, torch.Tensor]],
    total: Checksum | None, *, copy: bool,
) -> Iterator[tuple[str, torch.Tensor]]:  # fmt: skip
    """The same pairs, on the host; their shapes go into `seen`, their content into `total`."""
    for name, tensor in tensors:
        tensor = tensor.detach().to("cpu", copy=copy).contiguous()
        if total is not None:
            total.add(name, tensor)
        seen.append((name, torch.empty_like(tensor, device="meta")))
        yield name, tensor.clone() if tensor._base is not None else tensor
