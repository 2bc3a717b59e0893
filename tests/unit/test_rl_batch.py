"""Which responses of a step are computed: all that can move the policy, and no others."""

import pytest

from megatron_tlt.data.rewards import RewardResult
from megatron_tlt.parallel import ParallelConfig, init_parallel
from megatron_tlt.rl.algorithms import AlgorithmConfig
from megatron_tlt.rl.batch import BatchLayout, TrainBatch, build_train_batch
from megatron_tlt.rl.dump import Sample
from megatron_tlt.types import FinishReason, Rollout

SCORES = ((1.0, 0.0), (1.0, 1.0), (0.0, 0.0))  # of three groups; only the first teaches anything


def batch_of(*, skip: bool = True, **algorithm) -> TrainBatch:
    samples = [
        Sample(group=group, rollout=_rollout(group, number), reward=RewardResult(score=score))
        for group, scores in enumerate(SCORES)
        for number, score in enumerate(scores)
    ]
    layout = BatchLayout(
        global_batch_size=6, max_tokens=64, max_response_len=8, skip_zero_advantage=skip
    )
    config = AlgorithmConfig(**algorithm)
    return build_train_batch(samples, config, layout, parallel=init_parallel(ParallelConfig(), seed=1))


def _rollout(group: int, number: int) -> Rollout:
    return Rollout(
        prompt_id=group, sample_index=number, prompt_tokens=(1, 2), tokens=(3,) * (number + 1),
        log_probs=(-0.5,) * (number + 1), weight_versions=(0,) * (number + 1),
        finish_reason=FinishReason.STOP,
    )  # fmt: skip


def computed(batch: TrainBatch) -> set[int]:
    return {i for shard in batch.shards for i in shard.batch.indices}


@pytest.mark.parametrize("name", ["dr_grpo", "dapo", "gspo"])
def test_groups_with_equal_rewards_are_counted_but_not_computed(name):
    batch, whole = batch_of(algorithm=name), batch_of(algorithm=name, skip=False)
    assert computed(batch) == {0, 1} and batch.num_left_out == 4
    assert computed(whole) == set(range(6)) and whole.num_left_out == 0
    assert batch.counts == whole.counts


@pytest.mark.parametrize(
    "algorithm",
    [
        dict(algorithm="dr_grpo", kl_loss_coef=0.1),
        dict(algorithm="dr_grpo", kl_coef=0.1),
        dict(algorithm="dr_grpo", entropy_coef=0.1),
        dict(algorithm="dr_grpo", normalize_advantages=True),
        dict(algorithm="reinforce_plus_plus"),
    ],
)
def test_what_has_another_gradient_is_computed(algorithm):
    batch = batch_of(**algorithm)
    assert computed(batch) == set(range(6)) and batch.num_left_out == 0
