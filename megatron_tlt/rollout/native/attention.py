"""One forward's tokens, and attention of those tokens over the slot cache.

Legend: t tokens of the forward, b requests of a block, w tokens a request, l cached positions, g
query groups, r query heads a group, d head dim.
"""

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

from megatron_tlt.ops.linear import native_bf16_gemm


@dataclass(slots=True)
class Block:
    """Tokens of neighbouring slots that attend in one call: `count` requests of `width` tokens each."""

    start: int
    """First of its tokens in the forward."""
    slot: int
    count: int
    width: int
    kv_len: int
    """Cached positions that the call reads from each slot."""
    mask: torch.Tensor | None = None
    """Additive `[b, 1, r * w, l]` (see `repeat_mask`); None: everything is visible."""
    pad: torch.Tensor | None = None
    """`[b * w]`: token (offset from `start`) at each place of the padded grid. None: the grid is full."""
    unpad: torch.Tensor | None = None
    """`[tokens]`: place in the grid of each token."""

    @property
    def num_tokens(self) -> int:
        return self.count * self.width if self.unpad is None else len(self.unpad)


@dataclass(slots=True)
class Batch:
    """Everything a forward needs besides weights and cache."""

    tokens: torch.Tensor
    """`[t]`"""
    positions: torch.Tensor
    """`[t]`, for rotary or learned positions."""
    rows: torch.Tensor
    """`[t]`, cache row that each token's key and value go to."""
    blocks: list[Block] = field(default_factory=list)


def attend(
    q: torch.Tensor, cache: torch.Tensor, block: Block, *, stride: int, groups: int
) -> torch.Tensor:
    """Attention of one block: q `[tokens, n, d]` to `[tokens, n * d]`.

    `cache` is one layer's `[rows, 2 * g * d]`, read in place: slots are equal, neighbouring ranges of
    rows. Query heads of a group stand as extra query positions, so keys are never repeated.
    """
    tokens, heads, dim = q.shape
    slots, width, repeats = block.count, block.width, heads // groups
    if block.pad is not None:
        q = q[block.pad]
    if width == 1:
        q = q.view(slots, groups, repeats, dim)
    else:
        q = q.view(slots, width, groups, repeats, dim).permute(0, 2, 3, 1, 4)
        q = q.reshape(slots, groups, repeats * width, dim)
    rows = cache[block.slot * stride : (block.slot + slots) * stride]
    kv = rows.view(slots, stride, 2, groups, dim)[:, : block.kv_len]
    k, v = kv.permute(2, 0, 3, 1, 4)
    if q.shape[2] == 1 and q.dtype == torch.bfloat16 and q.is_cpu and native_bf16_gemm():
        # A single query row takes torch's slow bf16 product of matrix and vector: two rows took a third to a
        # sixth of its time.
        out = F.scaled_dot_product_attention(q.expand(-1, -1, 2, -1), k, v, attn_mask=block.mask)
        return out[:, :, 0].reshape(slots, heads * dim)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=block.mask)
    if width == 1:
        return out.reshape(slots, heads * dim)
    out = out.view(slots, groups, repeats, width, dim).permute(0, 3, 1, 2, 4)
    out = out.reshape(slots * width, heads * dim)
    return out if block.unpad is None else out[block.unpad]


def causal_mask(
    lengths: torch.Tensor, *, width: int, kv_len: int, dtype: torch.dtype
) -> torch.Tensor:
    """Additive `[b, 1, w, l]`: token i of a request with `lengths` cached positions sees lengths + i + 1."""
    device = lengths.device
    last = lengths[:, None] + torch.arange(width, device=device)  # [b, w]
    hidden = torch.arange(kv_len, device=device) > last[..., None]
    return torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill_(
        hidden, float("-inf")
    )[:, None]


def repeat_mask(mask: torch.Tensor, *, repeats: int) -> torch.Tensor:
    """`[b, 1, w, l]` for the query order of `attend`; a single position broadcasts as it is."""
    return mask.repeat(1, 1, repeats, 1) if repeats > 1 and mask.shape[2] > 1 else mask
