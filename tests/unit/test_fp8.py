"""FP8 casts, scales and products against numbers worked out by hand, loops over tiles and torch's kernel."""

import math

import pytest

from megatron_tlt.ops.fp8 import (
    E4M3, E5M2, FP8_MAX, Quantized, amax_of, cast, current_scale, e8m0_exponent, e8m0_scale,
    power_of_two_scale, product, quantize_tensor, quantize_tiles, rounding_error,
    update_delayed_scaling,
)  # fmt: skip
from megatron_tlt.ops.fp8_recipe import GRAD, INPUT, WEIGHT, Recipe

import torch

ONE = torch.tensor(1.0)
FLOAT_MAX = torch.finfo(torch.float32).max


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_cast_rounds_to_even_saturates_and_keeps_nan():
    """e4m3 has steps of 2 from 16 to 32; its largest value is 448, where the next step would be 480."""
    x = torch.tensor([17.0, 19.0, -17.5, 460.0, 1e30, -math.inf, math.nan])
    values = cast(x, ONE, E4M3).float().tolist()
    assert values[:6] == [16.0, 20.0, -18.0, 448.0, 448.0, -448.0]
    assert math.isnan(values[6])
    assert cast(torch.tensor([1e30]), ONE, E5M2).item() == 57344.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cast_multiplies_in_float32(dtype):
    """1.2 x 3 = 3.6 lies between 3.5 and 3.75; a product rounded to bfloat16 first would be 3.609."""
    scale = torch.tensor(1.001)
    x = normal(64, 64, seed=1).to(dtype)
    expected = (x.double() * scale.double()).float().clamp(-448, 448).to(E4M3)
    assert torch.equal(cast(x, scale, E4M3).float(), expected.float())


@pytest.mark.parametrize(
    "amax, exact, power_of_two",
    [(2.0, 224.0, 128.0), (448.0, 1.0, 1.0), (7.0, 64.0, 64.0), (0.0, 1.0, 1.0), (math.inf, 1.0, 1.0),
     (math.nan, 1.0, 1.0), (1e-39, FLOAT_MAX, 2.0**127)],
)  # fmt: skip
def test_current_scale_follows_transformer_engine(amax, exact, power_of_two):
    for wanted, rounds in ((exact, False), (power_of_two, True)):
        scale, inverse = current_scale(torch.tensor(amax), E4M3, power_of_two=rounds)
        assert scale.item() == wanted
        assert inverse.item() == torch.tensor(1.0 / wanted).item()


@pytest.mark.parametrize(
    "value, exponent",
    [(1.0, 127), (1.5, 128), (2.0, 128), (2.0**-127, 0), (2.0**-140, 0), (2.0**-127 * 1.25, 1), (0.0, 0),
     (FLOAT_MAX, 254), (math.inf, 254), (math.nan, 255)],
)  # fmt: skip
def test_e8m0_exponents_are_rounded_up(value, exponent):
    assert e8m0_exponent(torch.tensor(value)).item() == exponent


def test_e8m0_scales_bring_every_amax_into_range():
    amax = torch.tensor([1e-30, 0.1, 1.0, 448.0 * 0.999, 500.0, 1e30])
    scale, inverse = e8m0_scale(amax, E4M3)
    assert torch.equal(scale * inverse, torch.ones(6))
    assert torch.equal(scale.frexp().mantissa, torch.full((6,), 0.5))
    largest = amax * scale
    assert bool((largest <= 448.0 * (1 + 1e-6)).all()) and bool((largest > 223.9).all())


def test_quantised_tiles_equal_a_loop_over_tiles():
    x = normal(4, 64) * torch.tensor([1e-3, 1.0, 30.0, 1e4])[:, None]
    for tile, scaling in (((1, 32), e8m0_scale), ((2, 16), power_of_two_scale)):
        ours = quantize_tiles(x, E4M3, tile=tile, scaling=scaling).dequantize()
        for i in range(0, 4, tile[0]):
            for j in range(0, 64, tile[1]):
                part = x[i : i + tile[0], j : j + tile[1]]
                scale, inverse = scaling(part.abs().max(), E4M3)
                expected = (part * scale).clamp(-448, 448).to(E4M3).float() * inverse
                assert torch.equal(ours[i : i + tile[0], j : j + tile[1]], expected)


def test_tiles_that_do_not_cover_are_refused_with_the_numbers():
    with pytest.raises(ValueError, match=r"\[3, 100\] matrix.* 1 x 32.* multiples"):
        quantize_tiles(normal(3, 100), E4M3, tile=(1, 32), scaling=e8m0_scale)


