"""FP8 tensors in plain torch: formats, saturating casts, scales, and the product of two of them.

The rules are Transformer Engine's (TE, github.com/NVIDIA/TransformerEngine, release 2.20), named at each
function, so that a run on a CPU has the numerics of its kernels up to the order of float32 sums. A value x is
stored as q = cast(x * scale) and read as q * scale_inv, with scale_inv = 1 / scale.

m rows, k columns; every product sums over the columns of both factors.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from megatron_tlt.device import has_fp8_gemm

import torch

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
FP8_MAX = {E4M3: 448.0, E5M2: 57344.0}
_FLOAT_MAX = torch.finfo(torch.float32).max
_MANTISSA_BITS = 23
_SIGN_AND_EXPONENT = -(1 << _MANTISSA_BITS)  # 0xff800000
_TWO_TO_MINUS_127 = 1 << (_MANTISSA_BITS - 1)  # as bits: a subnormal
_E8M0_LARGEST, _E8M0_NAN = 0xFE, 0xFF

Scaling = Callable[[torch.Tensor, torch.dtype], tuple[torch.Tensor, torch.Tensor]]
"""(amax float32, fp8 dtype) -> (scale, scale_inv)."""


def amax_of(x: torch.Tensor) -> torch.Tensor:
    """Largest magnitude in `x`, a float32 scalar; NaN if one is in it, 0 for an empty tensor."""
    if x.numel() == 0:
        return torch.zeros((), device=x.device)
    low, high = torch.aminmax(x.detach())  # thirty times as fast as the norm on a CPU
    return torch.maximum(-low, high).float()


def cast(x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`x * scale` (float32) rounded to nearest even; what is out of range becomes the largest finite value,
    as TE's casts (`satfinite`) do, infinity included; NaN stays NaN."""
    scale = scale.view(1) if scale.dim() == 0 else scale  # so that bf16 times it is float32
    return (x * scale).clamp_(-FP8_MAX[dtype], FP8_MAX[dtype]).to(dtype)


