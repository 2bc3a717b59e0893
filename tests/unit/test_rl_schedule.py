"""Who generates what, phases and their memory, and the dump: pure parts of the RL loop."""

import json
import threading
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from megatron_tlt.data.rewards import RewardResult
from megatron_tlt.rl.dump import Sample, dump_path, in_order, read_dump, write_dump
from megatron_tlt.rl.phases import MemoryBudgetError, PhaseClock
from megatron_tlt.rl.schedule import (
    LengthPredictor,
    Replica,
    SharedFeed,
    StaticFeed,
    fair_slots,
    generate_from,
)
from megatron_tlt.types import FinishReason, Prompt, Rollout, SamplingParams

PROMPTS = [Prompt(prompt_id=i, tokens=(1,) * (1 + i % 3)) for i in range(11)]


def rollout(prompt_id: int, length: int, sample: int = 0) -> Rollout:
    return Rollout(
        prompt_id=prompt_id, sample_index=sample, prompt_tokens=(1,), tokens=(2,) * length,
        log_probs=(-0.1,) * length, weight_versions=tuple(range(length)),
        finish_reason=FinishReason.STOP,
    )  # fmt: skip


def drain(feed) -> list[Prompt]:
    return list(iter(feed.take, None))


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_a_static_split_hands_out_every_prompt_exactly_once_and_deals_the_long_ones_out(count):
    parts = [drain(StaticFeed(PROMPTS, Replica(index=i, count=count))) for i in range(count)]
    assert sorted(p.prompt_id for part in parts for p in part) == list(range(11))
    assert {part[0].prompt_id for part in parts} == set(range(count))  # the longest, one each
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_a_shared_queue_hands_out_every_prompt_exactly_once_whoever_pulls_when():
    store = dist.HashStore()
    alone = SimpleNamespace(rank=lambda: 0, size=lambda: 1)
    taken: list[list[Prompt]] = [[], [], []]

    def pull(index: int) -> None:
        taken[index] = drain(SharedFeed(PROMPTS, store, "step/1", tp_group=alone))

    threads = [threading.Thread(target=pull, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert sorted(p.prompt_id for part in taken for p in part) == list(range(11))
    assert drain(SharedFeed(PROMPTS, store, "step/1", tp_group=alone)) == []
    assert len(drain(SharedFeed(PROMPTS, store, "step/2", tp_group=alone))) == 11


def test_long_prompts_go_first_by_what_their_responses_had():
    predictor = LengthPredictor()
    first = predictor.order(PROMPTS[:3])
    assert [p.prompt_id for p in first] == [2, 1, 0]  # nothing known: the longest prompt
    predictor.observe([rollout(0, 90), rollout(0, 110, 1), rollout(1, 10), rollout(2, 20)])
    assert [p.prompt_id for p in predictor.order(PROMPTS[:4])] == [0, 3, 2, 1]  # 3: the mean, 43
    predictor.observe([rollout(0, 20)])  # (100 + 20) / 2
    state = json.loads(json.dumps(predictor.state_dict()))
    assert state == {"0": 60.0, "1": 10.0, "2": 20.0}
    other = LengthPredictor()
    other.load_state_dict(state)
    assert other.order(PROMPTS) == predictor.order(PROMPTS)


class SlotEngine:
    """Finishes the oldest response at every step, and remembers how many were under way."""

    def __init__(self) -> None:
        self.queue: list[Rollout] = []
        self.most = 0

    def submit(self, prompts, params, *, step=0) -> None:
        self.queue += [rollout(p.prompt_id, 1, i) for p in prompts for i in range(params.n)]
        self.most = max(self.most, len(self.queue))

    def stream(self):
        while self.queue:
            yield self.queue.pop(0)


@pytest.mark.parametrize("slots,most", [(4, 6), (100, 33)])
def test_an_engine_takes_another_prompt_only_when_it_has_room(slots, most):
    engine = SlotEngine()
    feed = StaticFeed(PROMPTS, Replica(index=0, count=1))
    done = list(generate_from(engine, feed, SamplingParams(n=3), step=1, slots=slots))
    assert len({(r.prompt_id, r.sample_index) for r in done}) == len(done) == 33
    assert engine.most == most  # whole groups: the prompt is prefilled once


def test_the_first_of_several_engines_leaves_the_others_their_share_of_a_shared_queue():
    """All 11 prompts would fit into the first one's slots; its own finished responses let it take more."""
    left, engine = list(PROMPTS), SlotEngine()
    feed = SimpleNamespace(take=lambda: left.pop(0) if left else None)
    slots = fair_slots(100, len(PROMPTS), 3, Replica(index=0, count=4))
    responses = generate_from(engine, feed, SamplingParams(n=3), step=1, slots=slots)
    next(responses)
    assert engine.most == 11 and len(left) == 7  # three of eleven prompts, and one for the finished response
    assert fair_slots(4, 11, 3, Replica(index=0, count=4)) == 4
    assert fair_slots(100, 1, 3, Replica(index=3, count=4)) == 3


def test_a_phase_that_exceeds_its_memory_ends_the_run_with_both_numbers():
    used = iter([1.0e9, 3.0e9])
    clock = PhaseClock(
        budget_bytes=2.0e9, peak_bytes=lambda: next(used), reset_peak=lambda: None
    )
    with clock("publish"):
        pass
    with pytest.raises(MemoryBudgetError, match=r"generate used 2.79 GiB, the budget is 1.86"):
        with clock("generate"):
            pass
    seconds, peaks = clock.take()
    assert peaks == {"publish": 1.0e9, "generate": 3.0e9} and set(seconds) == set(peaks)


@pytest.mark.parametrize("wrong", [("publish", "update"), ("generate", "update"), ("update",)])
def test_phases_in_a_wrong_order_are_refused(wrong):
    clock = PhaseClock()
    with pytest.raises(AssertionError, match="must not follow"):
        for phase in wrong:
            with clock(phase):
                pass


def test_engine_and_trainer_phases_do_not_overlap():
    clock = PhaseClock()
    with pytest.raises(AssertionError, match="begins inside"), clock("generate"), clock("reward"):
        pass


def test_a_dump_gives_back_every_token_version_and_log_prob(tmp_path):
    samples = [
        Sample(group=1, rollout=rollout(7, 3), reward=RewardResult(score=0.5, verdict=0.5)),
        Sample(group=0, rollout=rollout(3, 0), reward=RewardResult(error="timeout")),
    ]
    path = write_dump(tmp_path, 12, samples)
    assert path == dump_path(tmp_path, 12) and read_dump(tmp_path, 12) == samples
    assert [s.group for s in in_order(samples)] == [0, 1]
    assert not samples[1].usable and samples[0].usable
    with pytest.raises(ValueError, match="no step 13"):
        read_dump(tmp_path, 13)
    record = json.loads(path.read_text().splitlines()[0])
    record["log_probs"].pop()
    path.write_text(json.dumps(record) + "\n")
    with pytest.raises(ValueError, match="3 tokens but 2 log_probs"):
        read_dump(tmp_path, 12)
