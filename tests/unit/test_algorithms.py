"""Presets, truncation policies, dynamic sampling, and advantages by token."""

import dataclasses
from typing import get_args

import pytest
import torch

from megatron_tlt.config import build_parser, parse, to_yaml
from megatron_tlt.rl.algorithms import (
    Algorithm,
    AlgorithmConfig,
    choose_groups,
    fill_batch,
    sequence_advantages_of,
    shape_rewards,
    token_advantages_of,
)

ALGORITHMS = get_args(Algorithm)


@dataclasses.dataclass
class _Run:
    algorithm: AlgorithmConfig  # without a default: that of one preset would hide those of the others


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_name_sets_every_field_and_each_can_be_overridden(name):
    config = AlgorithmConfig(algorithm=name)
    assert None not in dataclasses.asdict(config).values()
    assert AlgorithmConfig(**dataclasses.asdict(config)) == config
    changed = AlgorithmConfig(algorithm=name, eps_clip=0.123, kl_coef=0.0, kl_loss_coef=0.0)
    assert changed.eps_clip == 0.123
    assert not changed.needs_reference


def test_presets_are_what_the_papers_say():
    dapo, gspo = AlgorithmConfig(algorithm="dapo"), AlgorithmConfig(algorithm="gspo")
    assert (dapo.eps_clip, dapo.eps_clip_high, dapo.loss_agg_mode) == (0.2, 0.28, "token_mean")
    assert dapo.dynamic_sampling and dapo.truncation == "shape" and not dapo.needs_reference
    assert (gspo.ratio_level, gspo.eps_clip, gspo.eps_clip_high) == ("sequence", 3e-4, 4e-4)
    dr_grpo = AlgorithmConfig(algorithm="dr_grpo")
    assert dr_grpo.loss_agg_mode == "sequence_mean_token_sum_norm"
    assert AlgorithmConfig(algorithm="ppo").eps_clip_c == 3.0


def test_the_command_line_and_yaml_give_the_same_configuration(tmp_path):
    parser = build_parser(_Run, prog="x", description="x")
    config, _ = parse(parser, _Run, ["--algorithm.algorithm", "dapo", "--algorithm.eps_clip", "0.1"])
    assert config.algorithm == AlgorithmConfig(algorithm="dapo", eps_clip=0.1)
    file = tmp_path / "run.yaml"
    file.write_text(to_yaml(config))
    again, _ = parse(build_parser(_Run, prog="x", description="x"), _Run, ["--config", str(file)])
    assert again.algorithm == config.algorithm


@pytest.mark.parametrize(
    "wrong",
    [
        {"algorithm": "grpo2"},
        {"eps_clip": 0.0},
        {"eps_clip_c": 0.5},
        {"gamma": 1.5},
        {"tis_clip": 0.5, "tis_clip_low": 0.5},
        {"kl_coef": -1.0},
        {"max_num_gen_batches": 0},
    ],
)
def test_values_out_of_range_are_refused_by_name(wrong):
    with pytest.raises(ValueError, match=list(wrong)[0]):
        AlgorithmConfig(**wrong)


REWARDS = torch.tensor([1.0, 0.0, 1.0, 1.0])
LENGTHS = torch.tensor([10, 100, 95, 0])
TRUNCATED = torch.tensor([False, True, False, False])


def shaped(**settings):
    return shape_rewards(AlgorithmConfig(**settings), REWARDS, LENGTHS, TRUNCATED, max_length=100)


def test_truncation_penalise_scores_truncated_answers_as_they_stand():
    found = shaped(truncation="penalise")
    assert found.rewards.tolist() == [1.0, 0.0, 1.0, 0.0]
    assert found.counted.tolist() == [True, True, True, False]  # without a token nothing counts


def test_truncation_mask_takes_them_out_of_loss_and_baseline_alike():
    found = shaped(truncation="mask")
    assert found.counted.tolist() == [True, False, True, False]
    groups = torch.zeros(4, dtype=torch.long)
    advantages = sequence_advantages_of(AlgorithmConfig(truncation="mask"), found, groups)
    assert advantages.tolist() == [0.0] * 4  # the two that count are equal


def test_truncation_shape_lowers_the_reward_of_long_answers():
    found = shaped(truncation="shape", overlong_buffer_len=10, overlong_penalty_factor=2.0)
    assert found.rewards.tolist() == [1.0, -2.0, 0.0, 0.0]
    assert shaped(truncation="shape").rewards[2] == 1.0 - 15 / 20  # a fifth of the limit