def current_scale(
    amax: torch.Tensor, dtype: torch.dtype, *, power_of_two: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """(scale, scale_inv) that bring `amax` to the largest value of `dtype`; TE's compute_scale_from_amax.

    1 where amax is 0, infinite or NaN; the largest float where the quotient overflows; with
    `power_of_two` rounded down to one.
    """
    scale = (FP8_MAX[dtype] / amax).clamp(max=_FLOAT_MAX)
    if power_of_two:
        scale = (scale.view(torch.int32) & _SIGN_AND_EXPONENT).view(torch.float32)
    scale = torch.where((amax > 0) & amax.isfinite(), scale, 1.0)
    return scale, scale.reciprocal()


def power_of_two_scale(
    amax: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """`current_scale` rounded down to a power of two: TE's block scaling."""
    return current_scale(amax, dtype, power_of_two=True)


def e8m0_scale(amax: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """(scale, scale_inv) of MXFP8: scale_inv = 2^(e - 127) is the smallest power of two that is at least
    amax / FP8_MAX, e its biased exponent in 8 bits (TE's float_to_e8m0, exp2f and exp2f_rcp)."""
    exponent = e8m0_exponent(amax * (1.0 / FP8_MAX[dtype]))
    scale = (_E8M0_LARGEST - exponent) << _MANTISSA_BITS
    scale = torch.where(exponent == _E8M0_LARGEST, _TWO_TO_MINUS_127, scale).view(torch.float32)
    inverse = exponent << _MANTISSA_BITS
    inverse = torch.where(exponent == 0, _TWO_TO_MINUS_127, inverse).view(torch.float32)
    is_nan = exponent == _E8M0_NAN
    return torch.where(is_nan, math.nan, scale), torch.where(is_nan, math.nan, inverse)


def e8m0_exponent(values: torch.Tensor) -> torch.Tensor:
    """The biased exponents (int32, 0 to 255) of `values >= 0` (float32) rounded up to powers of two."""
    bits = values.view(torch.int32)
    exponent, mantissa = bits >> _MANTISSA_BITS, bits & ~_SIGN_AND_EXPONENT
    is_exact = (mantissa == 0) | ((exponent == 0) & (mantissa <= _TWO_TO_MINUS_127))
    rounded = torch.where(is_exact | (exponent == _E8M0_LARGEST), exponent, exponent + 1)
    rounded = torch.where(values.isinf(), _E8M0_LARGEST, rounded)
    return torch.where(values.isnan(), _E8M0_NAN, rounded).to(torch.int32)


@functools.cache
def _values(fp8: torch.dtype, dtype: torch.dtype) -> torch.Tensor:
    """`[256]`: what each byte means."""
    return torch.arange(256, dtype=torch.uint8).view(fp8).to(dtype)


def _looked_up(data: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`data.to(dtype)`, two to three times as fast on a CPU."""
    return torch.take(_values(data.dtype, dtype), data.view(torch.uint8).long())


@dataclass(frozen=True, slots=True)
class Quantized:
    """A matrix in FP8. Example: data `[256, 512]`, scale_inv `[256, 4]`, tile (1, 128)."""

    data: torch.Tensor
    """`[m, k]` in an FP8 dtype."""
    scale_inv: torch.Tensor
    """float32: a scalar, or `[m / a, k / b]` for tiles of a x b."""
    tile: tuple[int, int] | None = None
    """Elements that share a scale; None: all of them."""

    def t(self) -> "Quantized":
        """The transpose, of the same numbers."""
        if self.tile is None:
            return replace(self, data=self.data.t())
        return Quantized(self.data.t(), self.scale_inv.t(), self.tile[::-1])

    def factor(self, dtype: torch.dtype) -> torch.Tensor:
        """`[m, k]` as a GEMM in `dtype` reads it: scaled, if by tiles, and bare otherwise.

        Exact in bfloat16 too: FP8 has at most 4 significant bits, and tile scales are powers of two.
        """
        bare = self.data.to(dtype) if self.data.is_cuda else _looked_up(self.data, dtype)
        if self.tile is None:
            return bare
        (rows, columns), (m, k) = self.tile, bare.shape
        tiles = bare.reshape(m // rows, rows, k // columns, columns)
        return (tiles * self.scale_inv[:, None, :, None].to(dtype)).view(m, k)

    def dequantize(self) -> torch.Tensor:
        """`[m, k]` float32."""
        return self.factor(torch.float32) * (self.scale_inv if self.tile is None else 1.0)


def quantize_tensor(x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> Quantized:
    """`x` `[m, k]` with one scale."""
    return Quantized(cast(x, scale, dtype), scale.reciprocal())


def quantize_tiles(
    x: torch.Tensor, dtype: torch.dtype, *, tile: tuple[int, int], scaling: Scaling
) -> Quantized:
    """`x` `[m, k]` with a scale for each tile. Raises ValueError when tiles do not cover it exactly."""
    (m, k), (rows, columns) = x.shape, tile
    if m % rows or k % columns:
        raise ValueError(
            f"a [{m}, {k}] matrix cannot be cut into FP8 tiles of {rows} x {columns}: "
            f"its sizes must be multiples of them"
        )
    tiles = x.float().reshape(m // rows, rows, k // columns, columns)
    scale, scale_inv = scaling(tiles.abs().amax(dim=(1, 3)), dtype)
    data = cast(tiles, scale[:, None, :, None], dtype)
    return Quantized(data.view(m, k), scale_inv, tile)


def product(
    a: Quantized, b: Quantized, *, dtype: torch.dtype, gemm_dtype: torch.dtype
) -> torch.Tensor:
    """`a [m, k]`, `b [n, k]` -> `a b^T [m, n]` in `dtype`, summed in float32.

    `gemm_dtype` is that of the factors: float32, or bfloat16 where the machine has such GEMMs, which takes
    the same exact factors but also rounds the sums to bfloat16 before one scale a tensor is multiplied in.
    torch's own FP8 GEMM (`_scaled_mm`) runs on GPUs that have one; on a CPU it takes three times as long as
    this with bfloat16 factors, and as long with float32 ones.
    """
    assert (a.tile is None) == (b.tile is None), "a tensor scale meets tile scales"
    if a.tile is None and a.data.is_cuda and has_fp8_gemm():
        second = b.data.contiguous().t()
        return torch._scaled_mm(
            a.data.contiguous(), second, a.scale_inv.view(()), b.scale_inv.view(()), out_dtype=dtype
        )
    out = a.factor(gemm_dtype) @ b.factor(gemm_dtype).t()
    if a.tile is None:
        out.mul_(a.scale_inv * b.scale_inv)
    return out.to(dtype)


def update_delayed_scaling(
    history: torch.Tensor,
    scale: torch.Tensor,
    fp8_max: torch.Tensor,
    *,
    margin: int = 0,
    amax_compute_algo: str = "most_recent",
) -> None:
    """TE's fused_amax_and_scale_update_after_reduction, in place.

    history `[h, n]` of n tensors: row 0 has the amax of the step that ends, row 1 the oldest, the last row
    the newest before it. It moves up by one, row 0 becomes 0, and scale = fp8_max / 2^margin / amax, amax
    that of row 0 (`most_recent`) or the largest in the window before it moved (`max`). A tensor that was
    not met (amax 0) keeps history and scale; one whose amax is not finite keeps its scale.
    """
    latest, window = history[0], torch.where(history.isnan(), 0.0, history)
    amax = latest if amax_compute_algo == "most_recent" else window.amax(dim=0)
    fresh = (fp8_max * 2.0**-margin / amax).clamp(max=_FLOAT_MAX)
    met = latest != 0
    scale.copy_(torch.where(met & (amax > 0) & amax.isfinite(), fresh, scale))
    moved = history.roll(-1, dims=0)
    moved[0] = 0.0
    history.copy_(torch.where(met, moved, history))


def rounding_error(dtype: torch.dtype, sigma: float = 1.0) -> float:
    """Root mean square error, relative to `sigma`, of rounding N(0, sigma^2) to `dtype`.

    With p mantissa bits the error in the binade from 2^e is uniform in half a unit of the last place, so its
    mean square is 2^(2 (e - p)) / 12; subnormal numbers and saturation are left out.
    """
    bits = {E4M3: 3, E5M2: 2}[dtype]
    below = [math.erf(2.0**e / (sigma * math.sqrt(2.0))) for e in range(-40, 41)]
    binades = zip(range(-40, 40), below, below[1:])
    mean_square = sum(4.0 ** (e - bits) / 12.0 * (high - low) for e, low, high in binades)
    return math.sqrt(mean_square) / sigma
