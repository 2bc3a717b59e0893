"""The native engine against transformers, and against itself under every other schedule."""

import pytest
import torch

from megatron_tlt.rollout.native.layers import Norm
from megatron_tlt.rollout.tuner import FixedPolicy
from megatron_tlt.types import OFF, FinishReason, Prompt, SamplingParams
from tests.unit.rollout_models import (
    CONFIGS,
    NGRAM,
    PROMPTS,
    SUBNET,
    VOCAB,
    Alternate,
    make_engine,
    reference,
    tokens_of,
)


@pytest.mark.parametrize("kind", CONFIGS)
def test_greedy_tokens_and_log_probs_equal_transformers(kind):
    model = reference(kind)
    rollouts = make_engine(kind).generate(PROMPTS, SamplingParams(temperature=0, max_tokens=16))
    for prompt, rollout in zip(PROMPTS, rollouts, strict=True):
        ids = torch.tensor([prompt.tokens])
        with torch.no_grad():
            expected = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=16,
                do_sample=False, eos_token_id=None, pad_token_id=0,
            )[0]  # fmt: skip
            assert rollout.tokens == tuple(expected[len(prompt.tokens) :].tolist())
            log_probs = torch.log_softmax(model(expected[None]).logits[0].float(), -1)
        at = range(len(prompt.tokens) - 1, len(expected) - 1)
        wanted = torch.stack([log_probs[i, expected[i + 1]] for i in at])
        torch.testing.assert_close(torch.tensor(rollout.log_probs), wanted, atol=1e-4, rtol=1e-4)


PARAMS = SamplingParams(n=3, temperature=0.8, top_k=20, top_p=0.95, max_tokens=20, seed=4)


@pytest.fixture(scope="module")
def plain():
    return make_engine().generate(PROMPTS, PARAMS, step=2)


@pytest.mark.parametrize(
    "sizes", [{"max_batch": 1}, {"max_batch": 2}, {"prefill_chunk": 3}, {"kv_cache_bytes": 170_000}],
    ids=["one", "two", "chunked", "bound"],
)  # fmt: skip
def test_tokens_do_not_depend_on_scheduling(plain, sizes):
    engine = make_engine(**sizes)
    assert engine.cache.num_bytes <= sizes.get("kv_cache_bytes", 10**9)
    rollouts = engine.generate(PROMPTS, PARAMS, step=2)
    assert tokens_of(rollouts) == tokens_of(plain)


def test_tokens_do_not_depend_on_neighbours_but_on_step_and_seed(plain):
    alone = make_engine().generate(PROMPTS[3:4], PARAMS, step=2)
    assert tokens_of(alone).items() <= tokens_of(plain).items()
    later = make_engine().generate(PROMPTS[3:4], PARAMS, step=3)
    assert tokens_of(alone) != tokens_of(later)
    assert len(set(tokens_of(alone).values())) == 3


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize(
    "policy", [FixedPolicy(strategy=NGRAM), FixedPolicy(strategy=SUBNET), Alternate(OFF, NGRAM, SUBNET, NGRAM, OFF, SUBNET)],
    ids=["ngram", "subnet", "alternate"],
)  # fmt: skip
def test_speculation_emits_the_very_tokens(policy, temperature):
    params = SamplingParams(
        n=2, temperature=temperature, top_p=0.9, repetition_penalty=1.1, max_tokens=60
    )
    plain = make_engine().generate(PROMPTS, params)
    engine = make_engine(policy=policy)
    rollouts = engine.generate(PROMPTS, params)
    assert tokens_of(rollouts) == tokens_of(plain)
    for a, b in zip(rollouts, plain, strict=True):
        torch.testing.assert_close(
            torch.tensor(a.log_probs), torch.tensor(b.log_probs), atol=1e-4, rtol=1e-4
        )
    stats = engine.stats()
    assert stats.drafted > 0 and 1 <= stats.accept_length <= 6
    assert stats.tokens == sum(len(r.tokens) for r in rollouts)
    accepted = sum(sum(s.accepted_by_position) for s in stats.recent)
    assert accepted >= sum(r.num_accepted for r in rollouts) > 0


