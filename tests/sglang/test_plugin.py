"""Our plugin inside SGLang's processes: sampled verification is exact, and the bandit changes the steps."""

import pytest

from megatron_tlt.rollout.sglang.plugin import BanditSteps, verify_uses_greedy
from megatron_tlt.rollout.tuner import forget_arms
from megatron_tlt.types import SamplingParams
from tests.sglang.distribution import check_samples
from tests.sglang.models import CHAIN, PROMPTS, exact_pair, native_engine, sglang_engine, tokens_of

STEPS = (0, 1, CHAIN.num_steps)


@pytest.fixture(scope="module")
def pair():
    return exact_pair()


@pytest.fixture(scope="module")
def engine(pair):
    model, drafter = pair
    engine = sglang_engine(model, drafter=drafter, strategy=CHAIN, adaptive_steps=STEPS)
    yield engine
    engine.close()


def test_changing_steps_change_no_token_and_the_bandit_learns(engine, pair):
    params = SamplingParams(temperature=0, max_tokens=100)
    rollouts = engine.generate(PROMPTS, params)
    assert tokens_of(rollouts) == tokens_of(native_engine(pair[0]).generate(PROMPTS, params))
    state = engine.tuner_state()
    tried = {name for _, name, rewards in state["rewards"] if rewards}
    assert tried == {"off", "eagle_1_1_2", "eagle_3_1_4"}


def test_sampled_tokens_follow_the_model_while_the_steps_change(engine, pair):
    rollouts = engine.generate(PROMPTS[:1], SamplingParams(n=600, temperature=0.7, max_tokens=4, top_k=4))
    assert sum(r.num_accepted for r in rollouts) > 0
    check_samples(pair[0], rollouts, temperature=0.7, top_k=4)


def test_the_policy_chooses_by_measured_speed_and_resumes(tmp_path):
    """A bandit without an engine: steps of 3 bring four tokens in the time of one."""
    path = tmp_path / "adaptive.json"
    path.write_text('{"1": {"candidate_steps": [3, 0]}}')
    policy = BanditSteps(3, str(path))
    assert policy.candidate_steps == [0, 3]
    for _ in range(40):
        steps = policy.get_steps_for_batch(2)
        policy._began -= 1.0
        policy.on_verify_complete([steps, steps], 2)
    again = BanditSteps(3, str(path))
    assert again.tuner.decisions == 40
    assert [again.get_steps_for_batch(2) for _ in range(5)].count(3) >= 4
    policy.set_cuda_graph_bs([1, 2, 4])
    assert policy.cuda_graph_bs_for_step(0) == [1, 2, 4]


def test_the_trainer_reads_and_replaces_what_the_bandit_inside_has_learned(engine, pair):
    params = SamplingParams(temperature=0, max_tokens=60)
    engine.generate(PROMPTS, params)
    learned = engine.tuner_state()
    engine.load_tuner_state(forget_arms(learned, ["eagle"]) | {"decisions": 1_000_010})
    assert engine.tuner_state()["decisions"] == 1_000_010  # read back before a step, too
    rollouts = engine.generate(PROMPTS, params)
    assert tokens_of(rollouts) == tokens_of(native_engine(pair[0]).generate(PROMPTS, params))
    state = engine.tuner_state()
    assert 1_000_010 < state["decisions"] < 1_001_010
    few = {name: len(rewards) for _, name, rewards in state["rewards"]}
    assert few["eagle_3_1_4"] <= state["decisions"] - 1_000_010


def test_only_greedy_requests_are_verified_greedily():
    others = dict(is_cpu=True, is_hip=False, is_xpu=False, use_rejection_sampling=False)
    assert verify_uses_greedy(is_all_greedy=True, **others)
    assert not verify_uses_greedy(is_all_greedy=False, **others)
