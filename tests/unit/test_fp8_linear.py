"""The FP8 linear layer: its three products, what it keeps for delayed scaling, its error beside theory."""

import math

import pytest

from megatron_tlt.models.fp8_linear import Fp8Quantizer
from megatron_tlt.ops.fp8 import rounding_error
from megatron_tlt.ops.fp8_linear import fp8_linear
from megatron_tlt.ops.fp8_recipe import GRAD, INPUT, WEIGHT, Recipe

import torch

NAMES = ["delayed", "tensorwise", "blockwise", "mxfp8"]
TOKENS, IN, OUT = 256, 384, 128


def operands(dtype=torch.float32) -> tuple[torch.Tensor, ...]:
    """x `[32, 8, in]`, w `[out, in]`, bias `[out]` and the output's gradient `[32, 8, out]`."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((32, 8, IN), (OUT, IN), (OUT,), (32, 8, OUT))
    x, w, b, g = (torch.randn(shape, generator=generator) for shape in shapes)
    return tuple(t.to(dtype) for t in (x, w * 0.02, b, g * 1e-3))


def quantizer_of(name: str, x, w, g, **options) -> Fp8Quantizer:
    """Delayed scaling as after a step with these very tensors."""
    quantizer = Fp8Quantizer(Recipe(name=name, **options))
    if name == "delayed":
        for number, tensor in ((INPUT, x), (WEIGHT, w), (GRAD, g)):
            largest = quantizer.recipe.largest()[number]
            quantizer.scale[number] = largest / tensor.abs().max().float()
    return quantizer


def run(quantizer, x, w, b, g):
    leaves = [t.clone().requires_grad_() for t in (x, w, b)]
    out = fp8_linear(*leaves, quantizer=quantizer)
    out.backward(g)
    return out.detach(), [leaf.grad for leaf in leaves]


@pytest.mark.parametrize("format", ["hybrid", "e4m3"])
@pytest.mark.parametrize("name", NAMES)
def test_the_three_products_are_those_of_dequantised_operands(name, format):
    x, w, b, g = operands()
    quantizer = quantizer_of(name, x, w, g, format=format)
    out, (dx, dw, db) = run(quantizer, x, w, b, g)
    flat = {INPUT: x.view(TOKENS, IN), WEIGHT: w, GRAD: g.view(TOKENS, OUT)}
    parts = {
        key: [q.dequantize().double() for q in quantizer(t, key, columnwise=True, record=False)]
        for key, t in flat.items()
    }
    expected = (
        parts[INPUT][0] @ parts[WEIGHT][0].t() + b,
        parts[GRAD][0] @ parts[WEIGHT][1].t(),
        parts[GRAD][1] @ parts[INPUT][1].t(),
        flat[GRAD].sum(dim=0),
    )
    for ours, wanted in zip((out, dx, dw, db), expected, strict=True):
        wanted = wanted.double().view(ours.shape)
        torch.testing.assert_close(
            ours.double(), wanted, rtol=0, atol=1e-5 * wanted.abs().max().item()
        )


def theoretical_sigma(quantizer: Fp8Quantizer, x: torch.Tensor, tensor: int) -> float:
    """Standard deviation of the scaled values; powers of two change nothing, so tiles scale by none."""
    quantised, _ = quantizer(x, tensor, columnwise=False, record=False)
    scale = 1.0 if quantised.tile else 1.0 / quantised.scale_inv.item()
    return x.float().std().item() * scale


@pytest.mark.parametrize("name", NAMES)
def test_the_error_of_each_product_is_that_of_rounding_its_factors(name):
    """Independent errors of two factors add in squares; the sum over many terms keeps the ratio."""
    x, w, b, g = operands()
    out, (dx, dw, _) = run(quantizer_of(name, x, w, g), x, w, torch.zeros_like(b), g)
    x, g = x.view(TOKENS, IN), g.view(TOKENS, OUT)
    quantizer = quantizer_of(name, x, w, g)
    sigmas = [theoretical_sigma(quantizer, t, n) for t, n in ((x, INPUT), (w, WEIGHT), (g, GRAD))]
    errors = [rounding_error(quantizer.recipe.dtype(n), sigma) for n, sigma in enumerate(sigmas)]
    forward, to_x, to_w = (math.hypot(errors[i], errors[j]) for i, j in ((0, 1), (2, 1), (2, 0)))
    for ours, exact, theory in (
        (out, x @ w.t(), forward), (dx, g @ w, to_x), (dw, g.t() @ x, to_w)
    ):  # fmt: skip
        error = ((ours.view(exact.shape) - exact).norm() / exact.norm()).item()
        assert error == pytest.approx(theory, rel=0.05)


@pytest.mark.parametrize("name", NAMES)
def test_bf16_products_are_the_float32_ones_rounded(name):
    tensors = operands(torch.bfloat16)
    x, w, _, g = tensors
    ours = run(quantizer_of(name, x, w, g), *tensors)
    wide = [t.float() for t in tensors]
    exact = run(quantizer_of(name, x.float(), w.float(), g.float()), *wide)
    for mine, reference in zip((ours[0], *ours[1]), (exact[0], *exact[1]), strict=True):
        assert mine.dtype == torch.bfloat16
        atol = 2**-7 * reference.abs().max().item()
        torch.testing.assert_close(mine.float(), reference, rtol=2**-6, atol=atol)


def test_the_weight_gradient_is_added_to_main_grad():
    x, w, _, g = operands()
    weight = torch.nn.Parameter(w.clone())
    plain = run(quantizer_of("tensorwise", x, w, g), *operands())[1][1]
    weight.main_grad, weight.grad_added_to_main_grad = torch.ones(OUT, IN), False
    for _ in range(2):
        fp8_linear(x, weight, quantizer=Fp8Quantizer(Recipe(name="tensorwise"))).backward(g)
    torch.testing.assert_close(weight.main_grad, 1.0 + 2.0 * plain)
    assert weight.grad_added_to_main_grad


def test_delayed_scaling_records_what_it_met_only_where_gradients_are_wanted():
    x, w, b, g = operands()
    quantizer = Fp8Quantizer(Recipe(name="delayed", amax_history_len=4))
    with torch.no_grad():
        fp8_linear(x, w, b, quantizer=quantizer)
    assert quantizer.amax_history.eq(0.0).all()
    run(quantizer, x, w, b, g)
    run(quantizer, x * 0.5, w, b, g * 2.0)
    wanted = torch.stack([x.abs().max(), w.abs().max(), g.abs().max() * 2.0])
    assert torch.equal(quantizer.amax_history[0], wanted)
    assert quantizer.amax_history[1:].eq(0.0).all() and quantizer.scale.eq(1.0).all()


def test_evaluation_takes_any_number_of_tokens_where_training_refuses():
    w = torch.randn(32, 64, requires_grad=True)
    quantizer = Fp8Quantizer(Recipe(name="mxfp8"))
    with torch.no_grad():
        assert fp8_linear(torch.randn(5, 64), w, quantizer=quantizer).shape == (5, 32)
    with pytest.raises(ValueError, match="cannot be cut into FP8 tiles"):
        fp8_linear(torch.randn(5, 64), w, quantizer=quantizer)


def test_scales_stay_float32_in_a_bf16_model():
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), Fp8Quantizer(Recipe(name="delayed")))
    model.bfloat16()
    assert model[0].weight.dtype == torch.bfloat16
    assert {name: b.dtype for name, b in model[1].named_buffers()} == {
        "scale": torch.float32, "amax_history": torch.float32
    }  # fmt: skip
