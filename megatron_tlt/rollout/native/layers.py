"""Building blocks of the inference model: linear layers, norms, rotary tables.

Legend: t tokens, h hidden, d head dim. No autograd: the engine runs under `torch.inference_mode`.
"""

import math

import torch
import torch.nn.functional as F

from megatron_tlt.ops.linear import native_bf16_gemm
from megatron_tlt.rollout.native.shape import ModelShape

# Up to so many rows a plain GEMM over [in, out] weights was at least as fast as oneDNN's packed weights in
# float32, for a matrix beyond the near caches (such as the head) and for a small one.
_SMALL = 1 << 20
_AVX512 = "AVX512" in torch.backends.cpu.get_cpu_capability()
_PLAIN_ROWS_LARGE, _PLAIN_ROWS_SMALL = (0, 2) if _AVX512 else (2, 16)


class Linear:
    """`y = x W + b` with W kept as `[in, out]`, and packed for oneDNN beside it on a CPU.

    Packed bf16 was 2 to 4 times as fast as torch's own at any number of rows, so it is always taken.
    """

    def __init__(
        self, in_features: int, out_features: int, *, bias: bool, like: torch.Tensor
    ) -> None:
        self.weight = like.new_zeros(in_features, out_features)
        self.bias = like.new_zeros(out_features) if bias else None
        self.packed: torch.Tensor | None = None
        small = in_features * out_features < _SMALL
        self.plain_rows = _PLAIN_ROWS_SMALL if small else _PLAIN_ROWS_LARGE
        if like.dtype == torch.bfloat16:
            self.plain_rows = 0

    def pack(self) -> None:
        """Refresh the packed copy; call after the weight changed."""
        weight = self.weight
        known = torch.backends.mkldnn.is_available() and (
            weight.dtype == torch.float32 or weight.dtype == torch.bfloat16 and native_bf16_gemm()
        )
        if weight.is_cpu and known:
            rows = weight.t().contiguous()
            self.packed = torch.ops.mkldnn._reorder_linear_weight(rows)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """`[t, in]` to `[t, out]`."""
        if self.packed is not None and len(x) > self.plain_rows:
            return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")
        if self.bias is None:
            return torch.mm(x, self.weight)
        return torch.addmm(self.bias, x, self.weight)

    def without_bias(self, x: torch.Tensor) -> torch.Tensor:
        """For a sum over ranks, which must add the bias once."""
        if self.packed is not None and len(x) > self.plain_rows:
            return torch.ops.mkldnn._linear_pointwise(x, self.packed, None, "none", [], "")
        return torch.mm(x, self.weight)

    def added_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """`residual + self(x)`; `residual` may be overwritten."""
        if self.packed is not None and len(x) > self.plain_rows:
            return torch.ops.mkldnn._linear_pointwise.binary(
                x, residual, self.packed, self.bias, "add"
            )
        if self.bias is not None:
            residual.add_(self.bias)
        return residual.addmm_(x, self.weight)


class Norm:
    """RMSNorm, or LayerNorm where there is a bias.

    RMSNorm is written as x / hypot(|x|, sqrt(h eps)) * (weight sqrt(h)): the same function in fewer passes
    than torch's, which took twice as long for the few rows of a decode step.
    """

    def __init__(self, size: int, *, epsilon: float, bias: bool, like: torch.Tensor) -> None:
        self.shape, self.epsilon = (size,), epsilon
        self.weight = like.new_ones(size)
        self.bias = like.new_zeros(size) if bias else None
        self.floor = torch.tensor(math.sqrt(size * epsilon), device=like.device)
        self.pack()

    def pack(self) -> None:
        """Refresh the scaled weight; call after the weight changed."""
        self.scaled = self.weight.float() * math.sqrt(self.shape[0])

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self.bias is not None:
            return F.layer_norm(x, self.shape, self.weight, self.bias, self.epsilon)
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
        length = torch.hypot(length, self.floor)
        if x.dtype == torch.float32:
            return x.div(length).mul_(self.scaled)
        return (x * length.reciprocal_()).mul_(self.scaled).to(x.dtype)


def rotary_order(head_dim: int) -> torch.Tensor:
    """Order that puts Hugging Face's half-split rotary pairs (i, i + d/2) side by side.

    Queries and keys are stored in this order, so that a rotation is one complex product; their scores
    do not change.
    """
    half = torch.arange(head_dim // 2)
    return torch.stack((half, half + head_dim // 2), 1).flatten()


def rotary_table(shape: ModelShape, *, device: torch.device) -> torch.Tensor:
    """`exp(i position frequency)`, complex64 `[max_position_embeddings, d / 2]`."""
    exponent = torch.arange(0, shape.head_dim, 2, dtype=torch.float32) / shape.head_dim
    frequency = _scaled(1.0 / shape.rotary_base**exponent, dict(shape.rope_scaling))
    angles = torch.outer(torch.arange(shape.max_position_embeddings).float(), frequency)
    return torch.polar(torch.ones_like(angles), angles).to(device)


def _scaled(frequency: torch.Tensor, scaling: dict) -> torch.Tensor:
    """Linear or Llama 3 frequency scaling, as `transformers.modeling_rope_utils` defines them."""
    if not scaling:
        return frequency
    factor = scaling["factor"]
    if "low_freq_factor" not in scaling:
        return frequency / factor
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    context = scaling["original_max_position_embeddings"]
    wavelength = 2 * math.pi / frequency
    smooth = ((context / wavelength - low) / (high - low)).clamp(0, 1)
    return (1 - smooth) * frequency / factor + smooth * frequency


def rotate(x: torch.Tensor, table: torch.Tensor) -> None:
    """Rotate `[t, n, d]` (paired order) in place by `table` `[t, 1, d / 2]`."""
    pairs = x.unflatten(-1, (-1, 2))
    if x.dtype == torch.float32:
        torch.view_as_complex(pairs).mul_(table)
    else:
        turned = torch.view_as_complex(pairs.float()) * table
        pairs.copy_(torch.view_as_real(turned))
