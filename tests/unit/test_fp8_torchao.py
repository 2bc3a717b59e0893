"""Our FP8 numerics against torchao's float8 training and MX formats, an independent implementation."""

import pytest

from megatron_tlt.models.fp8_linear import Fp8Quantizer
from megatron_tlt.ops.fp8 import E4M3, current_scale, e8m0_scale, power_of_two_scale, quantize_tiles
from megatron_tlt.ops.fp8_linear import fp8_linear
from megatron_tlt.ops.fp8_recipe import Recipe

import torch

float8 = pytest.importorskip("torchao.float8")
utils = pytest.importorskip("torchao.float8.float8_utils")


def operands() -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((64, 256), (128, 256), (64, 128))
    return tuple(torch.randn(shape, generator=generator).bfloat16() for shape in shapes)


def test_tensorwise_layer_equals_torchaos_forward_and_backward():
    """torchao: e4m3 forward, e5m2 gradients, one current scale a tensor; it emulates in the input's dtype."""
    x, w, g = operands()
    config = float8.Float8LinearConfig(emulate=True)
    theirs = torch.nn.Sequential(torch.nn.Linear(256, 128, bias=False, dtype=torch.bfloat16))
    float8.convert_to_float8_training(theirs, config=config)
    with torch.no_grad():
        theirs[0].weight.copy_(w)
    inputs, weight = [x.clone().requires_grad_() for _ in range(2)], w.clone().requires_grad_()
    expected = theirs(inputs[0])
    expected.backward(g)
    result = fp8_linear(inputs[1], weight, quantizer=Fp8Quantizer(Recipe(name="tensorwise")))
    result.backward(g)
    pairs = (
        (result, expected), (inputs[1].grad, inputs[0].grad), (weight.grad, theirs[0].weight.grad)
    )  # fmt: skip
    for ours, reference in pairs:
        # Not to the last bit: its emulation multiplies factors that were scaled, and so rounded, in bfloat16.
        error = ((ours - reference).float().norm() / reference.float().norm()).item()
        assert error < 4e-3


@pytest.mark.parametrize("power_of_two", [False, True])
def test_tensorwise_scales_equal_torchaos(power_of_two):
    for amax in (torch.tensor(v) for v in (1e-6, 0.37, 1.0, 448.0, 1e5)):
        theirs = utils.amax_to_scale(amax, E4M3, round_scales_to_power_of_2=power_of_two)
        ours, _ = current_scale(amax, E4M3, power_of_two=power_of_two)
        # It divides in float64 and rounds, Transformer Engine and we divide in float32.
        assert ours.item() == pytest.approx(theirs.item(), rel=0 if power_of_two else 2**-23)


def test_rowwise_values_equal_torchaos():
    """One scale a row, as torchao's rowwise recipe has it, is a tile of one row."""
    x, _, _ = operands()
    granularity = float8.config.ScalingGranularity.AXISWISE
    scale = utils.tensor_to_scale(
        x, E4M3, scaling_granularity=granularity, axiswise_dim=-1, round_scales_to_power_of_2=True
    )
    expected = utils.to_fp8_saturated(x.float() * scale, E4M3)
    ours = quantize_tiles(x, E4M3, tile=(1, 256), scaling=power_of_two_scale)
    assert torch.equal(ours.data.float(), expected.float())
    assert torch.equal(ours.scale_inv, 1.0 / scale)


def test_mxfp8_values_and_exponents_equal_torchaos():
    mx = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor")
    config = pytest.importorskip("torchao.prototype.mx_formats.config")
    x = operands()[0].float() * torch.tensor([1e-4, 1.0, 300.0, 7e4]).repeat(16)[:, None]
    exponents, data = mx.to_mx(x, E4M3, 32, config.ScaleCalculationMode.RCEIL)[:2]
    ours = quantize_tiles(x, E4M3, tile=(1, 32), scaling=e8m0_scale)
    assert torch.equal(ours.data.float(), data.float().view(64, 256))
    theirs = torch.exp2(exponents.view(torch.uint8).float() - 127.0)
    assert torch.equal(ours.scale_inv, theirs.view(ours.scale_inv.shape))
