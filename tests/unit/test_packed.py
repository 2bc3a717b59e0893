"""Packed micro-batches against one sequence a row, and entropy against torch.distributions."""

import pytest
import torch

from megatron_tlt.models.gpt import ModelConfig, build_chunks
from megatron_tlt.models.initialize import initialize_parameters
from megatron_tlt.ops.log_probs import vocab_parallel_entropy, vocab_parallel_log_probs
from megatron_tlt.parallel import ParallelConfig, init_parallel
from megatron_tlt.train.packed import build_micro_batches, run_packed

VOCAB = 61
PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9], [10, 11]]
RESPONSES = {0: [12, 13, 14, 15], 1: [16, 17] * 20, 2: [], 3: [18]}
SHAPES = {
    "llama": dict(preset="tiny-llama"),
    "gpt2": dict(preset="tiny-gpt2"),
    "qwen3": dict(preset="tiny-llama", qk_layernorm=True),
    "recomputed": dict(preset="tiny-llama", recompute_granularity="full"),
    "attention recomputed": dict(preset="tiny-llama", recompute_granularity="selective"),
}


def model_of(kind: str):
    parallel = init_parallel(ParallelConfig(), seed=1)
    chunks = build_chunks(ModelConfig(**SHAPES[kind]), parallel, vocab_size=VOCAB)
    initialize_parameters(chunks, seed=3, vocab_size=VOCAB)
    with torch.no_grad():
        for parameter in chunks[0].parameters():  # far from uniform, so that positions matter
            parameter.mul_(3.0)
    return chunks, parallel


def scores(chunks, parallel, plan, *, packed: bool) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Log-probabilities of each response, and the gradient of their mean."""
    batches = build_micro_batches(PROMPTS, RESPONSES, plan, parallel=parallel, packed=packed)

    def function(number, logits):
        log_probs = vocab_parallel_log_probs(logits, batches[number].labels, vocab_size=VOCAB)
        return (log_probs * batches[number].response_mask).sum() / 45, log_probs.detach()

    chunks[0].zero_grad()
    reports = run_packed(chunks, batches, function, parallel=parallel, forward_only=False)
    found = {}
    for batch, report in zip(batches, reports, strict=True):
        found |= dict(zip(batch.indices, batch.gather(report), strict=True))
    gradient = torch.cat(
        [getattr(p, "main_grad", p.grad).flatten() for p in chunks[0].parameters()]
    )
    return [found[i] for i in sorted(found)], gradient.clone()


@pytest.mark.parametrize("kind", SHAPES)
def test_packed_log_probs_and_gradients_equal_those_of_one_sequence_a_row(kind):
    chunks, parallel = model_of(kind)
    plain, plain_gradient = scores(chunks, parallel, [[0], [1], [2], [3]], packed=False)
    assert [len(x) for x in plain] == [4, 40, 0, 1]
    for plan in ([[0, 1, 2, 3]], [[1, 3], [2, 0], []]):
        packed, gradient = scores(chunks, parallel, plan, packed=True)
        for ours, theirs in zip(packed, plain, strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)
        torch.testing.assert_close(gradient, plain_gradient, atol=1e-6, rtol=1e-4)


def test_a_sequence_does_not_see_its_neighbours_in_the_row(monkeypatch):
    chunks, parallel = model_of("llama")
    before, _ = scores(chunks, parallel, [[0, 1, 2, 3]], packed=True)
    monkeypatch.setitem(RESPONSES, 0, [20, 21, 22, 23])
    after, _ = scores(chunks, parallel, [[0, 1, 2, 3]], packed=True)
    assert not torch.equal(before[0], after[0])
    for ours, theirs in zip(after[1:], before[1:], strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=0)


def test_entropy_and_its_gradient_are_those_of_torch_without_the_padding():
    torch.manual_seed(0)
    logits = (3 * torch.randn(2, 5, 16)).requires_grad_()
    reference = logits.detach()[..., :13].clone().requires_grad_()
    weight = torch.rand(2, 5)
    expected = torch.distributions.Categorical(logits=reference).entropy()
    entropy = vocab_parallel_entropy(logits, vocab_size=13)
    torch.testing.assert_close(entropy, expected)
    (entropy * weight).sum().backward()
    (expected * weight).sum().backward()
    torch.testing.assert_close(logits.grad[..., :13], reference.grad)
    assert not logits.grad[..., 13:].any()
