"""The pieces of the policy loss and their composition, against values worked out by hand."""

import math

import pytest
import torch

from megatron_tlt.ops.policy_loss import (
    GlobalCounts,
    clipped_surrogate,
    count_tokens_and_sequences,
    kl_penalty,
    log_ratio,
    mismatch_weights,
    token_weights,
    weighted_sum,
)
from megatron_tlt.rl.algorithms import AlgorithmConfig
from megatron_tlt.rl.policy_loss import PolicyTokens, policy_loss

# Two responses of 3 and 1 counted tokens packed in one row, the first token masked.
MASK = torch.tensor([[0.0, 1, 1, 1, 0, 1]])
SEGMENTS = torch.tensor([[0, 0, 0, 0, 1, 1]])
COUNTS = GlobalCounts(num_tokens=4, num_sequences=2, max_length=10)


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token_mean", (1 + 2 + 3 + 8) / 4),
        ("sequence_mean_token_mean", (2 + 8) / 2),
        ("sequence_mean_token_sum", (6 + 8) / 2),
        ("sequence_mean_token_sum_norm", (6 + 8) / (2 * 10)),
    ],
)
def test_aggregation_weighs_tokens_as_its_name_says(mode, expected):
    losses = torch.tensor([[math.nan, 1.0, 2.0, 3.0, math.inf, 8.0]])
    weights = token_weights(MASK, SEGMENTS, mode=mode, counts=COUNTS)
    assert float(weighted_sum(losses, weights)) == pytest.approx(expected)


def test_counts_are_of_tokens_and_of_sequences_that_have_any():
    segments = torch.tensor([[0, 0, 1, 1, 2, 2]])
    mask = torch.tensor([[1.0, 1, 0, 0, 0, 1]])
    assert count_tokens_and_sequences(mask, segments).tolist() == [3, 2]
    assert count_tokens_and_sequences(mask * 0, segments).tolist() == [0, 0]


def test_a_micro_batch_without_counted_tokens_has_loss_zero_and_a_gradient_of_zeros():
    log_probs = torch.randn(1, 4, requires_grad=True)
    zeros, segments = torch.zeros(1, 4), torch.zeros(1, 4, dtype=torch.long)
    tokens = PolicyTokens(
        log_probs=log_probs, old_log_probs=zeros, advantages=zeros, mask=zeros, segments=segments
    )
    loss, _ = policy_loss(AlgorithmConfig(), tokens, COUNTS)
    loss.backward()
    assert float(loss) == 0.0
    assert torch.equal(log_probs.grad, torch.zeros(1, 4))


def test_clipping_bounds_what_a_ratio_can_gain():
    ratios = torch.tensor([0.5, 0.9, 1.25, 1.5, 0.5, 1.5, 9.0])
    advantages = torch.tensor([1.0, 1.0, 1.0, 1.0, -1.0, -1.0, -1.0])
    found = clipped_surrogate(
        ratios.log(), advantages, eps_clip=0.2, eps_clip_high=0.28, eps_clip_c=3.0
    )
    expected = [-0.5, -0.9, -1.25, -1.28, 0.8, 1.5, 3.0]
    assert found.losses.tolist() == pytest.approx(expected)
    assert found.clipped.tolist() == [False, False, False, True, True, False, False]
    assert found.dual_clipped.tolist() == [False] * 6 + [True]


def test_clipped_tokens_have_no_gradient():
    x = torch.tensor([0.5, -0.5, 3.0]).requires_grad_()
    found = clipped_surrogate(
        x, torch.tensor([1.0, -1.0, -1.0]), eps_clip=0.2, eps_clip_high=0.2, eps_clip_c=3.0
    )
    found.losses.sum().backward()
    assert x.grad.tolist() == [0.0, 0.0, 0.0]


def test_an_advantage_of_zero_gives_no_gradient_however_far_the_ratio():
    x = torch.tensor([-300.0, 0.0, 300.0]).requires_grad_()
    found = clipped_surrogate(x, torch.zeros(3), eps_clip=0.2, eps_clip_high=0.2, eps_clip_c=3.0)
    found.losses.sum().backward()
    assert found.losses.abs().tolist() == [0.0] * 3
    assert x.grad.abs().tolist() == [0.0] * 3


def test_kl_estimators_have_their_closed_forms():
    log_probs, ref = torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, -1.0])  # x = 0.5, -1
    cases = {
        "k1": [0.5, -1.0],
        "k2": [0.125, 0.5],
        "k3": [math.exp(-0.5) - 1 + 0.5, math.e - 2],
    }
    for kind, expected in cases.items():
        assert kl_penalty(log_probs, ref, kind=kind).tolist() == pytest.approx(expected)
    far = kl_penalty(torch.tensor([-9.0]), torch.tensor([0.0]), kind="low_var_kl")
    assert far.tolist() == [10.0]
    with pytest.raises(ValueError, match="k4"):
        kl_penalty(log_probs, ref, kind="k4")


def test_k1_and_k3_average_to_the_kl_divergence_and_equal_policies_give_zero():
    p, q = torch.tensor([0.7, 0.2, 0.1]), torch.tensor([0.2, 0.5, 0.3])
    kl = float((p * (p / q).log()).sum())
    for kind in ("k1", "k3"):
        mean = float((p * kl_penalty(p.log(), q.log(), kind=kind)).sum())
        assert mean == pytest.approx(kl, rel=1e-5)
    for kind in ("k1", "k2", "k3", "low_var_kl"):
        assert kl_penalty(p.log(), p.log(), kind=kind).tolist() == [0.0] * 3


