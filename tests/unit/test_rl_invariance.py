"""The gradient of every algorithm depends on the global batch alone, not on how it is cut.

A small attention model in plain torch, eleven responses of very unequal length in four groups. The reference is
one micro-batch with one sequence a row; every packing, budget and number of shards must give its gradient.
"""

from typing import get_args

import pytest
import torch
import torch.nn.functional as F

from megatron_tlt.ops.advantages import moments
from megatron_tlt.ops.packing import build_micro_batch, plan_micro_batches
from megatron_tlt.ops.policy_loss import GlobalCounts, count_tokens_and_sequences, kl_penalty
from megatron_tlt.rl.algorithms import (
    Algorithm,
    AlgorithmConfig,
    sequence_advantages_of,
    shape_rewards,
    token_advantages_of,
)
from megatron_tlt.rl.policy_loss import PolicyTokens, policy_loss

LENGTHS = [3, 1, 17, 2, 5, 5, 9, 0, 4, 30, 7]
GROUPS = torch.tensor([0, 0, 0, 1, 1, 1, 2, 2, 3, 3, 3])
REWARDS = torch.tensor([1.0, 0.0, 0.3, 1.0, 1.0, 1.0, 0.0, 7.0, 1.0, 0.0, 0.5])
TRUNCATED = torch.tensor([length == 30 for length in LENGTHS])
VOCAB, WIDTH = 13, 8


