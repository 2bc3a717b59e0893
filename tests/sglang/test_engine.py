"""Plain decoding on the real SGLang against transformers and the embedded engine; one engine for the file."""

import os
import signal

import pytest
import torch

from megatron_tlt.rollout.checksum import weights_checksum
from megatron_tlt.types import FinishReason, Prompt, SamplingParams
from tests.sglang.models import PROMPTS, VOCAB, native_engine, sglang_engine, target, tokens_of

GREEDY = SamplingParams(temperature=0, max_tokens=24)


@pytest.fixture(scope="module")
def model():
    return target()


@pytest.fixture(scope="module")
def engine(model):
    engine = sglang_engine(model)
    yield engine
    engine.close()


@pytest.fixture
def published(engine, model):
    """The engine with the first model's weights, whatever the test before did."""
    engine.update_weights("target", model.state_dict().items(), version=1)
    return engine


def expected_log_probs(model, rollout, temperature: float) -> torch.Tensor:
    ids = torch.tensor([rollout.prompt_tokens + rollout.tokens])
    with torch.no_grad():
        logits = model(ids).logits[0, len(rollout.prompt_tokens) - 1 : -1].float() / temperature
    return torch.log_softmax(logits, -1).gather(1, torch.tensor(rollout.tokens)[:, None])[:, 0]


def test_greedy_tokens_equal_transformers_and_the_embedded_engine(published, model):
    rollouts = published.generate(PROMPTS, GREEDY)
    assert tokens_of(rollouts) == tokens_of(native_engine(model).generate(PROMPTS, GREEDY))
    for prompt, rollout in zip(PROMPTS, rollouts, strict=True):
        ids = torch.tensor([prompt.tokens])
        with torch.no_grad():
            expected = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False,
                eos_token_id=None, pad_token_id=0,
            )[0]  # fmt: skip
        assert rollout.tokens == tuple(expected[len(prompt.tokens) :].tolist())
        wanted = expected_log_probs(model, rollout, 1.0)
        torch.testing.assert_close(torch.tensor(rollout.log_probs), wanted, atol=1e-4, rtol=1e-4)
        assert rollout.finish_reason == FinishReason.LENGTH and set(rollout.weight_versions) == {1}


def test_sampled_tokens_follow_the_model(published, model):
    """Chi-square of the second token given the first, and log-probabilities over the whole vocabulary."""
    count = 1000
    params = SamplingParams(n=count, temperature=0.7, max_tokens=2, top_k=4)
    rollouts = published.generate(PROMPTS[:1], params)
    for rollout in rollouts[:20]:
        wanted = expected_log_probs(model, rollout, 0.7)
        torch.testing.assert_close(torch.tensor(rollout.log_probs), wanted, atol=1e-4, rtol=1e-4)
    pairs = torch.tensor([r.tokens for r in rollouts])
    observed = torch.zeros(VOCAB, VOCAB)
    observed.index_put_((pairs[:, 0], pairs[:, 1]), torch.ones(count), accumulate=True)

    def distribution(tokens) -> torch.Tensor:
        with torch.no_grad():
            logits = model(torch.tensor([tokens])).logits[0, -1] / 0.7
        kept = logits.topk(4).indices
        return torch.zeros(VOCAB).scatter_(0, kept, torch.softmax(logits[kept], 0))

    first, expected = distribution(PROMPTS[0].tokens), torch.zeros(VOCAB, VOCAB)
    for token in first.nonzero().flatten().tolist():
        expected[token] = first[token] * distribution((*PROMPTS[0].tokens, token)) * count
    assert not observed[expected == 0].any()
    big = expected > 5
    freedom = int(big.sum()) - 1
    statistic = ((observed - expected).square() / expected)[big].sum()
    assert freedom >= 5 and statistic < freedom + 4 * (2 * freedom) ** 0.5


def test_stop_tokens_end_a_response_and_belong_to_it(published):
    whole = published.generate(PROMPTS[:1], GREEDY)[0].tokens
    params = SamplingParams(temperature=0, max_tokens=24, stop_token_ids=(whole[10],))
    cut = published.generate(PROMPTS[:1], params)[0]
    assert cut.tokens == whole[: whole.index(whole[10]) + 1] and cut.finish_reason == FinishReason.STOP


def test_the_engine_holds_what_was_published_and_says_so(published, model):
    other = target(seed=2)
    before = tokens_of(published.generate(PROMPTS, GREEDY))
    assert published.engine_checksum() == weights_checksum(model.state_dict().items())
    pairs = list(other.state_dict().items())
    published.update_weights("target", pairs, version=7, checksum=weights_checksum(pairs))
    assert published.engine_checksum() == weights_checksum(pairs)
    rollouts = published.generate(PROMPTS, GREEDY)
    assert {v for r in rollouts for v in r.weight_versions} == {7}
    assert tokens_of(rollouts) == tokens_of(native_engine(other).generate(PROMPTS, GREEDY)) != before


def test_bad_weights_are_refused_and_the_old_ones_stay(published, model):
    pairs = dict(model.state_dict())
    before = published.engine_checksum()
    wrong = {
        "belong to another configuration": pairs | {"model.norm.weight": torch.ones(3)},
        "were not given": {k: v for k, v in pairs.items() if "layers.2" not in k},
        "is unknown": pairs | {"model.layers.9.mlp.up_proj.weight": torch.ones(1)},
    }
    for message, tensors in wrong.items():
        with pytest.raises(ValueError, match=message):
            published.update_weights("target", tensors.items(), version=3)
    with pytest.raises(ValueError, match="changed on the way"):
        published.update_weights("target", pairs.items(), version=3, checksum="0" * 32)
    with pytest.raises(ValueError, match="needs drafter"):
        published.update_weights("draft", pairs.items(), version=3)
    assert published.engine_checksum() == before


