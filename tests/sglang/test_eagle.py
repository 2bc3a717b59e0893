"""EAGLE on the real SGLang: exact acceptance, updates without cross-talk, drafters as good as ours."""

import pytest
import torch

from megatron_tlt.draft.batch import collate
from megatron_tlt.draft.trainer import DrafterTrainer, DrafterTrainerConfig
from megatron_tlt.models.drafter import Drafter, DrafterConfig
from megatron_tlt.rollout.checksum import weights_checksum
from megatron_tlt.rollout.sglang import answers
from megatron_tlt.rollout.sglang.probe import probe_engine
from megatron_tlt.types import FeatureSample, Prompt, Rollout, SamplingParams
from tests.sglang.distribution import check_samples
from tests.sglang.models import (
    CHAIN,
    NGRAM,
    PROMPTS,
    TREE,
    VOCAB,
    config_of,
    exact_pair,
    native_engine,
    sglang_engine,
    target,
    tokens_of,
)

STEPS = CHAIN.num_steps
EXACT = SamplingParams(temperature=0, max_tokens=1 + 10 * (STEPS + 1))
LONG = SamplingParams(temperature=0, max_tokens=100)
FRESH = [Prompt(prompt_id=20 + p.prompt_id, tokens=(60 - p.prompt_id, *p.tokens)) for p in PROMPTS]
"""Prompts of which SGLang's radix cache holds nothing."""
SAMPLED = SamplingParams(n=600, temperature=0.7, max_tokens=4, top_k=4)


@pytest.fixture(scope="module")
def exact():
    """An engine that drafts by chains for a target that its drafter computes exactly."""
    model, drafter = exact_pair()
    engine = sglang_engine(model, drafter=drafter, strategy=CHAIN)
    yield engine, model, drafter
    engine.close()


def accept_length(engine, params=EXACT) -> tuple[float, dict]:
    rollouts = engine.generate(PROMPTS[:3], params)
    verify_ct = sum(r.verify_ct for r in rollouts)
    return (sum(r.num_accepted for r in rollouts) + verify_ct) / verify_ct, tokens_of(rollouts)


def bad(drafter: Drafter) -> dict:
    torch.manual_seed(3)
    return drafter.state_dict() | {"fc.weight": torch.randn(32, 64) * 0.3}


def test_acceptance_is_exact_falls_with_a_bad_draft_and_comes_back_by_updates(exact):
    engine, model, drafter = exact
    length, tokens = accept_length(engine)
    assert length == STEPS + 1
    assert tokens == tokens_of(native_engine(model).generate(PROMPTS[:3], EXACT))
    before = engine.engine_checksum()
    engine.update_weights("draft", bad(drafter).items(), version=2)
    length, same = accept_length(engine)
    assert length < 1.3 and same == tokens
    assert engine.engine_checksum() == before == weights_checksum(model.state_dict().items())
    engine.update_weights("draft", drafter.state_dict().items(), version=3)
    assert accept_length(engine) == (STEPS + 1, tokens)


def test_drafted_responses_may_fill_the_context_to_its_last_token(exact):
    engine, model, drafter = exact
    for number, length in enumerate((1, 150, 159)):
        prompt = Prompt(prompt_id=number, tokens=tuple(i % 60 + 1 for i in range(length)))
        params = SamplingParams(temperature=0, max_tokens=160 - length)
        (rollout,) = engine.generate([prompt], params)
        assert len(rollout.tokens) == 160 - length


def test_the_probe_names_a_draft_that_does_not_fit_and_a_target_that_is_another(exact):
    engine, model, drafter = exact
    tokens = PROMPTS[2].tokens

    def difference(rollout: Rollout) -> float:
        ids = torch.tensor([rollout.prompt_tokens + rollout.tokens])
        with torch.no_grad():
            rows = torch.log_softmax(model(ids).logits[0, :-1].float(), -1)
        found = rows.gather(1, ids[0, 1:, None])[len(rollout.prompt_tokens) - 1 :, 0]
        return float((found - torch.tensor(rollout.log_probs)).abs().max())

    report = probe_engine(engine, tokens, difference=difference, min_accept_length=3.9)
    assert report["accept_length"] == STEPS + 1 and report["max_log_prob_diff"] < 1e-4
    with pytest.raises(ValueError, match="differ by up to 1"):
        probe_engine(engine, tokens, difference=lambda rollout: difference(rollout) + 1.0)
    engine.update_weights("draft", bad(drafter).items(), version=2)
    with pytest.raises(ValueError, match="drafts are hardly ever accepted"):
        probe_engine(engine, tokens, min_accept_length=1.5)
    engine.update_weights("draft", drafter.state_dict().items(), version=3)


def test_a_new_target_makes_the_old_draft_stale_until_its_own_comes(exact):
    engine, model, drafter = exact
    other, own = exact_pair(seed=9)
    engine.update_weights("target", other.state_dict().items(), version=4)
    length, tokens = accept_length(engine)
    assert length < 2 and tokens == tokens_of(native_engine(other).generate(PROMPTS[:3], EXACT))
    engine.update_weights("draft", own.state_dict().items(), version=4)
    assert accept_length(engine) == (STEPS + 1, tokens)
    engine.update_weights("target", model.state_dict().items(), version=5)
    engine.update_weights("draft", drafter.state_dict().items(), version=5)
    assert accept_length(engine)[0] == STEPS + 1


