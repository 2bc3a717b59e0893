"""The decoder layer of a subnet: megatron-core's, with sliced linears and a layer that can be skipped.

The extension points are the linears, because everything else of SelfAttention and MLP reads its sizes
from the tensors: the query, key and value rows that are not selected are never computed, so attention
runs on the kept heads only, and the activation on the kept neurons only. A skipped layer runs no kernel
and no collective. All of it follows the plan that `SubnetTransformerLayer.set_plan` was given last; the
plan must not change between the forward pass of a step and its backward pass.

n query heads, g key/value groups, r = n / g, d head dim, f MLP neurons, t TP size, B neurons per block.
"""

from collections.abc import Callable
from dataclasses import dataclass

from megatron_tlt.models.fp8_linear import Fp8Products
from megatron_tlt.models.local_linear import LocalColumnParallelLinear, LocalRowParallelLinear
from megatron_tlt.ops.linear import gemm_dtype
from megatron_tlt.subnet.cuts import Cut, SlicedParameter, on_backward
from megatron_tlt.subnet.draw import LayerPlan
from megatron_tlt.subnet.shape import Pools

import torch
from megatron.core.tensor_parallel import (
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.transformer_layer import TransformerLayer


class _ScaledLinear(torch.autograd.Function):
    """`x w^T * scale + bias * bias_scale`, the scale inside the GEMMs, forward and backward."""

    @staticmethod
    def forward(ctx, x, weight, bias, scale: float, bias_scale: float):
        ctx.save_for_backward(x, weight)
        ctx.scale, ctx.bias_scale, ctx.has_bias = scale, bias_scale, bias is not None
        dtype = gemm_dtype(x)
        bias = None if bias is None else bias.to(dtype)
        out = _gemm(bias, x.to(dtype), weight.to(dtype).t(), beta=bias_scale, alpha=scale)
        return out.to(x.dtype)

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        dtype, grad_x, grad_weight = gemm_dtype(x), None, None
        grad = grad.to(dtype)
        if ctx.needs_input_grad[0]:
            grad_x = _gemm(None, grad, weight.to(dtype), alpha=ctx.scale).to(x.dtype)
        if ctx.needs_input_grad[1]:
            grad_weight = _gemm(None, grad.t(), x.to(dtype), alpha=ctx.scale).to(weight.dtype)
        grad_bias = (grad.sum(dim=0) * ctx.bias_scale).to(x.dtype) if ctx.has_bias else None
        return grad_x, grad_weight, grad_bias, None, None


def _gemm(
    bias: torch.Tensor | None, a: torch.Tensor, b: torch.Tensor, *, beta: float = 0.0, alpha: float
) -> torch.Tensor:
    """`a b * alpha + bias * beta`; without a bias its place is not read."""
    if bias is None:
        return torch.addmm(a.new_empty(1), a, b, beta=0.0, alpha=alpha)
    return torch.addmm(bias, a, b, beta=beta, alpha=alpha)


def scaled_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    scale: float,
    bias_scale: float = 1.0,
) -> torch.Tensor:
    """`[..., in]`, `[out, in]` -> `[..., out]`: `x w^T * scale + bias * bias_scale`."""
    flat = _ScaledLinear.apply(x.reshape(-1, x.shape[-1]), weight, bias, scale, bias_scale)
    return flat.view(*x.shape[:-1], weight.shape[0])


class SubnetColumnParallelLinear(LocalColumnParallelLinear):
    """Computes the selected output rows only: `[s, b, h] -> [s, b, kept/t]`."""

    def __init__(self, *args: object, **options: object) -> None:
        super().__init__(*args, **options)
        self.sliced_weight, self.sliced_bias = SlicedParameter(), SlicedParameter()

    def set_cut(self, cut: Cut | None) -> None:
        """Rows to compute; None: all."""
        self.sliced_weight.set_cut(cut)
        self.sliced_bias.set_cut(cut)

    def renew(self) -> None:
        """The weights have changed."""
        self.sliced_weight.renew()
        self.sliced_bias.renew()

    def forward(
        self,
        input_: torch.Tensor,
        weight: torch.Tensor | None = None,
        runtime_gather_output: bool | None = None,
    ) -> tuple[torch.Tensor, None]:
        if self.sliced_weight.cut is None or self.tp_group.size() > 1:
            return super().forward(input_, weight, runtime_gather_output)
        return self.compute(input_, self.sliced_weight.of(self.weight), self._kept_bias()), None

    def _kept_bias(self) -> torch.Tensor | None:
        return None if self.bias is None else self.sliced_bias.of(self.bias)

    def _forward_impl(self, input, weight, *args, **options):
        """megatron-core's GEMM with its collectives, on the slice."""
        if self.sliced_weight.cut is not None:
            weight = self.sliced_weight.of(self.weight)
            options["bias"] = self._kept_bias()
        return super()._forward_impl(input, weight, *args, **options)


