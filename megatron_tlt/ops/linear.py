"""The linear layer of the `local` back-end: its GEMMs, its collectives, its weight gradient.

Same mathematics as megatron's `LinearWithGradAccumulationAndAsyncCommunication`, with two differences:
the weight gradient is added to `main_grad` inside the GEMM (megatron does so with Apex on CUDA only), and
a CPU without bf16 GEMMs computes in float32 and rounds the result, which has the numerics of a bf16 GEMM
with float32 sums; torch's own bf16 GEMM is a scalar loop there, up to a hundred times slower.
"""

import functools

import torch
import torch.distributed as dist
import torch.nn.functional as F


@functools.cache
def native_bf16_gemm() -> bool:
    """Whether oneDNN has bf16 kernels for this CPU."""
    return torch.backends.mkldnn.is_available() and bool(
        torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )


def gemm_dtype(tensor: torch.Tensor) -> torch.dtype:
    """The dtype in which products of `tensor` are computed."""
    emulated = tensor.dtype == torch.bfloat16 and not tensor.is_cuda and not native_bf16_gemm()
    return torch.float32 if emulated else tensor.dtype


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        input: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        group: dist.ProcessGroup | None,
        allreduce_dgrad: bool,
        sequence_parallel: bool,
    ) -> torch.Tensor:
        ctx.save_for_backward(input, weight)
        # Not saved: autograd would refuse the sums that other layers add to it in place.
        ctx.main_grad = getattr(weight, "main_grad", None)
        ctx.parameter = None if ctx.main_grad is None else weight
        ctx.use_bias = bias is not None
        ctx.group, ctx.allreduce_dgrad = group, allreduce_dgrad
        ctx.sequence_parallel = sequence_parallel
        dtype = gemm_dtype(input)
        total = gather_sequence(input, group) if sequence_parallel else input
        bias = None if bias is None else bias.to(dtype)
        return F.linear(total.to(dtype), weight.to(dtype), bias).to(input.dtype)

    @staticmethod
    def backward(ctx, grad_output: torch.Tensor):
        input, weight = ctx.saved_tensors
        dtype, handle, grad_input = gemm_dtype(input), None, None
        grad = grad_output.reshape(-1, grad_output.shape[-1]).to(dtype)
        if ctx.needs_input_grad[0]:
            grad_input = (grad @ weight.to(dtype)).to(input.dtype)
            grad_input = grad_input.view(*grad_output.shape[:-1], -1)
            if ctx.sequence_parallel:
                whole, grad_input = grad_input, torch.empty_like(input)
                handle = dist.reduce_scatter_tensor(
                    grad_input, whole, group=ctx.group, async_op=True
                )
            elif ctx.allreduce_dgrad:
                handle = dist.all_reduce(grad_input, group=ctx.group, async_op=True)
        grad_weight = None
        if ctx.needs_input_grad[1]:
            total = gather_sequence(input, ctx.group) if ctx.sequence_parallel else input
            total = total.reshape(-1, total.shape[-1]).to(dtype)
            grad_weight = _weight_gradient(ctx, grad, total)
        grad_bias = grad.sum(dim=0).to(grad_output.dtype) if ctx.use_bias else None
        if handle is not None:
            handle.wait()
        return grad_input, grad_weight, grad_bias, None, None, None


def _weight_gradient(ctx, grad: torch.Tensor, total: torch.Tensor) -> torch.Tensor | None:
    """The gradient, or, where it was added to `main_grad`, what tells data parallelism so."""
    if ctx.main_grad is None:
        return (grad.t() @ total).to(ctx.saved_tensors[1].dtype)
    if ctx.main_grad.dtype == grad.dtype:
        ctx.main_grad.addmm_(grad.t(), total)
    else:
        ctx.main_grad.add_(grad.t() @ total)
    if getattr(ctx.parameter, "embedding_ends_gradient", False):
        return None  # a tied head: the embedding's gradient still comes, and calls the hook
    return mark_added(ctx.parameter)


def mark_added(parameter: torch.Tensor) -> torch.Tensor:
    """Say that the gradient is in `main_grad`; the tensor is never read, but overlapping hooks insist
    on one."""
    parameter.grad_added_to_main_grad = True
    return torch.empty_like(parameter)


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx, tokens: torch.Tensor, weight: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(tokens)
        ctx.parameter = weight
        return F.embedding(tokens, weight)

    @staticmethod
    def backward(ctx, grad_output: torch.Tensor):
        (tokens,) = ctx.saved_tensors
        main_grad = ctx.parameter.main_grad
        rows = grad_output.reshape(-1, main_grad.shape[1]).to(main_grad.dtype)
        main_grad.index_add_(0, tokens.reshape(-1), rows)
        return None, mark_added(ctx.parameter)


def embedding(tokens: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Rows `[..., h]` of `weight` `[v, h]`; where it has a `main_grad`, the gradient is added to the rows
    that occur, instead of making one of the whole table first."""
    if not hasattr(weight, "main_grad"):
        return F.embedding(tokens, weight)
    return _Embedding.apply(tokens, weight)


def gather_sequence(input: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """`[s/t, b, h] -> [s, b, h]`."""
    total = input.new_empty(input.shape[0] * group.size(), *input.shape[1:])
    dist.all_gather_into_tensor(total, input.contiguous(), group=group)
    return total


def linear(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    group: dist.ProcessGroup | None = None,
    allreduce_dgrad: bool = False,
    sequence_parallel: bool = False,
) -> torch.Tensor:
    """`input [..., in] @ weight[out, in]^T + bias [out]`, in the input's dtype.

    With `sequence_parallel` the input `[s/t, b, in]` is gathered over `group` and its gradient scattered;
    with `allreduce_dgrad` the input's gradient is summed over `group`. Where the weight has a `main_grad`
    (megatron's DDP buffers) the weight's gradient is added there and `grad_added_to_main_grad` is set;
    a slice of a parameter has none and gets an ordinary gradient.
    """
    return _Linear.apply(input, weight, bias, group, allreduce_dgrad, sequence_parallel)