class Model(torch.nn.Module):
    """Embeddings of token and position, one attention layer, a head; float64."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.token = torch.nn.Embedding(VOCAB, WIDTH)
        self.position = torch.nn.Embedding(64, WIDTH)
        self.qkv = torch.nn.Linear(WIDTH, 3 * WIDTH)
        self.head = torch.nn.Linear(WIDTH, VOCAB)
        self.double()

    def forward(self, batch):
        x = self.token(batch.tokens) + self.position(batch.position_ids)  # [b, s, h]
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        mask = batch.attention_mask()
        seen = None if mask is None else ~mask[0]
        x = x + F.scaled_dot_product_attention(q, k, v, attn_mask=seen, is_causal=seen is None)
        return self.head(x).log_softmax(-1)


def make_data():
    generator = torch.Generator().manual_seed(5)

    def ids(count):
        return torch.randint(VOCAB, (count,), generator=generator).tolist()

    def noise():
        return [0.3 * torch.randn(n, generator=generator) - 2.5 for n in LENGTHS]

    prompts = [ids(2 + i % 3) for i in range(len(LENGTHS))]
    return prompts, [ids(n) for n in LENGTHS], {"old": noise(), "ref": noise(), "rollout": noise()}


PROMPTS, RESPONSES, KNOWN = make_data()


def advantages_of_shards(config, shards):
    """Token advantages of each shard (a list of response numbers), as ranks would find them."""
    lengths = torch.tensor(LENGTHS)
    shaped = shape_rewards(config, REWARDS, lengths, TRUNCATED, max_length=30)
    kl = [
        kl_penalty(old, ref, kind=config.kl_reward_type)
        for old, ref in zip(KNOWN["old"], KNOWN["ref"], strict=True)
    ]
    sums = torch.stack([x.sum() for x in kl])
    advantages = sequence_advantages_of(config, shaped, GROUPS, kl_sums=sums)

    def on_rank(mine, reduce):
        return token_advantages_of(
            config,
            advantages[mine],
            shaped.counted[mine],
            lengths[mine],
            kl=torch.cat([kl[i] for i in mine]) if mine else torch.zeros(0),
            sum_over_ranks=reduce,
        )

    total = torch.zeros(3, dtype=torch.float64)
    for mine in shards:
        on_rank(mine, total.add_)  # the first pass leaves the sum over all shards in `total`
    found = [on_rank(mine, lambda _: total) for mine in shards]
    values = [list(f.split([LENGTHS[i] for i in mine])) for f, mine in zip(found, shards, strict=True)]
    return shaped.counted, values


def gradient(config, *, num_ranks, max_tokens, packed, local_counts=False):
    """Gradient, loss and metrics, summed over micro-batches and ranks as the trainer sums them."""
    sizes = [len(p) + len(r) for p, r in zip(PROMPTS, RESPONSES, strict=True)]
    plan = plan_micro_batches(sizes, max_tokens=max_tokens, num_ranks=num_ranks)
    shards = [[i for batch in rank for i in batch] for rank in plan]
    counted, advantages = advantages_of_shards(config, shards)
    by_response = {
        i: value
        for mine, values in zip(shards, advantages, strict=True)
        for i, value in zip(mine, values, strict=True)
    }
    batches = [
        build_micro_batch(PROMPTS, RESPONSES, members, packed=packed) for rank in plan for members in rank
    ]
    masks = [
        b.scatter([torch.full((LENGTHS[i],), float(counted[i])) for i in b.indices]) for b in batches
    ]
    totals = sum(
        count_tokens_and_sequences(mask, b.segments) for mask, b in zip(masks, batches, strict=True)
    )
    counts = GlobalCounts(num_tokens=totals[0], num_sequences=totals[1], max_length=30)
    model, loss, metrics = Model(), 0.0, {}
    for batch, mask in zip(batches, masks, strict=True):
        log_p = model(batch)
        known = {
            name: batch.scatter([values[i] for i in batch.indices]) for name, values in KNOWN.items()
        }
        tokens = PolicyTokens(
            log_probs=log_p.gather(-1, batch.labels[..., None]).squeeze(-1),
            old_log_probs=known["old"],
            ref_log_probs=known["ref"],
            rollout_log_probs=known["rollout"],
            entropy=-(log_p.exp() * log_p).sum(-1),
            advantages=batch.scatter([by_response[i] for i in batch.indices]),
            mask=mask,
            segments=batch.segments,
        )
        if local_counts:  # the mean over micro-batches of their own means
            own = count_tokens_and_sequences(mask, batch.segments) * len(batches)
            counts = GlobalCounts(num_tokens=own[0], num_sequences=own[1], max_length=30)
        share, found = policy_loss(config, tokens, counts)
        share.backward()
        loss += float(share.detach())
        metrics = {name: metrics.get(name, 0.0) + float(value) for name, value in found.items()}
    return torch.cat([p.grad.reshape(-1) for p in model.parameters()]), loss, metrics


CUTS = [
    {"num_ranks": 1, "max_tokens": 40, "packed": False},
    {"num_ranks": 1, "max_tokens": 40, "packed": True},
    {"num_ranks": 1, "max_tokens": 200, "packed": True},
    {"num_ranks": 2, "max_tokens": 64, "packed": True},
    {"num_ranks": 3, "max_tokens": 40, "packed": False},
    {"num_ranks": 16, "max_tokens": 40, "packed": True},  # some ranks have nothing
]
FULL = {"entropy_coef": 0.01, "kl_loss_coef": 0.1, "kl_coef": 0.05, "use_tis": True}


@pytest.mark.parametrize("name", get_args(Algorithm))
@pytest.mark.parametrize("truncation", ["penalise", "mask"])
def test_the_gradient_does_not_depend_on_micro_batches_packing_or_shards(name, truncation):
    config = AlgorithmConfig(algorithm=name, truncation=truncation, **FULL)
    whole = gradient(config, num_ranks=1, max_tokens=1000, packed=False)
    assert float(whole[0].norm()) > 1e-4
    for cut in CUTS:
        found = gradient(config, **cut)
        assert torch.allclose(found[0], whole[0], rtol=1e-6, atol=1e-6), cut
        assert found[1] == pytest.approx(whole[1], rel=1e-6, abs=1e-7), cut
        assert found[2] == pytest.approx(whole[2], rel=1e-5, abs=1e-6), cut


@pytest.mark.parametrize("mode", [
    "token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum", "sequence_mean_token_sum_norm",
])  # fmt: skip
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_every_aggregation_and_ratio_level_is_invariant(mode, level):
    config = AlgorithmConfig(
        loss_agg_mode=mode, ratio_level=level, tis_level=level, tis_mode="mask", **FULL
    )
    whole = gradient(config, num_ranks=1, max_tokens=1000, packed=False)
    for cut in CUTS[1:4]:
        assert torch.allclose(gradient(config, **cut)[0], whole[0], rtol=1e-6, atol=1e-6), cut


def test_dividing_by_counts_of_the_micro_batch_is_noticed():
    """The fault that this file guards against."""
    config = AlgorithmConfig(algorithm="dapo")
    whole, _, _ = gradient(config, num_ranks=1, max_tokens=1000, packed=False)
    wrong, _, _ = gradient(config, num_ranks=1, max_tokens=40, packed=True, local_counts=True)
    assert float((wrong - whole).norm()) > 0.1 * float(whole.norm())


def test_groups_without_variance_leave_no_gradient_at_all(monkeypatch):
    monkeypatch.setattr(f"{__name__}.REWARDS", torch.full((len(LENGTHS),), 0.3))
    for name in ("grpo", "dr_grpo", "dapo", "rloo", "reinforce_plus_plus_baseline", "gspo"):
        config = AlgorithmConfig(algorithm=name, truncation="penalise", kl_coef=0.0, kl_loss_coef=0.0)
        found, loss, _ = gradient(config, num_ranks=2, max_tokens=64, packed=True)
        assert loss == 0.0
        assert torch.equal(found, torch.zeros_like(found))


def test_moments_add_up_over_shards():
    values, mask = torch.randn(20), torch.rand(20) > 0.5
    parts = moments(values[:7], mask[:7]) + moments(values[7:], mask[7:])
    assert torch.allclose(parts, moments(values, mask))
