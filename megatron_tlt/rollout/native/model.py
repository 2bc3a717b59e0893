"""The decoder: GPT-2, Llama, Qwen2 and Qwen3 in one class, tensor parallel over a group that is passed in.

Legend: t tokens, h hidden, v vocabulary, n query heads and g query groups of this rank, d head dim.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F

from megatron_tlt.rollout.native.attention import Batch, attend
from megatron_tlt.rollout.native.layers import Linear, Norm, rotary_table, rotate
from megatron_tlt.rollout.native.shape import ModelShape


class TensorParallel:
    """A process group, or the null object of size 1."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        self.size = dist.get_world_size(group) if group is not None else 1
        self.rank = dist.get_rank(group) if group is not None else 0

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        if self.size > 1:
            dist.all_reduce(x, group=self.group)
        return x

    def concat(self, x: torch.Tensor) -> torch.Tensor:
        """Gather `[t, v / size]` of all ranks to `[t, v]`."""
        if self.size == 1:
            return x
        parts = [torch.empty_like(x) for _ in range(self.size)]
        dist.all_gather(parts, x.contiguous(), group=self.group)
        return torch.cat(parts, -1)

    def agree(self, values: Sequence[int]) -> list[int]:
        """The first rank's small integers, on every rank."""
        if self.size == 1:
            return list(values)
        box = [list(values)]
        dist.broadcast_object_list(box, group_src=0, group=self.group)
        return box[0]


class Attention:
    """Self-attention of this rank's heads, without the output projection."""

    def __init__(
        self, shape: ModelShape, *, tp: TensorParallel, like: torch.Tensor, inputs: int | None = None
    ) -> None:
        self.heads = shape.num_attention_heads // tp.size
        self.groups = shape.num_query_groups // tp.size
        self.dim, self.epsilon = shape.head_dim, shape.norm_epsilon
        width = (self.heads + 2 * self.groups) * self.dim
        self.qkv = Linear(inputs or shape.hidden_size, width, bias=shape.qkv_bias, like=like)
        self.out = Linear(
            self.heads * self.dim, shape.hidden_size, bias=shape.output_bias, like=like
        )
        # One norm weight a head, so that queries and keys are normalised by one call.
        self.qk_norm = (
            like.new_ones(self.heads + self.groups, self.dim) if shape.qk_norm else None
        )

    def __call__(
        self,
        x: torch.Tensor,
        batch: Batch,
        cache: torch.Tensor,
        *,
        stride: int,
        table: torch.Tensor | None,
    ) -> torch.Tensor:
        """Writes keys and values of `x` `[t, h]` to `cache`, then attends: `[t, n * d]`."""
        qkv = self.qkv(x)
        split, last = self.heads * self.dim, (self.heads + self.groups) * self.dim
        qk = qkv[:, :last].unflatten(1, (-1, self.dim))
        if self.qk_norm is not None:
            qk.copy_(F.rms_norm(qk, (self.dim,), None, self.epsilon) * self.qk_norm)
        if table is not None:
            rotate(qk, table)
        cache.index_copy_(0, batch.rows, qkv[:, split:])
        q = qk[:, : self.heads]
        outs = [
            attend(
                q[block.start : block.start + block.num_tokens],
                cache,
                block,
                stride=stride,
                groups=self.groups,
            )
            for block in batch.blocks
        ]
        return outs[0] if len(outs) == 1 else torch.cat(outs)


class Mlp:
    """The feed-forward part, gated or not."""

    def __init__(self, shape: ModelShape, *, tp: TensorParallel, like: torch.Tensor) -> None:
        width = shape.ffn_hidden_size // tp.size
        self.gated, self.activation = shape.gated, shape.activation
        parts = 2 if self.gated else 1
        self.up = Linear(shape.hidden_size, parts * width, bias=shape.mlp_bias, like=like)
        self.down = Linear(width, shape.hidden_size, bias=shape.mlp_bias, like=like)

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        """Everything but the projection down: `[t, ffn / size]`."""
        x = self.up(x)
        if self.gated:
            gate, up = x.chunk(2, -1)
            return self._activate(gate).mul_(up)
        return self._activate(x)

    def _activate(self, x: torch.Tensor) -> torch.Tensor:
        if self.activation == "silu":
            return F.silu(x)
        return F.gelu(x, approximate="tanh" if self.activation == "gelu_tanh" else "none")


