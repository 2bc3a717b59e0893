"""Packing: who computes which sequence, and how sequences lie in the tensors."""

import random

import pytest
import torch

from megatron_tlt.ops.packing import build_micro_batch, packing_stats, plan_micro_batches


def long_tailed(count, seed=0):
    rng = random.Random(seed)
    return [min(2048, int(40 * rng.paretovariate(1.1))) for _ in range(count)]


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("count", [0, 1, 2, 7, 256])
def test_every_sequence_is_placed_once_within_the_budget_and_counts_are_equal(count, num_ranks):
    lengths = long_tailed(count)
    plan = plan_micro_batches(lengths, max_tokens=2048, num_ranks=num_ranks)
    assert len(plan) == num_ranks
    assert sorted(i for rank in plan for batch in rank for i in batch) == list(range(count))
    assert len({len(rank) for rank in plan}) == 1 and len(plan[0]) >= 1
    assert all(sum(lengths[i] for i in batch) <= 2048 for rank in plan for batch in rank)


def test_a_rank_without_sequences_gets_empty_micro_batches():
    plan = plan_micro_batches([9, 9, 9], max_tokens=9, num_ranks=4)
    assert sorted(len(rank) for rank in plan) == [1, 1, 1, 1]
    assert sorted(len(rank[0]) for rank in plan) == [0, 1, 1, 1]


def test_long_tailed_batches_are_balanced_and_full():
    lengths = long_tailed(512)
    plan = plan_micro_batches(lengths, max_tokens=4096, num_ranks=8)
    stats = packing_stats(plan, lengths, max_tokens=4096)
    assert stats.imbalance < 1.05
    assert stats.fill > 0.5
    one = packing_stats([[[0], [1]], [[2], []]], [5, 3, 4], max_tokens=10)
    assert (one.num_micro_batches, one.imbalance, one.fill) == (2, 16 / 12, 12 / 40)


def test_balance_is_of_cost_when_attention_counts():
    lengths = [100] + [10] * 10
    quadratic = plan_micro_batches(lengths, max_tokens=1000, num_ranks=2, quadratic=1.0)
    assert sorted(sum(lengths[i] for i in rank[0]) for rank in quadratic) == [100, 100]
    costs = sorted(sum(n + n * n for i in rank[0] for n in [lengths[i]]) for rank in quadratic)
    assert costs == [1100, 10100]  # no better split exists: the long one is alone


def test_the_number_of_micro_batches_is_the_least_that_fits_and_a_multiple():
    lengths = [4] * 12
    assert len(plan_micro_batches(lengths, max_tokens=8, num_ranks=2)[0]) == 3
    assert len(plan_micro_batches(lengths, max_tokens=11, num_ranks=2)[0]) == 3
    assert len(plan_micro_batches(lengths, max_tokens=8, num_ranks=2, multiple_of=2)[0]) == 4


def test_the_plan_is_a_pure_function_of_its_arguments():
    lengths = long_tailed(64)
    plans = [plan_micro_batches(list(lengths), max_tokens=4096, num_ranks=3) for _ in range(2)]
    assert plans[0] == plans[1]


def test_a_sequence_beyond_the_budget_is_refused_with_the_remedy():
    with pytest.raises(ValueError, match="2049 tokens does not fit.*2048: raise it"):
        plan_micro_batches([3, 2049], max_tokens=2048, num_ranks=1)
    with pytest.raises(ValueError, match="num_ranks 0"):
        plan_micro_batches([3], max_tokens=4, num_ranks=0)


PROMPTS = [[11, 12], [21], [31, 32, 33], [41]]
RESPONSES = [[13, 14], [22, 23, 24], [34], []]


def test_packed_sequences_lie_end_to_end_each_with_its_own_positions():
    batch = build_micro_batch(PROMPTS, RESPONSES, [1, 3, 0], packed=True, pad_to=11)
    assert batch.tokens.tolist() == [[21, 22, 23, 24, 41, 11, 12, 13, 14, 0, 0]]
    assert batch.labels.tolist() == [[22, 23, 24, 0, 0, 12, 13, 14, 0, 0, 0]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 0, 0, 1, 2, 3, 0, 1]]
    assert batch.segments.tolist() == [[0, 0, 0, 0, 1, 2, 2, 2, 2, 2, 2]]
    assert batch.response_mask.tolist() == [[1, 1, 1, 0, 0, 0, 1, 1, 0, 0, 0]]
    assert batch.cu_seqlens.tolist() == [0, 4, 5, 9, 11]
    assert batch.response_lengths == (3, 0, 2)


def test_rows_are_the_twin_with_one_sequence_each():
    batch = build_micro_batch(PROMPTS, RESPONSES, [2, 0], packed=False, pad_multiple=3)
    assert batch.tokens.tolist() == [[31, 32, 33, 34, 0, 0], [11, 12, 13, 14, 0, 0]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 4, 5]] * 2
    assert batch.response_mask.tolist() == [[0, 0, 1, 0, 0, 0], [0, 1, 1, 0, 0, 0]]
    assert batch.attention_mask() is None
    assert batch.cu_seqlens.tolist() == [0, 6, 12]


def test_attention_is_causal_and_stays_within_the_sequence():
    batch = build_micro_batch(PROMPTS, RESPONSES, [1, 0], packed=True, pad_to=10)
    visible = ~batch.attention_mask()[0, 0]
    owners = [0, 0, 0, 0, 1, 1, 1, 1, 2, 2]  # the padding sees itself alone
    for i in range(10):
        for j in range(10):
            assert bool(visible[i, j]) == (j <= i and owners[i] == owners[j])


def test_values_of_response_tokens_go_to_the_places_that_predict_them_and_come_back():
    values = [torch.tensor([1.0, 2.0, 3.0]), torch.zeros(0), torch.tensor([4.0, 5.0])]
    for packed in (True, False):
        batch = build_micro_batch(PROMPTS, RESPONSES, [1, 3, 0], packed=packed)
        placed = batch.scatter(values)
        assert torch.equal(placed != 0, batch.response_mask > 0)
        labels = batch.labels[placed > 0].tolist()
        assert labels == [22, 23, 24, 13, 14]
        for back, value in zip(batch.gather(placed), values, strict=True):
            assert torch.equal(back, value)


def test_an_empty_micro_batch_is_padding_that_counts_nothing():
    for packed in (True, False):
        batch = build_micro_batch(PROMPTS, RESPONSES, [], packed=packed, pad_multiple=4)
        assert batch.tokens.shape == (1, 4)
        assert float(batch.response_mask.sum()) == 0.0
        assert batch.scatter([]).shape == (1, 4)
        assert batch.gather(torch.ones(1, 4)) == [] or batch.gather(torch.ones(1, 4))[0].numel() == 0
        assert batch.cu_seqlens.tolist() == [0, 4]


def test_a_sequence_without_prompt_is_refused():
    with pytest.raises(ValueError, match="sequence 0 has an empty prompt"):
        build_micro_batch([[]], [[1]], [0], packed=True)
