"""The decoder layer of a drafter in training: several passes over one batch, packed or not.

Legend: b lines, s rows, h hidden, n heads, d head dim.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import nn

Past = list[tuple[torch.Tensor, torch.Tensor]]
"""Keys and values of each pass so far."""


class LayerSizes(Protocol):
    """What the layer reads of `models.drafter.DrafterConfig`."""

    layout: str
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    head_dim: int
    norm_epsilon: float


@dataclass(frozen=True, slots=True)
class Rows:
    """Where the rows of a batch stand, `[b, s]` each."""

    positions: torch.Tensor
    """Place in the row's own sequence."""
    segments: torch.Tensor | None = None
    """Number of the row's sequence: rows see their own alone. None: one sequence a line."""

    @staticmethod
    def unpacked(tokens: torch.Tensor) -> "Rows":
        """Of tokens `[b, s]`, one sequence a line."""
        return Rows(torch.arange(tokens.shape[1], device=tokens.device).expand(1, -1))

    def visible(self, lag: int) -> torch.Tensor:
        """bool `[b, s, s]`: row i sees row k of its own sequence up to k = i - lag."""
        places = torch.arange(self.positions.shape[1], device=self.positions.device)
        seen = (places <= places[:, None] - lag)[None]
        if self.segments is None:
            return seen
        return seen & (self.segments[:, :, None] == self.segments[:, None, :])


class DraftLayer(nn.Module):
    """One layer; EAGLE-3's takes embedding and state side by side, EAGLE-1/2's has no input norm."""

    def __init__(self, config: LayerSizes) -> None:
        super().__init__()
        self.eagle3, size = config.layout == "eagle3", config.hidden_size
        norm = dict(eps=config.norm_epsilon)
        if self.eagle3:
            self.input_layernorm = nn.RMSNorm(size, **norm)
            self.hidden_norm = nn.RMSNorm(size, **norm)
        self.self_attn = _Attention(config)
        self.post_attention_layernorm = nn.RMSNorm(size, **norm)
        self.mlp = _Mlp(config)

    def forward(self, x: torch.Tensor, table: torch.Tensor, past: Past, rows: Rows) -> torch.Tensor:
        inner = residual = x
        if self.eagle3:
            embedded, residual = x.chunk(2, -1)
            inner = torch.cat((self.input_layernorm(embedded), self.hidden_norm(residual)), -1)
        x = residual + self.self_attn(inner, table, past, rows)
        return x + self.mlp(self.post_attention_layernorm(x))


class _Mlp(nn.Module):
    def __init__(self, config: LayerSizes) -> None:
        super().__init__()
        sizes = config.hidden_size, config.ffn_hidden_size
        self.gate_proj, self.up_proj = nn.Linear(*sizes, bias=False), nn.Linear(*sizes, bias=False)
        self.down_proj = nn.Linear(*reversed(sizes), bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class _Attention(nn.Module):
    def __init__(self, config: LayerSizes) -> None:
        super().__init__()
        self.heads, self.groups, self.dim = (
            config.num_attention_heads, config.num_query_groups, config.head_dim,
        )  # fmt: skip
        width = config.hidden_size * (2 if config.layout == "eagle3" else 1)
        self.q_proj = nn.Linear(width, self.heads * self.dim, bias=False)
        self.k_proj = nn.Linear(width, self.groups * self.dim, bias=False)
        self.v_proj = nn.Linear(width, self.groups * self.dim, bias=False)
        self.o_proj = nn.Linear(self.heads * self.dim, config.hidden_size, bias=False)

    def forward(self, x: torch.Tensor, table: torch.Tensor, past: Past, rows: Rows) -> torch.Tensor:
        """Appends this pass's keys and values to `past`."""
        q = _rotate(self._heads(self.q_proj(x), self.heads), table)
        k = _rotate(self._heads(self.k_proj(x), self.groups), table)
        v = self._heads(self.v_proj(x), self.groups)
        repeats = self.heads // self.groups
        k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
        past.append((k, v))
        if len(past) > 1:
            out = _attend_passes(q, past, rows)
        elif rows.segments is None:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=rows.visible(0)[:, None])
        return self.o_proj(out.transpose(1, 2).flatten(2))

    def _heads(self, x: torch.Tensor, count: int) -> torch.Tensor:
        return x.unflatten(-1, (count, self.dim)).transpose(1, 2)  # [b, n, s, d]


def _attend_passes(q: torch.Tensor, past: Past, rows: Rows) -> torch.Tensor:
    """Attention of pass j = len(past) - 1 over pass 0 up to row i - j, then pass m at row i - j + m."""
    j, count = len(past) - 1, q.shape[2]
    scale = q.shape[-1] ** -0.5
    first = (q @ past[0][0].transpose(-1, -2)) * scale
    first = first.masked_fill(~rows.visible(j)[:, None], float("-inf"))
    columns, values = [first], []
    for m in range(1, j + 1):
        key, value = (_down(x, j - m) for x in past[m])
        score = (q * key).sum(-1, keepdim=True) * scale
        absent = (rows.positions < j - m)[:, None, :, None]
        columns.append(score.masked_fill(absent, float("-inf")))
        values.append(value)
    weights = torch.cat(columns, -1).softmax(-1)
    out = weights[..., :count] @ past[0][1]
    for m, value in enumerate(values):
        out = out + weights[..., count + m : count + m + 1] * value
    return out


def _down(x: torch.Tensor, rows: int) -> torch.Tensor:
    """Row i becomes row i - rows, zeros on top."""
    return F.pad(x, (0, 0, rows, 0))[:, :, : x.shape[2]] if rows else x


def rotary_angles(positions: torch.Tensor, *, head_dim: int, base: float) -> torch.Tensor:
    """Angles `[b, 1, s, d / 2]` of positions `[b, s]`."""
    exponent = torch.arange(0, head_dim, 2, device=positions.device).float() / head_dim
    return positions[:, None, :, None].float() * base**-exponent


def _rotate(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Hugging Face's half-split rotation of `[b, n, s, d]`."""
    a, b = x.chunk(2, -1)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)
