"""A linear layer whose three products run on FP8 operands; its collectives are those of ops/linear.py.

    forward   y  = x  w^T     x and w quantised along the input features
    dgrad     dx = dy w       dy and w^T quantised along the output features
    wgrad     dw = dy^T x     both quantised along the tokens

Biases and their gradients stay in high precision. What is kept for the backward pass is FP8: x quantised
along the tokens (with sequence parallelism the local part of x itself, gathered and quantised again) and w
along the output features.
"""

from typing import Protocol

from megatron_tlt.ops.fp8 import Quantized, product
from megatron_tlt.ops.fp8_recipe import GRAD, INPUT, WEIGHT, Both
from megatron_tlt.ops.linear import gather_sequence, gemm_dtype, mark_added

import torch
import torch.distributed as dist


class Quantizer(Protocol):
    """What quantises the tensors of one layer, and notes their amax where its recipe wants that."""

    def __call__(self, x: torch.Tensor, tensor: int, *, columnwise: bool, record: bool) -> Both:
        """`x` `[m, k]`; `tensor` is INPUT, WEIGHT or GRAD; `record` its amax."""


def _flat(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(-1, x.shape[-1])


class _Fp8Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        input: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        quantizer: Quantizer,
        group: dist.ProcessGroup | None,
        reduction: tuple[bool, bool],
        trains: bool,
    ) -> torch.Tensor:
        ctx.allreduce_dgrad, ctx.sequence_parallel = reduction
        total = gather_sequence(input, group) if ctx.sequence_parallel else input
        need_x, need_w = (trains and needed for needed in ctx.needs_input_grad[:2])
        ctx.gathers = need_w and ctx.sequence_parallel
        x, x_t = quantizer(
            _flat(total), INPUT, columnwise=need_w and not ctx.gathers, record=trains
        )
        w, w_t = quantizer(weight, WEIGHT, columnwise=need_x, record=trains)
        kept = [q for q in (x_t, w_t) if q is not None]
        ctx.tiles = [q.tile for q in kept]
        tensors = [part for q in kept for part in (q.data, q.scale_inv)]
        ctx.save_for_backward(*tensors, *([input] if ctx.gathers else []))
        # Not saved: autograd would refuse the sums that other layers add to it in place.
        ctx.main_grad = getattr(weight, "main_grad", None)
        ctx.parameter = None if ctx.main_grad is None else weight
        ctx.weight_dtype, ctx.input_shape, ctx.use_bias = weight.dtype, input.shape, bias is not None
        ctx.quantizer, ctx.group = quantizer, group
        out = product(x, w, dtype=input.dtype, gemm_dtype=gemm_dtype(input))
        if bias is not None:
            out += bias
        return out.view(*total.shape[:-1], -1)

    @staticmethod
    def backward(ctx, grad_output: torch.Tensor):
        need_x, need_w = ctx.needs_input_grad[:2]
        *pairs, local_input = ctx.saved_tensors if ctx.gathers else (*ctx.saved_tensors, None)
        kept = [Quantized(*q) for q in zip(pairs[::2], pairs[1::2], ctx.tiles, strict=True)]
        dtypes = {"dtype": grad_output.dtype, "gemm_dtype": gemm_dtype(grad_output)}
        grad, grad_input, grad_weight, handle = _flat(grad_output), None, None, None
        rows, columns = ctx.quantizer(grad, GRAD, columnwise=need_w, record=True)
        if need_x:
            grad_input = product(rows, kept[-1], **dtypes).view(*grad_output.shape[:-1], -1)
            grad_input, handle = _begin_reduction(ctx, grad_input)
        if need_w:
            if ctx.gathers:
                total = _flat(gather_sequence(local_input, ctx.group))
                x_t = ctx.quantizer(total, INPUT, columnwise=True, record=False)[1]
            else:
                x_t = kept[0]
            grad_weight = _weight_gradient(ctx, product(columns, x_t, **dtypes))
        grad_bias = grad.sum(dim=0) if ctx.use_bias else None
        if handle is not None:
            handle.wait()
        return grad_input, grad_weight, grad_bias, None, None, None, None


def _begin_reduction(ctx, grad: torch.Tensor) -> tuple[torch.Tensor, dist.Work | None]:
    """Begin to sum the input's gradient over the group, as far as it is asked for."""
    if ctx.sequence_parallel:
        part = grad.new_empty(ctx.input_shape)
        return part, dist.reduce_scatter_tensor(part, grad, group=ctx.group, async_op=True)
    if ctx.allreduce_dgrad:
        return grad, dist.all_reduce(grad, group=ctx.group, async_op=True)
    return grad, None


def _weight_gradient(ctx, gradient: torch.Tensor) -> torch.Tensor:
    """The gradient, or, where it was added to `main_grad`, what tells data parallelism so."""
    if ctx.main_grad is None:
        return gradient.to(ctx.weight_dtype)
    ctx.main_grad.add_(gradient)
    return mark_added(ctx.parameter)


def fp8_linear(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    quantizer: Quantizer,
    group: dist.ProcessGroup | None = None,
    allreduce_dgrad: bool = False,
    sequence_parallel: bool = False,
) -> torch.Tensor:
    """`ops.linear.linear` on FP8 operands: the same arguments, and the layer's `quantizer`.

    Only where gradients are enabled are amax recorded and operands of the backward pass made, so evaluation
    takes any number of tokens. Raises ValueError for sizes that the recipe's tiles do not cover.
    """
    return _Fp8Linear.apply(
        input, weight, bias, quantizer, group, (allreduce_dgrad, sequence_parallel),
        torch.is_grad_enabled(),
    )  # fmt: skip
