"""Saving: asynchronous, selective, on one disk or several, with what can go wrong in between."""

import json
import os
import shutil
import time
from pathlib import Path

import pytest

from megatron_tlt.parallel import init_parallel
from megatron_tlt.train import pretrain as loop
from megatron_tlt.train import publish
from megatron_tlt.train.checkpoint import (
    TRACKER, CheckpointConfig, CheckpointSaver, complete_iterations, find_checkpoint, iteration_folder,
    load_checkpoint, published_iterations,
)  # fmt: skip
from megatron_tlt.train.pretrain import pretrain
from megatron_tlt.train.setup import build_run
from tests.dist.runs import DISTRIBUTED, checkpoint_tensors, run_config, steps, train
from tests.dist.workers import run_distributed

import torch


def built(log_dir, **sections):
    torch.set_num_threads(1)
    config = run_config(log_dir, **sections)
    return build_run(config, init_parallel(config.parallel, seed=config.training.seed))


def assert_bit_equal(ours, theirs):
    assert ours.keys() == theirs.keys() and len(ours) > 0
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Two ranks, four steps, saved synchronously after each two."""
    root = tmp_path_factory.mktemp("trained")
    run_distributed(train, 2, root / "logs", "tiny-llama", options(root))
    return root


def options(root, **checkpoint):
    return {
        "optimizer": DISTRIBUTED,
        "model": {"num_layers": 2},
        "training": {"train_iters": 4},
        "checkpoint": {"save": str(root), "save_interval": 2} | checkpoint,
    }


def test_asynchronous_checkpoints_are_bit_equal_to_synchronous_ones(trained, tmp_path):
    run_distributed(train, 2, tmp_path / "logs", "tiny-llama", options(tmp_path, async_save=True))
    assert complete_iterations(tmp_path) == [2, 4]
    for iteration in (2, 4):
        ours = checkpoint_tensors(iteration_folder(tmp_path, iteration))
        assert_bit_equal(ours, checkpoint_tensors(iteration_folder(trained, iteration)))
    assert not list(tmp_path.glob(".*")) and (tmp_path / TRACKER).read_text() == "4"


def save_then_change(root, log_dir):
    """Change every weight while the writer waits; returns them as they were at the save."""
    run = built(log_dir)
    before = [p.detach().clone() for p in run.model[0].parameters()]
    saver = CheckpointSaver(root, groups=run.parallel.groups, async_save=True)
    saver.save(run.state, run.model, None)
    for parameter in run.model[0].parameters():
        parameter.data.fill_(float(run.parallel.rank + 7))
    saver.finish()
    load_checkpoint(iteration_folder(Path(root), 0), run.model, None, groups=run.parallel.groups)
    return all(torch.equal(a, b) for a, b in zip(before, run.model[0].parameters()))


def test_training_that_goes_on_does_not_change_what_is_being_written(tmp_path):
    assert run_distributed(save_then_change, 2, tmp_path / "ckpt", tmp_path) == [True, True]


def keep_layers(name):
    return "decoder.layers" in name


def save_selection(root, log_dir):
    """Save some tensors, change all, load the selection; (kept came back, others stayed)."""
    run = built(log_dir, training={"train_iters": 3})
    pretrain(run)
    saver = CheckpointSaver(root, groups=run.parallel.groups)
    folder = saver.save(run.state, run.model, run.optimizer, keep=keep_layers)
    named = dict(run.model[0].named_parameters())
    before = {name: p.detach().clone() for name, p in named.items()}
    for parameter in named.values():
        parameter.data.fill_(3.0)
    groups = run.parallel.groups
    load_checkpoint(folder, run.model, run.optimizer, groups=groups, keep=keep_layers)
    kept = all(torch.equal(p, before[n]) for n, p in named.items() if keep_layers(n))
    others = all(bool((p == 3.0).all()) for n, p in named.items() if not keep_layers(n))
    try:
        load_checkpoint(folder, run.model, None, groups=groups)
        refused = ""
    except ValueError as error:
        refused = str(error)
    return kept, others, refused


def test_a_selection_holds_and_fills_what_was_selected_and_is_refused_as_a_whole(tmp_path):
    for kept, others, refused in run_distributed(save_selection, 2, tmp_path / "ckpt", tmp_path):
        assert kept and others
        assert "saved from another model, or with a selection" in refused
    names = checkpoint_tensors(iteration_folder(tmp_path / "ckpt", 3))
    assert any("exp_avg" in name for name in names) and all(map(keep_layers, names))


def failing_save(root, log_dir):
    """The disk of rank 1 is full; returns the error on each rank."""
    run = built(log_dir)
    if run.parallel.rank == 1:
        def full(*_):
            raise OSError(28, "No space left on device")

        publish.write_files, original = full, publish.write_files
    try:
        CheckpointSaver(root, groups=run.parallel.groups).save(run.state, run.model, None)
    except RuntimeError as error:
        return str(error)
    finally:
        if run.parallel.rank == 1:
            publish.write_files = original


def test_a_failing_rank_is_named_on_all_ranks_and_nothing_is_published(tmp_path):
    for error in run_distributed(failing_save, 2, tmp_path / "ckpt", tmp_path):
        assert "was not saved: rank 1" in error and "No space left" in error
    assert published_iterations(tmp_path / "ckpt") == []


def test_a_non_finite_loss_does_not_lose_the_checkpoint_that_is_being_written(tmp_path, monkeypatch):
    run = built(tmp_path / "logs", checkpoint={"save": str(tmp_path), "save_interval": 2, "async_save": True})
    take, write = loop._take, publish.write_files

    def poisoned(run, batches, samples):
        if run.state.iteration == 2:
            run.model[0].decoder.final_layernorm.weight.data.fill_(torch.nan)
        return take(run, batches, samples)

    def slow(*arguments):
        time.sleep(1.0)
        return write(*arguments)

    monkeypatch.setattr(loop, "_take", poisoned)
    monkeypatch.setattr(publish, "write_files", slow)
    with pytest.raises(loop.NonFiniteError, match="iteration 3"):
        pretrain(run)
    assert complete_iterations(tmp_path) == [2]


@pytest.mark.parametrize("how", ["truncate", "flip", "delete"])
@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", "manifest.json", "train_state.json"])
def test_a_damaged_checkpoint_is_skipped_by_name_and_the_one_before_it_taken(
    how, name, trained, tmp_path
):
    root = tmp_path / "copy"
    shutil.copytree(trained, root)
    path = iteration_folder(root, 4) / name
    content = bytearray(path.read_bytes())
    if how == "delete":
        path.unlink()
    else:
        content[len(content) // 2] ^= 1
        path.write_bytes(content if how == "flip" else content[: len(content) // 2])
    with pytest.warns(UserWarning, match=f"iter_0000004 is not resumed from: .*{name}"):
        found = find_checkpoint(CheckpointConfig(load=str(root)))
    assert found == iteration_folder(root, 2)


def test_a_run_whose_every_checkpoint_is_damaged_does_not_start_anew(trained, tmp_path):
    root = tmp_path / "copy"
    shutil.copytree(trained, root)
    for iteration in (2, 4):
        (iteration_folder(root, iteration) / "common.pt").unlink()
    config = CheckpointConfig(load=str(root), save=str(root))
    with pytest.warns(UserWarning), pytest.raises(ValueError, match="no complete checkpoint.*common.pt"):
        find_checkpoint(config)


def test_retention_counts_whole_checkpoints_only_and_so_keeps_the_last_of_them(trained, tmp_path):
    root = tmp_path / "copy"
    shutil.copytree(trained, root)
    shutil.copytree(iteration_folder(root, 4), iteration_folder(root, 6))
    (iteration_folder(root, 6) / "__0_0.distcp").write_bytes(b"half")
    publish.move_tracker(root, 4, keep_last=1, shared=True)
    assert published_iterations(root) == [4, 6] and complete_iterations(root) == [4]


def on_own_disks(task, folders, *arguments):
    """Each rank a node of its own, with a disk of its own."""
    rank = int(os.environ["RANK"])
    before = {name: os.environ[name] for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE")}
    os.environ.update(LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    try:
        return task(Path(folders[rank]), *arguments)
    finally:
        os.environ.update(before)


def train_there(root, iterations, sections):
    resume = {"load": str(root), "save": str(root), "save_interval": 2, "keep_last": 2}
    merged = sections | {"checkpoint": resume, "training": {"train_iters": iterations}}
    return train(root / "logs", "tiny-llama", merged | {"model": {"num_layers": 2}})["iteration"]


def test_nodes_with_disks_of_their_own_save_resume_and_train_as_with_one_disk(trained, tmp_path):
    folders = [str(tmp_path / "node0"), str(tmp_path / "node1")]
    pipeline = {"parallel": {"pipeline_model_parallel_size": 2}}
    assert run_distributed(on_own_disks, 2, train_there, folders, 4, pipeline) == [4, 4]
    names = [{path.name for path in Path(f, "iter_0000004").iterdir()} for f in folders]
    assert "__0_0.distcp" in names[0] and "__1_0.distcp" not in names[0]
    assert "__1_0.distcp" in names[1] and "__0_0.distcp" not in names[1]
    # Another layout: each rank needs what the other node has written.
    assert run_distributed(on_own_disks, 2, train_there, folders, 6, {"optimizer": DISTRIBUTED}) == [6, 6]
    ours = steps(tmp_path / "node1" / "logs")
    assert len(ours) == 6
    theirs = steps(trained / "logs")
    for a, b in zip(ours[:4], theirs, strict=True):
        assert a[0] == pytest.approx(b[0], abs=1e-5)


def test_a_checkpoint_that_one_node_did_not_publish_is_passed_over(tmp_path):
    folders = [str(tmp_path / "node0"), str(tmp_path / "node1")]
    pipeline = {"parallel": {"pipeline_model_parallel_size": 2}}
    assert run_distributed(on_own_disks, 2, train_there, folders, 4, pipeline) == [4, 4]
    shutil.rmtree(tmp_path / "node1" / "iter_0000004")  # as after a kill between the two renames
    found = run_distributed(on_own_disks, 2, find_there, folders)
    assert found == ["iter_0000002", "iter_0000002"]
    state = json.loads((tmp_path / "node1" / "iter_0000002" / "train_state.json").read_text())
    assert state["iteration"] == 2  # the files that this node lacked came over


def find_there(root):
    config = run_config(root / "logs")
    init_parallel(config.parallel, seed=1)
    return find_checkpoint(CheckpointConfig(load=str(root))).name
