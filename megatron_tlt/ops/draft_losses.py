"""Losses that teach a drafter to continue the target: states, and token distributions.

Legend: b sequences, s rows, h hidden, v vocabulary, p passes. `mask` `[b, s]` says which rows count, or how
much; every loss is a mean over them.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F


def masked_mean(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Mean of `[b, s]` where `mask` is True, or weighted by it; 0 where nothing counts."""
    weights = mask.to(values.dtype)
    total = weights.sum()
    return torch.where(weights > 0, values * weights, 0.0).sum() / torch.where(total > 0, total, 1.0)


def feature_loss(
    predicted: torch.Tensor, target: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    """SmoothL1 between states `[b, s, h]`, mean over h (EAGLE, https://arxiv.org/abs/2401.15077, L_reg)."""
    per_row = F.smooth_l1_loss(predicted.float(), target.float(), reduction="none").mean(-1)
    return masked_mean(per_row, mask)


def soft_cross_entropy(
    logits: torch.Tensor, target_logits: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    """Cross entropy of `logits` `[b, s, v]` against softmax(target_logits), in nats (EAGLE's L_cls)."""
    target = torch.softmax(target_logits.float(), -1)
    per_row = -(target * torch.log_softmax(logits.float(), -1)).sum(-1)
    return masked_mean(per_row, mask)


def overlap(logits: torch.Tensor, target_logits: torch.Tensor) -> torch.Tensor:
    """Chance `[b, s]` that a draft drawn from `logits` is accepted by p/q rejection: sum of min(p, q)."""
    return torch.minimum(torch.softmax(logits.float(), -1), torch.softmax(target_logits.float(), -1)).sum(-1)


def acceptance_loss(
    logits: torch.Tensor, target_logits: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    """Total variation distance of the two distributions: the chance that a sampled draft is rejected.

    What rejection sampling pays for is this itself, not a divergence (https://arxiv.org/abs/2211.17192,
    theorem 3.5).
    """
    return masked_mean(1 - overlap(logits, target_logits), mask)


def accept_rates(hits: Sequence[torch.Tensor], mask: torch.Tensor) -> torch.Tensor:
    """Share of chains whose draft j and all before it agree: `[p]`.

    `hits[j]` bool `[b, s]`: pass j's guess at row i is the token that follows. A chain that starts at row i
    takes pass j at row i + j, so only rows with all p guesses inside `mask` start one.
    """
    passes = len(hits)
    rows = mask.shape[1] - passes + 1
    if rows < 1:
        return torch.zeros(passes)
    starts = torch.stack([mask[:, j : j + rows] for j in range(passes)]).all(0)
    alive, rates = starts, []
    for j, hit in enumerate(hits):
        alive = alive & hit[:, j : j + rows]
        rates.append(alive.sum() / starts.sum().clamp(min=1))
    return torch.stack(rates)


def simulated_accept_length(hits: Sequence[torch.Tensor], mask: torch.Tensor) -> float:
    """Tokens per verification of a chain of len(hits) drafts, bonus token included, all starts weighted
    alike.
    """
    return 1.0 + float(accept_rates(hits, mask).sum())
