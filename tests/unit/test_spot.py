"""Spot training's policies: the state machine, the lessons' buffer, the trigger, the ledger; all without a model."""

import itertools
import json
import random

import pytest
import torch

from megatron_tlt.draft.buffer import DraftBuffer, window
from megatron_tlt.draft.spot import EDGES, SpotMachine, SpotState, after_poll
from megatron_tlt.draft.trigger import Trigger, TriggerConfig
from megatron_tlt.rl.draft_report import DraftReport, Tail, preemptions, training_metrics
from megatron_tlt.rl.timeline import Timeline, read_timeline, timeline_path
from megatron_tlt.rollout.acceptance import Acceptance, accept_length, add_counts, rates
from megatron_tlt.types import FeatureSample


class Counter:
    """A store of one process."""

    def __init__(self) -> None:
        self.values: dict[str, int] = {}

    def add(self, key: str, amount: int) -> int:
        self.values[key] = self.values.get(key, 0) + amount
        return self.values[key]


def machines(count: int, *, threshold: int = 1, clock=lambda: 0.0) -> list[SpotMachine]:
    store = Counter()
    return [
        SpotMachine(
            store=store, key="k", world_size=count, threshold=threshold, timeout_s=10.0, clock=clock
        )
        for _ in range(count)
    ]


@pytest.mark.parametrize("threshold", [1, 2, 3])
def test_ranks_train_from_the_threshold_on_and_stop_when_the_last_is_done(threshold):
    ranks = machines(4, threshold=threshold)
    for order in ((2, 0, 3, 1), (0, 1, 2, 3), (3, 1, 0, 2)):
        for rank in ranks:
            rank.begin()
        done = []
        for number in order:
            ranks[number].finish()
            done.append(number)
            states = [ranks[i].poll(has_lessons=True) for i in done]
            if len(done) == 4:
                wanted = SpotState.READY
            else:
                wanted = SpotState.TRAINING if len(done) >= threshold else SpotState.IDLE
            assert states == [wanted] * len(done)


def test_any_interleaving_of_ranks_keeps_to_the_edges_and_ends():
    for seed in range(200):
        rng = random.Random(seed)
        ranks = machines(rng.randint(1, 6), threshold=rng.randint(1, 6))
        for _ in range(3):
            pending = {rank: None for rank in range(len(ranks))}
            for rank in ranks:
                rank.begin()
            steps = 0
            while pending:
                number, steps = rng.choice(list(pending)), steps + 1
                rank, before = ranks[number], ranks[number].state
                if before == SpotState.BUSY:
                    rank.finish()
                elif rank.poll(has_lessons=rng.random() < 0.8) == SpotState.READY:
                    del pending[number]
                assert rank.state in EDGES[before] and steps < 10_000
        assert all(rank.state == SpotState.READY for rank in ranks)


def test_a_rank_that_looks_late_still_sees_the_end_of_its_step():
    slow, fast = machines(2)
    for rank in (slow, fast):
        rank.begin()
        rank.finish()
    assert fast.poll(has_lessons=True) == SpotState.READY
    fast.begin()
    fast.finish()
    assert fast.poll(has_lessons=True) == SpotState.TRAINING
    assert slow.poll(has_lessons=True) == SpotState.READY


def test_one_rank_alone_never_waits_and_without_lessons_nobody_trains():
    (alone,) = machines(1)
    alone.begin()
    alone.finish()
    assert alone.poll(has_lessons=True) == SpotState.READY
    for idle, threshold in itertools.product((1, 2, 3), (1, 2)):
        state = after_poll(idle=idle, world_size=4, threshold=threshold, has_lessons=False)
        assert state == SpotState.IDLE


def test_a_dead_rank_is_an_error_after_the_time_and_a_wrong_call_at_once():
    now = [0.0]
    first, _ = machines(2, clock=lambda: now[0])
    first.begin()
    with pytest.raises(AssertionError, match="busy -> training|busy -> idle|no legal step"):
        first.poll(has_lessons=True)
        first.poll(has_lessons=True)
        first.begin()
    first, _ = machines(2, clock=lambda: now[0])
    first.begin()
    first.finish()
    now[0] = 9.0
    assert first.poll(has_lessons=True) == SpotState.TRAINING
    now[0] = 11.0
    with pytest.raises(TimeoutError, match="1 of 2 ranks"):
        first.poll(has_lessons=True)


