"""Bounded memory, preemption, atomic weight updates: nothing leaks and no token changes."""

import gc

import pytest
import torch

from megatron_tlt.rollout.checksum import weights_checksum
from megatron_tlt.rollout.native.cache import PlaneShape, SlotCache
from megatron_tlt.rollout.native.request import Request
from megatron_tlt.rollout.tuner import FixedPolicy
from megatron_tlt.types import Prompt, SamplingParams
from tests.unit.rollout_models import NGRAM, PROMPTS, make_engine, reference, tokens_of

ROW = 3 * 2 * 16 * 4  # bytes a token: layers, keys and values, width, float32


def _live_requests() -> int:
    gc.collect()
    return sum(isinstance(thing, Request) for thing in gc.get_objects())


def test_ten_times_oversubscribed_stays_within_the_bound_and_leaks_nothing():
    prompts = [Prompt(prompt_id=i, tokens=tuple(range(1, 4 + i % 7))) for i in range(10)]
    params = SamplingParams(n=4, temperature=1.0, max_tokens=80, seed=3)
    expected = make_engine(max_batch=40).generate(prompts, params)
    before, bound = _live_requests(), 400 * ROW  # 40 requests of up to 90 tokens in 400 rows
    engine = make_engine(max_batch=40, kv_cache_bytes=bound, policy=FixedPolicy(strategy=NGRAM))
    engine.capture_features(300)
    rollouts = []
    engine.submit(prompts, params)
    for rollout in engine.stream():
        rollouts.append(rollout)
        held = sum(len(r.tokens) for r in engine.scheduler.running)
        assert held <= engine.cache.rows and engine.recorder.rows <= 300
        assert engine.cache.planes["target"].nbytes <= bound
    assert tokens_of(rollouts) == tokens_of(expected)
    assert engine.stats().preemptions > 5 and not engine.scheduler.busy
    assert sum(len(f.hidden) for f in engine.take_features()) <= 300
    assert _live_requests() == before


def test_abort_in_the_middle_of_preemption_leaks_nothing():
    before = _live_requests()
    engine = make_engine(max_batch=12, kv_cache_bytes=150 * ROW)
    engine.submit(PROMPTS, SamplingParams(n=6, temperature=1.0, max_tokens=60))
    while not engine.scheduler.preempted:
        assert list(engine._step()) is not None
    started = len(engine.scheduler.running) + len(engine.scheduler.preempted)
    aborted = engine.abort([0, 1, 2])
    aborted += engine.abort()
    assert len(aborted) == started and not engine.scheduler.busy
    del aborted
    assert _live_requests() == before
    again = engine.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=20))
    plain = make_engine().generate(PROMPTS, SamplingParams(temperature=0, max_tokens=20))
    assert tokens_of(again) == tokens_of(plain)


def test_released_memory_is_gone_and_after_resuming_no_token_changes():
    params = SamplingParams(n=3, temperature=1.0, max_tokens=20, seed=5)
    expected = make_engine().generate(PROMPTS, params)
    engine, weights = make_engine(), reference("llama").state_dict()
    engine.capture_features(300)
    held = engine.cache.num_bytes
    engine.generate(PROMPTS, params)
    features = engine.take_features()
    states = [f.hidden.clone() for f in features]
    engine.release_memory_occupation()
    engine.release_memory_occupation()
    assert held > 0 and engine.cache.num_bytes == 0
    assert all(torch.equal(f.hidden, state) for f, state in zip(features, states, strict=True))
    with pytest.raises(ValueError, match="resume_memory_occupation"):
        engine.submit(PROMPTS, params)
    doubled = {name: 2 * tensor for name, tensor in weights.items()}
    for version, tensors in enumerate((doubled, weights), 2):  # they come while the cache is away
        engine.update_weights("target", tensors.items(), version=version)
    engine.resume_memory_occupation()
    engine.resume_memory_occupation()
    assert engine.cache.num_bytes == held
    assert tokens_of(engine.generate(PROMPTS, params)) == tokens_of(expected)
    assert len(engine.take_features()) == len(features)