def test_the_sequence_ratio_is_the_geometric_mean_with_the_gradient_of_gspo():
    new = torch.tensor([[5.0, -1.0, -2.0, -3.0, 5.0, -0.5]]).requires_grad_()
    old = torch.tensor([[0.0, -1.5, -2.0, -3.1, 0.0, -1.0]])
    ratios = log_ratio(new, old, MASK, SEGMENTS, level="sequence")
    assert ratios[0].tolist() == pytest.approx([0.0, 0.2, 0.2, 0.2, 0.0, 0.5], abs=1e-6)
    weights = token_weights(MASK, SEGMENTS, mode="sequence_mean_token_mean", counts=COUNTS)
    weighted_sum(ratios.exp(), weights).backward()
    # d(mean over sequences of s_i) / d(log pi_t) = s_i / (2 |y_i|)
    a, b = math.exp(0.2) / 6, math.exp(0.5) / 2
    assert new.grad[0].tolist() == pytest.approx([0.0, a, a, a, 0.0, b], rel=1e-5)


def mismatch(level, keep, bounds=(0.5, 2.0)):
    train = torch.tensor([[7.0, -1.0, -1.0, -1.0, 7.0, -1.0]])
    rollout = torch.tensor([[0.0, -1.0, -3.0, -1.0 - math.log(1.5), 0.0, 0.0]])
    found = mismatch_weights(
        train, rollout, MASK, SEGMENTS, level=level, keep=keep, bounds=bounds
    )  # token ratios 1, e^2, 1.5 | e^-1
    return found.weights[0].tolist(), found.clipped[0].tolist()


def test_truncated_importance_sampling_bounds_the_weight_of_a_token():
    weights, clipped = mismatch("token", "truncate")
    assert weights == pytest.approx([0.0, 1.0, 2.0, 1.5, 0.0, 0.5])
    assert clipped == [False, False, True, False, False, True]


def test_icepop_masks_tokens_outside_the_bounds():
    weights, _ = mismatch("token", "mask")
    assert weights == pytest.approx([0.0, 1.0, 0.0, 1.5, 0.0, 0.0])


def test_the_sequence_mask_drops_whole_responses():
    """The rule is per sequence: no token of a dropped response may survive by its own ratio."""
    weights, clipped = mismatch("sequence", "mask")
    kept = (math.exp(2) * 1.5) ** (1 / 3)  # 2.23, above 2
    assert weights == [0.0] * 6
    assert clipped == [False, True, True, True, False, True]
    weights, _ = mismatch("sequence", "mask", bounds=(0.5, 3.0))
    assert weights == pytest.approx([0.0, kept, kept, kept, 0.0, 0.0])


def tokens_with(**changes):
    generator = torch.Generator().manual_seed(3)

    def draw():
        return -torch.rand(1, 6, generator=generator)

    values = {
        "log_probs": draw(),
        "old_log_probs": draw(),
        "advantages": torch.tensor([[9.0, 1.0, 1.0, 1.0, 9.0, -2.0]]),
        "mask": MASK,
        "segments": SEGMENTS,
        "ref_log_probs": draw(),
        "rollout_log_probs": draw(),
        "entropy": -draw(),
    }
    return PolicyTokens(**values | changes)


def test_the_loss_is_the_sum_of_its_parts():
    config = AlgorithmConfig(
        algorithm="grpo",
        kl_loss_coef=0.5,
        entropy_coef=0.25,
        use_tis=True,
        loss_agg_mode="token_mean",
        eps_clip=0.99,
        eps_clip_high=100.0,
    )
    tokens = tokens_with()
    loss, metrics = policy_loss(config, tokens, COUNTS)
    x, o, r = (
        t[MASK > 0].double()
        for t in (tokens.log_probs, tokens.old_log_probs, tokens.rollout_log_probs)
    )
    weight = (o - r).exp().clamp(max=2.0)
    d = x - tokens.ref_log_probs[MASK > 0].double()
    pg = -((x - o).exp() * tokens.advantages[MASK > 0] * weight).mean()
    kl = ((-d).exp() - 1 + d).mean()
    entropy = tokens.entropy[MASK > 0].double().mean()
    assert float(metrics["pg_loss"]) == pytest.approx(float(pg), rel=1e-5)
    assert float(metrics["kl_loss"]) == pytest.approx(float(kl), rel=1e-5)
    assert float(loss) == pytest.approx(float(pg + 0.5 * kl - 0.25 * entropy), rel=1e-5)


def test_with_coefficient_zero_kl_and_entropy_are_metrics_only():
    config = AlgorithmConfig(algorithm="dapo")
    with_all, metrics = policy_loss(config, tokens_with(), COUNTS)
    without, _ = policy_loss(config, tokens_with(ref_log_probs=None, entropy=None), COUNTS)
    assert float(with_all) == float(without)
    assert {"kl_loss", "entropy_loss"} <= metrics.keys()


def test_nothing_under_the_mask_reaches_loss_or_gradient():
    bad = torch.tensor([[math.nan, 0.0, 0.0, 0.0, math.inf, 0.0]])
    config = AlgorithmConfig(kl_loss_coef=0.1, entropy_coef=0.1, use_tis=True)
    clean = tokens_with(log_probs=tokens_with().log_probs.requires_grad_())
    expected, _ = policy_loss(config, clean, COUNTS)
    expected.backward()
    dirty = tokens_with(
        log_probs=(tokens_with().log_probs + bad).detach().requires_grad_(),
        **{
            name: getattr(clean, name) + bad
            for name in (
                "old_log_probs", "advantages", "ref_log_probs", "rollout_log_probs", "entropy",
            )
        },
    )  # fmt: skip
    loss, metrics = policy_loss(config, dirty, COUNTS)
    loss.backward()
    assert float(loss) == float(expected)
    assert torch.equal(dirty.log_probs.grad, clean.log_probs.grad)
    assert all(torch.isfinite(value) for value in metrics.values())
