"""Subnet training through the real pretraining command: layouts, resume, evaluation, refusals, the log."""

import pytest

from megatron_tlt.parallel import init_parallel
from megatron_tlt.train.optimizer import inner_optimizers
from megatron_tlt.train.pretrain import evaluate_run, pretrain
from megatron_tlt.train.setup import build_run
from tests.dist.runs import (
    DISTRIBUTED, OVERLAPPED, PP2, SP2, TP2, largest_difference, read_metrics, run_config, steps, train,
)  # fmt: skip
from tests.dist.workers import run_distributed

EST = {"schedule": "practical", "ends": [4, 7], "ends_in": "steps", "tp_strata": 2, "pp_strata": 2,
       "digest_interval": 1}  # fmt: skip
TRAINING = {"train_iters": 10, "eval_interval": 2}
FROZEN = EST | {"idle_params": "frozen"}
LAYOUTS = {
    "TP2": (2, {"parallel": TP2}),
    "PP2": (2, {"parallel": PP2}),
    "DP2": (2, {}),
}
RESUMES = {
    "TP2+SP": (2, {"parallel": SP2}),
    "PP2": (2, {"parallel": PP2}),
    "DP2 overlapped": (2, {"optimizer": OVERLAPPED}),
}


def start(world_size, log_dir, preset, sections):
    merged = {"training": TRAINING, "est": EST} | sections
    if world_size == 1:
        return [train(log_dir, preset, merged)]
    return run_distributed(train, world_size, log_dir, preset, merged)


def evaluations(log_dir) -> list[tuple[float]]:
    return [(m["lm loss validation"],) for m in read_metrics(log_dir, "validation")]


@pytest.fixture(scope="module", params=["tiny-gpt2", "tiny-llama"])
def alone(request, tmp_path_factory):
    """One process, whose checkpoint of iteration 2 lies in the middle of the first stage."""
    root = tmp_path_factory.mktemp("alone")
    start(1, root / "logs", request.param, {"checkpoint": {"save": str(root), "save_interval": 2}})
    return request.param, root


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_run_does_not_depend_on_its_layout(layout, alone, tmp_path):
    preset, root = alone
    world_size, sections = LAYOUTS[layout]
    start(world_size, tmp_path, preset, sections)
    assert largest_difference(steps(tmp_path), steps(root / "logs")) < 1e-4  # gradient norms spike
    assert largest_difference(evaluations(tmp_path), evaluations(root / "logs")) < 1e-5
    ours, theirs = ([m["lm loss"] for m in read_metrics(x)] for x in (tmp_path, root / "logs"))
    assert ours == pytest.approx(theirs, abs=1e-5)


@pytest.mark.parametrize("layout", RESUMES)
def test_a_run_resumed_in_the_middle_of_stage_1_under_another_layout_is_the_same(
    layout, alone, tmp_path
):
    preset, root = alone
    world_size, sections = RESUMES[layout]
    checkpoint = {"load": str(root), "ckpt_step": 2}
    start(world_size, tmp_path, preset, sections | {"checkpoint": checkpoint})
    ours, theirs = steps(tmp_path), steps(root / "logs")[2:]
    assert largest_difference(ours, theirs) < 1e-4
    assert [x[0] for x in ours] == pytest.approx([x[0] for x in theirs], abs=1e-5)
    for name in ("est-stage", "est-flops", "est-saving-layers", "est-touched-mlp", "est-clip-fraction"):
        ours, theirs = (
            [m[name] for m in read_metrics(x)] for x in (tmp_path, root / "logs")
        )
        # The padded vocabulary, hence the head's FLOPs, grows with TP.
        assert ours == pytest.approx(theirs[2:], rel=0.15 if name == "est-flops" else 1e-9), name


@pytest.mark.parametrize("optimizer", [{}, DISTRIBUTED, OVERLAPPED], ids=["plain", "distributed", "overlapped"])
def test_frozen_layers_skipped_from_the_first_step_survive_a_checkpoint(optimizer, tmp_path):
    """Adam counts its steps in each weight, and a frozen layer makes none: the count must stay common."""
    sections = {"est": FROZEN, "optimizer": optimizer}
    save = {"checkpoint": {"save": str(tmp_path), "save_interval": 2}}
    start(2, tmp_path / "logs", "tiny-gpt2", sections | save)
    load = {"checkpoint": {"load": str(tmp_path), "ckpt_step": 2}}
    other = {} if optimizer else DISTRIBUTED
    start(2, tmp_path / "again", "tiny-gpt2", {"est": FROZEN, "optimizer": other} | load)
    ours, theirs = steps(tmp_path / "again"), steps(tmp_path / "logs")[2:]
    assert largest_difference(ours, theirs) < 1e-4
    counts = run_distributed(adam_steps, 2, str(tmp_path / "counts"), sections)
    assert all(count == {3.0} for count in counts)


def adam_steps(log_dir, sections) -> set[float]:
    """The steps that the weights of this rank have made after three steps of a run."""
    training = {"train_iters": 3, "eval_iters": 0}
    config = run_config(log_dir, **(sections | {"training": training}))
    run = build_run(config, init_parallel(config.parallel, seed=1))
    pretrain(run)
    return {
        float(state["step"])
        for inner in inner_optimizers(run.optimizer)
        for state in inner.state.values()
    }


