"""What can be said of Transformer Engine's layers without it: the record of the real ones, and their scales."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_tlt.models import te
from megatron_tlt.models.backend import local_layer_spec
from megatron_tlt.parallel import ParallelConfig, init_parallel
from tools.check_te_construction import SHAPES, build, describe

import torch

RECORD = Path(__file__).resolve().parents[2] / "tools" / "te_construction.json"

WINDOW = 4


class LinearOfTransformerEngine(torch.nn.Module):
    """Holds the state of delayed scaling as TE's linears do: three tensors forward, two backward."""

    def __init__(self, recipe: str | None = "delayed") -> None:
        super().__init__()
        self.config = SimpleNamespace(fp8="hybrid" if recipe else None, fp8_recipe=recipe)
        self.fp8_meta: dict[str, object] = {}

    def init_fp8_meta_tensors(self, recipe: object) -> None:
        for name, tensors in (("scaling_fwd", 3), ("scaling_bwd", 2)):
            self.fp8_meta[name] = SimpleNamespace(
                scale=torch.ones(tensors), amax_history=torch.zeros(WINDOW, tensors)
            )


def test_scales_are_those_of_input_weight_and_output_gradient():
    linear = LinearOfTransformerEngine()
    assert te.delayed_state(linear)["scale"].tolist() == [1.0, 1.0, 1.0]  # before the first forward pass
    linear.fp8_meta["scaling_fwd"].scale.copy_(torch.tensor([2.0, 3.0, 99.0]))
    linear.fp8_meta["scaling_bwd"].scale.copy_(torch.tensor([4.0, 99.0]))
    linear.fp8_meta["scaling_bwd"].amax_history[1] = torch.tensor([5.0, 99.0])
    state = te.delayed_state(linear)
    assert state["scale"].tolist() == [2.0, 3.0, 4.0]
    assert state["amax_history"][1].tolist() == [0.0, 0.0, 5.0]
    fresh = LinearOfTransformerEngine()
    te.load_delayed_state(fresh, state)
    for name, tensor in te.delayed_state(fresh).items():
        assert torch.equal(tensor, state[name])
    assert fresh.fp8_meta["scaling_fwd"].scale[2] == 1.0


@pytest.mark.parametrize("recipe", [None, "tensorwise"])
def test_other_recipes_have_no_state(recipe):
    assert te.delayed_state(LinearOfTransformerEngine(recipe)) == {}


@pytest.mark.parametrize("shape", SHAPES)
def test_our_layers_have_the_parameters_and_checkpoint_names_of_the_recorded_ones(shape):
    """Written by tools/check_te_construction.py from the real package: so checkpoints interchange."""
    record = json.loads(RECORD.read_text())
    assert record["versions"]["transformer-engine"] == te.TE_VERSION
    parallel = init_parallel(ParallelConfig(), seed=1)
    _, chunk = build(shape, parallel, local_layer_spec)
    recorded = record["shapes"][shape]
    assert describe(chunk, parallel) == {
        "parameters": recorded["parameters"], "checkpoint": recorded["checkpoint"]
    }  # fmt: skip
