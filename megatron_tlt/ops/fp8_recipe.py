"""The FP8 recipes of a linear layer: which scale each of its tensors gets.

- delayed: one scale a tensor, from the amax of earlier steps.
- tensorwise: one scale a tensor, from the tensor itself (TE's Float8CurrentScaling).
- blockwise: powers of two for tiles of 1 x 128 (input, gradient) and 128 x 128 (weight; TE's
  Float8BlockScaling).
- mxfp8: powers of two for 1 x 32 tiles along the sum of each product (TE's MXFP8BlockScaling).

With tiles along one direction a tensor and its transpose are two quantisations of the same input, so each
product gets the one that runs along its sum.
"""

from dataclasses import dataclass
from typing import Literal

from megatron_tlt.ops.fp8 import (
    E4M3, E5M2, FP8_MAX, Quantized, amax_of, current_scale, e8m0_scale, power_of_two_scale,
    quantize_tensor, quantize_tiles,
)  # fmt: skip

import torch

RecipeName = Literal["delayed", "tensorwise", "blockwise", "mxfp8"]
Format = Literal["e4m3", "hybrid"]
INPUT, WEIGHT, GRAD = range(3)
"""The tensors of a linear layer that are quantised; GRAD is the gradient of its output."""
NUM_TENSORS = 3
_BLOCK, _MX_BLOCK = 128, 32
_ALIGNMENT = {"delayed": 16, "tensorwise": 16, "blockwise": _BLOCK, "mxfp8": _MX_BLOCK}

Both = tuple[Quantized, Quantized | None]
"""A matrix quantised along its columns and, where asked for, its transpose along its rows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """What a linear layer must know. Example: Recipe(name="delayed", format="hybrid")."""

    name: RecipeName
    format: Format = "hybrid"
    """e4m3 for all tensors, or e4m3 forward and e5m2 for gradients (hybrid)."""
    margin: int = 0
    """delayed: the scale is divided by 2^margin."""
    amax_history_len: int = 1
    """delayed: steps of the window."""
    amax_compute_algo: Literal["most_recent", "max"] = "most_recent"
    """delayed: which amax of the window counts."""

    @property
    def alignment(self) -> int:
        """Every size of a product must be a multiple of this (TE and cuBLAS: 16; tiles: their length)."""
        return _ALIGNMENT[self.name]

    @property
    def is_delayed(self) -> bool:
        return self.name == "delayed"

    def dtype(self, tensor: int) -> torch.dtype:
        """The format of INPUT, WEIGHT or GRAD."""
        return E5M2 if tensor == GRAD and self.format == "hybrid" else E4M3

    def largest(self) -> torch.Tensor:
        """`[3]`: the largest value of each tensor's format."""
        return torch.tensor([FP8_MAX[self.dtype(tensor)] for tensor in range(NUM_TENSORS)])

    def quantize(
        self, x: torch.Tensor, tensor: int, *, columnwise: bool, scale: torch.Tensor | None = None
    ) -> Both:
        """`x` `[m, k]` for a sum over k and, with `columnwise`, its transpose for a sum over m.

        `scale` (a scalar) is needed by delayed scaling and by no other recipe. Raises ValueError for sizes
        that tiles do not cover.
        """
        dtype = self.dtype(tensor)
        if self.name in ("delayed", "tensorwise"):
            assert (scale is not None) == self.is_delayed
            if scale is None:
                scale, _ = current_scale(amax_of(x), dtype)
            whole = quantize_tensor(x, scale, dtype)
            return whole, whole.t() if columnwise else None
        if self.name == "blockwise" and tensor == WEIGHT:
            square = quantize_tiles(
                x, dtype, tile=(_BLOCK, _BLOCK), scaling=power_of_two_scale
            )
            return square, square.t() if columnwise else None
        scaling = power_of_two_scale if self.name == "blockwise" else e8m0_scale
        length = self.alignment
        along_rows = quantize_tiles(x, dtype, tile=(1, length), scaling=scaling)
        if not columnwise:
            return along_rows, None
        return along_rows, quantize_tiles(x, dtype, tile=(length, 1), scaling=scaling).t()
