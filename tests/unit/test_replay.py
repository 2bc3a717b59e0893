"""Cost tables, traces, the simulator and the contextual bandit."""

import json
import random

import pytest

from megatron_tlt.rollout.contextual import ContextualTuner
from megatron_tlt.rollout.costs import CostTable
from megatron_tlt.rollout.replay import OraclePolicy, replay
from megatron_tlt.rollout.trace import TraceResponse, accepted_at, read_trace, trace_of, write_trace
from megatron_tlt.rollout.tuner import BanditTuner, FixedPolicy, StepContext, TunerConfig
from megatron_tlt.types import OFF, SamplingParams, StepRecord, Strategy
from tests.unit.rollout_models import NGRAM, PROMPTS, SUBNET, make_engine
from tools.replay_rollout import make_policies, strategy_of

FOUR = Strategy(drafter="ngram", num_steps=4, num_draft_tokens=5)
EAGLE = Strategy(drafter="eagle", num_steps=3, num_draft_tokens=4)
COSTS = CostTable(
    {"off": {1: 1.0, 8: 2.0}, str(FOUR): {1: 1.5, 8: 6.0}, str(EAGLE): {1: 1.6, 8: 3.0}}, 0.01
)


def test_costs_are_interpolated_and_survive_json():
    assert COSTS.seconds("off", 1) == 1 and COSTS.seconds("off", 8) == 2
    assert COSTS.seconds("off", 4) == pytest.approx(1 + 3 / 7)
    assert COSTS.seconds("off", 15) == pytest.approx(3)
    assert CostTable.from_json(json.loads(json.dumps(COSTS.to_json()))) == COSTS
    with pytest.raises(ValueError, match="no cost"):
        COSTS.seconds("subnet_1_1_2", 1)


def test_costs_of_step_records_leave_the_prefill_out():
    record = StepRecord(batch=2, strategy=FOUR, tokens=5, drafted=8, target_ms=4, draft_ms=1, other_ms=1)
    first = StepRecord(
        batch=2, strategy=FOUR, tokens=5, drafted=8, target_ms=4, draft_ms=1, other_ms=51,
        prefill_ms=50, prefill_tokens=10,
    )  # fmt: skip
    table = CostTable.of_records([record, first])
    assert table.seconds(str(FOUR), 2) == pytest.approx(0.006)
    assert table.prefill_token == pytest.approx(0.005)


def test_acceptance_between_steps_follows_from_the_step_that_passed_over():
    # First token 1; then 3 tokens (2 accepted, one refused), 5 (all 4 accepted), 1 (none).
    assert accepted_at((1, 3, 5, 1), FOUR) == (0, 2, 1, 0, 4, 4, 3, 2, 1, 0)


def test_a_trace_survives_its_file_and_other_tokens_are_refused(tmp_path):
    params = SamplingParams(n=2, temperature=0.8, max_tokens=30)
    runs = {
        strategy: make_engine(policy=FixedPolicy(strategy=strategy)).generate(PROMPTS, params)
        for strategy in (OFF, NGRAM, SUBNET)
    }
    trace = trace_of(runs)
    assert [r.tokens for r in trace] == [30] * 10
    for response, rollout in zip(trace, runs[SUBNET], strict=True):
        position = 0
        for n in rollout.step_tokens:
            if 0 < position < 26:  # near the end drafts are cut
                assert response.accepts[str(SUBNET)][position] == n - 1
            position += n
    write_trace(tmp_path / "trace.jsonl", trace)
    assert read_trace(tmp_path / "trace.jsonl") == trace
    other = make_engine().generate(PROMPTS, SamplingParams(n=2, temperature=0.9, max_tokens=30))
    with pytest.raises(ValueError, match="other tokens"):
        trace_of({OFF: runs[OFF], NGRAM: other})


def _trace(lengths: list[int], accepted: int) -> list[TraceResponse]:
    return [
        TraceResponse(
            prompt_id=i, sample_index=0, prompt_tokens=5, tokens=n,
            accepts={"off": (0,) * n, str(FOUR): (accepted,) * n, str(EAGLE): (1,) * n},
        )
        for i, n in enumerate(lengths)
    ]  # fmt: skip


def test_the_clock_of_one_engine_is_the_sum_of_its_steps():
    result = replay(_trace([9, 3], 3), lambda: FixedPolicy(strategy=FOUR), COSTS, max_batch=1)
    # 8 tokens in steps of 4 (two steps), 2 tokens in one; two prompts of 5 tokens.
    assert result.steps == 3 and result.seconds == pytest.approx(3 * 1.5 + 2 * 5 * 0.01)
    both = replay(_trace([9, 3], 3), FixedPolicy, COSTS, max_batch=2)
    assert both.steps == 8
    assert both.seconds == pytest.approx(2 * COSTS.seconds("off", 2) + 6 * 1.0 + 0.1)