def test_memory_in_use_is_not_released():
    engine = make_engine()
    engine.submit(PROMPTS, SamplingParams(max_tokens=4, temperature=0))
    with pytest.raises(ValueError, match=f"0 running and {len(PROMPTS)} waiting"):
        engine.release_memory_occupation()
    assert len(list(engine.stream())) == len(PROMPTS)


@pytest.mark.parametrize("stride", [3, 5, 7, 10])
def test_dividing_the_cache_anew_keeps_what_the_slots_hold(stride):
    planes = {"a": PlaneShape(layers=2, width=3, dtype=torch.float32)}
    cache = SlotCache(planes, max_batch=8, longest=10, device=torch.device("cpu"), max_bytes=40 * 24)
    assert (cache.rows, cache.stride, cache.slots) == (40, 5, 8)
    lengths = [3, 2, 1, 3][: cache.slots_of(stride)]
    content = [torch.randn(2, n, 3) for n in lengths]
    for slot, rows in enumerate(content):
        cache.planes["a"][:, slot * 5 : slot * 5 + rows.shape[1]] = rows
    cache.divide(stride, lengths=lengths)
    assert cache.slots == min(8, 40 // stride)
    for slot, rows in enumerate(content):
        first = slot * stride
        assert torch.equal(cache.planes["a"][:, first : first + rows.shape[1]], rows)


def _failing(tensors):
    for i, pair in enumerate(tensors):
        if i == 5:
            raise ConnectionError("the sender went away")
        yield pair


@pytest.mark.parametrize("fault", ["iterator", "incomplete", "shape", "unknown", "checksum"])
def test_a_weight_update_that_fails_leaves_the_old_weights(fault):
    params = SamplingParams(temperature=0, max_tokens=20)
    engine = make_engine()
    expected = engine.generate(PROMPTS, params)
    good = {name: tensor * 1.3 for name, tensor in reference("llama").state_dict().items()}
    tensors, checksum = good.items(), None
    if fault == "iterator":
        tensors = _failing(tensors)
    elif fault == "incomplete":
        tensors = list(tensors)[:-3]
    elif fault == "shape":
        tensors = [*tensors, ("model.norm.weight", torch.ones(3))]
    elif fault == "unknown":
        tensors = [*tensors, ("model.layers.9.mlp.up_proj.weight", torch.ones(3))]
    else:
        checksum = weights_checksum(reference("llama").state_dict().items())
    with pytest.raises((ValueError, ConnectionError)):
        engine.update_weights("target", tensors, version=2, checksum=checksum)
    again = engine.generate(PROMPTS, params)
    assert tokens_of(again) == tokens_of(expected)
    assert {v for r in again for v in r.weight_versions} == {1}
    engine.update_weights("target", good.items(), version=2, checksum=weights_checksum(good.items()))
    assert tokens_of(engine.generate(PROMPTS, params)) != tokens_of(expected)


def test_a_checksum_sees_every_bit_but_not_the_order():
    pairs = list(reference("llama").state_dict().items())
    whole = weights_checksum(pairs)
    assert whole == weights_checksum(reversed(pairs)) and len(whole) == 32
    name, tensor = pairs[4]
    changed = tensor.clone()
    changed.view(torch.int32).view(-1)[7] ^= 1
    assert weights_checksum([*pairs[:4], (name, changed), *pairs[5:]]) != whole
    assert weights_checksum([*pairs[:4], (name + "x", tensor), *pairs[5:]]) != whole


def test_siblings_that_start_after_an_update_use_the_new_prompt():
    """The prompt's cached rows belong to the old weights, so they must not be copied any more."""
    changed = {n: t * 1.2 for n, t in reference("llama").state_dict().items()}
    params = SamplingParams(n=4, temperature=1.0, max_tokens=20, seed=1)
    engine = make_engine(max_batch=2)
    engine.submit(PROMPTS[3:4], params)
    assert engine._step() == []
    engine.update_weights("target", changed.items(), version=2)
    late = [r for r in engine.stream() if r.sample_index >= 2]
    fresh = make_engine()
    fresh.update_weights("target", changed.items(), version=2)
    expected = tokens_of(fresh.generate(PROMPTS[3:4], params))
    assert len(late) == 2
    for rollout in late:
        assert rollout.tokens == expected[rollout.prompt_id, rollout.sample_index]
