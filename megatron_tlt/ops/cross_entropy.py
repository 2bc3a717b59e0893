"""Cross entropy over a vocabulary that is split over tensor-parallel ranks and padded at its end.

Same mathematics as megatron's `vocab_parallel_cross_entropy` (max and sum of exponentials reduced over
the TP group), with one difference: columns at or beyond the true vocabulary never enter the softmax, so
the loss does not depend on the padding and padded rows get a gradient of exactly zero.
"""

import torch
import torch.distributed as dist


# Elements that are taken through all passes of the softmax together, so that they stay in the cache.
_BLOCK_ELEMENTS = 2**19


class _VocabParallelCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        logits: torch.Tensor,
        target: torch.Tensor,
        vocab_size: int,
        group: dist.ProcessGroup | None,
        consume_logits: bool,
    ) -> torch.Tensor:
        world, rank = (1, 0) if group is None else (group.size(), group.rank())
        width = logits.shape[-1]
        first = rank * width
        valid = max(0, min(width, vocab_size - first))  # true columns that this rank holds
        rows, labels = logits.detach().reshape(-1, width), target.reshape(-1)
        here = (labels >= first) & (labels < first + valid)
        local_target = torch.where(here, labels - first, 0).unsqueeze(-1)
        # float32, as in Megatron, whatever the logits are
        reusable = consume_logits and logits.dtype == torch.float32
        weights = rows if reusable else torch.empty_like(rows, dtype=torch.float32)
        weights[:, valid:] = 0.0
        shared_largest = None
        if world > 1:
            shared_largest = torch.full(labels.shape, -torch.inf, device=logits.device)
            if valid:
                shared_largest = rows[:, :valid].amax(dim=-1).float()
            dist.all_reduce(shared_largest, op=dist.ReduceOp.MAX, group=group)
        sums = torch.zeros(2, labels.numel(), device=logits.device)
        predicted, total = sums
        if valid:
            _exponentials(
                rows[:, :valid], weights[:, :valid], shared_largest, local_target, (predicted, total)
            )
            predicted.masked_fill_(~here, 0.0)
        if world > 1:
            dist.all_reduce(sums, group=group)
        ctx.save_for_backward(weights, total, here, local_target)
        ctx.shape, ctx.dtype, ctx.valid = logits.shape, logits.dtype, valid
        return (total.log() - predicted).view(target.shape)

    @staticmethod
    def backward(ctx, grad_loss: torch.Tensor):
        weights, total, here, local_target = ctx.saved_tensors
        grad = weights  # saved for this one use: backward runs once per forward
        per_row = grad_loss.reshape(-1)
        if ctx.valid:
            grad.mul_((per_row / total).unsqueeze(-1))
            grad.scatter_add_(-1, local_target, torch.where(here, -per_row, 0.0).unsqueeze(-1))
        return grad.to(ctx.dtype).view(ctx.shape), None, None, None, None


def _exponentials(
    rows: torch.Tensor,
    out: torch.Tensor,
    shared_largest: torch.Tensor | None,
    target: torch.Tensor,
    sums: tuple[torch.Tensor, torch.Tensor],
) -> None:
    """`out = exp(rows - largest)`; fills sums with (rows[target] - largest, row sums of out)."""
    predicted, total = sums
    step = max(1, _BLOCK_ELEMENTS // rows.shape[1])
    for begin in range(0, rows.shape[0], step):
        part = slice(begin, begin + step)
        block = out[part]
        if block.data_ptr() != rows[part].data_ptr():
            block.copy_(rows[part])  # once to float32: mixed operands take torch's slow path
        largest = block.amax(dim=-1) if shared_largest is None else shared_largest[part]
        block.sub_(largest.unsqueeze(-1))
        predicted[part] = block.gather(-1, target[part]).squeeze(-1)
        torch.sum(block.exp_(), dim=-1, out=total[part])


def vocab_parallel_cross_entropy(
    logits: torch.Tensor,
    target: torch.Tensor,
    *,
    vocab_size: int,
    group: dist.ProcessGroup | None = None,
    consume_logits: bool = False,
) -> torch.Tensor:
    """Loss per token in nats, float32, of the shape of `target`.

    logits: `[..., v/t]`, this rank's columns of the padded vocabulary; target: `[...]` global token
    ids below `vocab_size`; `vocab_size`: true size; `group`: the TP group (None for one rank).
    `consume_logits`: the caller needs the logits no more, and their memory may be overwritten. The gradient
    can be asked for once.
    """
    return _VocabParallelCrossEntropy.apply(logits, target, vocab_size, group, consume_logits)