def test_responses_without_a_verdict_do_not_count():
    usable = torch.tensor([False, True, True, True])
    found = shape_rewards(
        AlgorithmConfig(), REWARDS, LENGTHS, TRUNCATED, max_length=100, usable=usable
    )
    assert found.counted.tolist() == [False, True, True, False]
    assert found.rewards.tolist() == [0.0, 0.0, 1.0, 0.0]


def test_dynamic_sampling_drops_whole_groups_and_counts_why():
    rewards = torch.tensor([1.0, 1, 0, 0, 1, 0, 1, 1, 0.5])
    groups = torch.tensor([5, 5, 7, 7, 9, 9, 2, 2, 4])
    counted = torch.tensor([True] * 8 + [False])
    choice = choose_groups(rewards, groups, counted)
    assert choice.kept == (9,)
    assert choice.flat == (5, 7, 2, 4)
    assert choice.drops == {"zero_std_1": 2, "zero_std_0": 1, "empty": 1}


def test_the_lone_loser_keeps_its_group():
    rewards, groups = torch.tensor([1.0] * 7 + [0.0]), torch.zeros(8, dtype=torch.long)
    assert choose_groups(rewards, groups, torch.ones(8, dtype=torch.bool)).kept == (0,)


def test_the_batch_keeps_its_size_when_retries_run_out():
    assert fill_batch([1, 2, 3], [4, 5], wanted=2) == [1, 2]
    assert fill_batch([1], [4, 5], wanted=2) == [1, 4]
    with pytest.raises(ValueError, match="1 kept and 2 flat groups do not make a batch of 4"):
        fill_batch([1], [4, 5], wanted=4)


def test_kl_in_the_reward_lowers_the_reward_of_a_whole_response_before_comparing():
    config = AlgorithmConfig(algorithm="rloo", kl_coef=0.1)
    found = shape_rewards(
        config, torch.tensor([1.0, 1.0]), torch.tensor([5, 5]), torch.zeros(2).bool(), max_length=9
    )
    groups = torch.zeros(2, dtype=torch.long)
    advantages = sequence_advantages_of(config, found, groups, kl_sums=torch.tensor([2.0, 0.0]))
    assert advantages.tolist() == pytest.approx([-0.2, 0.2])
    with pytest.raises(ValueError, match="kl_sums"):
        sequence_advantages_of(config, found, groups)


def test_group_advantages_are_the_same_at_every_token_of_a_response():
    found = token_advantages_of(
        AlgorithmConfig(), torch.tensor([1.0, -1.0]), torch.tensor([True, True]), torch.tensor([2, 1])
    )
    assert found.tolist() == [1.0, 1.0, -1.0]


def test_reinforce_plus_plus_whitens_returns_with_the_kl_of_each_token():
    config = AlgorithmConfig(algorithm="reinforce_plus_plus", kl_coef=1.0)
    counted, lengths = torch.tensor([True, True, False]), torch.tensor([2, 1, 1])
    found = token_advantages_of(
        config,
        torch.tensor([1.0, 0.0, 0.0]),
        counted,
        lengths,
        kl=torch.tensor([0.5, 0.25, -1.0, 7.0]),
    )
    returns = torch.tensor([0.25, 0.75, 1.0])
    expected = (returns - returns.mean()) / returns.std()
    assert found.tolist() == pytest.approx([*expected.tolist(), 0.0], abs=1e-6)
    with pytest.raises(ValueError, match="pass kl"):
        token_advantages_of(config, torch.zeros(3), counted, lengths)


def test_whitening_leaves_flat_groups_at_exactly_zero():
    config = AlgorithmConfig(algorithm="reinforce_plus_plus_baseline")
    advantages = torch.tensor([0.5, -0.5, 0.0, 0.0])  # two groups, the second flat
    lengths = torch.tensor([3, 1, 2, 2])  # the mean over tokens is not 0
    found = token_advantages_of(config, advantages, torch.ones(4).bool(), lengths)
    assert found[4:].tolist() == [0.0] * 4
    assert found[0] > 0 > found[3]


def test_a_rank_without_responses_takes_part_in_whitening():
    config = AlgorithmConfig(algorithm="reinforce_plus_plus", kl_coef=0.0)
    calls = []

    def record(moments):
        calls.append(moments.tolist())
        return moments

    empty = torch.zeros(0)
    found = token_advantages_of(
        config, empty, empty.bool(), empty.long(), sum_over_ranks=record
    )
    assert found.tolist() == [] and calls == [[0.0, 0.0, 0.0]]
