"""What ends a run: a late, stopped or failing rank is named, all ranks end in time, their stacks are kept."""

import json
import os
import signal
import time

import pytest

from megatron_tlt.pretrain import main
from megatron_tlt.train import pretrain as loop
from megatron_tlt.train.watchdog import EXIT_LATE, EXIT_PEER_FAILED
from tools.ranks import Ranks

RUN = [
    "--model.preset=tiny-gpt2", "--model.num_layers=2", "--training.train_iters=400",
    "--training.global_batch_size=4", "--training.eval_iters=0", "--data.mock_data=true",
    "--data.num_workers=0", "--logging.peak_tflops=1", "--logging.log_interval=1",
]  # fmt: skip


def start(tmp_path, function, *arguments, world_size=2):
    options = [*RUN, f"--logging.log_dir={tmp_path}", *arguments]
    return Ranks(function, (options,), world_size=world_size, log=tmp_path / "log")


def wait_for(tmp_path, words, seconds=60.0):
    deadline = time.monotonic() + seconds
    log = tmp_path / "log"
    while not (log.exists() and words in log.read_text()):
        assert time.monotonic() < deadline, log.read_text() if log.exists() else "no log"
        time.sleep(0.05)


def slow_data_on_rank_1(options):
    """Rank 1 waits for ever for the data of the third step."""
    take = loop._take

    def stuck(run, batches, samples):
        if run.parallel.rank == 1 and run.state.iteration == 3:
            time.sleep(3600)
        return take(run, batches, samples)

    loop._take = stuck
    return main(options)


def fail_on_rank_1(options):
    take = loop._take

    def failing(run, batches, samples):
        if run.parallel.rank == 1 and run.state.iteration == 3:
            raise OSError("the disk is gone")
        return take(run, batches, samples)

    loop._take = failing
    return main(options)


def keep_the_interpreter_on_rank_1(options):
    """Rank 1 stays in C code that keeps Python's lock, so no thread of it can run."""
    take = loop._take

    def stuck(run, batches, samples):
        if run.parallel.rank == 1 and run.state.iteration == 3:
            sum(range(10**12))
        return take(run, batches, samples)

    loop._take = stuck
    return main(options)


def test_the_late_rank_its_phase_and_all_stacks_are_reported_and_all_ranks_end(tmp_path):
    ranks = start(tmp_path, slow_data_on_rank_1, "--timeouts.step=4", "--timeouts.data=4")
    codes = ranks.wait(60)
    text = (tmp_path / "log").read_text()
    assert codes == [EXIT_LATE, EXIT_LATE], text[-2000:]
    assert "late: rank 1" in text and "in phase data of iteration 3" in text
    assert "slow_data_on_rank_1" not in text  # stacks go to files
    assert "in stuck" in (tmp_path / "stacks" / "rank_1.txt").read_text()
    assert "train_step" in (tmp_path / "stacks" / "rank_0.txt").read_text()
    traces = [tmp_path / "stacks" / f"rank_{rank}_collectives.json" for rank in (0, 1)]
    waiting, late = (len(json.loads(trace.read_text())["entries"]) for trace in traces)
    assert waiting > late > 0  # rank 0 is in a collective that rank 1 has not come to


def test_a_stopped_process_is_named_before_the_step_limit(tmp_path):
    ranks = start(tmp_path, main, "--timeouts.contact=4")
    wait_for(tmp_path, "iteration        5/")
    ranks.send(1, signal.SIGSTOP)
    codes = ranks.wait(60)
    text = (tmp_path / "log").read_text()
    assert codes[0] == EXIT_LATE, text[-2000:]
    assert "timeouts.contact=4.0 s is over; late: rank 1" in text and "no sign of life" in text


def test_the_error_of_one_rank_ends_the_other_within_seconds(tmp_path):
    ranks = start(tmp_path, fail_on_rank_1)
    wait_for(tmp_path, "the disk is gone")
    began = time.monotonic()
    codes = ranks.wait(60)
    text = (tmp_path / "log").read_text()
    assert time.monotonic() - began < 8
    assert codes == [EXIT_PEER_FAILED, 1], text[-2000:]
    assert f"error: [rank 0] rank 1 ({os.uname().nodename}) failed: OSError: the disk is gone" in text


@pytest.mark.parametrize("late", ["--timeouts.data=3"])
def test_a_rank_whose_interpreter_is_stuck_is_ended_by_its_own_timer_or_by_its_peers(late, tmp_path):
    ranks = start(tmp_path, keep_the_interpreter_on_rank_1, late, "--timeouts.contact=5")
    codes = ranks.wait(90)
    text = (tmp_path / "log").read_text()
    assert codes is not None and codes[0] == EXIT_LATE, text[-2000:]
    assert "late: rank 1" in text


def test_ranks_end_when_their_launcher_is_gone(tmp_path):
    """A launcher that was killed leaves no orphans that write into the next run's checkpoints."""
    pid_file = tmp_path / "pid"
    launcher = Ranks(orphan, (RUN + [f"--logging.log_dir={tmp_path}"], str(pid_file)), world_size=1,
                     log=tmp_path / "log")  # fmt: skip
    wait_for(tmp_path, "iteration        5/")
    pid = int(pid_file.read_text())
    launcher.kill()
    deadline = time.monotonic() + 20
    while _alive(pid):
        assert time.monotonic() < deadline, "the orphan still runs"
        time.sleep(0.1)


def orphan(options, pid_file):
    child = os.fork()
    if child == 0:
        os._exit(main(options))
    with open(pid_file, "w") as stream:
        stream.write(str(child))
    os.waitpid(child, 0)


def _alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as stream:
            return stream.read().split(") ")[1][0] != "Z"
    except FileNotFoundError:
        return False
