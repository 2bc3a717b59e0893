"""Our own layers on a GPU: against the CPU, by torch's FP8 kernel, over NCCL, and the speed of a product."""

import statistics
import time

import pytest

from megatron_tlt import device
from megatron_tlt.ops.fp8 import E4M3, amax_of, current_scale, product, quantize_tensor
from tests.gpu.runs import train
from tests.gpu.workers import gpus, run_on_gpus

import torch

pytestmark = pytest.mark.gpu
LAYOUTS = {
    "TP2": {"tensor_model_parallel_size": 2},
    "TP2+SP": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "PP2": {"pipeline_model_parallel_size": 2},
}
DELAYED = {"fp8": "hybrid", "fp8_recipe": "delayed"}


def quantized(rows: int, columns: int, seed: int, where: torch.device):
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)).to(where)
    return quantize_tensor(x, current_scale(amax_of(x), E4M3)[0], E4M3)


@pytest.mark.skipif(not device.has_fp8_gemm(), reason="this GPU has no FP8 GEMM")
@pytest.mark.parametrize("transposed", [False, True])
def test_torchs_fp8_kernel_gives_what_the_emulation_gives(transposed):
    results = []
    for where in (device.device(), torch.device("cpu")):
        a, b = quantized(64, 256, 1, where), quantized(128, 256, 2, where)
        if transposed:
            a, b = quantized(256, 64, 1, where).t(), quantized(256, 128, 2, where).t()
        results.append(product(a, b, dtype=torch.float32, gemm_dtype=torch.float32).cpu())
    torch.testing.assert_close(results[0], results[1], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("precision", [{}, DELAYED], ids=["bf16", "delayed"])
def test_a_single_gpu_learns(precision):
    losses = train("local", precision)
    assert losses[-1] < losses[0] - 0.5


@pytest.mark.skipif(gpus() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("impl", ["local", "transformer_engine"])
def test_two_gpus_over_nccl_equal_one(impl, layout):
    if impl == "transformer_engine":
        pytest.importorskip("transformer_engine.pytorch")
    expected = train(impl, DELAYED)
    for losses in run_on_gpus(train, 2, impl, DELAYED, layout=LAYOUTS[layout]):
        for mine, reference in zip(losses, expected, strict=True):
            assert mine == pytest.approx(reference, rel=0.005)


@pytest.mark.skipif(not device.has_fp8_gemm(), reason="this GPU has no FP8 GEMM")
def test_the_speed_of_an_fp8_product_is_reported(record_property):
    """4096^3 in TFLOP/s beside bf16: a figure for the report, with no bound to fail."""
    where, size = device.device(), 4096
    a, b = quantized(size, size, 1, where), quantized(size, size, 2, where)
    wide = [torch.randn(size, size, device=where, dtype=torch.bfloat16) for _ in range(2)]
    calls = {
        "fp8": lambda: product(a, b, dtype=torch.bfloat16, gemm_dtype=torch.bfloat16),
        "bf16": lambda: wide[0] @ wide[1].t(),
    }
    for name, call in calls.items():
        times = []
        for _ in range(20):
            device.synchronize()
            before = time.perf_counter()
            call()
            device.synchronize()
            times.append(time.perf_counter() - before)
        speed = 2 * size**3 / statistics.median(times) / 1e12
        record_property(f"{name}_tflops", round(speed, 1))
        print(f"{name}: {speed:.1f} TFLOP/s")
