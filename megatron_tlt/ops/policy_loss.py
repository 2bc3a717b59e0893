"""The pieces of a policy-gradient loss, each per token: ratios, clipping, KL, mismatch weights, averages.

Tensors of one micro-batch have one shape, written `[...]`: `[b, s]` with one sequence a row, or `[1, t]`
with sequences packed end to end. `segments[...]` (int64) numbers the response that a token belongs to,
0 .. n - 1 within the micro-batch; `mask[...]` is 1 at the response tokens that count. Where the mask is 0 any
value may stand, finite or not: it neither enters a sum nor gets a gradient.

Losses are sums of `weight * value` with weights that already hold the *global* counts (`token_weights`), so
the sum over micro-batches and data-parallel ranks is the loss, however the batch was cut.
"""

from dataclasses import dataclass
from typing import Literal

import torch

LossAggMode = Literal[
    "token_mean",
    "sequence_mean_token_mean",
    "sequence_mean_token_sum",
    "sequence_mean_token_sum_norm",
]
KlType = Literal["k1", "k2", "k3", "low_var_kl"]
Level = Literal["token", "sequence"]


@dataclass(frozen=True, kw_only=True, slots=True)
class GlobalCounts:
    """What a loss is divided by: counts over all micro-batches and data-parallel ranks of one update."""

    num_tokens: float
    """Response tokens that count."""
    num_sequences: float
    """Responses with at least one such token."""
    max_length: float
    """Constant divisor of sequence_mean_token_sum_norm: the longest response allowed, in tokens."""


def count_tokens_and_sequences(mask: torch.Tensor, segments: torch.Tensor) -> torch.Tensor:
    """`[2]` float64 of one micro-batch; summed over micro-batches and ranks it fills `GlobalCounts`."""
    present = mask > 0
    tokens = present.sum().double()
    return torch.stack((tokens, segments[present].unique().numel() + 0 * tokens))


def token_weights(
    mask: torch.Tensor, segments: torch.Tensor, *, mode: LossAggMode, counts: GlobalCounts
) -> torch.Tensor:
    """Weight of each token's loss, `[...]` float32, 0 where masked.

    With n_t tokens and n_s sequences in the global batch, and l_i tokens in response i:
    token_mean 1/n_t (DAPO); sequence_mean_token_mean 1/(n_s l_i) (GRPO); sequence_mean_token_sum 1/n_s;
    sequence_mean_token_sum_norm 1/(n_s max_length) (Dr.GRPO: the divisor is a constant).
    """
    present = (mask > 0).float()
    sequences, tokens = max(counts.num_sequences, 1.0), max(counts.num_tokens, 1.0)
    if mode == "token_mean":
        return present / tokens
    if mode == "sequence_mean_token_sum":
        return present / sequences
    if mode == "sequence_mean_token_sum_norm":
        return present / (sequences * counts.max_length)
    if mode == "sequence_mean_token_mean":
        return present / (sequences * _lengths(mask, segments)[segments])
    raise ValueError(f"loss_agg_mode {mode!r} is not known")