def dense_evaluation(root, preset) -> float:
    """Validation loss of the checkpoint of iteration 2 as an ordinary dense model."""
    checkpoint = {"load": str(root), "ckpt_step": 2, "finetune": True}
    config = run_config(root / "dense", preset=preset, training=TRAINING, checkpoint=checkpoint)
    return evaluate_run(build_run(config, init_parallel(config.parallel, seed=1)))[0]


def test_an_evaluation_in_the_middle_of_a_stage_is_of_the_full_model(alone):
    preset, root = alone
    assert evaluations(root / "logs")[0][0] == pytest.approx(dense_evaluation(root, preset), abs=1e-6)


REFUSALS = {
    "draw was 'random', is 'nested'": EST | {"draw": "nested"},
    "stages was .*; give the run's est options": EST | {"ends": [5, 7]},
    "trained on subnets .*this run is dense": {"schedule": "dense"},
}


@pytest.mark.parametrize("message", REFUSALS)
def test_other_subnets_than_the_checkpoints_are_refused_with_the_difference(message, alone, tmp_path):
    preset, root = alone
    sections = {"checkpoint": {"load": str(root), "ckpt_step": 2}, "est": REFUSALS[message]}
    with pytest.raises(ValueError, match=message):
        start(1, tmp_path, preset, sections)


def test_finetune_takes_the_weights_into_any_schedule(alone, tmp_path):
    preset, root = alone
    load = {"load": str(root), "finetune": True, "save": str(tmp_path)}
    start(1, tmp_path / "logs", preset, {"checkpoint": load, "est": {"schedule": "dense"}})
    assert len(steps(tmp_path / "logs")) == 10
    again = {"load": str(tmp_path)}
    with pytest.raises(ValueError, match="trained without subnets, this run has est.schedule=practical"):
        start(1, tmp_path / "more", preset, {"checkpoint": again, "training": {"train_iters": 20}})


def test_the_log_has_both_throughputs_and_the_stages(alone, capsys, tmp_path):
    preset, root = alone
    records = read_metrics(root / "logs")
    assert [m["est-stage"] for m in records] == [0] * 4 + [1] * 3 + [2] * 3
    for record in records:
        ratio = record["throughput"] / record["throughput-dense-equivalent"]
        assert ratio < 1.0 if record["est-stage"] < 2 else ratio == pytest.approx(1.0)
    stages = read_metrics(root / "logs", "stages")
    assert [record["iteration"] for record in stages] == [4, 7, 7, 10, 10, 10]
    assert stages[3]["est-stage-0-predicted"] < stages[4]["est-stage-1-predicted"] < 1.0
    assert stages[5]["est-stage-2-measured"] == 1.0
    start(1, tmp_path, preset, {})
    printed = capsys.readouterr().out
    for words in ("stage: 0 | subnet: 0.500 layers", "dense-equivalent (TFLOP/s/GPU):", "FLOPs saved:",
                  " stage 0: 4 steps | FLOPs per token: 0.", "over stage 2's: predicted 0."):  # fmt: skip
        assert words in printed


def test_a_dense_run_is_built_of_plain_layers_and_logs_no_subnets(tmp_path):
    config = run_config(tmp_path)
    run = build_run(config, init_parallel(config.parallel, seed=1))
    assert {type(layer).__name__ for layer in run.model[0].decoder.layers} == {"TransformerLayer"}
    train(tmp_path)
    assert not any(name.startswith("est-") for name in read_metrics(tmp_path)[0])


def test_an_adaptive_run_resumes_its_decisions_from_the_checkpoint(tmp_path):
    est = EST | {"schedule": "adaptive", "ends": [6, 9], "adaptive_window": 1, "adaptive_min_gain": 10.0}
    save = {"checkpoint": {"save": str(tmp_path), "save_interval": 3}}
    start(1, tmp_path / "logs", "tiny-gpt2", {"est": est} | save)
    assert [m["est-stage"] for m in read_metrics(tmp_path / "logs")] == [0] * 2 + [1] * 2 + [2] * 6
    load = {"checkpoint": {"load": str(tmp_path), "ckpt_step": 3}}
    start(1, tmp_path / "again", "tiny-gpt2", {"est": est} | load)
    assert [m["est-stage"] for m in read_metrics(tmp_path / "again")] == [1] + [2] * 6
    assert largest_difference(steps(tmp_path / "again"), steps(tmp_path / "logs")[3:]) < 1e-5


def test_a_longer_run_goes_on_when_the_ends_are_steps_and_is_refused_when_fractions(tmp_path):
    fractions = {"schedule": "practical", "ends": ["1/5", "1/2"]}
    for name, est in (("steps", EST), ("fractions", fractions)):
        folder = tmp_path / name
        short, same = {"train_iters": 5, "eval_iters": 0}, {"save": str(folder), "load": str(folder)}
        start(1, folder / "logs", "tiny-gpt2", {"est": est, "training": short, "checkpoint": same})
        longer = {"est": est, "training": short | {"train_iters": 10}, "checkpoint": same}
        if name == "steps":
            start(1, folder / "logs", "tiny-gpt2", longer)
            assert [m["est-stage"] for m in read_metrics(folder / "logs")] == [0] * 4 + [1] * 3 + [2] * 3
        else:
            with pytest.raises(ValueError, match="ends in steps or tokens where train_iters changes"):
                start(1, folder / "logs", "tiny-gpt2", longer)
