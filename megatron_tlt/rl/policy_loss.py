"""The loss of one micro-batch, put together from the per-token pieces as the configuration says.

Shapes as in ops/policy_loss.py: `[...]` is `[b, s]`, or `[1, t]` when packed.
"""

from dataclasses import dataclass

import torch

from megatron_tlt.ops.policy_loss import (
    GlobalCounts,
    clipped_surrogate,
    kl_penalty,
    log_ratio,
    mismatch_weights,
    token_weights,
    weighted_sum,
)
from megatron_tlt.rl.algorithms import AlgorithmConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyTokens:
    """What is known of each token of one micro-batch; all `[...]`. Values where `mask` is 0 are ignored."""

    log_probs: torch.Tensor
    """Of the policy that is trained, with gradient, at the sampling temperature."""
    old_log_probs: torch.Tensor
    """Of the policy before the first update of this step, computed by the trainer."""
    advantages: torch.Tensor
    mask: torch.Tensor
    """1 at response tokens that count: response mask times the `counted` of `shape_rewards`."""
    segments: torch.Tensor
    rollout_log_probs: torch.Tensor | None = None
    """Of the rollout engine; needed by use_tis."""
    ref_log_probs: torch.Tensor | None = None
    """Of the reference; needed by kl_loss_coef, else a metric if given."""
    entropy: torch.Tensor | None = None
    """Of the policy's distribution, with gradient if entropy_coef > 0; else a metric if given."""


def policy_loss(
    config: AlgorithmConfig, tokens: PolicyTokens, counts: GlobalCounts
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """This micro-batch's share of the loss, and of the metrics; shares add up over micro-batches and ranks.

    Loss = weighted sum of surrogate * mismatch weight + kl_loss_coef * KL - entropy_coef * entropy. Metrics
    (detached scalars): pg_loss, kl_loss, entropy_loss in the loss's own average; pg_clipfrac,
    pg_clipfrac_lower (dual clip), ppo_kl, tis_clipfrac, tis as means over tokens.
    """
    tokens = _only_masked(tokens)
    mask, segments = tokens.mask, tokens.segments
    weights = token_weights(mask, segments, mode=config.loss_agg_mode, counts=counts)
    per_token = token_weights(mask, segments, mode="token_mean", counts=counts)
    ratios = log_ratio(
        tokens.log_probs, tokens.old_log_probs, mask, segments, level=config.ratio_level
    )
    surrogate = clipped_surrogate(
        ratios,
        tokens.advantages,
        eps_clip=config.eps_clip,
        eps_clip_high=config.eps_clip_high,
        eps_clip_c=config.eps_clip_c,
    )
    losses, metrics = surrogate.losses, {}
    if config.use_tis:
        losses = losses * _mismatch(config, tokens, per_token, metrics)
    loss = metrics["pg_loss"] = weighted_sum(losses, weights)
    metrics["pg_clipfrac"] = weighted_sum(surrogate.clipped.float(), per_token)
    metrics["pg_clipfrac_lower"] = weighted_sum(surrogate.dual_clipped.float(), per_token)
    metrics["ppo_kl"] = weighted_sum(tokens.old_log_probs - tokens.log_probs, per_token)
    if tokens.ref_log_probs is not None:
        kl = kl_penalty(tokens.log_probs, tokens.ref_log_probs, kind=config.kl_loss_type)
        if config.use_unbiased_kl:  # https://arxiv.org/abs/2512.02556, section 3.1
            kl = kl * ratios.clamp(min=-20.0, max=20.0).exp()
        metrics["kl_loss"] = weighted_sum(kl, weights)
        if config.kl_loss_coef > 0:
            loss = loss + config.kl_loss_coef * metrics["kl_loss"]
    if tokens.entropy is not None:
        metrics["entropy_loss"] = weighted_sum(tokens.entropy, weights)
        if config.entropy_coef > 0:
            loss = loss - config.entropy_coef * metrics["entropy_loss"]
    metrics["loss"] = loss
    return loss, {name: value.detach() for name, value in metrics.items()}


def _mismatch(
    config: AlgorithmConfig,
    tokens: PolicyTokens,
    per_token: torch.Tensor,
    metrics: dict[str, torch.Tensor],
) -> torch.Tensor:
    found = mismatch_weights(
        tokens.old_log_probs,
        tokens.rollout_log_probs,
        tokens.mask,
        tokens.segments,
        level=config.tis_level,
        keep=config.tis_mode,
        bounds=(config.tis_clip_low, config.tis_clip),
    )
    metrics["tis"] = weighted_sum(found.weights, per_token)
    metrics["tis_clipfrac"] = weighted_sum(found.clipped.float(), per_token)
    return found.weights


def _only_masked(tokens: PolicyTokens) -> PolicyTokens:
    """The same with zeros where the mask is 0, so that nothing there, NaN included, gets into a gradient."""
    present = tokens.mask > 0

    def clean(values: torch.Tensor | None) -> torch.Tensor | None:
        return None if values is None else torch.where(present, values, 0.0)

    return PolicyTokens(
        log_probs=clean(tokens.log_probs),
        old_log_probs=clean(tokens.old_log_probs.detach()),
        advantages=clean(tokens.advantages),
        mask=tokens.mask,
        segments=tokens.segments,
        rollout_log_probs=clean(tokens.rollout_log_probs),
        ref_log_probs=clean(tokens.ref_log_probs),
        entropy=clean(tokens.entropy),
    )
