"""The EAGLE drafter inside the native engine: its numbers, its trees, and that it changes no token."""

import pytest
import torch
import transformers

from megatron_tlt.draft.batch import collate
from megatron_tlt.draft.trainer import DrafterTrainer, DrafterTrainerConfig
from megatron_tlt.models.drafter import Drafter, DrafterConfig
from megatron_tlt.rollout.native.engine import NativeEngine, NativeEngineConfig
from megatron_tlt.rollout.native.request import Running
from megatron_tlt.rollout.native.runner import FEATURES
from megatron_tlt.rollout.tuner import FixedPolicy
from megatron_tlt.types import OFF, Prompt, SamplingParams, Strategy
from tests.unit.rollout_models import (
    CHAIN,
    COMMON,
    HYBRID,
    NGRAM,
    PROMPTS,
    SUBNET,
    TREE,
    VOCAB,
    Alternate,
    drafter_config,
    make_drafter,
    make_engine,
    reference,
    tokens_of,
)

def _eagle_engine(drafter: Drafter, kind: str = "llama", **options) -> NativeEngine:
    engine = make_engine(kind, drafter=drafter.config, **options)
    engine.update_weights("draft", drafter.state_dict().items(), version=1)
    return engine


@pytest.mark.parametrize("layout", ["eagle", "eagle3"])
def test_a_drafted_chain_equals_the_training_passes(layout):
    """Features from a full transformers forward; drafts along the tokens that the engine itself chose."""
    drafter, model = make_drafter(layout=layout), reference("llama")
    engine = _eagle_engine(drafter, policy=FixedPolicy(strategy=OFF))
    engine.submit(PROMPTS[2:3], SamplingParams(temperature=0, max_tokens=20))
    for _ in range(6):
        engine._step()
    (request,) = engine.scheduler.running
    ids = torch.tensor([request.tokens])
    with torch.no_grad():
        states = model(ids, output_hidden_states=True).hidden_states
    inner = torch.cat([states[i] for i in drafter.config.feature_layers] or [states[-1]], -1)
    eagle = engine.speculation.drafters["eagle"]
    draft = None
    with torch.inference_mode():
        running = Running.of(engine.scheduler.running, device=torch.device("cpu"))
        plane = engine.cache.planes[FEATURES][0]
        rows = len(request.tokens) - 1
        width = drafter.config.feature_size
        torch.testing.assert_close(plane[:rows, :width], inner[0, :rows], atol=1e-4, rtol=1e-4)
        draft = eagle.propose(running, CHAIN, levels=4)
    chain = draft.tokens[0, 1:].tolist()
    assert len(chain) == 4
    tokens = torch.tensor([request.tokens[1:] + chain])
    padded = torch.cat((inner[:, :rows], torch.zeros(1, 4, width)), 1)
    with torch.no_grad():
        for step, output in enumerate(drafter.passes(tokens, padded, count=4)):
            guess = drafter.target_tokens(drafter.logits(output[0, rows - 1 + step]).argmax())
            assert int(guess) == chain[step]


@pytest.mark.parametrize("layout", ["eagle", "eagle3"])
@pytest.mark.parametrize("strategy", [CHAIN, TREE, HYBRID], ids=["chain", "tree", "hybrid"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_drafts_emit_the_very_tokens(strategy, temperature, layout):
    params = SamplingParams(
        n=2, temperature=temperature, top_p=0.9, repetition_penalty=1.1, max_tokens=40
    )
    plain = make_engine().generate(PROMPTS, params)
    engine = _eagle_engine(make_drafter(layout=layout), policy=FixedPolicy(strategy=strategy))
    rollouts = engine.generate(PROMPTS, params)
    assert tokens_of(rollouts) == tokens_of(plain)
    for a, b in zip(rollouts, plain, strict=True):
        torch.testing.assert_close(
            torch.tensor(a.log_probs), torch.tensor(b.log_probs), atol=1e-4, rtol=1e-4
        )
    assert engine.stats().accept_length > 1


@pytest.mark.parametrize("kind", ["gpt2", "qwen3"])
def test_switching_every_step_under_preemption_and_updates_emits_the_very_tokens(kind):
    """All strategies in turn, a cache that holds a few requests, and new weights for both models on the way."""
    params = SamplingParams(n=4, temperature=0, max_tokens=60)
    after = reference(kind).state_dict()
    name = next(n for n in after if "mlp" in n and n.endswith("weight"))
    changed = after | {name: after[name] * 1.5}

    def run(engine: NativeEngine) -> dict:
        engine.submit(PROMPTS, params)
        stream = engine.stream()
        rollouts = [next(stream)]
        return tokens_of(rollouts + list(stream))

    expected = run(make_engine(kind))
    switching = Alternate(OFF, NGRAM, CHAIN, TREE, OFF, SUBNET, HYBRID, CHAIN, OFF, OFF, TREE)
    engine = _eagle_engine(make_drafter(kind), kind, policy=switching, kv_cache_bytes=150_000)
    assert run(engine) == expected
    assert engine.stats().preemptions > 0
    engine.update_weights("target", changed.items(), version=2)
    engine.update_weights("draft", make_drafter(kind).state_dict().items(), version=2)
    fresh = make_engine(kind)
    fresh.update_weights("target", changed.items(), version=2)
    assert run(engine) == run(fresh) != expected


def _exact_pair() -> tuple[transformers.PreTrainedModel, Drafter]:
    """A one-layer target without attention, and a drafter that computes the same thing."""
    torch.manual_seed(5)
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
            max_position_embeddings=160, **COMMON,
        )
    ).eval()  # fmt: skip
    for parameter in model.parameters():
        parameter.data += torch.randn_like(parameter) * 0.1
    layer = model.model.layers[0]
    layer.self_attn.o_proj.weight.data.zero_()
    model.model.norm.weight.data.fill_(1.0)  # the drafter leaves the norm out: a positive factor
    drafter = Drafter(DrafterConfig.for_target(model.config.to_dict()))
    drafter.fc.weight.data = torch.cat((torch.eye(32), torch.zeros(32, 32)), 1)
    own = drafter.layers[0]
    own.self_attn.o_proj.weight.data.zero_()
    own.mlp.load_state_dict(layer.mlp.state_dict())
    own.post_attention_layernorm.load_state_dict(layer.post_attention_layernorm.state_dict())
    return model, drafter