def test_weights_change_in_mid_response_and_tokens_carry_the_version(published, model):
    long = SamplingParams(temperature=0, max_tokens=130)
    published.submit(PROMPTS[:1], SamplingParams(temperature=0, max_tokens=1))
    published.submit([Prompt(prompt_id=9, tokens=PROMPTS[1].tokens)], long)
    stream = published.stream()
    assert next(stream).prompt_id == 0
    published.update_weights("target", target(seed=2).state_dict().items(), version=2)
    (rest,) = stream
    versions = list(rest.weight_versions)
    assert len(rest.tokens) == 130 and versions == sorted(versions) and set(versions) == {1, 2}
    wanted = expected_log_probs(model, rest, 1.0)[: versions.count(1)]
    torch.testing.assert_close(
        torch.tensor(rest.log_probs[: len(wanted)]), wanted, atol=1e-4, rtol=1e-4
    )


def test_pause_resume_and_abort_lose_nothing(published):
    params = SamplingParams(temperature=0, max_tokens=100)
    expected = tokens_of(published.generate(PROMPTS, params))
    published.submit(PROMPTS[:1], SamplingParams(temperature=0, max_tokens=1))
    published.submit(PROMPTS[1:], params)
    first = next(published.stream())
    published.pause()
    assert list(published.stream()) == [] and len(first.tokens) == 1
    gone = published.abort([4])
    assert published.paused
    published.resume()
    rest = list(published.stream())
    assert tokens_of(rest) == {k: v for k, v in expected.items() if k[0] in (1, 2, 3)}
    for rollout in gone:
        assert rollout.finish_reason == FinishReason.ABORT
        assert expected[4, 0][: len(rollout.tokens)] == rollout.tokens
    assert published.stats().aborted == len(gone)


def test_weights_come_while_the_memory_is_released_and_serve_after_it_is_resumed(published, model):
    expected = tokens_of(published.generate(PROMPTS, GREEDY))
    published.release_memory_occupation()
    published.release_memory_occupation()
    published.update_weights("target", model.state_dict().items(), version=2)
    published.resume_memory_occupation()
    published.resume_memory_occupation()
    rollouts = published.generate(PROMPTS, GREEDY)
    assert tokens_of(rollouts) == expected and set(rollouts[0].weight_versions) == {2}


def test_features_are_the_states_that_the_tokens_were_drawn_from(published, model):
    published.capture_features(10_000, context_rows=4)
    rollouts = published.generate(
        [Prompt(prompt_id=20 + p.prompt_id, tokens=(60 - p.prompt_id, *p.tokens)) for p in PROMPTS],
        SamplingParams(temperature=0.9, max_tokens=20),
    )
    samples = {s.prompt_id: s for s in published.take_features()}
    published.capture_features(0)
    assert len(samples) == len(rollouts)
    for rollout in rollouts:
        sample, ids = samples[rollout.prompt_id], torch.tensor([rollout.prompt_tokens + rollout.tokens])
        with torch.no_grad():
            states = model(ids, output_hidden_states=True).hidden_states[-1][0]
        at = len(rollout.prompt_tokens) - 1 - len(sample.context_tokens)
        assert sample.tokens == rollout.tokens and sample.context_tokens
        assert sample.context_tokens == rollout.prompt_tokens[-len(sample.context_tokens) :]
        torch.testing.assert_close(sample.hidden, states[at:-1], atol=1e-4, rtol=1e-4)


def test_what_cannot_be_done_is_refused(published):
    for params, message in (
        (SamplingParams(stop=("x",)), "take neither"),
        (SamplingParams(repetition_penalty=1.1), "take neither"),
        (SamplingParams(max_tokens=159), "max_model_len=160"),
    ):
        with pytest.raises(ValueError, match=message):
            published.submit(PROMPTS[:1], params)
    with pytest.raises(ValueError, match="vocabulary of 61"):
        published.submit([Prompt(prompt_id=0, tokens=(61,))], GREEDY)


def test_responses_may_fill_the_context_to_its_last_token(published):
    for length in (1, 100, 159):
        prompt = Prompt(prompt_id=0, tokens=tuple(range(1, 60)) * 2 + tuple(range(1, 42)))
        prompt = Prompt(prompt_id=0, tokens=prompt.tokens[:length])
        params = SamplingParams(temperature=0, max_tokens=160 - length)
        (rollout,) = published.generate([prompt], params)
        assert len(rollout.tokens) == 160 - length and rollout.finish_reason == FinishReason.LENGTH


def test_a_killed_engine_is_replaced_and_nothing_is_lost(published):
    params = SamplingParams(temperature=0, max_tokens=120)
    expected = tokens_of(published.generate(PROMPTS, params))
    published.submit(PROMPTS, params)
    os.kill(published.check_health()["pids"][0], signal.SIGKILL)
    rollouts = list(published.stream())
    assert published.restarts == 1 and tokens_of(rollouts) == expected
    assert {v for r in rollouts for v in r.weight_versions} == {1}
