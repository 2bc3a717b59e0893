"""The vocabulary-parallel loss against torch's own, on one rank."""

import pytest

from megatron_tlt.ops import cross_entropy
from megatron_tlt.ops.cross_entropy import vocab_parallel_cross_entropy

import torch
import torch.nn.functional as F

VOCAB, PADDED = 37, 64


def logits_and_target(dtype=torch.float32):
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(5, 3, PADDED, generator=generator) * 4
    target = torch.randint(0, VOCAB, (5, 3), generator=generator)
    return logits.to(dtype).requires_grad_(), target


def reference(logits, target):
    losses = F.cross_entropy(
        logits[..., :VOCAB].float().flatten(0, 1), target.flatten(), reduction="none"
    )
    return losses.view(target.shape)


@pytest.mark.parametrize("consume", [False, True])
@pytest.mark.parametrize("block", [PADDED, 4 * PADDED, 2**19])
def test_loss_and_gradient_equal_torchs(block, consume, monkeypatch):
    monkeypatch.setattr(cross_entropy, "_BLOCK_ELEMENTS", block)
    logits, target = logits_and_target()
    weights = torch.linspace(0.0, 2.0, target.numel()).view(target.shape)
    expected = reference(logits, target)
    (expected_grad,) = torch.autograd.grad((expected * weights).sum(), logits)
    work = logits.clone()  # what a model hands over: not a leaf, used nowhere else
    losses = vocab_parallel_cross_entropy(work, target, vocab_size=VOCAB, consume_logits=consume)
    (grad,) = torch.autograd.grad((losses * weights).sum(), logits)
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(grad, expected_grad, rtol=1e-5, atol=1e-6)


def test_logits_stay_as_they_are_unless_given_away():
    logits, target = logits_and_target()
    before = logits.detach().clone()
    vocab_parallel_cross_entropy(logits, target, vocab_size=VOCAB).sum().backward()
    assert torch.equal(logits, before)


def test_the_padded_vocabulary_changes_neither_loss_nor_gradient():
    logits, target = logits_and_target()
    with torch.no_grad():
        logits[..., VOCAB:] = 1e4
    losses = vocab_parallel_cross_entropy(logits, target, vocab_size=VOCAB)
    losses.sum().backward()
    torch.testing.assert_close(losses, reference(logits, target), rtol=1e-5, atol=1e-6)
    assert torch.equal(logits.grad[..., VOCAB:], torch.zeros(5, 3, PADDED - VOCAB))


def test_large_logits_neither_overflow_nor_vanish():
    logits = torch.tensor([[1e4, 0.0, -1e4]], requires_grad=True)
    losses = vocab_parallel_cross_entropy(logits, torch.tensor([1]), vocab_size=3)
    losses.sum().backward()
    assert losses.item() == 1e4
    assert torch.equal(logits.grad, torch.tensor([[1.0, -1.0, 0.0]]))


def test_bf16_logits_give_a_float32_loss():
    logits, target = logits_and_target(torch.bfloat16)
    losses = vocab_parallel_cross_entropy(logits, target, vocab_size=VOCAB)
    assert losses.dtype == torch.float32
    torch.testing.assert_close(losses, reference(logits, target), rtol=1e-5, atol=1e-5)
    losses.sum().backward()
    assert logits.grad.dtype == torch.bfloat16
