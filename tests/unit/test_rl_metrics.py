"""Metrics of rollouts, rewards and evaluations against counting by hand."""

import math
from itertools import combinations

import pytest
import torch

from megatron_tlt.rl.metrics import (
    MismatchError,
    check_mismatch,
    evaluation_metrics,
    ledger_metrics,
    length_metrics,
    mismatch_metrics,
    mismatch_sums,
    pass_at_k,
    quantile,
    repetition_fraction,
    reward_metrics,
    speculation_metrics,
)
from megatron_tlt.types import FinishReason, Rollout


@pytest.mark.parametrize("n", [1, 2, 5, 6])
def test_pass_at_k_is_the_share_of_all_subsets_with_a_correct_sample(n):
    for correct in range(n + 1):
        samples = [i < correct for i in range(n)]
        for k in range(1, n + 1):
            subsets = list(combinations(samples, k))
            expected = sum(any(subset) for subset in subsets) / len(subsets)
            assert pass_at_k(n, correct, k) == pytest.approx(expected)


def test_pass_at_k_refuses_impossible_counts():
    for n, c, k in ((4, 1, 5), (4, 5, 1), (4, 1, 0)):
        with pytest.raises(ValueError, match="pass@"):
            pass_at_k(n, c, k)


def test_evaluation_averages_over_prompts_and_counts_truncation():
    metrics = evaluation_metrics(
        "set", [[1.0, 0.0, 0.0, 0.0], [1.0, 1.1, 0.5, 0.0]], lengths=[2, 4], truncated=[True, False]
    )
    assert metrics == pytest.approx(
        {
            "eval/set": (0.25 + 0.65) / 2,
            "eval/set-pass@1": (1 / 4 + 2 / 4) / 2,
            "eval/set-pass@2": (1 / 2 + 5 / 6) / 2,
            "eval/set-pass@4": 1.0,
            "eval/set-response_len/mean": 3.0,
            "eval/set-truncated_ratio": 0.5,
        }
    )
    for scores in ([], [[1.0], []]):
        with pytest.raises(ValueError, match="evaluation set x"):
            evaluation_metrics("x", scores)


def test_length_metrics_show_the_tail():
    metrics = length_metrics([1] * 90 + [10] * 9 + [100], [False] * 99 + [True])
    assert metrics["rollout/response_len/p90"] == 1.0
    assert metrics["rollout/response_len/p99"] == 10.0
    assert metrics["rollout/response_len/max"] == metrics["rollout/response_len/tail_ratio"] == 100.0
    assert metrics["rollout/response_len/mean"] == pytest.approx(2.8)
    assert metrics["rollout/truncated_ratio"] == 0.01
    assert length_metrics([], []) == {}
    assert quantile([3, 5], 0.0) == 3 and quantile([3, 5], 1.0) == 5


def test_reward_metrics_count_flat_groups_by_reward_and_leave_out_what_does_not_count():
    metrics = reward_metrics(
        [1, 1, 0, 0, 1, 0, 0.5, 0.5, 9],
        [1, 1, 2, 2, 3, 3, 4, 4, 1],
        counted=[True] * 8 + [False],
    )
    assert metrics == pytest.approx(
        {
            "rollout/raw_reward": 0.5,
            "rollout/zero_std/count_1": 1,
            "rollout/zero_std/count_0": 1,
            "rollout/zero_std/count_0.5": 1,
            "baseline_reward/pct_0": 0.25,
            "baseline_reward/pct_1": 0.25,
            "baseline_reward/pct_mixed": 0.5,
        }
    )
    assert reward_metrics([1.0], [0], counted=[False]) == {}


def rollout(verify_ct, num_drafted, num_accepted):
    return Rollout(
        prompt_id=0,
        sample_index=0,
        prompt_tokens=(1,),
        tokens=(2,),
        log_probs=(0.0,),
        weight_versions=(0,),
        finish_reason=FinishReason.STOP,
        verify_ct=verify_ct,
        num_drafted=num_drafted,
        num_accepted=num_accepted,
    )


def test_acceptance_is_weighted_by_tokens_and_leaves_out_responses_without_speculation():
    metrics = speculation_metrics([rollout(10, 40, 20), rollout(1, 4, 0), rollout(0, 0, 0)])
    assert metrics["rollout/spec_accept_length"] == pytest.approx(31 / 11)
    assert metrics["rollout/spec_accept_rate"] == pytest.approx(20 / 44)
    assert speculation_metrics([rollout(0, 0, 0)]) == {}


def test_mismatch_is_measured_over_counted_tokens_of_all_ranks():
    train = torch.tensor([-1.0, -2.0, -3.0, math.nan])
    engine = torch.tensor([-1.5, -2.0, -2.8, 0.0])
    mask = torch.tensor([1, 1, 1, 0])
    parts = [mismatch_sums(train[a:b], engine[a:b], mask[a:b]) for a, b in ((0, 1), (1, 4), (4, 4))]
    sums = torch.stack(parts)
    total = torch.cat((sums[:, :4].sum(0), sums[:, 4:].amax(0))).tolist()
    metrics = mismatch_metrics(total)
    d = [0.5, 0.0, -0.2]
    assert metrics["train/train_rollout_logprob_abs_diff"] == pytest.approx(0.7 / 3, rel=1e-6)
    assert metrics["train/train_rollout_logprob_abs_diff_max"] == pytest.approx(0.5)
    assert metrics["train/rollout_kl"] == pytest.approx(-sum(d) / 3, rel=1e-6)
    expected = sum(math.exp(x) - 1 - x for x in d) / 3
    assert metrics["train/rollout_kl_k3"] == pytest.approx(expected, rel=1e-6)


def test_a_difference_beyond_the_threshold_ends_the_run_and_nan_does_too():
    name = "train/train_rollout_logprob_abs_diff"
    check_mismatch({name: 0.09}, threshold=0.1)
    check_mismatch({name: 5.0}, threshold=0.0)
    for value in (0.11, math.nan):
        with pytest.raises(MismatchError, match="max_logprob_diff 0.1"):
            check_mismatch({name: value}, threshold=0.1)


def test_repetition_is_the_share_of_windows_seen_before():
    assert repetition_fraction([1, 2, 3, 4], size=2) == 0.0
    assert repetition_fraction([1, 2, 1, 2, 1, 2], size=2) == pytest.approx(3 / 5)
    assert repetition_fraction([1], size=2) == 0.0
    assert repetition_fraction([5] * 100) == pytest.approx(1 - 1 / 85)


def test_the_ledger_is_a_mean_over_ranks_and_names_idle_phases_that_nobody_entered():
    busy, late = {"generate": 3.0, "update": 1.0}, {"generate": 2.0, "update": 1.0, "wait": 1.0}
    assert ledger_metrics([busy, late]) == {
        "ledger/generate": 2.5, "ledger/update": 1.0, "ledger/wait": 0.5, "ledger/train_drafter": 0.0,
        "ledger/bubble_frac": 0.125,
    }  # fmt: skip
