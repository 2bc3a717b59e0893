"""The RL algorithms: a name is a preset of small functions, and every choice can be changed by itself.

Order of use in a step, over the whole batch of r responses (which every rank holds as numbers) and t tokens:
`shape_rewards` -> `choose_groups` -> `sequence_advantages_of` -> `token_advantages_of` -> for each
micro-batch `policy_loss`. All are pure; sums over ranks go through a function that the caller passes in.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Literal, get_args

import torch

from megatron_tlt.ops.advantages import (
    AdvantageEstimator,
    group_stats,
    moments,
    overlong_penalty,
    reward_to_go,
    sequence_advantages,
    whiten,
)
from megatron_tlt.ops.policy_loss import KlType, Level, LossAggMode

Algorithm = Literal[
    "grpo",
    "dr_grpo",
    "dapo",
    "rloo",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "gspo",
    "ppo",
]
TruncationPolicy = Literal["penalise", "mask", "shape"]
Sum = Callable[[torch.Tensor], torch.Tensor]
"""Adds a tensor over the data-parallel ranks; the identity on one rank."""

_COMMON = {
    "advantage_estimator": "grpo",
    "normalize_advantages": False,
    "eps_clip": 0.2,
    "eps_clip_high": 0.2,
    "eps_clip_c": 0.0,
    "ratio_level": "token",
    "loss_agg_mode": "token_mean",
    "kl_coef": 0.0,
    "kl_loss_coef": 0.0,
    "truncation": "penalise",
    "dynamic_sampling": False,
}
# What each name changes in _COMMON.
_PRESETS: dict[str, dict[str, object]] = {
    "grpo": {"loss_agg_mode": "sequence_mean_token_mean", "kl_loss_coef": 0.001},
    "dr_grpo": {
        "advantage_estimator": "dr_grpo",
        "loss_agg_mode": "sequence_mean_token_sum_norm",
    },
    "dapo": {"eps_clip_high": 0.28, "truncation": "shape", "dynamic_sampling": True},
    "rloo": {"advantage_estimator": "rloo", "kl_coef": 0.001},
    "reinforce_plus_plus": {
        "advantage_estimator": "reinforce_plus_plus",
        "normalize_advantages": True,
        "kl_coef": 0.001,
    },
    "reinforce_plus_plus_baseline": {
        "advantage_estimator": "reinforce_plus_plus_baseline",
        "normalize_advantages": True,
        "kl_loss_coef": 0.001,
    },
    "gspo": {
        "eps_clip": 3e-4,
        "eps_clip_high": 4e-4,
        "ratio_level": "sequence",
        "loss_agg_mode": "sequence_mean_token_mean",
    },
    "ppo": {
        "advantage_estimator": "reinforce_plus_plus",
        "normalize_advantages": True,
        "eps_clip_c": 3.0,
        "kl_coef": 0.001,
    },
}


@dataclass(kw_only=True, slots=True)
class AlgorithmConfig:
    """Which RL algorithm. A field left at null takes the algorithm's own value."""

    algorithm: Algorithm = "grpo"
    """Preset: grpo, dr_grpo (no std, constant divisor), dapo (clip-higher, token mean, dynamic sampling,
    overlong shaping), rloo, reinforce_plus_plus (no groups), reinforce_plus_plus_baseline, gspo (sequence
    ratio), ppo (clipped and dual-clipped, returns whitened over the batch; there is no value network)."""
    advantage_estimator: AdvantageEstimator | None = None
    """How rewards become advantages: grpo, dr_grpo, rloo, reinforce_plus_plus[_baseline]."""
    normalize_advantages: bool | None = None
    """Whiten advantages over all tokens of the global batch."""
    advantage_epsilon: float = 1e-6
    """Added to a group's standard deviation (grpo)."""
    gamma: float = 1.0
    """Discount a token of rewards that come later (reinforce_plus_plus)."""
    eps_clip: float | None = None
    """The ratio may fall to 1 - eps_clip."""
    eps_clip_high: float | None = None
    """The ratio may rise to 1 + eps_clip_high (clip-higher where it exceeds eps_clip)."""
    eps_clip_c: float | None = None
    """Dual clip: largest ratio that counts against a negative advantage, > 1; 0: off."""
    ratio_level: Level | None = None
    """token, or sequence (GSPO: geometric mean over the response)."""
    loss_agg_mode: LossAggMode | None = None
    """token_mean, sequence_mean_token_mean, sequence_mean_token_sum, sequence_mean_token_sum_norm; all over
    the global batch."""
    loss_agg_length: int = 0
    """Divisor of sequence_mean_token_sum_norm in tokens; 0: the longest response allowed."""
    kl_coef: float | None = None
    """Coefficient of the KL to the reference in the reward."""
    kl_loss_coef: float | None = None
    """Coefficient of the KL to the reference in the loss; with both 0 it is a metric only."""
    kl_loss_type: KlType = "k3"
    """KL estimator in the loss: k1, k2, k3, low_var_kl (k3 within +-10)."""
    use_unbiased_kl: bool = False
    """Multiply the KL in the loss by the importance ratio, so that its gradient is that of the reverse KL."""
    kl_reward_type: KlType = "k1"
    """KL estimator in the reward."""
    ref_update_interval: int = 0
    """Steps after which the reference becomes the present policy; 0: never."""
    entropy_coef: float = 0.0
    """Coefficient of the entropy bonus."""
    use_tis: bool = False
    """Weigh tokens by pi_trainer / pi_engine, bounded, where the rollout engine's numbers differ."""
    tis_level: Level = "token"
    """Importance ratio of a token, or geometric mean over its response."""
    tis_mode: Literal["truncate", "mask"] = "truncate"
    """Outside the bounds: truncate to the bound, or mask (icepop by token, sequence mask by sequence)."""
    tis_clip: float = 2.0
    """Upper bound of the weight."""
    tis_clip_low: float = 0.0
    """Lower bound of the weight."""
    max_logprob_diff: float = 0.0
    """The run stops when the mean |log-prob difference| of trainer and engine exceeds this; 0: never."""
    truncation: TruncationPolicy | None = None
    """Responses cut at the length limit: penalise (scored as they stand), mask (out of loss, baseline and
    reward metrics) or shape (scored, minus the overlong penalty of all long responses)."""
    overlong_buffer_len: int = 0
    """truncation: shape. Tokens before the limit over which the penalty grows; 0: a fifth of the limit."""
    overlong_penalty_factor: float = 1.0
    """truncation: shape. Penalty at the limit."""
    dynamic_sampling: bool | None = None
    """Replace groups whose rewards are all equal by those of further prompts."""
    max_num_gen_batches: int = 4
    """dynamic_sampling. Generation rounds a step; then flat groups (advantage 0) fill the batch."""

    def __post_init__(self) -> None:
        if self.algorithm not in _PRESETS:
            raise ValueError(f"algorithm {self.algorithm!r} is none of {', '.join(get_args(Algorithm))}")
        preset = _COMMON | _PRESETS[self.algorithm]
        for field in fields(self):
            if getattr(self, field.name) is None:
                setattr(self, field.name, preset[field.name])
        self._check()

    def _check(self) -> None:
        for name, good, need in (
            ("eps_clip", 0 < self.eps_clip < 1, "between 0 and 1"),
            ("eps_clip_high", self.eps_clip_high > 0, "> 0"),
            ("eps_clip_c", self.eps_clip_c == 0 or self.eps_clip_c > 1, "0 (off) or > 1"),
            ("gamma", 0 < self.gamma <= 1, "in (0, 1]"),
            ("advantage_epsilon", self.advantage_epsilon > 0, "> 0"),
            ("kl_coef", self.kl_coef >= 0, ">= 0"),
            ("kl_loss_coef", self.kl_loss_coef >= 0, ">= 0"),
            ("entropy_coef", self.entropy_coef >= 0, ">= 0"),
            ("tis_clip", self.tis_clip > max(self.tis_clip_low, 0), "> tis_clip_low"),
            ("tis_clip_low", self.tis_clip_low >= 0, ">= 0"),
            ("max_logprob_diff", self.max_logprob_diff >= 0, ">= 0"),
            ("max_num_gen_batches", self.max_num_gen_batches >= 1, ">= 1"),
            ("ref_update_interval", self.ref_update_interval >= 0, ">= 0"),
            ("loss_agg_length", self.loss_agg_length >= 0, ">= 0"),
            ("overlong_buffer_len", self.overlong_buffer_len >= 0, ">= 0"),
        ):
            if not good:
                raise ValueError(f"{name} {getattr(self, name)} is out of range: it must be {need}")

    @property
    def needs_reference(self) -> bool:
        """Whether reference log-probabilities enter reward or loss."""
        return self.kl_coef > 0 or self.kl_loss_coef > 0