def weighted_sum(values: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Sum of `weights * values`, scalar; values at weight 0 are not touched, so NaN there is harmless."""
    return (torch.where(weights != 0, values, 0.0) * weights).sum()


def log_ratio(
    log_probs: torch.Tensor,
    old_log_probs: torch.Tensor,
    mask: torch.Tensor,
    segments: torch.Tensor,
    *,
    level: Level = "token",
) -> torch.Tensor:
    """log of the importance ratio pi / pi_old at each token, `[...]`, 0 where masked.

    level "sequence" is GSPO's (https://arxiv.org/abs/2507.18071, eq. 7 and the token form, eq. 14): the
    value is the response's mean log ratio, the gradient is that of the token's own log-probability.
    """
    difference = torch.where(mask > 0, log_probs - old_log_probs.detach(), 0.0)
    if level == "token":
        return difference
    mean = sequence_mean(difference.detach(), mask, segments)
    return torch.where(mask > 0, difference - difference.detach() + mean, 0.0)


def sequence_mean(
    values: torch.Tensor, mask: torch.Tensor, segments: torch.Tensor
) -> torch.Tensor:
    """Mean over the counted tokens of each response, written at all of its tokens, `[...]`."""
    flat, index = torch.where(mask > 0, values, 0.0).reshape(-1), segments.reshape(-1)
    lengths = _lengths(mask, segments)
    sums = values.new_zeros(len(lengths)).index_add_(0, index, flat)
    return (sums / lengths.to(sums.dtype))[segments]


def _lengths(mask: torch.Tensor, segments: torch.Tensor) -> torch.Tensor:
    """Counted tokens of each response of the micro-batch, at least 1, `[n]` float32."""
    index = segments.reshape(-1)
    size = int(index.max()) + 1 if index.numel() else 0
    flat = (mask > 0).reshape(-1).float()
    return flat.new_zeros(size).index_add_(0, index, flat).clamp(min=1.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Surrogate:
    """Clipped surrogate at each token; all `[...]`."""

    losses: torch.Tensor
    clipped: torch.Tensor
    """bool: the upper or lower bound replaced the ratio, so the token has no gradient."""
    dual_clipped: torch.Tensor
    """bool: the dual clip bounded the loss of a negative advantage."""


def clipped_surrogate(
    log_ratios: torch.Tensor,
    advantages: torch.Tensor,
    *,
    eps_clip: float,
    eps_clip_high: float,
    eps_clip_c: float = 0.0,
) -> Surrogate:
    """max(-A r, -A clip(r, 1 - eps_clip, 1 + eps_clip_high)), and for A < 0 at most -A eps_clip_c.

    PPO-clip (https://arxiv.org/abs/1707.06347, eq. 7) with DAPO's separate upper bound; `eps_clip_c` > 1
    is the dual clip (https://arxiv.org/abs/1912.09729, eq. 5), 0 leaves it out. Where A is 0 the loss and
    its gradient are exactly 0. Log ratios are kept within +-20, so that no ratio overflows.
    """
    ratio = log_ratios.clamp(min=-20.0, max=20.0).exp()
    plain = -advantages * ratio
    bounded = -advantages * ratio.clamp(min=1.0 - eps_clip, max=1.0 + eps_clip_high)
    losses = torch.maximum(plain, bounded)
    dual_clipped = torch.zeros_like(losses, dtype=torch.bool)
    if eps_clip_c > 0:
        ceiling = -advantages * eps_clip_c
        dual_clipped = (advantages < 0) & (losses > ceiling)
        losses = torch.where(dual_clipped, ceiling, losses)
    return Surrogate(losses=losses, clipped=bounded > plain, dual_clipped=dual_clipped)


def kl_penalty(
    log_probs: torch.Tensor, ref_log_probs: torch.Tensor, *, kind: KlType
) -> torch.Tensor:
    """Estimate of KL(pi || ref) at each token from its two log-probabilities, `[...]`.

    http://joschu.net/blog/kl-approx.html, with x = log pi - log ref: k1 = x (unbiased, may be negative),
    k2 = x^2 / 2, k3 = exp(-x) - 1 + x (unbiased, never negative), low_var_kl = k3 kept within +-10 as in
    verl and slime. As a loss only k2 (and k3 on average over old samples) has a useful gradient; that of k1
    has mean zero.
    """
    x = log_probs - ref_log_probs.detach()
    if kind == "k1":
        return x
    if kind == "k2":
        return 0.5 * x * x
    if kind not in ("k3", "low_var_kl"):
        raise ValueError(f"kl_loss_type {kind!r} is not one of k1, k2, k3, low_var_kl")
    k3 = torch.expm1(-x) + x
    return k3.clamp(min=-10.0, max=10.0) if kind == "low_var_kl" else k3


@dataclass(frozen=True, kw_only=True, slots=True)
class MismatchWeights:
    """How much each token counts when trainer and rollout engine disagree; all `[...]`, no gradient."""

    weights: torch.Tensor
    clipped: torch.Tensor
    """bool: the weight was bounded, or set to 0."""


def mismatch_weights(
    train_log_probs: torch.Tensor,
    rollout_log_probs: torch.Tensor,
    mask: torch.Tensor,
    segments: torch.Tensor,
    *,
    level: Level,
    keep: Literal["truncate", "mask"],
    bounds: tuple[float, float],
) -> MismatchWeights:
    """Importance weights pi_train(old) / pi_rollout, bounded to `bounds` = (low, high).

    level "token", keep "truncate": truncated importance sampling, TIS
    (https://fengyao.notion.site/off-policy-rl).
    level "token", keep "mask": tokens outside the bounds get 0 (icepop, https://ringtech.notion.site/icepop).
    level "sequence": the ratio is the geometric mean over the response, so with keep "mask" whole responses
    drop out (sequence mask). Weights are 0 where `mask` is.
    """
    difference = log_ratio(train_log_probs.detach(), rollout_log_probs, mask, segments)
    if level == "sequence":
        difference = sequence_mean(difference, mask, segments)
    ratio = difference.clamp(min=-20.0, max=20.0).exp()
    low, high = bounds
    present = mask > 0
    outside = ((ratio < low) | (ratio > high)) & present
    bounded = torch.where(outside, 0.0, ratio) if keep == "mask" else ratio.clamp(min=low, max=high)
    return MismatchWeights(weights=torch.where(present, bounded, 0.0), clipped=outside)
