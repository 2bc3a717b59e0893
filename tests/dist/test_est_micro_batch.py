"""Larger micro-batches in early stages: the same samples and gradient, fewer and larger forward passes."""

import pytest

from megatron_tlt.pretrain import main
from megatron_tlt.train import pretrain as loop
from megatron_tlt.train.step import joined
from tests.dist.runs import OVERLAPPED, VPP2, largest_difference, run_config, steps, train
from tests.dist.workers import run_distributed

import torch

EST = {"schedule": "practical", "ends": [2, 4], "ends_in": "steps", "tp_strata": 2, "pp_strata": 4}
BASE = {"model": {"num_layers": 8}, "training": {"train_iters": 6, "micro_batch_size": 1, "eval_iters": 0}}
LAYOUTS = {
    "one process": (1, {"training": BASE["training"]}, [8, 4]),
    "DP2 overlapped": (2, {"optimizer": OVERLAPPED}, [4, 2]),
    "PP2xVPP2": (2, {"parallel": VPP2}, [4, 2]),
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plain")
    train(folder, "tiny-llama", BASE | {"est": EST})
    return steps(folder)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_losses_and_gradient_norms_equal_the_plain_run(layout, plain, tmp_path):
    world_size, sections, sizes = LAYOUTS[layout]
    merged = BASE | sections | {"est": EST | {"micro_batch_per_stage": sizes}}
    if world_size == 1:
        train(tmp_path, "tiny-llama", merged)
    else:
        run_distributed(train, world_size, tmp_path, "tiny-llama", merged)
    assert largest_difference(steps(tmp_path), plain) < 1e-4
    assert [x[0] for x in steps(tmp_path)] == pytest.approx([x[0] for x in plain], abs=1e-5)


def test_the_passes_of_each_stage_have_the_size_that_was_asked_for(monkeypatch, tmp_path):
    seen, real = [], loop.train_step

    def watched(chunks, optimizer, batches, *, parallel):
        seen.append([len(batch["tokens"]) for batch in batches])
        return real(chunks, optimizer, batches, parallel=parallel)

    monkeypatch.setattr(loop, "train_step", watched)
    train(tmp_path, "tiny-llama", BASE | {"est": EST | {"micro_batch_per_stage": [8, 4]}})
    assert seen == [[8], [8], [4, 4], [4, 4], [1] * 8, [1] * 8]


def test_joining_keeps_the_order_of_the_samples():
    batches = [{"tokens": torch.full((2, 3), i)} for i in range(4)]
    (first, second) = joined(batches, 2)
    assert first["tokens"][:, 0].tolist() == [0, 0, 1, 1]
    assert second["tokens"][:, 0].tolist() == [2, 2, 3, 3]
    assert joined(batches, 1) is batches


@pytest.mark.parametrize(
    ("sizes", "sections", "words"),
    [
        ([3], {"training": {"micro_batch_size": 2}}, "3 is not a multiple of training.micro_batch_size=2"),
        ([1, 1, 1, 1], {"training": {"micro_batch_size": 1}}, "4 sizes for 3 stages"),
        ([16], {}, "global batch size 8 is not divisible by 16 x data-parallel size 1"),
        ([8], {"model": {"num_layers": 8}, "parallel": VPP2, "world": 2}, "interleaved schedule"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(sizes, sections, words, tmp_path):
    world_size = sections.pop("world", 1)
    est = EST | {"micro_batch_per_stage": sizes, "pp_strata": None}
    config = run_config(tmp_path, est=est, **sections)
    with pytest.raises(ValueError, match=words):
        config.check(world_size)


def test_the_dry_run_shows_what_a_stage_holds(capsys):
    arguments = [
        "--model.preset=tiny-gpt2", "--training.train_iters=9", "--training.global_batch_size=8",
        "--data.mock_data=true", "--est.schedule=practical", "--est.micro_batch_per_stage=[8,4]",
        "--dry_run",
    ]  # fmt: skip
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    for stage, size in enumerate((8, 4, 1)):
        assert f" stage {stage}: micro-batches of {size}, about " in printed
