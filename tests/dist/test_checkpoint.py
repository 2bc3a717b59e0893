"""Checkpoints: a run that is stopped and resumed, under any layout, is the run that never stopped."""

import json

import pytest

from megatron_tlt.models.gpt import ModelConfig
from megatron_tlt.parallel import init_parallel
from megatron_tlt.train.checkpoint import TRACKER, complete_iterations
from megatron_tlt.train.save import save_checkpoint
from megatron_tlt.train.setup import build_run
from tests.dist.runs import (
    DISTRIBUTED, OVERLAPPED, PP2, SP2, TP2, VPP2, checkpoint_tensors, largest_difference,
    run_config, steps, train,
)  # fmt: skip
from tests.dist.workers import run_distributed

import torch

VOCAB = 257  # the byte-level tokenizer's
LAYOUTS = {
    "one process": (1, {}),
    "TP1xPP2": (2, {"parallel": PP2}),
    "PP2xVPP2": (2, {"parallel": VPP2}),
    "TP2+SP": (2, {"parallel": SP2}),
    "DP2": (2, {}),
    "DP2 distributed": (2, {"optimizer": DISTRIBUTED}),
    "DP2 overlapped": (2, {"optimizer": OVERLAPPED}),
    "TP2xPP2": (4, {"parallel": TP2 | PP2}),
}
SOURCES = {
    "TP2xPP1": (2, {"parallel": TP2}),
    "DP2 overlapped": (2, {"optimizer": OVERLAPPED}),
    "PP2 distributed": (2, {"parallel": PP2, "optimizer": DISTRIBUTED}),
}


def start(world_size, folder, preset, sections, *, checkpoint, **training):
    merged = sections | {"checkpoint": checkpoint, "training": {"train_iters": 10} | training}
    if world_size == 1:
        return [train(folder, preset, merged)]
    return run_distributed(train, world_size, folder, preset, merged)


@pytest.fixture(scope="module", params=[("tiny-gpt2", "TP2xPP1"), ("tiny-llama", "DP2 overlapped"),
                                        ("tiny-llama", "PP2 distributed")])  # fmt: skip
def saved(request, tmp_path_factory):
    """An uninterrupted run of 10 steps that saved after 5 and at its end."""
    preset, source = request.param
    root = tmp_path_factory.mktemp("saved")
    world_size, sections = SOURCES[source]
    results = start(
        world_size, root / "logs", preset, sections,
        checkpoint={"save": str(root), "save_interval": 5},
    )  # fmt: skip
    return preset, root, results[0], checkpoint_tensors(root / "iter_0000010")


