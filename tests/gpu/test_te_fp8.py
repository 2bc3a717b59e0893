"""Transformer Engine on a GPU: its FP8 products against ours, subnets through it, and FP8 beside bf16."""

import pytest

from megatron_tlt import device
from megatron_tlt.models import te
from megatron_tlt.models.fp8_linear import Fp8Quantizer
from megatron_tlt.ops.fp8_linear import fp8_linear
from megatron_tlt.ops.fp8_recipe import Recipe
from tests.gpu.runs import train

import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not te.HAVE_TE, reason="Transformer Engine is not installed"),
]
EST = {"schedule": "practical", "ends": [6, 12], "ends_in": "steps", "mlp_align": 32}
FP8 = {
    "delayed": {"fp8": "hybrid", "fp8_recipe": "delayed"},
    "tensorwise": {"fp8": "hybrid", "fp8_recipe": "tensorwise"},
    "blockwise": {"fp8": "e4m3", "fp8_recipe": "blockwise"},
    "mxfp8": {"fp8": "e4m3", "fp8_recipe": "mxfp8"},
}


def recipe_here(name: str):
    """(TE's recipe, ours), or a skip with TE's own reason where this GPU has no kernels for it."""
    recipes = pytest.importorskip("transformer_engine.common.recipe")
    quantization = pytest.importorskip("transformer_engine.pytorch.quantization")
    theirs = {
        "delayed": lambda: recipes.DelayedScaling(amax_history_len=1, amax_compute_algo="most_recent"),
        "tensorwise": recipes.Float8CurrentScaling,
        "blockwise": recipes.Float8BlockScaling,
        "mxfp8": recipes.MXFP8BlockScaling,
    }[name]()
    try:
        quantization.check_recipe_support(theirs)
    except (AssertionError, RuntimeError) as error:
        pytest.skip(str(error))
    format = "hybrid" if name in ("delayed", "tensorwise") else "e4m3"
    return theirs, Recipe(name=name, format=format)


@pytest.mark.parametrize("name", FP8)
def test_forward_and_both_gradients_equal_transformer_engines(name):
    """Same casts, so the results differ by the order of sums and one rounding to bf16. Twice: with the scales
    of a fresh layer, and of the step after it."""
    pytorch = pytest.importorskip("transformer_engine.pytorch")
    theirs, ours = recipe_here(name)
    generator = torch.Generator().manual_seed(0)
    x, w, g = (
        torch.randn(shape, generator=generator).to(device.device(), torch.bfloat16) * size
        for shape, size in (((256, 512), 1.0), ((384, 512), 0.02), ((256, 384), 1e-2))
    )
    module = pytorch.Linear(512, 384, bias=False, params_dtype=torch.bfloat16, device=device.device())
    with torch.no_grad():
        module.weight.copy_(w)
    quantizer = Fp8Quantizer(ours).to(device.device())
    for _ in range(2):
        inputs = [x.clone().requires_grad_() for _ in range(2)]
        weight = w.clone().requires_grad_()
        module.weight.grad = None
        with pytorch.fp8_autocast(enabled=True, fp8_recipe=theirs):
            expected = module(inputs[0])
        expected.backward(g)
        result = fp8_linear(inputs[1], weight, quantizer=quantizer)
        result.backward(g)
        pairs = (
            (result, expected), (inputs[1].grad, inputs[0].grad), (weight.grad, module.weight.grad)
        )  # fmt: skip
        for mine, reference in pairs:
            atol = 2**-7 * reference.abs().max().item()
            torch.testing.assert_close(mine, reference, rtol=2**-6, atol=atol)
        if ours.is_delayed:
            amax = torch.stack([t.abs().max().float() for t in (x, w, g)])
            quantizer.scale.copy_(ours.largest().to(amax.device) / amax)


@pytest.mark.parametrize("subnets", [False, True], ids=["dense", "subnets"])
@pytest.mark.parametrize("name", ["bf16", *FP8])
def test_runs_on_transformer_engine_and_on_our_layers_agree(name, subnets):
    """bf16 first; then each recipe, across two stage ends of the subnets."""
    precision = FP8.get(name, {})
    if precision:
        recipe_here(name)
    options = {"est": EST} if subnets else {}
    theirs = train("transformer_engine", precision, **options)
    ours = train("local", precision, **options)
    for mine, reference in zip(ours, theirs, strict=True):
        assert mine == pytest.approx(reference, rel=0.01)


@pytest.mark.parametrize("name", FP8)
def test_fp8_loss_is_within_one_percent_of_bf16(name):
    recipe_here(name)
    fp8, bf16 = (train("transformer_engine", p, steps=100)[-10:] for p in (FP8[name], {}))
    assert sum(fp8) == pytest.approx(sum(bf16), rel=0.01)