def test_speculation_needs_fewer_steps_where_text_repeats():
    params = SamplingParams(temperature=0, max_tokens=80)
    counts = []
    for strategy in (OFF, NGRAM):
        engine = make_engine("gpt2", policy=FixedPolicy(strategy=strategy))
        engine.generate(PROMPTS[:1], params)
        counts.append(engine.stats().steps)
    assert counts[0] == 79 and counts[1] < 50


def test_a_broken_acceptance_is_caught(monkeypatch):
    """Mutation: every draft is taken for the target's own draw."""
    from megatron_tlt.rollout.native import engine as module

    exact = module.step

    def wrong(runner, running, draft):
        output = exact(runner, running, draft)
        if draft is not None:
            output.lengths[:] = draft.levels + 1
        return output

    params = SamplingParams(temperature=0, max_tokens=30)
    expected = tokens_of(make_engine().generate(PROMPTS, params))
    monkeypatch.setattr(module, "step", wrong)
    broken = make_engine(policy=FixedPolicy(strategy=SUBNET)).generate(PROMPTS, params)
    assert tokens_of(broken) != expected


def test_sampled_tokens_follow_the_model_with_speculation():
    """Chi-square of the second token given the first, over seeds, against transformers' softmax."""
    model, count = reference("llama"), 2000
    engine = make_engine(policy=FixedPolicy(strategy=SUBNET), max_batch=500, max_model_len=16)
    params = SamplingParams(n=count, temperature=0.7, max_tokens=3, top_k=4)
    rollouts = engine.generate(PROMPTS[:1], params)
    assert engine.stats().accept_length > 1
    pairs = torch.tensor([r.tokens[:2] for r in rollouts])

    def distribution(tokens: tuple[int, ...]) -> torch.Tensor:
        with torch.no_grad():
            logits = model(torch.tensor([tokens])).logits[0, -1] / 0.7
        kept = logits.topk(4).indices
        return torch.zeros(VOCAB).scatter_(0, kept, torch.softmax(logits[kept], 0))

    first = distribution(PROMPTS[0].tokens)
    expected = torch.zeros(VOCAB, VOCAB)
    for token in first.nonzero().flatten().tolist():
        expected[token] = first[token] * distribution((*PROMPTS[0].tokens, token)) * count
    observed = torch.zeros(VOCAB, VOCAB)
    observed.index_put_((pairs[:, 0], pairs[:, 1]), torch.ones(count), accumulate=True)
    assert not observed[expected == 0].any()
    big = expected > 5
    statistic = ((observed - expected).square() / expected)[big].sum()
    freedom = int(big.sum()) - 1
    assert statistic < freedom + 4 * (2 * freedom) ** 0.5


def test_stop_tokens_and_strings_end_a_response():
    params = SamplingParams(temperature=0, max_tokens=40)
    whole = make_engine().generate(PROMPTS[:1], params)[0].tokens
    stop = whole[10]
    first = whole.index(stop)
    cut = SamplingParams(temperature=0, max_tokens=40, stop_token_ids=(stop,))
    for policy in (None, FixedPolicy(strategy=NGRAM)):
        rollout = make_engine(policy=policy).generate(PROMPTS[:1], cut)[0]
        assert rollout.tokens == whole[: first + 1]
        assert rollout.finish_reason == FinishReason.STOP

    def decode(tokens: list[int]) -> str:
        return "".join(chr(200 + t) for t in tokens)

    text = decode(list(whole[6:8]))
    named = SamplingParams(temperature=0, max_tokens=40, stop=(text,))
    rollout = make_engine(decode=decode).generate(PROMPTS[:1], named)[0]
    assert decode(list(rollout.tokens)).endswith(text) and len(rollout.tokens) <= 8
    with pytest.raises(ValueError, match="decode"):
        make_engine().generate(PROMPTS[:1], named)


def test_weights_change_in_the_middle_and_tokens_carry_the_version():
    engine = make_engine(max_batch=4)
    engine.submit(PROMPTS, SamplingParams(n=2, temperature=1.0, max_tokens=12))
    stream = engine.stream()
    first = next(stream)
    engine.update_weights("target", reference("llama").state_dict().items(), version=2)
    rest = list(stream)
    assert set(first.weight_versions) == {1} and len(rest) == 9
    assert {v for r in rest for v in r.weight_versions} == {1, 2}
    for r in rest:
        assert list(r.weight_versions) == sorted(r.weight_versions)