@pytest.mark.parametrize("steps", [1, 3, 5])
def test_a_perfect_drafter_is_always_accepted(steps):
    model, drafter = _exact_pair()
    strategy = Strategy(drafter="eagle", num_steps=steps, num_draft_tokens=steps + 1)
    engine = NativeEngine(
        model.config.to_dict(), NativeEngineConfig(max_model_len=150), drafter=drafter.config,
        policy=FixedPolicy(strategy=strategy),
    )  # fmt: skip
    engine.update_weights("target", model.state_dict().items(), version=0)
    with pytest.raises(ValueError, match="update_weights"):
        engine.generate(PROMPTS[:1], SamplingParams(temperature=0, max_tokens=9))
    engine.abort()
    engine.update_weights("draft", drafter.state_dict().items(), version=0)
    tokens = 1 + (steps + 1) * 10
    engine.generate(PROMPTS[:3], SamplingParams(temperature=0, max_tokens=tokens))
    assert engine.stats().accept_length == steps + 1


@pytest.mark.parametrize("verification", ["shared", "rejection"])
@pytest.mark.parametrize("strategy", [CHAIN, TREE, HYBRID, NGRAM, SUBNET], ids=str)
@pytest.mark.parametrize("options", [dict(temperature=0.7, top_k=4), dict(temperature=1.0, top_p=0.3)])
def test_sampled_tokens_follow_the_model(strategy, options, verification):
    """Chi-square of the second and third token given what comes before, against transformers' softmax."""
    if verification == "rejection" and strategy not in (CHAIN, SUBNET):
        pytest.skip("only sampled chains are rejected")
    model, count = reference("llama"), 1500
    engine = _eagle_engine(
        make_drafter(), policy=FixedPolicy(strategy=strategy), max_batch=500, verification=verification
    )
    rollouts = engine.generate(PROMPTS[:1], SamplingParams(n=count, max_tokens=4, **options))
    assert engine.stats().accept_length > 1
    pairs = [(r.tokens[:i], r.tokens[i]) for r in rollouts for i in (1, 2)]
    statistic = freedom = 0.0
    for prefix in sorted({prefix for prefix, _ in pairs}):
        drawn = [token for other, token in pairs if other == prefix]
        if len(drawn) < 40:
            continue
        expected = _truncated(model, PROMPTS[0].tokens + prefix, **options) * len(drawn)
        observed = torch.bincount(torch.tensor(drawn), minlength=VOCAB)
        assert not observed[expected == 0].any()
        big = expected > 5
        statistic += float(((observed - expected).square() / expected)[big].sum())
        freedom += max(int(big.sum()) - 1, 0)
    assert freedom >= 5
    assert statistic < freedom + 4 * (2 * freedom) ** 0.5


def _truncated(model, tokens, *, temperature, top_k=0, top_p=1.0) -> torch.Tensor:
    with torch.no_grad():
        logits = model(torch.tensor([tokens])).logits[0, -1] / temperature
    probs = torch.softmax(logits, 0)
    order = probs.argsort(descending=True)
    before = probs[order].cumsum(0) - probs[order]
    keep = order[(before < top_p) & (torch.arange(VOCAB) < (top_k or VOCAB))]
    kept = torch.zeros(VOCAB).scatter_(0, keep, probs[keep])
    return kept / kept.sum()