@pytest.mark.parametrize("layout", ["one process", "TP1xPP2", "DP2", "DP2 overlapped", "TP2xPP2"])
def test_resuming_under_another_layout_continues_the_same_run(layout, saved, tmp_path):
    preset, root, result, final = saved
    world_size, sections = LAYOUTS[layout]
    checkpoint = {"load": str(root), "ckpt_step": 5, "save": str(tmp_path)}
    resumed = start(world_size, tmp_path / "logs", preset, sections, checkpoint=checkpoint)
    ours, theirs = steps(tmp_path / "logs"), steps(root / "logs")[5:]
    assert largest_difference(ours, theirs) < 1e-5
    assert [step[2] for step in ours] == [step[2] for step in theirs]  # learning rates, exactly
    assert resumed[0] == result  # iteration, samples, weight decay
    assert_same_tensors(checkpoint_tensors(tmp_path / "iter_0000010"), final, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("layout", ["PP2xVPP2", "TP2+SP", "DP2 distributed"])
def test_loading_and_saving_again_keeps_weights_and_moments_bit_by_bit(layout, saved, tmp_path):
    preset, root, _, _ = saved
    world_size, sections = LAYOUTS[layout]
    arguments = (str(root / "iter_0000005"), str(tmp_path), preset, sections)
    if world_size == 1:
        load_and_save(*arguments)
    else:
        run_distributed(load_and_save, world_size, *arguments)
    before = checkpoint_tensors(root / "iter_0000005")
    assert_same_tensors(checkpoint_tensors(tmp_path / "iter_0000005"), before, atol=0.0, rtol=0.0)


def load_and_save(load, save, preset, sections):
    """Build a run from `load` under another layout and save it without a step."""
    merged = sections | {"checkpoint": {"load": load, "save": save}, "training": {"train_iters": 10}}
    config = run_config(save, preset=preset, **merged)
    run = build_run(config, init_parallel(config.parallel, seed=1))
    run.state.scheduler = run.scheduler.state_dict()
    save_checkpoint(save, run.state, run.model, run.optimizer, groups=run.parallel.groups)


def assert_same_tensors(ours, theirs, *, atol, rtol):
    """Weights and both moments; of tables padded for TP, the rows of the vocabulary."""
    assert ours.keys() == theirs.keys()
    assert any("exp_avg_sq" in name for name in ours)
    for name, expected in theirs.items():
        got = ours[name]
        if "word_embeddings" in name or "output_layer" in name:
            got, expected = got[:VOCAB], expected[:VOCAB]
        torch.testing.assert_close(
            got, expected, atol=atol, rtol=rtol, msg=lambda text, name=name: f"{name}: {text}"
        )


def test_bf16_master_weights_and_moments_survive_a_layout_change(tmp_path):
    bf16 = {"train_iters": 8, "bf16": True}
    start(2, tmp_path / "a" / "logs", "tiny-llama", {"parallel": TP2},
          checkpoint={"save": str(tmp_path / "a"), "save_interval": 4}, **bf16)  # fmt: skip
    checkpoint = {"load": str(tmp_path / "a"), "ckpt_step": 4}
    start(2, tmp_path / "b", "tiny-llama", {"optimizer": DISTRIBUTED}, checkpoint=checkpoint, **bf16)
    expected = steps(tmp_path / "a" / "logs")[4:]
    for ours, theirs in zip(steps(tmp_path / "b"), expected, strict=True):
        assert ours == pytest.approx(theirs, rel=0.01)


def test_a_checkpoint_of_another_model_or_tokenizer_is_refused_with_the_difference(saved, tmp_path):
    preset, root, _, _ = saved
    checkpoint = {"load": str(root)}
    with pytest.raises(ValueError, match="another model: .*num_layers: checkpoint 4, this run 2"):
        start(1, tmp_path, preset, {"model": {"num_layers": 2}}, checkpoint=checkpoint)
    null = {"tokenizer": {"tokenizer_type": "NullTokenizer", "vocab_size": 100}}
    with pytest.raises(ValueError, match="another tokenizer: .*vocab_size: checkpoint 257, this run"):
        start(1, tmp_path, preset, null, checkpoint=checkpoint)


def test_a_run_that_was_asked_to_resume_and_finds_nothing_ends(tmp_path):
    empty = {"load": str(tmp_path / "nothing"), "save": str(tmp_path / "new")}
    with pytest.raises(ValueError, match="no complete checkpoint"):
        start(1, tmp_path, "tiny-gpt2", {}, checkpoint=empty)


def test_the_same_command_starts_continues_and_then_has_nothing_to_do(tmp_path):
    same = {"load": str(tmp_path), "save": str(tmp_path), "save_interval": 2}
    stop = {"train_iters": 6, "exit_interval": 4}
    first = start(1, tmp_path / "logs", "tiny-gpt2", {}, checkpoint=same, **stop)[0]
    second = start(1, tmp_path / "logs", "tiny-gpt2", {}, checkpoint=same, **stop)[0]
    third = start(1, tmp_path / "logs", "tiny-gpt2", {}, checkpoint=same, **stop)[0]
    assert [r["iteration"] for r in (first, second, third)] == [4, 6, 6]
    assert len(steps(tmp_path / "logs")) == 6


def test_retention_keeps_the_newest_and_the_tracker_names_the_last(tmp_path):
    keep = {"save": str(tmp_path), "save_interval": 1, "keep_last": 2}
    start(1, tmp_path / "logs", "tiny-gpt2", {}, checkpoint=keep, train_iters=4)
    assert complete_iterations(tmp_path) == [3, 4]
    assert (tmp_path / TRACKER).read_text() == "4"
    assert not list(tmp_path.glob(".*"))  # nothing half-written or half-deleted stays


def test_a_half_written_checkpoint_is_not_resumed_from(tmp_path):
    same = {"save": str(tmp_path), "save_interval": 1}
    start(1, tmp_path / "logs", "tiny-gpt2", {}, checkpoint=same, train_iters=3)
    (tmp_path / "iter_0000003" / "train_state.json").unlink()
    with pytest.warns(UserWarning, match="iter_0000003 is not resumed from.*train_state.json is missing"):
        load = same | {"load": str(tmp_path)}
        start(1, tmp_path / "again", "tiny-gpt2", {}, checkpoint=load, train_iters=3)
    assert len(steps(tmp_path / "again")) == 1


def test_finetune_takes_the_weights_only(saved, tmp_path):
    preset, root, _, _ = saved
    checkpoint = {"load": str(root), "finetune": True}
    start(1, tmp_path, preset, {}, checkpoint=checkpoint)
    assert len(steps(tmp_path)) == 10
    trained, untrained = steps(root / "logs")[-1][0], steps(root / "logs")[0][0]
    assert steps(tmp_path)[0][0] < trained + 0.5 * (untrained - trained)


def test_a_resume_without_moments_keeps_iteration_and_schedule(saved, tmp_path):
    preset, root, _, _ = saved
    checkpoint = {"load": str(root), "ckpt_step": 5, "no_load_optim": True}
    start(1, tmp_path, preset, {}, checkpoint=checkpoint)
    theirs = steps(root / "logs")[5:]
    assert [step[2] for step in steps(tmp_path)] == [step[2] for step in theirs]
    assert steps(tmp_path)[0][0] == pytest.approx(theirs[0][0], abs=1e-5)


def test_the_state_file_says_what_the_model_is(saved):
    preset, root, _, _ = saved
    state = json.loads((root / "iter_0000010" / "train_state.json").read_text())
    assert state["model"]["hidden_size"] == ModelConfig(preset=preset).hidden_size
    assert (state["iteration"], state["consumed_train_samples"]) == (10, 80)
    assert state["consumed_train_tokens"] == 80 * 64
