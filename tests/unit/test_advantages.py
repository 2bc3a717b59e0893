"""Advantages against numbers worked out by hand, and what must be exactly zero."""

import math

import pytest
import torch

from megatron_tlt.ops.advantages import (
    group_stats,
    moments,
    overlong_penalty,
    reward_to_go,
    sequence_advantages,
    whiten,
)

# Two prompts, members interleaved: rewards 1, 0, 0, 1 and 2, 4, 6 (means 1/2 and 4; std 1/sqrt(3) and 2).
GROUPS = torch.tensor([7, 3, 7, 3, 7, 3, 7])
REWARDS = torch.tensor([1.0, 2.0, 0.0, 4.0, 0.0, 6.0, 1.0], dtype=torch.float64)


def advantages(estimator, **options):
    return sequence_advantages(estimator, REWARDS, GROUPS, **options)


def test_grpo_is_the_reward_in_standard_deviations_from_the_group_mean():
    half = 0.5 * math.sqrt(3)
    expected = [half, -1.0, -half, 0.0, -half, 1.0, half]
    assert advantages("grpo", epsilon=1e-12).tolist() == pytest.approx(expected, abs=1e-9)


def test_dr_grpo_leaves_the_standard_deviation_out():
    assert advantages("dr_grpo").tolist() == [0.5, -2.0, -0.5, 0.0, -0.5, 2.0, 0.5]


def test_rloo_compares_with_the_mean_of_the_others():
    # 1 against mean(0, 0, 1) = 1/3; 0 against 2/3; 2 against 5; 4 against 4; 6 against 3
    expected = [2 / 3, -3.0, -2 / 3, 0.0, -2 / 3, 3.0, 2 / 3]
    assert advantages("rloo").tolist() == pytest.approx(expected)


def test_reinforce_plus_plus_takes_rewards_as_they_are_and_its_baseline_form_centres_them():
    assert torch.equal(advantages("reinforce_plus_plus"), REWARDS)
    assert torch.equal(advantages("reinforce_plus_plus_baseline"), advantages("dr_grpo"))


def test_an_unknown_estimator_is_refused():
    with pytest.raises(ValueError, match="gae"):
        advantages("gae")


@pytest.mark.parametrize("estimator", ["grpo", "dr_grpo", "rloo", "reinforce_plus_plus_baseline"])
def test_groups_without_variance_give_exactly_zero_in_spite_of_rounding(estimator):
    noisy = torch.tensor([0.1 + 0.2, 0.3, 0.3, 0.1 * 3])  # equal but for the last bits
    assert float(noisy.double().std()) < 1e-7
    found = sequence_advantages(estimator, noisy, torch.zeros(4, dtype=torch.long))
    assert found.tolist() == [0.0] * 4


@pytest.mark.parametrize("estimator", ["grpo", "dr_grpo", "rloo", "reinforce_plus_plus_baseline"])
def test_a_group_of_one_gives_exactly_zero(estimator):
    found = sequence_advantages(estimator, torch.tensor([5.0]), torch.tensor([0]))
    assert found.tolist() == [0.0]


@pytest.mark.parametrize("estimator", ["grpo", "dr_grpo", "rloo", "reinforce_plus_plus_baseline"])
def test_responses_that_do_not_count_change_nothing_for_their_peers(estimator):
    """An empty or aborted response has no verdict: whatever reward it carries must not leak."""
    counted = torch.tensor([True, True, True, False])
    groups = torch.zeros(4, dtype=torch.long)
    alone = sequence_advantages(estimator, torch.tensor([1.0, 0.0, 0.0]), groups[:3])
    for leak in (0.0, 1e6, float("nan")):
        rewards = torch.tensor([1.0, 0.0, 0.0, leak])
        found = sequence_advantages(estimator, rewards, groups, counted=counted)
        assert torch.equal(found[:3], alone)
        assert found[3] == 0.0


def test_a_group_in_which_nothing_counts_is_flat_and_zero():
    none = torch.zeros(2, dtype=torch.bool)
    groups = torch.zeros(2, dtype=torch.long)
    stats = group_stats(torch.tensor([1.0, 0.0]), groups, counted=none)
    assert stats.is_flat.all()
    found = sequence_advantages("grpo", torch.tensor([1.0, 0.0]), groups, counted=none)
    assert found.tolist() == [0.0, 0.0]


def test_the_spread_of_the_whole_group_decides_not_that_of_neighbours():
    """The lone loser of a group keeps the group alive."""
    stats = group_stats(torch.tensor([1.0, 1.0, 1.0, 0.0]), torch.zeros(4, dtype=torch.long))
    assert not stats.is_flat.any()


def test_unequal_shapes_are_refused():
    with pytest.raises(ValueError, match=r"\(2,\)"):
        group_stats(torch.zeros(3), torch.zeros(2, dtype=torch.long))


def test_reward_to_go_adds_token_rewards_from_here_to_the_end():
    final, lengths = torch.tensor([1.0, 5.0, 2.0]), torch.tensor([3, 0, 2])
    kl = torch.tensor([-0.1, -0.2, -0.3, -0.5, 0.0])
    found = reward_to_go(final, kl, lengths)
    assert found.tolist() == pytest.approx([0.4, 0.5, 0.7, 1.5, 2.0])


def test_reward_to_go_discounts_what_comes_later():
    found = reward_to_go(torch.tensor([1.0]), torch.zeros(3), torch.tensor([3]), gamma=0.5)
    assert found.tolist() == pytest.approx([0.25, 0.5, 1.0])


def test_a_response_of_length_zero_writes_its_reward_nowhere():
    final, lengths = torch.tensor([1.0, 99.0]), torch.tensor([2, 0])
    assert reward_to_go(final, torch.zeros(2), lengths).tolist() == [1.0, 1.0]
    assert reward_to_go(final[1:], torch.zeros(0), lengths[1:]).tolist() == []


def test_whitening_is_over_the_moments_of_all_shards():
    values = torch.tensor([1.0, 2.0, 3.0, 4.0, 1000.0])
    mask = torch.tensor([1, 1, 1, 1, 0])
    shards = [(values[:1], mask[:1]), (values[1:], mask[1:])]
    total = sum(moments(v, m) for v, m in shards)
    found = torch.cat([whiten(v, m, total) for v, m in shards])
    std = math.sqrt(5 / 3)
    expected = [-1.5 / std, -0.5 / std, 0.5 / std, 1.5 / std, 0.0]
    assert found.tolist() == pytest.approx(expected, abs=1e-6)


def test_whitening_a_batch_without_variance_gives_exactly_zero():
    values = torch.full((1000,), 0.1) + 0.2
    mask = torch.ones(1000)
    assert whiten(values, mask, moments(values, mask)).abs().max() == 0.0
    empty = torch.zeros(0)
    assert whiten(empty, empty, moments(empty, empty)).tolist() == []


def test_overlong_penalty_grows_linearly_over_the_buffer():
    lengths = torch.tensor([0, 80, 90, 95, 100, 120])
    found = overlong_penalty(lengths, max_length=100, buffer_length=20, factor=0.5)
    assert found.tolist() == pytest.approx([0.0, 0.0, -0.25, -0.375, -0.5, -0.5])
    with pytest.raises(ValueError, match="overlong_buffer_len 101"):
        overlong_penalty(lengths, max_length=100, buffer_length=101)
