"""What is kept of every running token: keys and values, drafter's keys and values, features.

All planes share one division of their rows into equal slots; running requests fill the first slots without
gaps. Dense slots let a decode step attend by one call over a view, with no copy of keys. The price: when a
request ends, the last one moves into its slot (one copy of its rows). Under a memory bound the slots are
shorter than the longest sequence at first, and are divided anew, fewer and longer, when a sequence
outgrows its slot: the scheduler takes requests out for that and has them recomputed later.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True, slots=True)
class PlaneShape:
    """One kind of state: `[layers, rows, width]`."""

    layers: int
    width: int
    dtype: torch.dtype

    @property
    def row_bytes(self) -> int:
        return self.layers * self.width * self.dtype.itemsize


class SlotCache:
    """Slot i owns rows i * stride to (i + 1) * stride of every plane.

    `longest`: rows of the longest sequence with its drafts. `max_bytes` bounds the planes given here
    together. Raises ValueError where it has no room for one longest sequence.
    """

    def __init__(
        self, planes: Mapping[str, PlaneShape], *, max_batch: int, longest: int,
        device: torch.device, max_bytes: int | None = None,
    ) -> None:  # fmt: skip
        row_bytes = sum(plane.row_bytes for plane in planes.values())
        self.rows = max_batch * longest
        if max_bytes is not None:
            self.rows = min(self.rows, max_bytes // row_bytes)
        if self.rows < longest:
            raise ValueError(
                f"a KV cache of {max_bytes} bytes holds no request of {longest} tokens, which needs "
                f"{longest * row_bytes} bytes: raise the bound or lower max_model_len"
            )
        self.max_batch, self.longest, self.device = max_batch, longest, device
        self.shapes, self.held = dict(planes), True
        self.allocate()
        self.shortest = max(1, self.rows // max_batch)
        self._set_stride(self.shortest)

    def _plane(self, shape: PlaneShape) -> torch.Tensor:
        return torch.zeros(
            shape.layers, self.rows, shape.width, dtype=shape.dtype, device=self.device
        )

    def _set_stride(self, stride: int) -> None:
        self.stride = stride
        self.slots = min(self.max_batch, self.rows // stride)
        self.first_row = torch.arange(self.slots, device=self.device) * stride

    def add_plane(self, name: str, shape: PlaneShape) -> None:
        """One more plane, empty, beside the bound that the others obey."""
        self.shapes[name] = shape
        if self.held:
            self.planes[name] = self._plane(shape)

    def allocate(self) -> None:
        """All planes, empty."""
        self.planes = {name: self._plane(shape) for name, shape in self.shapes.items()}
        self.held = True

    def release(self) -> None:
        """Give the memory back until `allocate`; what the planes hold is lost."""
        self.planes, self.held = {}, False

    @property
    def num_bytes(self) -> int:
        return sum(plane.numel() * plane.itemsize for plane in self.planes.values())

    def slots_of(self, stride: int) -> int:
        """Slots that a division into `stride` rows each would have."""
        return min(self.max_batch, self.rows // stride)

    def copy(self, source: int, target: int, *, length: int) -> None:
        """Copy the first `length` rows of slot `source` to slot `target`."""
        a, b = source * self.stride, target * self.stride
        for plane in self.planes.values():
            plane[:, b : b + length] = plane[:, a : a + length]

    def move_rows(self, name: str, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """Copy single rows of one plane, all read before any is written."""
        plane = self.planes[name]
        plane.index_copy_(1, targets, plane.index_select(1, sources))

    def divide(self, stride: int, *, lengths: list[int]) -> None:
        """Slots of `stride` rows from now on; slot i keeps its first `lengths[i]` rows."""
        assert len(lengths) <= self.slots_of(stride) and max(lengths, default=0) <= stride
        before = self.stride
        order = range(len(lengths))
        for slot in reversed(order) if stride > before else order:
            a, b, length = slot * before, slot * stride, lengths[slot]
            if a != b:
                for plane in self.planes.values():  # cloned: the ranges may overlap
                    plane[:, b : b + length] = plane[:, a : a + length].clone()
        self._set_stride(stride)
