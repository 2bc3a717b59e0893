"""Metrics of rollouts, rewards and evaluations under the names that users chart; pure functions.

Names are slime's (`rollout/...`, `eval/...`, `train/...`), NeMo-RL's for the shares of solved prompts.
"""

import math
import statistics
from collections.abc import Mapping, Sequence

import torch

from megatron_tlt.types import Rollout

_HASH_BASE = 0x9E3779B97F4A7C15  # odd, so powers never vanish
_IDLE = ("wait", "train_drafter")  # phases of ranks that others keep waiting


def length_metrics(lengths: Sequence[int], truncated: Sequence[bool]) -> dict[str, float]:
    """`rollout/response_len/{mean,median,max,min,p90,p99}`, `tail_ratio` (max over median) and
    `rollout/truncated_ratio`; empty for no responses."""
    if not lengths:
        return {}
    ordered = sorted(lengths)
    median = statistics.median(ordered)
    values = {
        "mean": sum(ordered) / len(ordered),
        "median": median,
        "max": ordered[-1],
        "min": ordered[0],
        "p90": quantile(ordered, 0.9),
        "p99": quantile(ordered, 0.99),
        "tail_ratio": ordered[-1] / max(median, 1),
    }
    metrics = {f"rollout/response_len/{name}": float(value) for name, value in values.items()}
    return metrics | {"rollout/truncated_ratio": sum(truncated) / len(truncated)}


def quantile(ordered: Sequence[float], share: float) -> float:
    """Nearest-rank quantile of ascending numbers: the smallest with at least `share` of them at or below."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def reward_metrics(
    rewards: Sequence[float], groups: Sequence[int], *, counted: Sequence[bool]
) -> dict[str, float]:
    """`rollout/raw_reward`, `rollout/zero_std/count_<reward>`, `baseline_reward/pct_{0,1,mixed}`.

    Only responses that count enter; a group is "0" or "1" when all its rewards are, else "mixed".
    """
    members: dict[int, list[float]] = {}
    for reward, group, counts in zip(rewards, groups, counted, strict=True):
        if counts:
            members.setdefault(group, []).append(reward)
    if not members:
        return {}
    everything = [reward for group in members.values() for reward in group]
    metrics = {"rollout/raw_reward": sum(everything) / len(everything)}
    shares = {"0": 0, "1": 0, "mixed": 0}
    for group in members.values():
        if max(group) == min(group):
            name = f"rollout/zero_std/count_{round(group[0], 3):g}"
            metrics[name] = metrics.get(name, 0.0) + 1.0
        kind = f"{group[0]:g}" if max(group) == min(group) and group[0] in (0.0, 1.0) else "mixed"
        shares[kind] += 1
    return metrics | {
        f"baseline_reward/pct_{kind}": count / len(members) for kind, count in shares.items()
    }


def speculation_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """`rollout/spec_accept_length` (tokens a verify step, bonus included) and `rollout/spec_accept_rate`.

    Sums over sums, so long responses weigh as they should; empty when nothing was speculated.
    """
    steps = sum(rollout.verify_ct for rollout in rollouts)
    if not steps:
        return {}
    accepted = sum(rollout.num_accepted for rollout in rollouts)
    drafted = sum(rollout.num_drafted for rollout in rollouts)
    return {
        "rollout/spec_accept_length": (accepted + steps) / steps,
        "rollout/spec_accept_rate": accepted / max(drafted, 1),
    }


def ledger_metrics(seconds: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """`ledger/<phase>`: mean seconds over the ranks, whose phases `seconds` holds; `ledger/bubble_frac`: the
    share in which ranks trained the drafter or waited. These two are there in every step, 0 where nobody did,
    so that means over steps are right."""
    names = sorted({name for rank in seconds for name in rank}.union(_IDLE))
    mean = {name: sum(rank.get(name, 0.0) for rank in seconds) / len(seconds) for name in names}
    idle = sum(mean[name] for name in _IDLE)
    metrics = {f"ledger/{name}": value for name, value in mean.items()}
    return metrics | {"ledger/bubble_frac": idle / max(sum(mean.values()), 1e-9)}


def mismatch_sums(
    log_probs: torch.Tensor, rollout_log_probs: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    """`[5]` float64 of the masked tokens: count, sum |d|, sum d, sum of k3, max |d|; d = trainer - engine.

    Add the first four over ranks and take the maximum of the last; then `mismatch_metrics`.
    """
    present = mask > 0
    d = (log_probs.detach().double() - rollout_log_probs.double())[present]
    largest = d.abs().max() if d.numel() else d.new_zeros(())
    # KL(engine || trainer): the tokens came from the engine, so k3 is exp(d) - 1 - d.
    k3 = torch.expm1(d) - d
    return torch.stack((d.new_tensor(float(d.numel())), d.abs().sum(), d.sum(), k3.sum(), largest))


def mismatch_metrics(sums: Sequence[float]) -> dict[str, float]:
    """`train/train_rollout_logprob_abs_diff`, `..._max`, `train/rollout_kl` (k1: engine minus trainer),
    `train/rollout_kl_k3`, from `mismatch_sums`."""
    count, absolute, signed, k3, largest = (float(x) for x in sums)
    count = max(count, 1.0)
    return {
        "train/train_rollout_logprob_abs_diff": absolute / count,
        "train/train_rollout_logprob_abs_diff_max": largest,
        "train/rollout_kl": -signed / count,
        "train/rollout_kl_k3": k3 / count,
    }


class MismatchError(RuntimeError):
    """Trainer and rollout engine disagree about log-probabilities beyond the threshold."""


def check_mismatch(metrics: dict[str, float], *, threshold: float) -> None:
    """Raises MismatchError when the mean difference exceeds `threshold` or is no number; 0 never does."""
    value = metrics["train/train_rollout_logprob_abs_diff"]
    if threshold > 0 and not value <= threshold:
        raise MismatchError(
            f"mean |log-prob difference| of trainer and engine is {value:.3g}, above max_logprob_diff "
            f"{threshold:.3g}: the engine has stale weights, or another temperature or precision"
        )


def repetition_fraction(tokens: Sequence[int], *, size: int = 16) -> float:
    """Share of `size`-token windows that occurred earlier in the same response.

    Windows are told apart by a 64-bit polynomial hash.
    """
    count = len(tokens) - size + 1
    if count <= 0:
        return 0.0
    powers = torch.tensor([pow(_HASH_BASE, i, 2**63) for i in range(size)])
    hashes = (torch.tensor(tokens).unfold(0, size, 1) * powers).sum(-1)  # [count], wraps around
    return 1.0 - hashes.unique().numel() / count


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Unbiased pass@k of one prompt (https://arxiv.org/abs/2107.03374, eq. 1): 1 - C(n-c, k) / C(n, k)."""
    if not 0 < k <= num_samples or not 0 <= num_correct <= num_samples:
        raise ValueError(
            f"pass@{k} needs 1 <= k <= samples and 0 <= correct <= samples, got {num_samples} samples "
            f"and {num_correct} correct ones"
        )
    return 1.0 - math.comb(num_samples - num_correct, k) / math.comb(num_samples, k)


