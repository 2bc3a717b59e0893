"""Every layout trains the same model: loss and gradient norm equal one process's."""

import pytest

from tests.dist.runs import (
    DISTRIBUTED, OVERLAPPED, PP2, SP2, TP2, VPP2, largest_difference, steps, train,
)  # fmt: skip
from tests.dist.workers import run_distributed

FULL = {"recompute_granularity": "full"}
SELECTIVE = {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "mlp"]}
LAYOUTS = {
    "TP2": (2, {"parallel": TP2}),
    "TP2+SP": (2, {"parallel": SP2}),
    "PP2": (2, {"parallel": PP2}),
    "PP2xVPP2": (2, {"parallel": VPP2}),
    "DP2": (2, {}),
    "DP2 distributed optimizer": (2, {"optimizer": DISTRIBUTED}),
    "DP2 distributed optimizer, overlapped": (2, {"optimizer": OVERLAPPED}),
    "TP2xPP2": (4, {"parallel": TP2 | PP2}),
    "TP2xPP2xVPP2+SP": (4, {"parallel": SP2 | VPP2}),
    "full recompute": (1, {"model": FULL}),
    "TP2+SP, selective recompute": (2, {"parallel": SP2, "model": SELECTIVE}),
    "PP2xVPP2, full recompute": (2, {"parallel": VPP2, "model": FULL}),
}
SHAPES = ["tiny-gpt2", "tiny-llama"]


@pytest.fixture(scope="module", params=SHAPES)
def reference(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("reference")
    train(folder, request.param)
    return request.param, steps(folder)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_loss_and_gradient_norm_equal_one_process(layout, reference, tmp_path):
    preset, expected = reference
    world_size, sections = LAYOUTS[layout]
    if world_size == 1:
        train(tmp_path, preset, sections)
    else:
        run_distributed(train, world_size, tmp_path, preset, sections)
    assert largest_difference(steps(tmp_path), expected) < 1e-5


@pytest.mark.parametrize("layout", ["TP2+SP", "PP2xVPP2", "DP2 distributed optimizer, overlapped"])
def test_bf16_is_within_one_percent_of_fp32(layout, reference, tmp_path):
    preset, expected = reference
    world_size, sections = LAYOUTS[layout]
    run_distributed(
        train, world_size, tmp_path, preset, sections | {"training": {"bf16": True}}
    )
    for ours, theirs in zip(steps(tmp_path), expected, strict=True):
        assert ours[:2] == pytest.approx(theirs[:2], rel=0.01)


def test_the_loss_does_not_depend_on_the_micro_batch_size(reference, tmp_path):
    preset, expected = reference
    train(tmp_path, preset, {"training": {"micro_batch_size": 8}})
    assert largest_difference(steps(tmp_path), expected) < 1e-5


def test_dropout_draws_differ_between_steps_and_repeat_between_runs(tmp_path):
    dropout = {"model": {"hidden_dropout": 0.1, "attention_dropout": 0.1}}
    train(tmp_path / "a", "tiny-gpt2", dropout)
    train(tmp_path / "b", "tiny-gpt2", dropout)
    train(tmp_path / "c", "tiny-gpt2")
    assert steps(tmp_path / "a") == steps(tmp_path / "b")
    assert largest_difference(steps(tmp_path / "a"), steps(tmp_path / "c")) > 1e-3
