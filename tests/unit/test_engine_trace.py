"""Decode steps lie back to back before the response that they finished; requests span their steps."""

import json

import pytest

from megatron_tlt.report.timeline import read_timeline
from megatron_tlt.rl.engine_trace import EngineTrace, engine_trace_path
from megatron_tlt.types import OFF, EngineStats, FinishReason, Rollout, StepRecord, Strategy

NGRAM = Strategy(drafter="ngram", num_steps=2, num_draft_tokens=3)


class FakeEngine:
    """Has done what a test says."""

    def __init__(self) -> None:
        self.records: list[StepRecord] = []

    def stats(self) -> EngineStats:
        return EngineStats(steps=len(self.records), recent=tuple(self.records[-4:]))


def response(*step_tokens: int) -> Rollout:
    tokens = tuple(range(sum(step_tokens)))
    return Rollout(
        prompt_id=7, sample_index=1, prompt_tokens=(1,), tokens=tokens, log_probs=(0.0,) * len(tokens),
        weight_versions=(0,) * len(tokens), finish_reason=FinishReason.STOP, step_tokens=step_tokens,
    )  # fmt: skip


def test_steps_and_requests_are_where_they_happened(tmp_path):
    engine, now = FakeEngine(), [100.0]
    path = engine_trace_path(tmp_path, 3)
    trace = EngineTrace(engine, rank=3, path=path, interval=2, clock=lambda: now[0])
    engine.records.append(StepRecord(batch=1, strategy=OFF, tokens=1, target_ms=9e9))  # before the rollout
    trace.begin(2)
    engine.records += [
        StepRecord(batch=2, strategy=NGRAM, tokens=4, drafted=4, accepted_by_position=(2,), target_ms=300.0,
                   draft_ms=100.0, other_ms=100.0),
        StepRecord(batch=2, strategy=OFF, tokens=2, target_ms=250.0),
    ]  # fmt: skip
    now[0] = 101.0
    trace.observe(response(1, 2, 1))
    trace.observe(response(1, 1))  # finished by the same step: it joined for the last one
    trace.end()
    events = read_timeline(tmp_path)
    steps = [e for e in events if e.kind == "decode"]
    assert [(e.label, e.start, e.end) for e in steps] == [
        ("ngram_2_1_3", pytest.approx(100.25), pytest.approx(100.75)),
        ("off", pytest.approx(100.75), pytest.approx(101.0)),
    ]
    requests = [e for e in events if e.kind == "request"]
    assert [(e.start, e.end) for e in requests] == [
        (pytest.approx(100.25), 101.0), (pytest.approx(100.75), 101.0)
    ]  # fmt: skip
    assert requests[0].details == {"request": "prompt 7 sample 1", "tokens": 4}
    assert {e.rank for e in events} == {3} and {e.step for e in events} == {2}


def test_an_engine_that_tells_no_steps_leaves_nothing(tmp_path):
    path = engine_trace_path(tmp_path, 0)
    trace = EngineTrace(FakeEngine(), rank=0, path=path, interval=1)
    trace.begin(1)
    trace.observe(response())
    trace.observe(response(1, 1, 1))
    trace.end()
    assert path.read_text() == ""


def test_only_every_nth_step_is_watched(tmp_path):
    path = engine_trace_path(tmp_path, 0)
    for interval, watched in ((0, []), (2, [2, 4])):
        trace = EngineTrace(FakeEngine(), rank=0, path=path, interval=interval)
        for step in range(1, 5):
            trace.begin(step)
            trace.observe(response(1))
            trace.end()
        lines = path.read_text().splitlines() if path.exists() else []
        assert [json.loads(line)["step"] for line in lines] == watched