class SubnetRowParallelLinear(LocalRowParallelLinear):
    """Reads the selected input columns only, and scales what it computed: `[s, b, kept/t] -> [s, b, h]`.

    The scale is 1 / (fraction kept), so that the expectation over draws is the full output; the bias is
    not part of it.
    """

    compute_scaled = staticmethod(scaled_linear)

    def __init__(self, *args: object, **options: object) -> None:
        super().__init__(*args, **options)
        self.sliced_weight = SlicedParameter()
        self.scale = self.bias_scale = 1.0

    def set_cut(self, cut: Cut | None, *, scale: float = 1.0, bias_scale: float = 1.0) -> None:
        """Columns to read (None: all) and the factors of the output and of the bias."""
        self.sliced_weight.set_cut(cut)
        self.scale, self.bias_scale = scale, bias_scale

    def renew(self) -> None:
        """The weights have changed."""
        self.sliced_weight.renew()

    def forward(self, input_: torch.Tensor) -> tuple[torch.Tensor, None]:
        if self.sliced_weight.cut is None and self.scale == self.bias_scale == 1.0:
            return super().forward(input_)
        weight, parallel = self.sliced_weight.of(self.weight), self.tp_group.size() > 1
        bias = None if parallel else self.bias
        output = self.compute_scaled(
            input_, weight, bias, scale=self.scale, bias_scale=self.bias_scale
        )
        if not parallel:
            return output, None
        if self.sequence_parallel:
            output = reduce_scatter_to_sequence_parallel_region(output, group=self.tp_group)
        else:
            output = reduce_from_tensor_model_parallel_region(output, group=self.tp_group)
        return output if self.bias is None else output + self.bias * self.bias_scale, None


class Fp8SubnetColumnParallelLinear(Fp8Products, SubnetColumnParallelLinear):
    """The selected output rows in FP8."""


class Fp8SubnetRowParallelLinear(Fp8Products, SubnetRowParallelLinear):
    """The selected input columns in FP8; the scale comes after the product, in high precision, so that the
    operands fill the range of FP8 as those of the full layer do."""

    def compute_scaled(
        self,
        input: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        *,
        scale: float,
        bias_scale: float,
    ) -> torch.Tensor:
        """As `scaled_linear`."""
        output = self.compute(input, weight, group=self.tp_group) * scale
        return output if bias is None else output + bias * bias_scale


@dataclass(frozen=True, slots=True)
class SkipCalls:
    """What data parallelism must be told about a layer that does not run; set by the controller."""

    before: Callable[[], None]
    """In the forward pass: its parameters' all-gather need not be waited for, but has to go on."""
    after: Callable[[], None] | None
    """In the backward pass: its gradients, all zero, are ready; None where nobody waits for them."""