def test_pause_abort_and_resume_lose_nothing(plain):
    engine = make_engine(max_batch=4)
    engine.submit(PROMPTS, PARAMS, step=2)
    got = []
    for rollout in engine.stream():
        got.append(rollout)
        engine.pause()
    gone = engine.abort([PROMPTS[4].prompt_id])
    engine.resume()
    got += list(engine.stream())
    expected = {k: v for k, v in tokens_of(plain).items() if k[0] != 4}
    assert {k: v for k, v in tokens_of(got).items() if k[0] != 4} == expected
    assert all(r.finish_reason == FinishReason.ABORT for r in gone)
    engine.submit(PROMPTS, PARAMS)
    next(engine.stream())
    aborted = engine.abort()
    assert len(aborted) <= 4 and engine.stats().aborted == len(aborted) + len(gone)
    assert not engine.scheduler.busy and list(engine.stream()) == []
    assert tokens_of(engine.generate(PROMPTS, PARAMS, step=2)) == tokens_of(plain)


def test_features_are_the_states_that_the_tokens_were_drawn_from():
    engine, model = make_engine(policy=FixedPolicy(strategy=SUBNET)), reference("llama")
    engine.capture_features(max_rows=10_000)
    rollouts = engine.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=20))
    features = {f.prompt_id: f for f in engine.take_features()}
    for rollout in rollouts:
        ids = torch.tensor([rollout.prompt_tokens + rollout.tokens])
        with torch.no_grad():
            states = model(ids, output_hidden_states=True).hidden_states[-1][0]
        at = len(rollout.prompt_tokens) - 1
        feature = features[rollout.prompt_id]
        assert feature.tokens == rollout.tokens and feature.weight_version == 1
        torch.testing.assert_close(feature.hidden, states[at:-1], atol=1e-4, rtol=1e-4)
    assert engine.take_features() == [] and engine.recorder.rows == 0


def test_features_stay_within_their_bound():
    engine = make_engine()
    engine.capture_features(max_rows=50)
    engine.generate(PROMPTS, SamplingParams(n=3, temperature=1.0, max_tokens=20))
    kept = engine.take_features()
    assert 0 < sum(len(f.hidden) for f in kept) <= 50
    assert all(len(f.hidden) == len(f.tokens) for f in kept) and engine.recorder.rows == 0


def test_bad_requests_are_refused_with_the_numbers():
    engine = make_engine()
    with pytest.raises(ValueError, match="max_model_len=100"):
        engine.generate(PROMPTS, SamplingParams(max_tokens=99))
    with pytest.raises(ValueError, match="vocabulary of 61"):
        engine.generate([Prompt(prompt_id=0, tokens=(61,))], SamplingParams(max_tokens=9))
    with pytest.raises(ValueError, match="holds no request"):
        make_engine(kv_cache_bytes=100)
    with pytest.raises(ValueError, match="belong to another configuration"):
        engine.update_weights("target", [("model.norm.weight", torch.ones(3))], version=2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_norm_equals_torchs(dtype):
    norm = Norm(48, epsilon=1e-5, bias=False, like=torch.empty(0, dtype=dtype))
    norm.weight.uniform_(0.5, 1.5)
    norm.pack()
    x = torch.randn(5, 48).to(dtype) * torch.tensor([[1e-3], [0.1], [1.0], [30.0], [0.0]]).to(dtype)
    expected = torch.nn.functional.rms_norm(x, (48,), norm.weight, 1e-5)
    tolerance = dict(atol=1e-6, rtol=1e-6) if dtype == torch.float32 else dict(atol=0, rtol=1e-2)
    torch.testing.assert_close(norm(x), expected, **tolerance)


def test_bfloat16_speaks_nearly_as_float32_does():
    """Log-probs of the same first token; later tokens may part at near ties."""
    params = SamplingParams(temperature=0, max_tokens=1)
    exact = make_engine().generate(PROMPTS, params)
    rounded = make_engine(dtype=torch.bfloat16).generate(PROMPTS, params)
    same = [(a, b) for a, b in zip(exact, rounded, strict=True) if a.tokens == b.tokens]
    assert len(same) >= 3
    for a, b in same:
        assert abs(a.log_probs[0] - b.log_probs[0]) < 0.1