def evaluation_metrics(
    name: str,
    scores: Sequence[Sequence[float]],
    *,
    lengths: Sequence[int] = (),
    truncated: Sequence[bool] = (),
    correct_at: float = 1.0,
) -> dict[str, float]:
    """Metrics of one evaluation set from `scores[prompt][sample]`.

    `eval/<name>`: avg@k, the mean score. `eval/<name>-pass@k` for k = 1, 2, 4 .. up to the samples of the
    prompt with fewest; a sample is correct at a score of `correct_at` or more. With `lengths` and
    `truncated` also `-response_len/mean` and `-truncated_ratio`. Raises ValueError for a prompt without a
    sample.
    """
    fewest = min((len(row) for row in scores), default=0)
    if not fewest:
        raise ValueError(f"evaluation set {name}: {len(scores)} prompts, one of them without a sample")
    means = [sum(row) / len(row) for row in scores]
    metrics = {f"eval/{name}": sum(means) / len(means)}
    k = 1
    while k <= fewest:
        passes = [pass_at_k(len(row), sum(x >= correct_at for x in row), k) for row in scores]
        metrics[f"eval/{name}-pass@{k}"] = sum(passes) / len(passes)
        k *= 2
    if lengths:
        metrics[f"eval/{name}-response_len/mean"] = sum(lengths) / len(lengths)
    if truncated:
        metrics[f"eval/{name}-truncated_ratio"] = sum(truncated) / len(truncated)
    return metrics