class SubnetTransformerLayer(TransformerLayer):
    """megatron-core's layer, whole, with part of its heads and neurons, or not at all."""

    def __init__(self, *args: object, **options: object) -> None:
        super().__init__(*args, **options)
        self.is_active = True
        self.skip_calls: SkipCalls | None = None
        self._full_heads = (
            self.self_attention.num_attention_heads_per_partition,
            self.self_attention.num_query_groups_per_partition,
        )

    @property
    def linears(self) -> tuple[torch.nn.Module, ...]:
        """qkv, proj, fc1, fc2."""
        attention, mlp = self.self_attention, self.mlp
        return attention.linear_qkv, attention.linear_proj, mlp.linear_fc1, mlp.linear_fc2

    def set_plan(self, plan: LayerPlan | None, pools: Pools) -> None:
        """Run as `plan` says from now on; None: skip."""
        self.is_active = plan is not None
        if plan is None:
            return
        cuts = layer_cuts(plan, pools, config=self.config, tp_group=self.tp_group)
        qkv, proj, fc1, fc2 = self.linears
        qkv.set_cut(cuts.qkv)
        proj.set_cut(cuts.proj, scale=plan.head_scale, bias_scale=plan.bias_scale)
        fc1.set_cut(cuts.fc1)
        fc2.set_cut(cuts.fc2, scale=plan.mlp_scale, bias_scale=plan.bias_scale)
        self._set_heads((cuts.heads, cuts.groups))

    def set_full(self) -> None:
        """Run whole and unscaled."""
        self.is_active = True
        for piece in self.linears:
            piece.set_cut(None)
        self._set_heads(self._full_heads)

    def _set_heads(self, counts: tuple[int, int]) -> None:
        attention = self.self_attention
        attention.num_attention_heads_per_partition = counts[0]
        attention.num_query_groups_per_partition = counts[1]

    def renew(self) -> None:
        """The weights have changed: gather the slices again."""
        for piece in self.linears:
            piece.renew()

    def cut_parameters(self) -> dict[torch.nn.Parameter, Cut]:
        """The parameters of which a part runs, and that part."""
        parts = {}
        for piece in self.linears:
            cut = piece.sliced_weight.cut
            if cut is not None:
                parts[piece.weight] = cut
                if cut.dim == 0 and piece.bias is not None:
                    parts[piece.bias] = cut
        return parts

    def forward(self, hidden_states: torch.Tensor, *args: object, **options: object):
        """`[s, b, h]` -> (`[s, b, h]`, context)."""
        if self.is_active:
            return super().forward(hidden_states, *args, **options)
        if self.skip_calls is not None:
            self.skip_calls.before()
            if self.skip_calls.after is not None and hidden_states.requires_grad:
                hidden_states = on_backward(hidden_states, self.skip_calls.after)
        return hidden_states, options.get("context")


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerCuts:
    """A layer plan in local rows and columns of one TP rank."""

    qkv: Cut | None
    proj: Cut | None
    fc1: Cut | None
    fc2: Cut | None
    heads: int
    """Query heads of this rank that run."""
    groups: int
    """Key/value groups of this rank that run."""


def layer_cuts(
    plan: LayerPlan, pools: Pools, *, config: object, tp_group: torch.distributed.ProcessGroup
) -> LayerCuts:
    """Where `plan` lies in megatron-core's layouts.

    linear_qkv: for each group r query heads, then key and value, d rows each. linear_proj: columns in the
    order of the query heads. linear_fc1: neurons; gated, the rank's gate rows, then its up rows.
    """
    rank, ranks = tp_group.rank(), tp_group.size()
    d, r = config.kv_channels, config.num_attention_heads // config.num_query_groups
    groups = config.num_query_groups // ranks
    units = _local(plan.heads, pools.heads.total, rank, ranks)
    if units is None:
        qkv = proj = None
        heads, kept_groups = groups * r, groups
    elif pools.gqa_unit == "heads":
        qkv_rows = [unit // r * (r + 2) + unit % r for unit in units]
        qkv_rows += [group * (r + 2) + r + kv for group in range(groups) for kv in (0, 1)]
        qkv, proj = Cut(0, d, tuple(sorted(qkv_rows))), Cut(1, d, tuple(units))
        heads, kept_groups = len(units), groups
    else:
        qkv, proj = Cut(0, (r + 2) * d, tuple(units)), Cut(1, r * d, tuple(units))
        heads, kept_groups = len(units) * r, len(units)
    fc1 = fc2 = None
    blocks = _local(plan.mlp, pools.mlp.total, rank, ranks)
    if blocks is not None:
        size, count = pools.mlp_block_size, pools.mlp.total // ranks
        rows = [*blocks, *(count + x for x in blocks)] if config.gated_linear_unit else blocks
        fc1, fc2 = Cut(0, size, tuple(rows)), Cut(1, size, tuple(blocks))
    return LayerCuts(qkv=qkv, proj=proj, fc1=fc1, fc2=fc2, heads=heads, groups=kept_groups)


def _local(
    units: tuple[int, ...] | None, total: int, rank: int, ranks: int
) -> list[int] | None:
    """The units that lie on this TP rank, numbered from its first; None: all."""
    if units is None:
        return None
    size = total // ranks
    return [unit - rank * size for unit in units if rank * size <= unit < (rank + 1) * size]
