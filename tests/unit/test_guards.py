"""Guards, limits and reports: the decisions, without a process group."""

import math
import random
import signal

import pytest

from megatron_tlt.rendezvous import wait_for_all
from megatron_tlt.train.guards import SpikeDetector
from megatron_tlt.train.profiling import ProfilingConfig, StepProfiler
from megatron_tlt.train.stop import StopRequests, _text
from megatron_tlt.train.watch_board import Place, late_ranks, late_text
from megatron_tlt.train.watchdog import TimeoutConfig

import torch
import torch.distributed as dist


def place(phase="step", iteration=7, count=20, seconds=3.0):
    return Place(host="node0", phase=phase, iteration=iteration, count=count, seconds=seconds)


def test_a_falling_noisy_loss_is_not_spiky_and_a_jump_is():
    noise = random.Random(1)
    detector = SpikeDetector(10.0)
    for step in range(500):
        assert detector.check(2 + 3 * math.exp(-step / 100) + noise.gauss(0, 0.05)) is None
    report = detector.check(5.0)
    assert "loss 5.000000" in report and "deviations above the median" in report
    assert detector.check(2.0) is None  # the spike is not in the history


def test_a_constant_loss_has_a_scale_of_one_percent():
    detector = SpikeDetector(10.0)
    assert all(detector.check(1.0) is None for _ in range(30))
    assert detector.check(1.09) is None
    assert detector.check(1.11) is not None


def test_nothing_is_spiky_before_twenty_losses():
    detector = SpikeDetector(1.0)
    assert all(detector.check(loss) is None for loss in [1.0] * 19 + [100.0])


def test_who_says_nothing_is_late_before_who_is_behind():
    places = {0: place(), 1: place("data", count=19), 2: place()}
    silent = {0: 0.5, 1: 0.5, 2: 0.5}
    late = late_ranks(places, silent, silent_after=2.5)
    assert list(late) == [1] and "in phase data of iteration 7 for 3 s" in late[1]
    late = late_ranks(places, silent | {2: 30.0}, silent_after=2.5)
    assert list(late) == [2] and "no sign of life for 30 s" in late[2]
    late = late_ranks(places, silent | {3: 9.0}, silent_after=2.5)
    assert list(late) == [3] and "no sign of life for 9 s, not one so far" in late[3]


def test_all_at_one_place_is_said_as_such_and_long_lists_are_cut():
    places = {rank: place() for rank in range(3)}
    assert late_ranks(places, dict.fromkeys(places, 0.0), silent_after=2.5) == {}
    assert late_text({}, places) == "all ranks are at the same place"
    text = late_text({rank: "x" for rank in range(20)}, places)
    assert "rank 0 (node0): x" in text and "rank 8" not in text and "and 12 more" in text


def test_a_signal_is_the_reason_before_the_time_limit():
    assert _text(0) is None
    assert "SIGTERM" in _text(signal.SIGTERM) and "SIGUSR1" in _text(signal.SIGUSR1)
    assert "exit_duration_in_mins" in _text(1)


def test_who_has_not_joined_is_named_after_the_limit():
    store = dist.HashStore()
    store.set("0", "node0")
    store.set("2", "node2")
    with pytest.raises(TimeoutError, match="ranks 1, 3 of 4 have not joined within 0 s"):
        wait_for_all(store, 4, seconds=0.3, what="ranks")
    store.set("1", "")
    store.set("3", "")
    wait_for_all(store, 4, seconds=0.0, what="ranks")


def test_handlers_are_put_back():
    before = signal.getsignal(signal.SIGTERM)
    stop = StopRequests()
    with stop.listening():
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        assert stop._code() == signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize("name", ["init", "data", "step", "save", "eval", "contact"])
def test_a_limit_of_nothing_is_refused(name):
    for seconds in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match=f"timeouts.{name}="):
            TimeoutConfig(**{name: seconds})


def test_the_profiler_writes_its_window_on_the_named_ranks_only(tmp_path):
    config = ProfilingConfig(profile=True, profile_step_start=2, profile_step_end=4, profile_ranks=[1])
    for rank in (0, 1):
        profiler = StepProfiler(config, rank=rank, folder=tmp_path)
        for iteration in range(6):
            written = profiler.before_step(iteration)
            assert (written is not None) == (rank == 1 and iteration == 4)
            torch.ones(8) @ torch.ones(8)
        assert profiler.close() is None
    (path,) = tmp_path.iterdir()
    assert path.name == "rank_1.pt.trace.json" and "aten::dot" in path.read_text()


def test_a_trace_that_is_open_at_the_end_of_the_run_is_written(tmp_path):
    config = ProfilingConfig(profile=True, profile_step_start=0, profile_step_end=100)
    profiler = StepProfiler(config, rank=0, folder=tmp_path)
    assert profiler.before_step(0) is None
    assert profiler.close().is_file()
