"""The launchers as users run them: torchrun restarts, exit codes, and several nodes on networks that fail."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from megatron_tlt.train.checkpoint import complete_iterations
from megatron_tlt.train.stop import EXIT_SAVED
from megatron_tlt.train.watchdog import EXIT_LATE
from tests.dist.runs import PP2, checkpoint_tensors, largest_difference, steps, train
from tests.dist.workers import free_port, run_distributed
from tools.netns_cluster import Cluster, why_not

import torch

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = os.environ | {"PYTHON": sys.executable, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
RUN = [
    "--model.preset=tiny-gpt2", "--model.num_layers=2", "--training.global_batch_size=8",
    "--training.micro_batch_size=2", "--training.eval_iters=1", "--data.mock_data=true",
    "--data.num_workers=0", "--optimizer.lr=1e-3", "--optimizer.lr_warmup_iters=2",
    "--logging.peak_tflops=1", "--logging.log_interval=1",
]  # fmt: skip
SECTIONS = {"model": {"num_layers": 2}, "optimizer": {"end_weight_decay": None, "weight_decay_incr_style": "constant"}}


def options(folder, iterations, *more):
    return [*RUN, f"--training.train_iters={iterations}", "--checkpoint.save_interval=2",
            f"--checkpoint.save={folder}", f"--checkpoint.load={folder}", *more]  # fmt: skip


def wait_for(process, log, words, seconds=120.0):
    deadline = time.monotonic() + seconds
    while not re.search(words, log.read_text() if log.exists() else ""):
        assert process.poll() is None and time.monotonic() < deadline, log.read_text()[-3000:]
        time.sleep(0.02)


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """The losses of an uninterrupted run of one process, to compare with."""
    root = tmp_path_factory.mktemp("reference")
    train(root, "tiny-gpt2", SECTIONS | {"training": {"train_iters": 60}})
    return steps(root)


def start(command, log):
    with open(log, "w") as output:
        return subprocess.Popen(command, cwd=ROOT, env=ENVIRONMENT, stdout=output, stderr=subprocess.STDOUT)


def rank_process(launcher, rank):
    """The process of a rank under torchrun, by its environment."""
    children = psutil.Process(launcher.pid).children()
    return next(child for child in children if child.environ().get("RANK") == str(rank))


def test_torchrun_restarts_a_killed_rank_from_the_last_checkpoint_with_the_same_losses(reference, tmp_path):
    folder, log = tmp_path / "ckpt", tmp_path / "log"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2",
               "--max_restarts=2", "-m", "megatron_tlt.pretrain", *options(folder, 60)]  # fmt: skip
    launcher = start(command, log)
    try:
        wait_for(launcher, log, r"iteration +1\d/")
        rank_process(launcher, 1).kill()
        assert launcher.wait(timeout=150) == 0, log.read_text()[-3000:]
    finally:
        launcher.kill()
    text = log.read_text()
    (resumed,) = map(int, re.findall(r"resuming from \S*iter_(\d+)", text))
    assert resumed >= 8 and resumed % 2 == 0
    last = dict(zip((int(n) for n in re.findall(r"iteration +(\d+)/", text)), steps(folder / "logs")))
    assert sorted(last) == list(range(1, 61))
    assert largest_difference([last[n] for n in range(1, 61)], reference) < 1e-5


def test_a_signal_to_the_launcher_saves_ends_with_code_4_and_the_same_command_continues(reference, tmp_path):
    folder, log = tmp_path / "ckpt", tmp_path / "log"
    command = ["bash", "launch/torchrun_single.sh", *options(folder, 60)]
    launcher = start(command, log)
    try:
        wait_for(launcher, log, r"iteration +9/")
        launcher.send_signal(signal.SIGUSR1)
        launcher.send_signal(signal.SIGTERM)
        assert launcher.wait(timeout=60) == EXIT_SAVED, log.read_text()[-3000:]
    finally:
        launcher.kill()
    assert "ended early: SIG" in log.read_text()
    stopped = len(steps(folder / "logs"))
    assert complete_iterations(folder)[-1] == stopped < 60
    launcher = start(command, log)
    assert launcher.wait(timeout=120) == 0, log.read_text()[-3000:]
    assert largest_difference(steps(folder / "logs"), reference) < 1e-5


def test_bad_input_keeps_its_exit_code_and_a_wrong_address_is_one_line(tmp_path):
    done = subprocess.run(
        ["bash", "launch/torchrun_single.sh", *RUN], cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True
    )
    assert done.returncode == 2 and "train_iters" in done.stderr
    multi = ENVIRONMENT | {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "no.such.host.invalid"}
    done = subprocess.run(
        ["bash", "launch/torchrun_multi.sh", *RUN], cwd=ROOT, env=multi, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert "error: [node 1] MASTER_ADDR=no.such.host.invalid cannot be reached" in done.stderr


def test_a_node_that_waits_in_vain_names_the_missing_one_in_bounded_time(tmp_path):
    port = str(free_port())
    alone = ENVIRONMENT | {"NNODES": "2", "NODE_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
                           "JOIN_TIMEOUT": "2"}  # fmt: skip
    done = subprocess.run(
        ["bash", "launch/torchrun_multi.sh", *RUN], cwd=ROOT, env=alone, capture_output=True, text=True,
        timeout=100,
    )  # fmt: skip
    assert done.returncode == 2
    assert "error: [node 0] nodes 1 of 2 have not joined within 2 s" in done.stderr


@pytest.fixture(scope="module")
def cluster():
    reason = why_not()
    if reason is not None:
        pytest.skip(f"network namespaces cannot be made here: {reason}")
    with Cluster(2) as made:
        yield made


def on_two_nodes(cluster, tmp_path, iterations, *more):
    """Every node with a folder of its own; (processes, logs, checkpoint folders)."""
    processes, logs, folders = [], [], []
    for node in range(2):
        disk = tmp_path / f"disk{node}"
        disk.mkdir(exist_ok=True)
        logs.append(disk / "log")
        folders.append(disk / "ckpt")
        command = ["bash", str(ROOT / "launch" / "torchrun_multi.sh"),
                   *options(folders[node], iterations, f"--data.data_cache_path={disk}/cache", *more)]  # fmt: skip
        with open(logs[node], "w") as output:
            processes.append(
                cluster.start(
                    node, command, environment=ENVIRONMENT | {"JOIN_TIMEOUT": "90"}, output=output
                )
            )
    return processes, logs, folders


def wait_all(processes, logs, seconds=200):
    deadline = time.monotonic() + seconds
    codes = [process.wait(timeout=max(1.0, deadline - time.monotonic())) for process in processes]
    return codes, "\n".join(log.read_text()[-3000:] for log in logs)


def test_a_pipeline_over_two_nodes_equals_one_machine(cluster, reference, tmp_path):
    pipeline = ["--parallel.pipeline_model_parallel_size=2"]
    processes, logs, folders = on_two_nodes(cluster, tmp_path, 6, *pipeline)
    codes, text = wait_all(processes, logs)
    assert codes == [0, 0], text
    assert "node0" in logs[0].read_text() and "on eth0" in logs[0].read_text()
    single = SECTIONS | {"parallel": PP2, "training": {"train_iters": 6}}
    run_distributed(train, 2, tmp_path / "single", "tiny-gpt2", single)
    assert steps(folders[1] / "logs") == steps(tmp_path / "single")
    assert "__1_0.distcp" not in {p.name for p in (folders[0] / "iter_0000006").iterdir()}


def test_a_node_that_is_cut_off_is_named_and_the_run_goes_on_after_it_is_back(cluster, reference, tmp_path):
    limits = ["--timeouts.contact=8", "--timeouts.step=60"]
    processes, logs, folders = on_two_nodes(cluster, tmp_path, 60, *limits)
    wait_for(processes[1], logs[1], r"iteration +1\d/")
    cluster.link(1, up=False)
    cut = time.monotonic()
    codes, text = wait_all(processes, logs, seconds=90)
    cluster.link(1, up=True)
    assert codes == [EXIT_LATE, EXIT_LATE], text
    assert time.monotonic() - cut < 75
    assert re.search(r"late: rank 1 \(node1\): no sign of life", logs[0].read_text()), text
    assert re.search(r"late: rank 0's node: no answer from node0:\d+", logs[1].read_text()), text
    processes, logs, folders = on_two_nodes(cluster, tmp_path, 60, *limits)
    codes, text = wait_all(processes, logs)
    assert codes == [0, 0], text
    assert "resuming from" in logs[0].read_text()
    last = checkpoint_tensors(folders[0] / "iter_0000060")
    train(tmp_path / "whole", "tiny-gpt2",
          SECTIONS | {"training": {"train_iters": 60}, "checkpoint": {"save": str(tmp_path / "whole")}})  # fmt: skip
    whole = checkpoint_tensors(tmp_path / "whole" / "iter_0000060")
    for name, tensor in whole.items():
        torch.testing.assert_close(last[name], tensor, atol=2e-5, rtol=1e-4)