def lesson(number: int, rows: int, *, context: int = 1, version: int = 0) -> FeatureSample:
    return FeatureSample(
        prompt_id=number, sample_index=0, tokens=tuple(range(rows - context)),
        context_tokens=(9,) * context, weight_version=version,
        hidden=torch.full((rows, 2), float(number)) + torch.arange(rows)[:, None],
    )  # fmt: skip


def test_the_longest_of_the_step_before_stay_and_older_ones_go():
    buffer = DraftBuffer(100, seed=0)
    buffer.begin_step(1)
    buffer.add([lesson(i, rows) for i, rows in enumerate((5, 30, 8, 18, 40))])
    buffer.begin_step(2)
    assert sorted(buffer.lengths) == [8, 40], "40 and, in what is left of 50 rows, 8 after 30 and 18 do not fit"
    buffer.add([lesson(9, 6)])
    buffer.begin_step(3)
    assert buffer.lengths == [6]
    buffer.begin_step(5)
    assert buffer.num_samples == 0


def test_short_responses_make_way_for_long_ones_and_never_for_old_ones():
    buffer = DraftBuffer(50, seed=0)
    buffer.begin_step(1)
    buffer.add([lesson(0, 20)])
    buffer.begin_step(2)
    for number, rows in enumerate((4, 12, 9, 16), 1):
        buffer.add([lesson(number, rows)])
        assert buffer.num_rows <= 50
    assert buffer.lengths == [20, 12, 16]


def test_rows_are_drawn_uniformly_so_a_response_weighs_as_its_tokens():
    buffer = DraftBuffer(1000, seed=3)
    buffer.begin_step(1)
    lengths = [10, 20, 30, 60, 120]
    buffer.add([lesson(i, rows) for i, rows in enumerate(lengths)])
    drawn = [0] * 5
    for _ in range(4000):  # the first response of each draw is drawn by rows alone
        drawn[buffer.draw(2)[0].prompt_id] += 1
    for count, rows in zip(drawn, lengths, strict=True):
        assert count / 4000 == pytest.approx(rows / 240, abs=0.025)
    assert all(len(s.hidden) == 2 for s in buffer.draw(2))
    together = buffer.draw(100)
    assert sum(len(s.hidden) for s in together) == 100
    assert sum(len(s.hidden) for s in buffer.draw(999)) == 240


def test_windows_reach_every_part_of_a_long_response():
    buffer = DraftBuffer(1000, seed=1)
    buffer.begin_step(1)
    buffer.add([lesson(0, 100, context=10)])
    seen = set()
    for _ in range(300):
        (part,) = buffer.draw(12)
        tokens = part.context_tokens + part.tokens
        first = int(part.hidden[0, 0])
        assert tokens == ((9,) * 10 + tuple(range(90)))[first : first + 12]
        seen.update(range(first, first + 12))
    assert seen == set(range(100))
    whole = lesson(3, 8, context=3)
    cut = window(whole, 0, 8)
    assert cut.tokens == whole.tokens and cut.context_tokens == whole.context_tokens


def test_a_buffer_survives_its_tensors_and_a_changed_one_has_another_digest():
    buffer = DraftBuffer(500, seed=7)
    buffer.begin_step(4)
    buffer.add([lesson(i, 10 + i, version=4) for i in range(6)])
    buffer.weigh({(2, 0): 3.0})
    buffer.draw(20)
    other = DraftBuffer(500, seed=7)
    other.load_state(buffer.state())
    assert other.digest() == buffer.digest() and other.newest_version == 4
    for _ in range(5):
        assert [s.tokens for s in other.draw(33)] == [s.tokens for s in buffer.draw(33)]
    buffer.add([lesson(7, 5)])
    assert other.digest() != buffer.digest()
    empty = DraftBuffer(500, seed=7)
    empty.load_state(DraftBuffer(500, seed=7).state())
    assert empty.num_rows == 0 and empty.newest_version == -1


def test_a_weight_multiplies_the_chance():
    buffer = DraftBuffer(100, seed=2)
    buffer.begin_step(1)
    buffer.add([lesson(0, 10), lesson(1, 10)])
    buffer.weigh({(1, 0): 3.0, (5, 0): 9.0})
    first = [buffer.draw(10)[0].prompt_id for _ in range(2000)]
    assert sum(first) / 2000 == pytest.approx(0.75, abs=0.03)