class Layer:
    """One pre-norm decoder layer."""

    def __init__(self, shape: ModelShape, *, tp: TensorParallel, like: torch.Tensor) -> None:
        norm = dict(epsilon=shape.norm_epsilon, bias=not shape.gated, like=like)
        self.tp = tp
        self.norm1, self.norm2 = Norm(shape.hidden_size, **norm), Norm(shape.hidden_size, **norm)
        self.attention = Attention(shape, tp=tp, like=like)
        self.mlp = Mlp(shape, tp=tp, like=like)

    def __call__(
        self,
        x: torch.Tensor,
        batch: Batch,
        cache: torch.Tensor,
        *,
        stride: int,
        table: torch.Tensor | None,
    ) -> torch.Tensor:
        """`x` `[t, h]` plus attention and MLP; `x` may be overwritten."""
        inner = self.attention(self.norm1(x), batch, cache, stride=stride, table=table)
        x = self._project(x, self.attention.out, inner)
        return self._project(x, self.mlp.down, self.mlp.inner(self.norm2(x)))

    def _project(self, x: torch.Tensor, linear: Linear, inner: torch.Tensor) -> torch.Tensor:
        if self.tp.size == 1:
            return linear.added_to(x, inner)
        x.add_(self.tp.sum(linear.without_bias(inner)))
        return x if linear.bias is None else x.add_(linear.bias)


class NativeModel:
    """Weights start at zero: fill them with `weights.WeightLoader`."""

    def __init__(
        self,
        shape: ModelShape,
        *,
        dtype: torch.dtype,
        device: torch.device,
        tp: TensorParallel | None = None,
    ) -> None:
        self.shape, self.tp = shape, tp or TensorParallel()
        shape.check_tensor_parallel(self.tp.size)
        like = torch.empty(0, dtype=dtype, device=device)
        self.dtype, self.device = dtype, device
        self.embedding = like.new_zeros(shape.vocab_size, shape.hidden_size)
        self.positions = self.table = None
        if shape.rotary_base:
            self.table = rotary_table(shape, device=device)
        else:
            self.positions = like.new_zeros(shape.max_position_embeddings, shape.hidden_size)
        self.layers = [Layer(shape, tp=self.tp, like=like) for _ in range(shape.num_layers)]
        self.norm = Norm(
            shape.hidden_size, epsilon=shape.norm_epsilon, bias=not shape.gated, like=like
        )
        # Every rank's slice has the same width; the last may hold rows beyond the vocabulary.
        self.head_rows = -(-shape.vocab_size // self.tp.size)
        self.head = Linear(shape.hidden_size, self.head_rows, bias=False, like=like)

    @property
    def kv_width(self) -> int:
        """Numbers that one token needs in one layer's cache."""
        return 2 * self.layers[0].attention.groups * self.shape.head_dim

    @property
    def repeats(self) -> int:
        """Query heads a query group."""
        return self.shape.num_attention_heads // self.shape.num_query_groups

    def linears(self) -> list[Linear]:
        inner = [
            linear
            for layer in self.layers
            for linear in (layer.attention.qkv, layer.attention.out, layer.mlp.up, layer.mlp.down)
        ]
        return [*inner, self.head]

    def norms(self) -> list[Norm]:
        inner = [norm for layer in self.layers for norm in (layer.norm1, layer.norm2)]
        return [*inner, self.norm]

    def embed(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """`[t]` to `[t, h]`."""
        x = F.embedding(tokens, self.embedding)
        return x if self.positions is None else x.add_(F.embedding(positions, self.positions))

    def forward(
        self,
        batch: Batch,
        cache: torch.Tensor,
        *,
        stride: int,
        layers: Sequence[int] | None = None,
        capture: dict[int, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Hidden states before the final norm, `[t, h]`.

        `cache` `[layers, rows, kv_width]` is read and written. `layers` names the layers to run (all by
        default; a subnet runs some). `capture` has its keys i filled with the states before layer i;
        key `num_layers` is the final state.
        """
        x = self.embed(batch.tokens, batch.positions)
        table = None if self.table is None else self.table[batch.positions][:, None]
        for index in range(self.shape.num_layers) if layers is None else layers:
            if capture is not None and index in capture:
                capture[index] = x.clone()
            x = self.layers[index](x, batch, cache[index], stride=stride, table=table)
        if capture is not None and self.shape.num_layers in capture:
            capture[self.shape.num_layers] = x.clone()
        return x

    def logits(self, final: torch.Tensor) -> torch.Tensor:
        """The head on states after the final norm: `[t, h]` to `[t, v]`."""
        return self.tp.concat(self.head(final))[:, : self.shape.vocab_size]
