"""What can be said of the Transformer Engine layer without it: how its scales are translated."""

from types import SimpleNamespace

import pytest

from megatron_tlt.models import te

import torch

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
