"""Element-wise parts of a decoder layer with few passes over memory and little kept for the backward pass."""

import functools

import torch
import torch.nn.functional as F

Tables = tuple[torch.Tensor, torch.Tensor]


class _Swiglu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, gate_up: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gate_up)
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx, grad_output: torch.Tensor) -> torch.Tensor:
        (gate_up,) = ctx.saved_tensors
        gate, up = gate_up.chunk(2, dim=-1)
        grad = torch.empty_like(gate_up)
        grad_gate, grad_up = grad.chunk(2, dim=-1)
        activated = F.silu(gate)
        torch.mul(grad_output, activated, out=grad_up)
        torch.mul(grad_output, up, out=activated)
        torch.ops.aten.silu_backward.grad_input(activated, gate, grad_input=grad_gate)
        return grad


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """`silu(gate) * up` of `[..., 2f]` = [gate, up]; keeps its input only and recomputes the rest."""
    return _Swiglu.apply(gate_up)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        input: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
    ) -> torch.Tensor:
        x = input.float()
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        scale = norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(input, weight, scale)
        return (x * scale).mul_(weight.float()).to(input.dtype)

    @staticmethod
    def backward(ctx, grad_output: torch.Tensor):
        input, weight, scale = ctx.saved_tensors
        normed, grad = input.float() * scale, grad_output.float()
        product = grad * normed
        grad_weight = product.flatten(0, -2).sum(dim=0).to(weight.dtype)
        mean = torch.mv(product.flatten(0, -2), weight.float()).div_(product.shape[-1])
        mean = mean.view(*product.shape[:-1], 1)
        torch.mul(grad, weight.float(), out=product)
        product.addcmul_(normed, mean, value=-1.0).mul_(scale)
        return product.to(input.dtype), grad_weight, None


def rms_norm(input: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`input / rms(input) * weight` over the last dimension, computed in float32 and rounded once."""
    return _RMSNorm.apply(input, weight, eps)


def rotary_tables(angles: torch.Tensor, dtype: torch.dtype) -> Tables:
    """cos and sin of `[s, 1, 1, d]` angles whose halves are equal: two `[s, 1, 1, 1, d/2]` tables."""
    half = angles[..., : angles.shape[-1] // 2].unsqueeze(2)
    return half.cos().to(dtype), half.sin().to(dtype)


@functools.lru_cache(maxsize=8)
def cached_rotary_tables(angles: torch.Tensor, dtype: torch.dtype) -> Tables:
    """`rotary_tables` of a tensor that every layer of every step is given again."""
    with torch.inference_mode(False):  # the first to ask may be in it, the next to ask may train
        return rotary_tables(angles, dtype)


@functools.lru_cache(maxsize=8)
def packed_lengths(cu_seqlens: torch.Tensor) -> tuple[int, ...]:
    """Lengths of packed sequences from their `[n + 1]` bounds, read once for all layers."""
    return tuple(cu_seqlens.diff().tolist())


@functools.lru_cache(maxsize=8)
def packed_rotary_tables(
    angles: torch.Tensor, cu_seqlens: torch.Tensor, dtype: torch.dtype
) -> Tables:
    """`rotary_tables` of packed sequences, each of which begins at position 0 of `angles`."""
    with torch.inference_mode(False):
        starts = [torch.arange(n, device=angles.device) for n in packed_lengths(cu_seqlens)]
        return rotary_tables(angles[torch.cat(starts)], dtype)


class _SplitRotary(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        mixed: torch.Tensor,
        groups: int,
        per_group: int,
        cos: torch.Tensor,
        sin: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        s, b, width = mixed.shape
        d = width // (groups * (per_group + 2))
        ctx.save_for_backward(cos, sin)
        ctx.sizes = s, b, groups, per_group, d
        mixed = mixed.view(s, b, groups, per_group + 2, d)
        query = mixed.new_empty(b, groups, per_group, s, d).permute(3, 0, 1, 2, 4)
        key = mixed.new_empty(b, groups, 1, s, d).permute(3, 0, 1, 2, 4)
        value = mixed.new_empty(b, groups, 1, s, d).permute(3, 0, 1, 2, 4)
        _rotate(mixed[..., :per_group, :], query, cos, sin, sign=1.0)
        _rotate(mixed[..., per_group : per_group + 1, :], key, cos, sin, sign=1.0)
        value.copy_(mixed[..., per_group + 1 :, :])
        return query.flatten(2, 3), key.flatten(2, 3), value.flatten(2, 3)

    @staticmethod
    def backward(ctx, *grads: torch.Tensor):
        cos, sin = ctx.saved_tensors
        s, b, groups, per_group, d = ctx.sizes
        query, key, value = (grad.unflatten(2, (groups, -1)) for grad in grads)
        mixed = query.new_empty(s, b, groups, per_group + 2, d)
        _rotate(query, mixed[..., :per_group, :], cos, sin, sign=-1.0)
        _rotate(key, mixed[..., per_group : per_group + 1, :], cos, sin, sign=-1.0)
        mixed[..., per_group + 1 :, :].copy_(value)
        return mixed.view(s, b, -1), None, None, None, None


def _rotate(
    source: torch.Tensor, out: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, sign: float
) -> None:
    first, second = source.chunk(2, dim=-1)
    out_first, out_second = out.chunk(2, dim=-1)
    torch.mul(first, cos, out=out_first)
    out_first.addcmul_(second, sin, value=-sign)
    torch.mul(second, cos, out=out_second)
    out_second.addcmul_(first, sin, value=sign)


def split_rotary(
    mixed: torch.Tensor, *, groups: int, per_group: int, tables: Tables
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Megatron's mixed projection into query, key and value, the first two turned by their positions.

    mixed: `[s, b, g * (r + 2) * d]`, per group r query heads, then key and value. Gives query
    `[s, b, g * r, d]`, key and value `[s, b, g, d]`, laid out as `[b, n, s, d]` for attention. `tables`:
    `rotary_tables`; halves are paired as in Llama (no interleaving).
    """
    return _SplitRotary.apply(mixed, groups, per_group, *tables)