def test_training_is_triggered_by_a_fallen_rate_or_a_newer_policy():
    trigger = Trigger(config=TriggerConfig(margin=0.1, stale_after=3))
    trigger.observe({"position_1": 0.8, "position_2": 0.5})
    assert trigger.reason(age=2) == "" and "3 steps" in trigger.reason(age=3)
    trigger.observe({"position_1": 0.75, "position_2": 0.35})
    assert "position_2" in trigger.reason(age=0)
    again = Trigger(config=trigger.config)
    again.load_state_dict(json.loads(json.dumps(trigger.state_dict())))
    assert again.reason(age=0) == trigger.reason(age=0)
    trigger.observe({"position_1": 0.9, "position_2": 0.5})
    assert trigger.reason(age=0) == "" and trigger.best["position_1"] == 0.9
    assert [trigger.alarms(x) for x in (0.0, 1.0, 1.19, 1.2)] == [False, True, True, False]


def test_acceptance_is_counted_by_position_and_bucket_and_adds_up_over_ranks():
    one, two = Acceptance(), Acceptance()
    one.observe("eagle", length=10, levels=3, accepted=2)
    two.observe("eagle", length=70, levels=3, accepted=0)
    two.observe("ngram", length=70, levels=1, accepted=1)
    counts = add_counts([one.take(), two.take()])
    assert rates(counts, "eagle", "position") == {1: 0.5, 2: 0.5, 3: 0.0}
    assert rates(counts, "eagle", "bucket") == {0: 2 / 3, 1: 0.0}
    assert accept_length(counts, ["eagle"]) == 2.0 and accept_length(counts, ["eagle", "ngram"]) == 2.0
    assert accept_length(counts, ["hybrid"]) == 0.0 and one.take() == {}


def test_overhead_is_the_longest_wait_for_a_micro_update_and_what_all_wait_for():
    def report(finished, noticed, update_s, **more):
        tail = Tail(finished_at=finished, noticed_at=noticed, update_s=update_s)
        return DraftReport(tails=[tail], **more)

    reports = [
        report(10.0, 12.04, 0.05, updates=3, tokens=30, loss_sum=6.0, collect_s=0.01),
        report(12.0, 12.001, 0.0),
        report(11.0, 12.02, 0.10, updates=1, tokens=10, loss_sum=4.0),
    ]
    assert [(round(a, 3), b) for a, b in preemptions(reports)] == [(0.04, 0.05), (0.02, 0.10)]
    metrics = training_metrics(reports, settle_s=0.2)
    assert metrics["draft/overhead_s"] == pytest.approx(0.2 + 0.04 + 0.01)
    assert metrics["draft/preempt_over_update"] == pytest.approx(0.8)
    assert metrics["draft/loss"] == pytest.approx(2.5) and metrics["draft/num_ranks_trained"] == 2


def test_the_ledger_has_no_gap_and_an_inner_span_cuts_the_outer_one(tmp_path):
    now = [100.0]
    path = timeline_path(tmp_path, 3)
    timeline = Timeline(rank=3, path=path, clock=lambda: now[0])

    def wait(seconds: float) -> None:
        now[0] += seconds

    timeline.begin_step(1)
    with timeline.span("generate"):
        wait(2)
        with timeline.span("train_drafter") as event:
            wait(3)
            event["updates"] = 4
        wait(1)
    wait(0.5)
    timeline.flush()
    events = read_timeline(path.parent)
    assert [(e["phase"], e["end"] - e["start"]) for e in events] == [
        ("generate", 2), ("train_drafter", 3), ("generate", 1), ("other", 0.5),
    ]  # fmt: skip
    assert all(a["end"] == b["start"] for a, b in itertools.pairwise(events))
    assert events[1]["updates"] == 4 and {(e["rank"], e["step"]) for e in events} == {(3, 1)}
    assert timeline.take() == {"generate": 3, "train_drafter": 3, "other": 0.5}
    path.write_text('{"rank": 1}\n')
    with pytest.raises(ValueError, match="no event"):
        read_timeline(path.parent)
