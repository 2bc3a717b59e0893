"""The drafter's training passes against a step-by-step simulation, its losses, and its trainer."""

import pytest
import torch

from megatron_tlt.draft.batch import DraftBatch, collate, pack
from megatron_tlt.draft.trainer import DrafterTrainer, DrafterTrainerConfig
from megatron_tlt.models.drafter import Drafter, DrafterConfig, default_feature_layers
from megatron_tlt.ops.draft_losses import (
    accept_rates,
    acceptance_loss,
    feature_loss,
    overlap,
    soft_cross_entropy,
)
from megatron_tlt.types import FeatureSample

SIZES = dict(
    hidden_size=16, ffn_hidden_size=24, num_attention_heads=4, num_query_groups=2, head_dim=4,
    vocab_size=11, max_position_embeddings=64,
)  # fmt: skip
CONFIGS = {
    "eagle": DrafterConfig(**SIZES),
    "eagle3": DrafterConfig(
        **SIZES, layout="eagle3", draft_vocab_size=7, feature_layers=(1, 2, 3)
    ),
}


def _drafter(layout: str) -> Drafter:
    torch.manual_seed(3)
    drafter = Drafter(CONFIGS[layout])
    for parameter in drafter.parameters():
        parameter.data += torch.randn_like(parameter) * 0.2
    table = torch.randn(11, 16)
    drafter.share(table, table)
    return drafter.eval()