def test_switching_on_costs_the_target_nothing():
    """The catch-up runs the drafter alone, in chunks; requests that lag behind draft nothing meanwhile."""
    engine = _eagle_engine(make_drafter(), policy=Alternate(*[OFF] * 20, *[CHAIN] * 60), prefill_chunk=16)
    engine.submit(PROMPTS[:3], SamplingParams(temperature=0, max_tokens=60))
    forwards = []
    forward = engine.model.forward

    def counting(batch, *args, **kwargs):
        forwards.append(len(batch.tokens))
        return forward(batch, *args, **kwargs)

    engine.model.forward = counting
    for _ in range(21):
        engine._step()
    assert sum(forwards[:2]) <= 16 * 2 and max(forwards[2:]) <= 3 * 5
    lag = [len(r.tokens) - 1 - r.drafted_to for r in engine.scheduler.running]
    assert max(lag) > 8
    for _ in range(10):
        engine._step()
    lag = [len(r.tokens) - 1 - r.drafted_to for r in engine.scheduler.running]
    assert max(lag) <= 5


@pytest.mark.parametrize("layout", ["eagle", "eagle3"])
def test_captured_features_train_a_drafter_that_the_engine_accepts(layout):
    """The whole circle on one target: capture, train, update, and a longer accept length."""
    drafter, params = make_drafter(layout=layout), SamplingParams(temperature=0, max_tokens=60)
    engine = _eagle_engine(drafter, policy=FixedPolicy(strategy=CHAIN))
    engine.capture_features(10_000, context_rows=5)
    plain = engine.generate(PROMPTS, params)
    before = engine.stats()
    samples = engine.take_features()
    trainer = DrafterTrainer(
        drafter, DrafterTrainerConfig(lr=5e-3, num_passes=3, token_weight=1.0, lr_warmup_iters=0)
    )
    for _ in range(80):
        metrics = trainer.step(collate(samples))
    assert metrics["accept_length"] > 1.5
    engine.update_weights("draft", drafter.state_dict().items(), version=2)
    assert tokens_of(engine.generate(PROMPTS, params)) == tokens_of(plain)
    after = engine.stats()
    gained = (after.speculated_tokens - before.speculated_tokens) / (after.verify_ct - before.verify_ct)
    assert gained > before.accept_length + 0.3


@pytest.mark.parametrize("layout", ["eagle", "eagle3"])
def test_features_with_context_are_the_states_of_a_full_forward(layout):
    drafter, model = make_drafter(layout=layout), reference("llama")
    engine = _eagle_engine(drafter, policy=Alternate(TREE, OFF, HYBRID))
    engine.capture_features(10_000, context_rows=6)
    engine.generate(PROMPTS, SamplingParams(temperature=0.9, max_tokens=20))
    samples = engine.take_features()
    assert len(samples) == len(PROMPTS)
    for sample in samples:
        prompt = PROMPTS[sample.prompt_id].tokens
        context = min(6, len(prompt) - 1)
        assert sample.context_tokens == prompt[len(prompt) - context :]
        with torch.no_grad():
            ids = torch.tensor([prompt + sample.tokens])
            states = model(ids, output_hidden_states=True).hidden_states
        rows = slice(len(prompt) - 1 - context, -1)
        last = states[-1][0, rows]
        if layout == "eagle3":
            inner = torch.cat([states[i][0, rows] for i in (0, 1, 2)], -1)
            torch.testing.assert_close(sample.hidden, inner, atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(sample.last_hidden, last, atol=1e-4, rtol=1e-4)
        else:
            torch.testing.assert_close(sample.hidden, last, atol=1e-4, rtol=1e-4)


def test_what_does_not_fit_is_refused():
    drafter = make_drafter()
    engine = _eagle_engine(drafter, policy=FixedPolicy(strategy=TREE), max_draft_tokens=6)
    with pytest.raises(ValueError, match="max_draft_tokens is 6"):
        engine.generate(PROMPTS[:1], SamplingParams(temperature=0, max_tokens=9))
    with pytest.raises(ValueError, match="without a drafter"):
        make_engine().update_weights("draft", drafter.state_dict().items(), version=1)
    with pytest.raises(ValueError, match="does not fit"):
        make_engine("gpt2", drafter=_changed_config(hidden_size=64))
    tables = {"embed_tokens.weight": torch.full((VOCAB, 32), 9.0)}
    before = engine.model.embedding.clone()
    engine.update_weights("draft", (drafter.state_dict() | tables).items(), version=2)
    assert torch.equal(engine.model.embedding, before)


def _changed_config(**changes) -> DrafterConfig:
    sizes = drafter_config()
    return DrafterConfig(**{n: getattr(sizes, n) for n in DrafterConfig.__slots__} | changes)


def test_prompts_of_one_token_draft_too():
    prompts = [Prompt(prompt_id=i, tokens=(i,)) for i in range(3)]
    params = SamplingParams(temperature=0, max_tokens=12)
    engine = _eagle_engine(make_drafter(), policy=FixedPolicy(strategy=TREE))
    assert tokens_of(engine.generate(prompts, params)) == tokens_of(
        make_engine().generate(prompts, params)
    )