@pytest.mark.parametrize("gemm_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["tensorwise", "blockwise", "mxfp8"])
def test_products_equal_those_of_the_dequantised_factors(name, gemm_dtype):
    """A bfloat16 GEMM reads the same factors and rounds its sums; a tensor's scale rounds once more."""
    recipe = Recipe(name=name)
    a, _ = recipe.quantize(normal(128, 256, seed=1), GRAD, columnwise=False)
    b, _ = recipe.quantize(normal(128, 256, seed=2), WEIGHT, columnwise=False)
    ours = product(a, b, dtype=torch.float32, gemm_dtype=gemm_dtype)
    expected = a.dequantize().double() @ b.dequantize().double().t()
    tolerance = 1e-5 if gemm_dtype == torch.float32 else 2**-7 * expected.abs().max().item()
    torch.testing.assert_close(ours.double(), expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("name", ["tensorwise", "blockwise", "mxfp8"])
def test_the_transpose_is_quantised_along_the_other_direction(name):
    """Powers of two change nothing but where values vanish, so these spread over 40 binades."""
    recipe, x = Recipe(name=name), normal(128, 256) * torch.exp2(8 * normal(128, 256, seed=1))
    for tensor in (INPUT, WEIGHT, GRAD):
        rows, columns = recipe.quantize(x, tensor, columnwise=True)
        again, _ = recipe.quantize(x.t().contiguous(), tensor, columnwise=False)
        assert torch.equal(columns.dequantize(), again.dequantize())
        same = torch.equal(columns.dequantize().t(), rows.dequantize())
        assert same == (name == "tensorwise" or (name == "blockwise" and tensor == WEIGHT))


def test_hybrid_keeps_gradients_in_e5m2():
    for format, expected in (("hybrid", (E4M3, E4M3, E5M2)), ("e4m3", (E4M3, E4M3, E4M3))):
        recipe = Recipe(name="tensorwise", format=format)
        assert tuple(recipe.dtype(tensor) for tensor in (INPUT, WEIGHT, GRAD)) == expected
        data = recipe.quantize(normal(16, 16), GRAD, columnwise=False)[0].data
        assert data.dtype == expected[2]


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_rounding_error_is_that_of_normal_samples(dtype):
    for sigma in (1.0, 1.5, 80.0):
        x = normal(400, 1000) * sigma
        error = (x.to(dtype).float() - x).norm() / x.norm()
        assert rounding_error(dtype, sigma) == pytest.approx(error.item(), rel=0.01)


def test_a_tensor_product_equals_torchs_own_fp8_kernel():
    a = quantize_tensor(normal(32, 64, seed=1), torch.tensor(90.0), E4M3)
    b = quantize_tensor(normal(16, 64, seed=2), torch.tensor(70.0), E4M3)
    theirs = torch._scaled_mm(
        a.data, b.data.t(), a.scale_inv.view(()), b.scale_inv.view(()), out_dtype=torch.float32
    )
    ours = product(a, b, dtype=torch.float32, gemm_dtype=torch.float32)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def by_hand(amaxes: list[float], *, window: int, algorithm: str, margin: int) -> list[float]:
    """Scales after each step by TE's documented rule, scale = (FP8_MAX / amax) / 2^margin, over a list."""
    seen, scale, scales = [0.0] * window, 1.0, []
    for amax in amaxes:
        if amax != 0.0:
            # The window is the newest `window` steps; entry 0 of TE's buffer is the step that ends.
            seen = [*seen[1:], amax]
            chosen = amax if algorithm == "most_recent" else max(seen)
            if math.isfinite(chosen):
                scale = 448.0 / chosen / 2**margin
        scales.append(scale)
    return scales


@pytest.mark.parametrize("algorithm", ["most_recent", "max"])
@pytest.mark.parametrize("window", [1, 3])
def test_delayed_scales_follow_the_documented_rule(window, algorithm):
    amaxes = [2.0, 8.0, 0.0, 1.0, 0.5, 0.25, math.inf, 4.0]
    history, scale = torch.zeros(window, 1), torch.ones(1)
    ours = []
    for amax in amaxes:
        assert history[0].item() == 0.0
        history[0] = amax
        update_delayed_scaling(
            history, scale, torch.tensor([448.0]), margin=1, amax_compute_algo=algorithm
        )
        ours.append(scale.item())
    assert ours == by_hand(amaxes, window=window, algorithm=algorithm, margin=1)


def test_a_tensor_that_was_not_met_keeps_scale_and_history():
    history = torch.tensor([[0.0, 5.0], [1.0, 1.0], [2.0, 2.0]])
    scale = torch.tensor([3.0, 3.0])
    update_delayed_scaling(history, scale, torch.tensor([448.0, 448.0]), amax_compute_algo="max")
    assert scale.tolist() == [3.0, pytest.approx(448.0 / 5.0)]
    assert history.tolist() == [[0.0, 0.0], [1.0, 2.0], [2.0, 5.0]]


def test_every_byte_is_read_as_torch_reads_it():
    for dtype in (E4M3, E5M2):
        data = torch.arange(256, dtype=torch.uint8).view(dtype).view(16, 16)
        for wide in (torch.float32, torch.bfloat16):
            for stored in (data, data.t()):
                ours, theirs = Quantized(stored, ONE).factor(wide), stored.to(wide)
                torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)


def test_amax_is_the_largest_magnitude():
    assert amax_of(torch.tensor([[1.0, -3.0]], dtype=torch.bfloat16)).item() == 3.0
    assert amax_of(torch.empty(0, 4)).item() == 0.0
    assert math.isnan(amax_of(torch.tensor([1.0, math.nan])).item())
    assert FP8_MAX == {d: torch.finfo(d).max for d in (E4M3, E5M2)}