@dataclass(frozen=True, kw_only=True, slots=True)
class ShapedRewards:
    """Rewards after the truncation policy; both `[r]`."""

    rewards: torch.Tensor
    counted: torch.Tensor
    """bool: the response enters baseline and loss."""


def shape_rewards(
    config: AlgorithmConfig,
    rewards: torch.Tensor,
    lengths: torch.Tensor,
    truncated: torch.Tensor,
    *,
    max_length: int,
    usable: torch.Tensor | None = None,
) -> ShapedRewards:
    """Apply the truncation policy to raw `rewards` `[r]`.

    `lengths` `[r]` response tokens; `truncated` bool `[r]`: ended at `max_length`. `usable` False marks
    responses without a verdict (aborted, verifier error): they, and responses without a token, do not count.
    """
    counted = lengths > 0
    if usable is not None:
        counted = counted & usable
    if config.truncation == "mask":
        counted = counted & ~truncated
    if config.truncation == "shape":
        buffer = config.overlong_buffer_len or max(1, max_length // 5)
        rewards = rewards + overlong_penalty(
            lengths,
            max_length=max_length,
            buffer_length=buffer,
            factor=config.overlong_penalty_factor,
        ).to(rewards.dtype)
    return ShapedRewards(rewards=torch.where(counted, rewards, 0.0), counted=counted)


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupChoice:
    """Dynamic sampling's verdict on one round of groups, by their names in order of first appearance."""

    kept: tuple[int, ...]
    """Groups whose rewards differ."""
    flat: tuple[int, ...]
    """Groups whose counted rewards are all equal."""
    drops: dict[str, int]
    """How many flat groups by reason: zero_std_<reward>, or empty (no response counts)."""


def choose_groups(
    rewards: torch.Tensor, groups: torch.Tensor, counted: torch.Tensor
) -> GroupChoice:
    """DAPO's filter (https://arxiv.org/abs/2503.14476, section 3.2): whole groups, never single responses."""
    stats = group_stats(rewards, groups, counted=counted)
    kept, flat, drops = {}, {}, {}
    for name, is_flat, count, mean in zip(
        groups.tolist(), stats.is_flat.tolist(), stats.count.tolist(), stats.mean.tolist(), strict=True
    ):
        if not is_flat:
            kept[name] = True
        elif name not in flat:
            flat[name] = True
            reason = f"zero_std_{round(mean, 3):g}" if count else "empty"
            drops[reason] = drops.get(reason, 0) + 1
    return GroupChoice(kept=tuple(kept), flat=tuple(flat), drops=drops)


def fill_batch(kept: list[int], flat: list[int], *, wanted: int) -> list[int]:
    """Exactly `wanted` groups: those kept, oldest first, then flat ones, so that the batch keeps its size.

    Raises ValueError when there are fewer in all.
    """
    chosen = [*kept, *flat][:wanted]
    if len(chosen) < wanted:
        raise ValueError(
            f"{len(kept)} kept and {len(flat)} flat groups do not make a batch of {wanted}"
        )
    return chosen


def sequence_advantages_of(
    config: AlgorithmConfig,
    shaped: ShapedRewards,
    groups: torch.Tensor,
    *,
    kl_sums: torch.Tensor | None = None,
) -> torch.Tensor:
    """One advantage a response, `[r]`.

    `kl_sums` `[r]`: KL in the reward, summed over each response; needed when kl_coef > 0 and the estimator
    compares whole responses. reinforce_plus_plus takes its KL by token, in `token_advantages_of`.
    """
    rewards = shaped.rewards
    if config.kl_coef > 0 and config.advantage_estimator != "reinforce_plus_plus":
        if kl_sums is None:
            raise ValueError(f"kl_coef {config.kl_coef} needs the KL of each response: pass kl_sums")
        rewards = rewards - config.kl_coef * kl_sums.to(rewards.dtype)
    return sequence_advantages(
        config.advantage_estimator,
        rewards,
        groups,
        counted=shaped.counted,
        epsilon=config.advantage_epsilon,
    )


def token_advantages_of(
    config: AlgorithmConfig,
    advantages: torch.Tensor,
    counted: torch.Tensor,
    lengths: torch.Tensor,
    *,
    kl: torch.Tensor | None = None,
    sum_over_ranks: Sum = lambda x: x,
) -> torch.Tensor:
    """Advantage at each response token of this rank, `[t]`, responses end to end.

    `advantages`, `counted`, `lengths` `[r]` are those of this rank's responses; `kl` `[t]` their KL to the
    reference (kl_reward_type). With normalize_advantages every rank must call this, responses or not: the
    moments go once through `sum_over_ranks`. Responses that do not count, and groups that
    reinforce_plus_plus_baseline found flat, stay exactly 0.
    """
    token_counts = counted.repeat_interleave(lengths)
    values = advantages.repeat_interleave(lengths)
    if config.advantage_estimator == "reinforce_plus_plus":
        penalty = torch.zeros_like(values)
        if config.kl_coef > 0:
            if kl is None:
                raise ValueError(f"kl_coef {config.kl_coef} needs the KL of each token: pass kl")
            penalty = -config.kl_coef * kl.to(values.dtype)
        values = reward_to_go(advantages, penalty, lengths, gamma=config.gamma)
        values = torch.where(token_counts, values, 0.0)
    if not config.normalize_advantages:
        return values
    total = sum_over_ranks(moments(values, token_counts))
    whitened = whiten(values, token_counts, total)
    if config.advantage_estimator == "reinforce_plus_plus":
        return whitened
    return torch.where(values == 0, 0.0, whitened)