def test_a_shared_queue_shortens_the_long_tail():
    trace = _trace([100, 2, 100, 2, 2, 2], 0)
    static = replay(trace, FixedPolicy, COSTS, max_batch=1, ranks=2)
    queue = replay(trace, FixedPolicy, COSTS, max_batch=1, ranks=2, sharing="queue")
    assert static.tokens == queue.tokens == 208
    assert queue.seconds < 0.6 * static.seconds and queue.bubble < static.bubble


def test_ranks_with_room_for_everything_share_a_queue_as_they_would_a_static_split():
    """Nobody takes more than its share before the others have looked."""
    trace = _trace([20] * 8, 0)
    results = [
        replay(trace, FixedPolicy, COSTS, max_batch=100, ranks=4, sharing=sharing)
        for sharing in ("static", "queue")
    ]
    assert results[0].rank_seconds == results[1].rank_seconds and len(set(results[1].rank_seconds)) == 1


def test_the_oracle_is_no_slower_than_any_static_strategy():
    rng = random.Random(0)
    trace = [
        TraceResponse(
            prompt_id=i, sample_index=0, prompt_tokens=5, tokens=60,
            accepts={"off": (0,) * 60, str(FOUR): tuple(rng.randrange(5) for _ in range(60)),
                     str(EAGLE): tuple(rng.randrange(4) for _ in range(60))},
        )
        for i in range(12)
    ]  # fmt: skip
    strategies = [OFF, FOUR, EAGLE]
    makers = make_policies(strategies, COSTS, threshold=4)
    seconds = {
        name: replay(trace, make, COSTS, max_batch=4).seconds for name, make in makers.items()
    }
    assert seconds["oracle"] <= 1.001 * min(seconds.values())
    assert seconds["contextual"] <= 1.1 * min(seconds[str(s)] for s in strategies)
    assert isinstance(makers["oracle"](), OraclePolicy)


def test_names_of_strategies_read_back():
    for strategy in (OFF, FOUR, EAGLE):
        assert strategy_of(str(strategy)) == strategy
    with pytest.raises(ValueError, match="no strategy"):
        strategy_of("ngram_4")


def _play(tuner, rate, *, steps, batches, seed=0, slow=1.0):
    """Share of time lost to the best arm of each step; acceptance follows `rate`, costs are 10 % noisy."""
    rng, spent, best = random.Random(seed), 0.0, 0.0
    arms = [OFF, FOUR, EAGLE]
    for step in range(steps):
        batch = batches[step % len(batches)]
        context = StepContext(accept_rate=rate, draft_version=1)
        arm = tuner.select(batch, context)

        def expected(a):
            gain = 0 if a == OFF else sum((rate + 0.1 * (a == EAGLE)) ** j for j in range(1, a.num_steps + 1))
            return 1 + gain, COSTS.seconds(str(a), batch) * slow

        tokens, seconds = expected(arm)
        tuner.record(
            arm, batch=batch, tokens=round(batch * tokens), seconds=seconds * rng.uniform(0.9, 1.1)
        )
        spent += seconds / tokens
        best += min(s / t for t, s in map(expected, arms))
    return spent / best - 1


@pytest.mark.parametrize("rate", [0.05, 0.4, 0.85])
def test_contextual_regret_is_below_five_per_cent_at_every_batch_size(rate):
    assert _play(ContextualTuner([OFF, FOUR, EAGLE], COSTS), rate, steps=600, batches=(1, 2, 5, 8)) < 0.05


def test_it_needs_fewer_trials_than_beg_where_batches_change():
    batches = (1, 3, 8, 30)
    contextual = _play(ContextualTuner([OFF, FOUR, EAGLE], COSTS), 0.3, steps=60, batches=batches)
    beg = _play(BanditTuner([OFF, FOUR, EAGLE]), 0.3, steps=60, batches=batches)
    assert contextual < beg


def test_a_wrong_cost_table_is_corrected():
    assert _play(ContextualTuner([OFF, FOUR, EAGLE], COSTS), 0.5, steps=600, batches=(1, 8), slow=3) < 0.05


def test_a_new_drafter_is_tried_again():
    tuner = ContextualTuner([OFF, EAGLE], COSTS, TunerConfig(epsilon=0, warmup=1))
    for _ in range(60):
        arm = tuner.select(1, StepContext(accept_rate=0.6, draft_version=1))
        tuner.record(arm, batch=1, tokens=1, seconds=COSTS.seconds(str(arm), 1))
    assert tuner.select(1, StepContext(accept_rate=0.6, draft_version=1)) == OFF
    assert tuner.select(1, StepContext(accept_rate=0.6, draft_version=2)) == EAGLE


def test_saved_state_continues_the_same_choices():
    one, two = (ContextualTuner([OFF, FOUR, EAGLE], COSTS) for _ in range(2))
    _play(one, 0.6, steps=80, batches=(1, 4))
    two.load_state_dict(json.loads(json.dumps(one.state_dict())))
    context = StepContext(accept_rate=0.6, draft_version=1)
    assert [one.select(2, context) for _ in range(100)] == [two.select(2, context) for _ in range(100)]
