"""Random streams, truncation rules and log-probs of `ops.sampling`."""

import math

import pytest
import torch
from transformers.generation import logits_process as hf

from megatron_tlt.ops.sampling import (
    SamplingTensors,
    inverse_cdf,
    sample,
    stream_seed,
    target_probs,
    token_log_probs,
    truncate,
    uniforms,
)

VOCAB = 40


def _logits(rows: int = 6) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(3)) * 2


def _hf(logits: torch.Tensor, *processors: object) -> torch.Tensor:
    for processor in processors:
        logits = processor(None, logits)
    return torch.softmax(logits, -1)


def test_uniforms_are_uniform_and_uncorrelated():
    seeds = torch.tensor([stream_seed(1, 2, i, 0) for i in range(200)])
    draws = uniforms(seeds[:, None], torch.arange(500)[None])
    assert 0 <= draws.min() and draws.max() < 1
    counts = torch.histc(draws.float(), bins=50, min=0, max=1)
    expected = draws.numel() / 50
    assert ((counts - expected).square() / expected).sum() < 49 + 5 * math.sqrt(2 * 49)
    lag = torch.corrcoef(torch.stack((draws[:, :-1].flatten(), draws[:, 1:].flatten())))[0, 1]
    across = torch.corrcoef(torch.stack((draws[:-1].flatten(), draws[1:].flatten())))[0, 1]
    assert abs(lag) < 0.02 and abs(across) < 0.02


def test_every_counter_changes_the_stream():
    base = (5, 6, 7, 8)
    seeds = {stream_seed(*base)}
    for i in range(4):
        seeds.add(stream_seed(*(x + (i == j) for j, x in enumerate(base))))
    assert len(seeds) == 5


@pytest.mark.parametrize("k", [1, 5, 39, 100])
def test_top_k_equals_transformers(k):
    probs = torch.softmax(_logits(), -1)
    got = truncate(probs, top_k=torch.full((6,), k))
    expected = _hf(_logits(), hf.TopKLogitsWarper(k))
    torch.testing.assert_close(got / got.sum(-1, keepdim=True), expected)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9, 0.999])
def test_top_k_then_top_p_equals_transformers(p):
    probs = torch.softmax(_logits(), -1)
    got = truncate(probs, top_k=torch.full((6,), 12), top_p=torch.full((6,), p))
    expected = _hf(_logits(), hf.TopKLogitsWarper(12), hf.TopPLogitsWarper(p))
    torch.testing.assert_close(got / got.sum(-1, keepdim=True), expected)


def test_min_p_equals_transformers():
    probs = torch.softmax(_logits(), -1)
    got = truncate(probs, min_p=torch.full((6,), 0.1))
    expected = _hf(_logits(), hf.MinPLogitsWarper(0.1))
    torch.testing.assert_close(got / got.sum(-1, keepdim=True), expected)


def test_top_p_over_a_large_flat_vocabulary_uses_all_of_it():
    logits = torch.randn(3, 5000, generator=torch.Generator().manual_seed(1)) * 0.01
    got = truncate(torch.softmax(logits, -1), top_p=torch.full((3,), 0.9))
    expected = _hf(logits, hf.TopPLogitsWarper(0.9))
    assert torch.equal(got > 0, expected > 0)


def test_rows_do_not_influence_each_other():
    logits = _logits()
    params = SamplingTensors(
        temperature=torch.tensor([0.7, 1.0, 1.3, 0.0, 1.0, 0.5]),
        top_k=torch.tensor([0, 5, 0, 3, 0, 2]),
        top_p=torch.tensor([1.0, 0.9, 0.5, 1.0, 1.0, 0.8]),
        any_greedy=True,
    )
    together = target_probs(logits, params)
    for row in range(6):
        alone = target_probs(logits[row : row + 1], params.take(torch.tensor([row])))
        torch.testing.assert_close(together[row : row + 1], alone, rtol=0, atol=0)
    assert together[3].max() == 1


def test_inverse_cdf_never_draws_probability_zero_and_hits_every_edge():
    probs = torch.tensor([[0.0, 0.25, 0.0, 0.75, 0.0]])
    for u, token in ((0.0, 1), (0.2499999, 1), (0.25, 3), (1 - 2**-52, 3)):
        assert inverse_cdf(probs, torch.tensor([u], dtype=torch.float64)).item() == token


def test_samples_follow_the_distribution():
    logits = _logits(1).expand(40000, -1)
    params = SamplingTensors(temperature=torch.full((40000,), 0.8))
    draws = sample(logits, params, uniform=uniforms(torch.tensor(11), torch.arange(40000)))
    expected = torch.softmax(_logits(1)[0] / 0.8, -1) * 40000
    observed = torch.bincount(draws, minlength=VOCAB)
    big = expected > 5
    statistic = ((observed - expected).square() / expected)[big].sum()
    freedom = int(big.sum()) - 1
    assert statistic < freedom + 4 * math.sqrt(2 * freedom)


def test_repetition_penalty_equals_transformers():
    logits, ids = _logits(2), torch.tensor([[1, 2, 2], [7, 8, 9]])
    seen = torch.zeros(2, VOCAB, dtype=torch.bool).scatter_(1, ids, True)
    params = SamplingTensors(temperature=None, repetition_penalty=torch.full((2,), 1.7))
    expected = hf.RepetitionPenaltyLogitsProcessor(1.7)(ids, logits.clone()).argmax(-1)
    assert torch.equal(sample(logits, params, uniform=None, seen=seen), expected)


def test_log_probs_are_of_the_whole_vocabulary_at_the_temperature():
    logits, tokens = _logits(), torch.arange(6)
    temperature = torch.tensor([0.7, 1.0, 2.0, 0.0, 1.0, 0.5])
    got = token_log_probs(logits, tokens, temperature=temperature)
    divided = logits / torch.where(temperature > 0, temperature, 1.0)[:, None]
    torch.testing.assert_close(got, torch.log_softmax(divided, -1)[torch.arange(6), tokens])
