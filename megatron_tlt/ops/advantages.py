"""Advantages of the GRPO family, from rewards and group numbers alone.

Shapes: r responses, t response tokens laid end to end (lengths `[r]` cut them). `groups[i]` names the prompt
of response i; members of a group may stand anywhere. `counted[i]` False takes response i out: out of its
group's mean and spread, and its own advantage is exactly 0 (an aborted response, a verifier error, a
truncated one under the policy "mask").

A group whose counted rewards all lie within `ZERO_SPREAD` of one another has nothing to teach: its advantages
are exactly 0, not the quotient of two rounding errors.
"""

from dataclasses import dataclass
from typing import Literal

import torch

AdvantageEstimator = Literal[
    "grpo", "dr_grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"
]
ZERO_SPREAD = 1e-6
"""Largest (max - min) of a group's rewards that still counts as "all equal"."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupStats:
    """Statistics of the counted members, as seen by each response: every field `[r]`, float64."""

    count: torch.Tensor
    mean: torch.Tensor
    std: torch.Tensor
    """With n - 1 in the denominator, as torch.std, TRL and verl; 0 for groups of one."""
    minimum: torch.Tensor
    maximum: torch.Tensor

    @property
    def is_flat(self) -> torch.Tensor:
        """`[r]` bool: no counted member differs from another (groups of one and none included)."""
        return ~(self.maximum - self.minimum > ZERO_SPREAD)


def group_stats(
    rewards: torch.Tensor, groups: torch.Tensor, *, counted: torch.Tensor | None = None
) -> GroupStats:
    """Statistics of `rewards` `[r]` within `groups` `[r]` (int). Raises ValueError on unequal shapes."""
    if rewards.dim() != 1 or rewards.shape != groups.shape:
        raise ValueError(
            f"rewards {tuple(rewards.shape)} and groups {tuple(groups.shape)} must both be [r]"
        )
    counted = torch.ones_like(groups, dtype=torch.bool) if counted is None else counted
    names, index = groups.unique(return_inverse=True)
    values, weight = rewards.double(), counted.double()

    def reduce(source: torch.Tensor, how: str, start: float) -> torch.Tensor:
        whole = source.new_full((len(names),), start)
        return whole.scatter_reduce(0, index, source, how)[index]

    count = reduce(weight, "sum", 0.0)
    mean = reduce(torch.where(counted, values, 0.0), "sum", 0.0) / count.clamp(min=1)
    squares = reduce(torch.where(counted, (values - mean) ** 2, 0.0), "sum", 0.0)
    return GroupStats(
        count=count,
        mean=mean,
        std=(squares / (count - 1).clamp(min=1)).sqrt(),
        minimum=reduce(torch.where(counted, values, torch.inf), "amin", torch.inf),
        maximum=reduce(torch.where(counted, values, -torch.inf), "amax", -torch.inf),
    )


def sequence_advantages(
    estimator: AdvantageEstimator,
    rewards: torch.Tensor,
    groups: torch.Tensor,
    *,
    counted: torch.Tensor | None = None,
    epsilon: float = 1e-6,
) -> torch.Tensor:
    """One advantage a response, `[r]`, in the dtype of `rewards` (computed in float64).

    grpo (https://arxiv.org/abs/2402.03300, section 4.1.2): (R - mean) / (std + `epsilon`).
    dr_grpo (https://arxiv.org/abs/2503.20783): R - mean, no std.
    rloo (https://arxiv.org/abs/2402.14740): R - mean of the others = n / (n - 1) * (R - mean).
    reinforce_plus_plus_baseline (https://arxiv.org/abs/2501.03262): R - mean; `whiten` follows.
    reinforce_plus_plus: R itself, no group; `whiten` follows.

    Differs from all of them in that flat groups and responses that do not count are exactly 0
    (reinforce_plus_plus knows no groups: there only the latter).
    """
    counted = torch.ones_like(groups, dtype=torch.bool) if counted is None else counted
    if estimator == "reinforce_plus_plus":
        return torch.where(counted, rewards, 0.0)
    stats = group_stats(rewards, groups, counted=counted)
    centred = rewards.double() - stats.mean
    if estimator == "grpo":
        centred = centred / (stats.std + epsilon)
    elif estimator == "rloo":
        centred = centred * stats.count / (stats.count - 1).clamp(min=1)
    elif estimator not in ("dr_grpo", "reinforce_plus_plus_baseline"):
        raise ValueError(f"advantage_estimator {estimator!r} is not known")
    return torch.where(counted & ~stats.is_flat, centred, 0.0).to(rewards.dtype)


def reward_to_go(
    final: torch.Tensor, token_rewards: torch.Tensor, lengths: torch.Tensor, *, gamma: float = 1.0
) -> torch.Tensor:
    """Return at each token, `[t]`: the response's `final` `[r]` at its last token, plus `token_rewards`
    `[t]` (minus the KL penalty, say) from here to its end, discounted by `gamma` a token.

    Zero-length responses have no token, and so nothing to write to.
    """
    if not len(token_rewards):
        return token_rewards
    pieces = token_rewards.double().split(lengths.tolist())
    returns = torch.nn.utils.rnn.pad_sequence(pieces, batch_first=True)  # [r, l]
    rows = lengths.nonzero().squeeze(-1)
    returns[rows, lengths[rows] - 1] += final.double()[rows]
    for i in range(returns.shape[1] - 2, -1, -1):
        returns[:, i] += gamma * returns[:, i + 1]
    present = torch.arange(returns.shape[1], device=lengths.device) < lengths[:, None]
    return returns[present].to(token_rewards.dtype)


def moments(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """`[3]` float64: count, sum and sum of squares of `values` where `mask`; add them over the ranks."""
    counted = values.double()[mask.bool()]
    return torch.stack(
        (counted.new_tensor(float(counted.numel())), counted.sum(), (counted * counted).sum())
    )


def whiten(values: torch.Tensor, mask: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    """Mean 0 and standard deviation 1 over the tokens that `total` (`moments`, summed) describes.

    Masked tokens, and all tokens of a batch without variance, are exactly 0. Standard deviation with n - 1.
    """
    count, first, second = total.tolist()
    mean = first / max(count, 1.0)
    variance = max(second - count * mean * mean, 0.0) / max(count - 1.0, 1.0)
    if variance <= 1e-10 * (1.0 + mean * mean):  # what cancellation leaves of equal numbers
        return torch.zeros_like(values)
    scaled = (values.double() - mean) / (variance**0.5 + 1e-8)
    return torch.where(mask.bool(), scaled, 0.0).to(values.dtype)


def overlong_penalty(
    lengths: torch.Tensor, *, max_length: int, buffer_length: int, factor: float = 1.0
) -> torch.Tensor:
    """DAPO's soft overlong punishment, `[r]`, in [-factor, 0] (https://arxiv.org/abs/2503.14476, eq. 13).

    0 up to `max_length - buffer_length` tokens, then linear down to -`factor` at `max_length` and beyond.
    """
    if not 0 < buffer_length <= max_length:
        raise ValueError(
            f"overlong_buffer_len {buffer_length} must lie in 1..{max_length} (the longest response)"
        )
    excess = lengths.float() - (max_length - buffer_length)
    return -factor * (excess / buffer_length).clamp(min=0.0, max=1.0)
