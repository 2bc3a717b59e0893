"""Log-probabilities and entropy of tokens from logits that are split over tensor-parallel ranks.

Both are those of the distribution that tokens are drawn from: logits divided by the sampling temperature,
over the true vocabulary. At temperature 0 (greedy) they are those of temperature 1, as in the rollout engine.
"""

import torch
import torch.distributed as dist

from megatron_tlt.ops.cross_entropy import vocab_parallel_cross_entropy

# Elements that are taken through all passes together, so that they stay in the cache.
_BLOCK_ELEMENTS = 2**19


def at_temperature(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """`logits / temperature`; the logits themselves at temperatures 0 and 1."""
    return logits if temperature in (0.0, 1.0) else logits / temperature


def vocab_parallel_log_probs(
    logits: torch.Tensor,
    targets: torch.Tensor,
    *,
    vocab_size: int,
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """log p(target), nats, float32, of the shape of `targets`; the memory of `logits` may be overwritten.

    logits: `[..., v/t]`, this rank's columns of the padded vocabulary, at the sampling temperature.
    """
    return -vocab_parallel_cross_entropy(
        logits, targets, vocab_size=vocab_size, group=group, consume_logits=True
    )


def vocab_parallel_entropy(
    logits: torch.Tensor, *, vocab_size: int, group: dist.ProcessGroup | None = None
) -> torch.Tensor:
    """Entropy `[...]` in nats, float32, of the distribution of `logits` `[..., v/t]`; differentiable."""
    return _VocabParallelEntropy.apply(logits, vocab_size, group)


class _VocabParallelEntropy(torch.autograd.Function):
    """H = log Z - sum(p x) with x = logits - max, Z = sum(exp(x)); dH/dx = -p (log p + H)."""

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        logits: torch.Tensor,
        vocab_size: int,
        group: dist.ProcessGroup | None,
    ) -> torch.Tensor:
        world, rank = (1, 0) if group is None else (group.size(), group.rank())
        width = logits.shape[-1]
        valid = max(0, min(width, vocab_size - rank * width))  # true columns that this rank holds
        rows = logits.detach().reshape(-1, width)
        largest = torch.full((len(rows),), -torch.inf, device=logits.device)
        if valid:
            largest = rows[:, :valid].amax(dim=-1).float()
        if world > 1:
            dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
        sums = torch.zeros(2, len(rows), device=logits.device)  # Z and sum(exp(x) x)
        step = max(1, _BLOCK_ELEMENTS // width)
        for begin in range(0, len(rows) if valid else 0, step):
            part = slice(begin, begin + step)
            shifted = rows[part, :valid].float() - largest[part, None]
            weights = shifted.exp()
            torch.sum(weights, dim=-1, out=sums[0, part])
            torch.sum(weights.mul_(shifted), dim=-1, out=sums[1, part])
        if world > 1:
            dist.all_reduce(sums, group=group)
        log_total = sums[0].log()
        entropy = log_total - sums[1] / sums[0]
        if ctx.needs_input_grad[0]:
            ctx.save_for_backward(rows.clone(), largest + log_total, entropy)
        ctx.shape, ctx.valid = logits.shape, valid
        return entropy.view(logits.shape[:-1])

    @staticmethod
    def backward(ctx, grad_entropy: torch.Tensor):
        rows, log_total, entropy = ctx.saved_tensors
        grad = torch.zeros_like(rows, dtype=torch.float32)
        log_p = rows[:, : ctx.valid].float() - log_total[:, None]
        grad[:, : ctx.valid] = -log_p.exp() * (log_p + entropy[:, None])
        grad *= grad_entropy.reshape(-1, 1)
        return grad.to(rows.dtype).view(ctx.shape), None, None