def test_sampling_is_refused_where_sglang_would_be_greedy(exact, monkeypatch):
    monkeypatch.setattr(answers, "plugin_is_installed", lambda: False)
    with pytest.raises(ValueError, match="verifies greedily"):
        exact[0].submit(PROMPTS[:1], SamplingParams(temperature=0.7))
    with pytest.raises(ValueError, match="leaves min_p out"):
        exact[0].submit(PROMPTS[:1], SamplingParams(temperature=0.7, min_p=0.1))


@pytest.fixture(scope="module")
def model():
    return target()


def trained_drafter(model, layout: str) -> Drafter:
    """A drafter that has learned this target's own answers, so that much is accepted."""
    config = DrafterConfig.for_target(config_of(model))
    if layout == "eagle3":
        fields = {name: getattr(config, name) for name in DrafterConfig.__slots__}
        config = DrafterConfig(
            **fields | dict(layout="eagle3", draft_vocab_size=48, feature_layers=(1, 2, 3))
        )
    torch.manual_seed(4)
    drafter = Drafter(config)
    if layout == "eagle3":
        drafter.draft_tokens([t for t in range(VOCAB) if t % 5 != 4][:48])
    drafter.share(model.model.embed_tokens.weight, model.lm_head.weight)
    engine = native_engine(model, drafter=drafter)
    engine.capture_features(10_000, context_rows=30)
    engine.generate(PROMPTS, LONG)
    samples = engine.take_features()
    trainer = DrafterTrainer(
        drafter, DrafterTrainerConfig(lr=5e-3, num_passes=3, token_weight=1.0, lr_warmup_iters=0)
    )
    for _ in range(60):
        trainer.step(collate(samples))
    return drafter


def check_features(model, config: DrafterConfig, rollout: Rollout, sample: FeatureSample) -> None:
    """Row by row what transformers computes: EAGLE-3's three inner states and, for both, the final ones."""
    ids = torch.tensor([rollout.prompt_tokens + rollout.tokens])
    with torch.no_grad():
        states = model(ids, output_hidden_states=True).hidden_states
    at = len(rollout.prompt_tokens) - 1 - len(sample.context_tokens)
    final, close = sample.hidden, dict(atol=1e-4, rtol=1e-4)
    if config.layout == "eagle3":
        inner = torch.cat([states[layer][0, at:-1] for layer in config.feature_layers], -1)
        torch.testing.assert_close(sample.hidden, inner, **close)
        final = sample.last_hidden
    torch.testing.assert_close(final, states[-1][0, at:-1], **close)
    assert sample.tokens == rollout.tokens and sample.context_tokens


@pytest.mark.parametrize(("layout", "strategy"), [("eagle", TREE), ("eagle3", CHAIN)], ids=["tree", "eagle3"])
def test_an_exported_drafter_is_accepted_as_often_as_in_the_embedded_engine(
    model, layout, strategy, record_property
):
    drafter = trained_drafter(model, layout)
    ours = native_engine(model, drafter=drafter, strategy=strategy)
    expected = tokens_of(ours.generate(PROMPTS, LONG))
    engine = sglang_engine(model, drafter=drafter, strategy=strategy)
    try:
        rollouts = engine.generate(PROMPTS, LONG)
        theirs = engine.stats().accept_length
        sampled = engine.generate(PROMPTS[:1], SAMPLED)
        engine.capture_features(10_000, context_rows=4)
        drawn = engine.generate(FRESH, SamplingParams(temperature=0.9, max_tokens=20))
        features = {sample.prompt_id: sample for sample in engine.take_features()}
    finally:
        engine.close()
    assert len(features) == len(drawn)
    for rollout in drawn:
        check_features(model, drafter.config, rollout, features[rollout.prompt_id])
    assert tokens_of(rollouts) == expected
    assert sum(r.num_accepted for r in sampled) > 0
    check_samples(model, sampled, temperature=0.7, top_k=4)
    assert ours.stats().accept_length > 1.3
    record_property("accept_ratio", theirs / ours.stats().accept_length)
    assert abs(theirs / ours.stats().accept_length - 1) < 0.03, (theirs, ours.stats().accept_length)


def test_ngrams_change_no_greedy_token_and_no_distribution(model):
    """SGLang's own n-gram drafts, which are verified by the function that EAGLE's are."""
    engine = sglang_engine(model, strategy=NGRAM)
    try:
        rollouts = engine.generate(PROMPTS, LONG)
        sampled = engine.generate(PROMPTS[:1], SAMPLED)
    finally:
        engine.close()
    assert sum(r.num_accepted for r in sampled) > 0
    check_samples(model, sampled, temperature=0.7, top_k=4)
    assert tokens_of(rollouts) == tokens_of(native_engine(model).generate(PROMPTS, LONG))
    assert engine.stats().verify_ct > 0