def _sequence(layout: str, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    tokens = torch.randint(0, 11, (1, rows), generator=generator)
    features = torch.randn(1, rows, CONFIGS[layout].feature_size, generator=generator)
    return tokens, features


def _simulate(drafter: Drafter, tokens, features, *, row: int, step: int) -> torch.Tensor:
    """Output at `row` when the target's states are known up to `row - step` and drafts go on from there.

    One row is added at a time and attention is written out over all rows so far: what an engine does.
    """
    layer = drafter.midlayer if drafter.config.layout == "eagle3" else drafter.layers[0]
    attention, known = layer.self_attn, row - step
    keys, values, state = [], [], None
    for i in range(row + 1):
        embedded = drafter.embedding[tokens[0, i]]
        if drafter.config.layout == "eagle3":
            residual = drafter.fc(features[0, i]) if i <= known else state
            inner = torch.cat((layer.input_layernorm(embedded), layer.hidden_norm(residual)))
        else:
            given = features[0, i] if i <= known else state
            inner = residual = drafter.fc(torch.cat((embedded, given)))
        q, k, v = (
            project(inner).view(-1, attention.dim)
            for project in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        angle = i * 10000.0 ** -(torch.arange(0, 4, 2) / 4)
        q, k = (
            torch.cat(
                (x[:, :2] * angle.cos() - x[:, 2:] * angle.sin(),
                 x[:, 2:] * angle.cos() + x[:, :2] * angle.sin()), 1,
            )
            for x in (q, k)
        )  # fmt: skip
        keys.append(k)
        values.append(v)
        heads = []
        for head in range(4):
            scores = torch.stack([q[head] @ key[head // 2] for key in keys]) / 2
            mixed = torch.stack([value[head // 2] for value in values])
            heads.append(torch.softmax(scores, 0) @ mixed)
        x = residual + attention.o_proj(torch.cat(heads))
        state = x + layer.mlp(layer.post_attention_layernorm(x))
    return state


@pytest.mark.parametrize("layout", CONFIGS)
def test_every_pass_equals_drafting_step_by_step(layout):
    drafter, (tokens, features) = _drafter(layout), _sequence(layout, 7)
    with torch.no_grad():
        outputs = drafter.passes(tokens, features, count=4)
        for step, output in enumerate(outputs):
            for row in range(step, 7):
                expected = _simulate(drafter, tokens, features, row=row, step=step)
                torch.testing.assert_close(output[0, row], expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("layout", CONFIGS)
def test_no_row_sees_what_comes_later(layout):
    drafter, (tokens, features) = _drafter(layout), _sequence(layout, 8)
    with torch.no_grad():
        before = drafter.passes(tokens, features, count=3)
        tokens[0, 5:], features[0, 5:] = 0, 9.0
        after = drafter.passes(tokens, features, count=3)
    for a, b in zip(before, after, strict=True):
        torch.testing.assert_close(a[:, :5], b[:, :5])
        assert not torch.allclose(a[:, 5:], b[:, 5:])


def _batch(layout: str = "eagle", rows: int = 12, count: int = 3) -> DraftBatch:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 11, (count, rows), generator=generator)
    last = torch.randn(count, rows, 16, generator=generator)
    features = last if layout == "eagle" else last.repeat(1, 1, 3)
    return DraftBatch(
        tokens=tokens, features=features, last_hidden=last,
        mask=torch.arange(rows) < torch.tensor([rows, rows - 2, rows - 5])[:, None],
    )  # fmt: skip


def test_the_loss_pairs_each_row_with_the_state_after_it():
    """Against a loop over rows that spells the alignment out."""
    drafter, batch = _drafter("eagle"), _batch()
    config = DrafterTrainerConfig(num_passes=2, pass_decay=0.5)
    metrics = DrafterTrainer(drafter, config).evaluate(batch, num_steps=2)
    total = 0.0
    with torch.no_grad():
        for j, output in enumerate(drafter.passes(batch.tokens, batch.features, count=2)):
            features, tokens, rows = 0.0, 0.0, 0
            for b in range(3):
                for i in range(j, 11):
                    if not batch.mask[b, i + 1]:
                        continue
                    wanted, got = batch.last_hidden[b, i + 1], output[b, i]
                    difference = (got - wanted).abs()
                    smooth = torch.where(difference < 1, difference**2 / 2, difference - 0.5)
                    features += smooth.mean()
                    p = torch.softmax(drafter.head @ wanted, 0)
                    tokens -= (p * torch.log_softmax(drafter.head @ got, 0)).sum()
                    rows += 1
            total += 0.5**j * (features + 0.1 * tokens) / rows
    assert metrics["loss"] == pytest.approx(float(total), rel=1e-5)


def test_padding_does_not_change_the_loss():
    drafter, batch = _drafter("eagle"), _batch()
    trainer = DrafterTrainer(drafter, DrafterTrainerConfig())
    before = trainer.evaluate(batch, num_steps=3)
    batch.tokens[~batch.mask], batch.features[~batch.mask] = 5, 7.0
    assert trainer.evaluate(batch, num_steps=3) == pytest.approx(before)


def test_perfect_predictions_have_no_loss_beyond_entropy():
    states, mask = torch.randn(2, 3, 4), torch.ones(2, 3, dtype=torch.bool)
    assert feature_loss(states, states, mask) == 0
    logits = torch.randn(2, 3, 5)
    entropy = torch.distributions.Categorical(logits=logits).entropy().mean()
    assert soft_cross_entropy(logits, logits, mask) == pytest.approx(float(entropy), rel=1e-5)


def test_accept_rates_follow_chains_along_the_diagonal():
    first = torch.tensor([[True, True, False, True]])
    second = torch.tensor([[False, True, True, False]])
    mask = torch.ones(1, 4, dtype=torch.bool)
    # Chains start at rows 0, 1, 2: their first guesses hit twice, of these the second at rows 1 and 2.
    assert accept_rates([first, second], mask).tolist() == pytest.approx([2 / 3, 2 / 3])
    mask[0, 3] = False
    assert accept_rates([first, second], mask).tolist() == pytest.approx([1.0, 1.0])


@pytest.mark.parametrize("layout", CONFIGS)
def test_training_learns_a_fixed_batch(layout):
    drafter, batch = _drafter(layout), _batch(layout)
    batch.tokens[:, 1:] = drafter.target_logits(batch.last_hidden)[:, 1:].argmax(-1)
    trainer = DrafterTrainer(
        drafter, DrafterTrainerConfig(lr=1e-2, num_passes=2, token_weight=1.0, lr_warmup_iters=0)
    )
    before = trainer.evaluate(batch, num_steps=2)
    table = drafter.head.clone()
    for _ in range(60):
        trainer.step(batch)
    after = trainer.evaluate(batch, num_steps=2)
    assert after["loss"] < before["loss"] and after["accept_length"] > before["accept_length"] + 0.3
    assert torch.equal(drafter.head, table)


def test_a_resumed_trainer_takes_the_same_steps():
    config = DrafterTrainerConfig(feature_noise=0.1)
    one, two = (DrafterTrainer(_drafter("eagle"), config) for _ in range(2))
    one.step(_batch())
    state = one.state_dict()
    two.load_state_dict({**state, "model": {k: v.clone() for k, v in state["model"].items()}})
    assert one.step(_batch()) == two.step(_batch())


def test_collate_keeps_the_last_rows_and_marks_padding():
    samples = [
        FeatureSample(
            prompt_id=i, sample_index=0, tokens=tuple(range(n)), context_tokens=(9,) * c,
            hidden=torch.arange(float(c + n))[:, None].expand(-1, 16), weight_version=0,
        )
        for i, (c, n) in enumerate(((2, 3), (0, 2)))
    ]  # fmt: skip
    batch = collate(samples, max_rows=4)
    assert batch.tokens.tolist() == [[9, 0, 1, 2], [0, 1, 0, 0]]
    assert batch.features[0, :, 0].tolist() == [1, 2, 3, 4] and batch.num_rows == 6
    with pytest.raises(ValueError, match="capture features"):
        collate([])


def _lessons(layout: str, lengths: tuple[int, ...]) -> list[FeatureSample]:
    generator = torch.Generator().manual_seed(5)
    lessons = []
    for number, (context, count) in enumerate((length // 3, length - length // 3) for length in lengths):
        last = torch.randn(context + count, 16, generator=generator)
        tokens = torch.randint(0, 11, (context + count,), generator=generator).tolist()
        wide = torch.randn(context + count, CONFIGS[layout].feature_size, generator=generator)
        lessons.append(
            FeatureSample(
                prompt_id=number, sample_index=0, tokens=tuple(tokens[context:]),
                context_tokens=tuple(tokens[:context]), weight_version=0,
                hidden=last if layout == "eagle" else wide,
                last_hidden=None if layout == "eagle" else last,
            )
        )  # fmt: skip
    return lessons


@pytest.mark.parametrize("layout", CONFIGS)
@pytest.mark.parametrize("passes", [1, 3])
def test_packed_loss_and_gradient_equal_unpacked_ones(layout, passes):
    lessons = _lessons(layout, (7, 2, 12, 5, 3))
    config = DrafterTrainerConfig(
        num_passes=passes, token_weight=0.5, acceptance_weight=0.3, rejection_weight=2.0
    )
    found = []
    for batch in (collate(lessons), pack(lessons), pack(lessons, multiple_of=16)):
        trainer = DrafterTrainer(_drafter(layout), config)
        loss, metrics = trainer._loss(batch, passes=passes)
        loss.backward()
        grads = [p.grad.clone() for p in trainer.model.parameters()]
        assert batch.num_rows == 29
        found.append((float(loss.detach()), metrics, grads))
    for other in found[1:]:
        assert other[0] == pytest.approx(found[0][0], rel=1e-5)
        assert other[1] == pytest.approx(found[0][1], rel=1e-5)
        for ours, theirs in zip(found[0][2], other[2], strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("layout", CONFIGS)
def test_a_packed_sequence_sees_nothing_of_its_neighbours(layout):
    drafter, lessons = _drafter(layout), _lessons(layout, (6, 9, 4))
    batch = pack(lessons)
    with torch.no_grad():
        before = drafter.passes(batch.tokens, batch.features, count=3, rows=batch.rows)
        batch.tokens[:, :6], batch.features[:, :6] = 1, 5.0
        batch.tokens[:, 15:], batch.features[:, 15:] = 2, -5.0
        after = drafter.passes(batch.tokens, batch.features, count=3, rows=batch.rows)
    for j, (a, b) in enumerate(zip(before, after, strict=True)):
        torch.testing.assert_close(a[:, 6 + j : 15], b[:, 6 + j : 15])
        assert not torch.allclose(a[:, :6], b[:, :6])


def test_the_acceptance_loss_is_the_chance_of_a_rejection():
    """Against Leviathan's rule played out: draw from q, keep with min(1, p / q)."""
    generator = torch.Generator().manual_seed(0)
    draft, target = torch.randn(2, 1, 1, 6, generator=generator)
    q, p = draft[0, 0].softmax(-1), target[0, 0].softmax(-1)
    drawn = torch.multinomial(q, 200_000, replacement=True, generator=generator)
    kept = torch.rand(200_000, generator=generator) < p[drawn] / q[drawn]
    mask = torch.ones(1, 1, dtype=torch.bool)
    assert float(acceptance_loss(draft, target, mask)) == pytest.approx(1 - float(kept.float().mean()), abs=5e-3)
    assert float(overlap(target, target)) == pytest.approx(1.0, abs=1e-6)


def test_weights_of_rows_are_those_of_a_weighted_mean():
    states, wanted = torch.randn(1, 4, 3), torch.zeros(1, 4, 3)
    whole = feature_loss(states, wanted, torch.tensor([[3.0, 0.0, 1.0, 0.0]]))
    first, third = (
        feature_loss(states, wanted, torch.arange(4)[None] == i) for i in (0, 2)
    )
    assert float(whole) == pytest.approx(float(3 * first + third) / 4, rel=1e-5)


@pytest.mark.parametrize("layout", CONFIGS)
def test_configuration_survives_the_exported_file(layout):
    assert DrafterConfig.from_hf(CONFIGS[layout].to_hf()) == CONFIGS[layout]


def test_exported_names_are_those_that_sglang_loads():
    eagle = set(_drafter("eagle").state_dict())
    layer = {f"self_attn.{x}_proj.weight" for x in "qkvo"}
    layer |= {f"mlp.{x}_proj.weight" for x in ("gate", "up", "down")}
    layer.add("post_attention_layernorm.weight")
    assert eagle == {"fc.weight", "fc.bias"} | {f"layers.0.{x}" for x in layer}
    eagle3 = set(_drafter("eagle3").state_dict())
    layer |= {"input_layernorm.weight", "hidden_norm.weight"}
    assert eagle3 == {"fc.weight", "norm.weight", "lm_head.weight", "d2t", "t2d"} | {
        f"midlayer.{x}" for x in layer
    }


def test_draft_vocabulary_maps_back_to_the_target():
    drafter = Drafter(CONFIGS["eagle3"])
    drafter.draft_tokens([10, 2, 3, 5, 7, 8, 0])
    assert drafter.target_tokens(torch.arange(7)).tolist() == [0, 2, 3, 5, 7, 8, 10]
    assert drafter.t2d.nonzero().flatten().tolist() == [0, 2, 3, 5, 7, 8, 10]


def test_bad_settings_are_refused_with_the_numbers():
    with pytest.raises(ValueError, match="three"):
        DrafterConfig(**SIZES, layout="eagle3")
    with pytest.raises(ValueError, match="5 layers"):
        default_feature_layers(5)
    with pytest.raises(ValueError, match="num_passes=0"):
        DrafterTrainerConfig(num_passes=0)
    with pytest.raises(ValueError, match="share"):
        DrafterTrainer(Drafter(CONFIGS["eagle"]), DrafterTrainerConfig())
