"""Ending early, and what guards a run on the way: signals, time, data order, replicas."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_tlt.parallel import init_parallel
from megatron_tlt.train import pretrain as loop
from megatron_tlt.train.checkpoint import complete_iterations
from megatron_tlt.train.guards import DataDigest
from megatron_tlt.train.pretrain import pretrain
from megatron_tlt.train.setup import build_run
from megatron_tlt.train.stop import StopRequests
from tests.dist.runs import DISTRIBUTED, PP2, TP2, read_metrics, run_config, train
from tests.dist.workers import run_distributed
from tools.inspect_checkpoint import main as inspect

import torch

ROOT = Path(__file__).resolve().parents[2]


def stopped_run(root, place, number, async_save):
    """Rank 1 signals itself, twice, at the third step or in the evaluation after it."""
    torch.set_num_threads(1)
    saving = {"save": str(root), "load": str(root), "async_save": async_save}
    config = run_config(root / "logs", training={"train_iters": 8, "eval_interval": 3, "eval_iters": 4},
                        checkpoint=saving)  # fmt: skip
    run = build_run(config, init_parallel(config.parallel, seed=1))
    stop, name = StopRequests(), "_take" if place == "step" else "evaluate"
    original = getattr(loop, name)

    def signalling(*args, **kwargs):
        if run.parallel.rank == 1 and run.state.iteration == 3 and stop.reason is None:
            os.kill(os.getpid(), number)
            os.kill(os.getpid(), number)
        return original(*args, **kwargs)

    setattr(loop, name, signalling)
    try:
        with stop.listening():
            state = pretrain(run, stop=stop)
    finally:
        setattr(loop, name, original)
    return state.iteration, stop.reason


@pytest.mark.parametrize("place,number", [("step", signal.SIGTERM), ("evaluation", signal.SIGUSR1)])
@pytest.mark.parametrize("async_save", [False, True])
def test_a_signal_at_one_rank_ends_all_after_a_save(place, number, async_save, tmp_path):
    results = run_distributed(stopped_run, 2, tmp_path, place, number, async_save)
    expected = 4 if place == "step" else 3
    name = signal.Signals(number).name
    assert results == [(expected, f"{name} was received")] * 2
    assert complete_iterations(tmp_path) == [expected]
    assert len(read_metrics(tmp_path / "logs", "validation")) == (1 if place == "step" else 0)
    run_distributed(go_on, 2, tmp_path)
    assert len(read_metrics(tmp_path / "logs")) == 8


def go_on(root):
    training = {"train_iters": 8, "eval_interval": 3, "eval_iters": 4}
    saving = {"save": str(root), "load": str(root)}
    return train(root / "logs", "tiny-gpt2", {"training": training, "checkpoint": saving})["iteration"]


def test_the_time_limit_ends_the_run_after_a_save(tmp_path):
    sections = {"training": {"train_iters": 5, "exit_duration_in_mins": 1e-9},
                "checkpoint": {"save": str(tmp_path)}}  # fmt: skip
    assert train(tmp_path / "logs", "tiny-gpt2", sections)["iteration"] == 1
    assert complete_iterations(tmp_path) == [1]


def digests(log_dir):
    return [record["data-digest"] for record in read_metrics(log_dir)]


def test_the_data_digest_is_the_same_under_every_layout_and_batch_cut_and_across_a_resume(tmp_path):
    train(tmp_path / "one", "tiny-gpt2", {"checkpoint": {"save": str(tmp_path / "c"), "save_interval": 3}})
    expected = digests(tmp_path / "one")
    assert len(set(expected)) == 6
    for name, sections in {
        "dp": {}, "tp": {"parallel": TP2}, "pp": {"parallel": PP2},
        "micro": {"training": {"micro_batch_size": 1}, "optimizer": DISTRIBUTED},
    }.items():  # fmt: skip
        run_distributed(train, 2, tmp_path / name, "tiny-gpt2", sections)
        assert digests(tmp_path / name) == expected
    resume = {"checkpoint": {"load": str(tmp_path / "c"), "ckpt_step": 3}}
    run_distributed(train, 2, tmp_path / "resumed", "tiny-gpt2", resume)
    assert digests(tmp_path / "resumed") == expected[3:]
    train(tmp_path / "other", "tiny-gpt2", {"training": {"seed": 5}})
    assert digests(tmp_path / "other")[0] != expected[0]


def digest_of(pairs_by_rank):
    parallel = init_parallel(run_config("x").parallel, seed=1)
    digest = DataDigest(7)
    for iteration, sample in pairs_by_rank[parallel.rank]:
        digest.add(iteration, [sample])
    return digest.value(parallel.groups.dp)


def test_the_digest_depends_on_the_iteration_of_each_sample_and_not_on_who_saw_it():
    here = run_distributed(digest_of, 2, [[(0, 1), (1, 3)], [(0, 2), (1, 4)]])
    there = run_distributed(digest_of, 2, [[(0, 2), (0, 1)], [(1, 4), (1, 3)]])
    later = run_distributed(digest_of, 2, [[(0, 1), (1, 2)], [(0, 3), (1, 4)]])
    assert here[0] == here[1] == there[0] == there[1] != later[0]
    assert 0 <= here[0] < 2**64


def diverging(log_dir):
    """One bit of one weight flips on rank 1."""
    torch.set_num_threads(1)
    config = run_config(log_dir, training={"check_weight_hash_across_dp_replicas_interval": 2})
    run = build_run(config, init_parallel(config.parallel, seed=1))
    if run.parallel.rank == 1:
        weight = run.model[0].decoder.final_layernorm.weight.data
        weight.view(torch.int32)[0] ^= 1
    try:
        pretrain(run)
        return "nothing", run.state.iteration
    except RuntimeError as error:
        return str(error), run.state.iteration


def test_a_replica_that_differs_in_one_bit_is_named_on_all_ranks(tmp_path):
    for message, iteration in run_distributed(diverging, 2, tmp_path):
        assert "the weights of rank 1 differ" in message and iteration == 2


def test_the_inspection_tool_lists_marks_and_judges(tmp_path, capsys):
    train(tmp_path / "logs", "tiny-gpt2", {"checkpoint": {"save": str(tmp_path), "save_interval": 3}})
    assert inspect(["--load", str(tmp_path), "--tensors"]) == 0
    printed = capsys.readouterr().out
    assert "iter_0000006: iteration 6, 48 samples" in printed and "<-" in printed
    assert "embedding.word_embeddings.weight [" in printed
    (tmp_path / "iter_0000006" / ".metadata").unlink()
    assert inspect(["--load", str(tmp_path)]) == 0
    first, second, third, _ = capsys.readouterr().out.splitlines()
    assert first.endswith("<-") and second.startswith("DAMAGED") and ".metadata is missing" in third
    (tmp_path / "iter_0000003" / "common.pt").write_bytes(b"")
    assert inspect(["--load", str(tmp_path), "--json"]) == 1
    assert inspect(["--load", str(tmp_path / "logs")]) == 2


def test_a_profiled_run_leaves_the_trace_of_its_window(tmp_path):
    window = {"profile": True, "profile_step_start": 1, "profile_step_end": 3, "profile_ranks": [1]}
    run_distributed(train, 2, tmp_path, "tiny-gpt2", {"profiling": window})
    (path,) = (tmp_path / "profile").iterdir()
    assert path.name == "rank_1.pt.trace.json" and "gloo:all_reduce" in path.read_text()


@pytest.mark.parametrize("code,requeued", [(4, True), (0, False), (1, False)])
def test_the_slurm_script_requeues_a_saved_run_and_no_other(code, requeued, tmp_path):
    """With stand-ins for Slurm's programs."""
    for name, text in {
        "srun": f'echo "srun $MASTER_ADDR $NNODES $JOB_ID: $*" >> calls; exit {code}',
        "scontrol": '[ "$1" = show ] && echo node7 || echo "scontrol $*" >> calls',
    }.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "77",
                                "SLURM_JOB_NODELIST": "node[7-8]", "SLURM_NNODES": "2"}  # fmt: skip
    done = subprocess.run(
        ["bash", str(ROOT / "launch" / "slurm.sbatch"), "--config", "run.yaml"],
        cwd=tmp_path, env=environment, capture_output=True, text=True,
    )  # fmt: skip
    calls = (tmp_path / "calls").read_text()
    assert done.returncode == code and "srun node7 2 77: --wait=120" in calls
    assert ("scontrol requeue 77" in calls) == requeued


def test_a_short_fault_campaign_loses_nothing(tmp_path):
    command = [sys.executable, "-m", "tools.prove_durability", "--kills=2", "--corruptions=1",
               f"--output={tmp_path}"]  # fmt: skip
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "'lost': 0, 'hung': 0, 'bit_equal': True" in done.stdout
