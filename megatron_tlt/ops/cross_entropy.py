"""Cross entropy over a vocabulary that is split over tensor-parallel ranks and padded at its end.

Same mathematics as megatron's `vocab_parallel_cross_entropy` (max and sum of exponentials reduced over
the TP group), with one difference: columns at or beyond the true vocabulary never enter the softmax, so
the loss does not depend on the padding and padded rows get a gradient of exactly zero.
"""

import torch
import torch.distributed as dist


class _VocabParallelCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        logits: torch.Tensor,
        target: torch.Tensor,
        vocab_size: int,
        group: dist.ProcessGroup | None,
    ) -> torch.Tensor:
        world, rank = (1, 0) if group is None else (group.size(), group.rank())
        width = logits.shape[-1]
        first = rank * width
        valid = max(0, min(width, vocab_size - first))  # true columns that this rank holds
        shown = logits[..., :valid]
        largest = torch.full(target.shape, -torch.inf, device=logits.device)
        if valid:
            largest = shown.amax(dim=-1).float()
        if world > 1:
            dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
        probs = shown - largest.unsqueeze(-1)  # float32, as in Megatron, whatever the logits are
        here = (target >= first) & (target < first + valid)
        local_target = torch.where(here, target - first, 0).unsqueeze(-1)
        if valid:
            predicted = probs.gather(-1, local_target).squeeze(-1)
            predicted = torch.where(here, predicted, 0.0)
        else:
            predicted = torch.zeros_like(largest)
        total = probs.exp_().sum(dim=-1)
        if world > 1:
            both = torch.stack((predicted, total))
            dist.all_reduce(both, group=group)
            predicted, total = both
        probs.div_(total.unsqueeze(-1))
        ctx.save_for_backward(probs, here, local_target)
        ctx.width, ctx.dtype = width, logits.dtype
        return total.log() - predicted

    @staticmethod
    def backward(ctx, grad_loss: torch.Tensor):
        probs, here, local_target = ctx.saved_tensors
        valid = probs.shape[-1]
        grad = probs  # saved for this one use: backward runs once per forward
        if valid:
            grad.scatter_add_(-1, local_target, -here.to(grad.dtype).unsqueeze(-1))
            grad.mul_(grad_loss.unsqueeze(-1))
        grad = grad.to(ctx.dtype)
        if valid < ctx.width:
            grad = torch.nn.functional.pad(grad, (0, ctx.width - valid))
        return grad, None, None, None


def vocab_parallel_cross_entropy(
    logits: torch.Tensor,
    target: torch.Tensor,
    *,
    vocab_size: int,
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """Loss per token in nats, float32, of the shape of `target`.

    logits: `[..., v/t]`, this rank's columns of the padded vocabulary; target: `[...]` global token
    ids below `vocab_size`; `vocab_size`: true size; `group`: the TP group (None for one rank).
    """
    return _VocabParallelCrossEntropy.apply(logits, target, vocab_size, group)
