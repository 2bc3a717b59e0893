"""The local layer and its fast paths against megatron-core's own local layer and plain PyTorch."""

import pytest

from megatron_tlt.models.backend import LocalRMSNorm, local_layer_spec
from megatron_tlt.models.gpt import ModelConfig, build_chunks, transformer_config
from megatron_tlt.models.initialize import initialize_parameters
from megatron_tlt.ops import linear as linear_module
from megatron_tlt.ops.fused import rotary_tables, split_rotary, swiglu
from megatron_tlt.ops.linear import embedding, linear
from megatron_tlt.parallel import ParallelConfig, init_parallel
from megatron_tlt.train.optimizer import OptimizerConfig, build_optimizer, wrap_data_parallel
from megatron_tlt.train.step import clip_and_update

import torch
import torch.nn.functional as F
from megatron.core.models.common.embeddings import RotaryEmbedding
from megatron.core.models.common.embeddings.rope_utils import apply_rotary_pos_emb
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.transformer.spec_utils import build_module

S, B, H = 12, 2, 32
LAYERS = {
    "GELU, LayerNorm, biases, MHA": dict(
        swiglu=False, normalization="LayerNorm", add_bias_linear=True, position="none", groups=4
    ),
    "tanh GELU, LayerNorm, MHA": dict(
        swiglu=False, normalization="LayerNorm", openai_gelu=True, position="none", groups=4
    ),
    "SwiGLU, RMSNorm, GQA, RoPE": dict(swiglu=True, position="rope", groups=2),
    "SwiGLU, RMSNorm, MHA, RoPE, qkv bias": dict(
        swiglu=True, position="rope", groups=4, add_qkv_bias=True
    ),
    "SwiGLU, GQA, RoPE, qk norm": dict(swiglu=True, position="rope", groups=1, qk_layernorm=True),
}


@pytest.fixture(scope="module")
def parallel():
    torch.set_num_threads(1)
    return init_parallel(ParallelConfig(), seed=1)


def close(ours, theirs, tolerance=1e-5):
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


def layer_config(*, position, groups, **fields):
    model = ModelConfig(
        num_layers=2, hidden_size=H, num_attention_heads=4, num_query_groups=groups,
        ffn_hidden_size=48, seq_length=S, **fields,
    )  # fmt: skip
    return transformer_config(model, ParallelConfig(), params_dtype=torch.float32)


def run(layer, inputs, rotary, mask):
    hidden = inputs.clone().requires_grad_()
    output, _ = layer(hidden, mask, rotary_pos_emb=rotary)
    output.square().sum().backward()
    return output, hidden.grad, {name: p.grad for name, p in layer.named_parameters()}


@pytest.mark.parametrize("masked", [False, True], ids=["causal", "mask argument"])
@pytest.mark.parametrize("name", LAYERS)
def test_output_and_gradients_equal_megatrons_own_local_layer(name, masked, parallel):
    config = layer_config(**LAYERS[name])
    qk_layernorm = config.qk_layernorm
    theirs_spec = get_gpt_layer_local_spec(
        qk_layernorm=qk_layernorm, normalization=config.normalization
    )
    options = dict(config=config, layer_number=1, pg_collection=parallel.groups)
    ours = build_module(local_layer_spec(qk_layernorm=qk_layernorm), **options)
    theirs = build_module(theirs_spec, **options)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for number, p in enumerate(ours.parameters()):
            p.normal_(1.0 if p.dim() == 1 and number == 0 else 0.0, 0.2, generator=generator)
        values = dict(ours.named_parameters())
        for theirs_name, p in theirs.named_parameters():
            p.copy_(values[theirs_name])
    rotary = None
    if LAYERS[name]["position"] == "rope":
        table = RotaryEmbedding(H // 4, 1.0, use_cpu_initialization=True)
        rotary = table(S)
    mask = torch.ones(S, S, dtype=torch.bool).triu(1)[None, None]
    if masked:
        mask = mask | (torch.arange(S) == 3) & (torch.arange(S)[:, None] > 3)
    inputs = torch.randn(S, B, H, generator=generator)
    ours_result = run(ours, inputs, rotary, mask if masked else None)
    theirs_result = run(theirs, inputs, rotary, mask)
    for mine, reference in zip(ours_result[:2], theirs_result[:2], strict=True):
        close(mine, reference)
    assert ours_result[2].keys() == theirs_result[2].keys()
    for key, grad in theirs_result[2].items():
        close(ours_result[2][key], grad, 1e-4)


def test_swiglu_equals_silu_times_up():
    x = torch.randn(5, 3, 14, dtype=torch.float64, requires_grad=True)
    gate, up = x.chunk(2, dim=-1)
    assert torch.allclose(swiglu(x), F.silu(gate) * up)
    assert torch.autograd.gradcheck(swiglu, x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm_equals_torchs(dtype):
    ours, theirs = LocalRMSNorm(16, eps=1e-5, dtype=dtype), torch.nn.RMSNorm(16, 1e-5, dtype=dtype)
    with torch.no_grad():
        ours.weight.copy_(torch.linspace(0.5, 2.0, 16))
        theirs.weight.copy_(ours.weight)
    x = torch.randn(6, 4, 16).to(dtype)
    results = []
    for norm in (ours, theirs):
        leaf = x.clone().requires_grad_()
        (norm(leaf).float() ** 3).sum().backward()
        results.append((norm(leaf), leaf.grad, norm.weight.grad))
    for mine, reference in zip(*results, strict=True):
        scale = 1e-5 if dtype == torch.float32 else 3e-2
        close(mine.float(), reference.float(), scale * float(reference.detach().abs().max()))


@pytest.mark.parametrize("per_group", [1, 3])
def test_split_rotary_equals_split_then_megatrons_rotation(per_group, parallel):
    groups, d = 2, 8
    table = RotaryEmbedding(d, 1.0, use_cpu_initialization=True)
    angles = table(S)
    mixed = torch.randn(S, B, groups * (per_group + 2) * d, requires_grad=True)
    parts = mixed.view(S, B, groups, per_group + 2, d).split((per_group, 1, 1), dim=3)
    expected = [part.reshape(S, B, -1, d) for part in parts]
    config = layer_config(swiglu=True, position="rope", groups=2)
    cp = parallel.groups.cp
    expected[:2] = [apply_rotary_pos_emb(x, angles, config, cp_group=cp) for x in expected[:2]]
    ours = split_rotary(
        mixed, groups=groups, per_group=per_group, tables=rotary_tables(angles, torch.float32)
    )
    weights = [torch.randn_like(x) for x in expected]
    grads = [
        torch.autograd.grad(sum((w * x).sum() for w, x in zip(weights, side)), mixed)[0]
        for side in (ours, expected)
    ]
    for mine, reference in zip([*ours, grads[0]], [*expected, grads[1]], strict=True):
        close(mine, reference)


def test_linear_adds_its_weight_gradient_to_main_grad():
    x, bias = torch.randn(3, 2, 5), torch.randn(4)
    weight = torch.nn.Parameter(torch.randn(4, 5))
    expected = torch.autograd.grad(F.linear(x, weight, bias).square().sum(), weight)[0]
    plain = torch.autograd.grad(linear(x, weight, bias).square().sum(), weight)[0]
    close(plain, expected)
    weight.main_grad, weight.grad_added_to_main_grad = torch.ones(4, 5), False
    linear(x, weight, bias).square().sum().backward()
    close(weight.main_grad, expected + 1.0)
    assert weight.grad_added_to_main_grad


def test_embedding_adds_the_rows_that_occur_to_main_grad():
    tokens = torch.tensor([[1, 4, 1], [0, 4, 4]])
    weight = torch.nn.Parameter(torch.randn(6, 3))
    upstream = torch.randn(2, 3, 3)
    expected = torch.autograd.grad((F.embedding(tokens, weight) * upstream).sum(), weight)[0]
    weight.main_grad, weight.grad_added_to_main_grad = torch.ones(6, 3), False
    (embedding(tokens, weight) * upstream).sum().backward()
    close(weight.main_grad, expected + 1.0)


@pytest.mark.parametrize("native", [False, True], ids=["float32 GEMM", "native bf16 GEMM"])
def test_bf16_linear_rounds_the_float32_product_once(native, monkeypatch):
    monkeypatch.setattr(linear_module, "native_bf16_gemm", lambda: native)
    x = torch.randn(7, 16).bfloat16().requires_grad_()
    weight = torch.randn(8, 16).bfloat16().requires_grad_()
    output = linear(x, weight)
    exact = x.double() @ weight.double().t()
    assert output.dtype == torch.bfloat16
    close(output.double(), exact, 2**-7)
    output.backward(torch.ones_like(output))
    close(weight.grad.double(), torch.ones(8, 7).double() @ x.detach().double(), 2**-6)


@pytest.mark.parametrize("preset", ["tiny-gpt2", "tiny-llama"])
def test_main_grad_after_two_backward_passes_equals_autograds(preset, parallel):
    """Tied (GPT-2) and untied (Llama) ends: both passes are summed, embedding and head included."""
    model = ModelConfig(preset=preset, num_layers=1)
    batches = [torch.randint(0, 50, (2, 9), generator=torch.Generator().manual_seed(i)) for i in (1, 2)]
    sums = []
    for wrapped in (False, True):
        chunks = build_chunks(model, parallel, vocab_size=50)
        initialize_parameters(chunks, seed=1, vocab_size=50)
        runner = chunks[0]
        if wrapped:
            (runner,) = wrap_data_parallel(chunks, OptimizerConfig(), parallel)
            runner.zero_grad_buffer()
        for batch in batches:
            positions = torch.arange(8).expand(2, -1)
            runner(batch[:, :-1], positions, None, labels=batch[:, 1:]).sum().backward()
        named = chunks[0].named_parameters()
        sums.append({n: p.main_grad if wrapped else p.grad for n, p in named})
    for name, expected in sums[0].items():
        close(sums[1][name], expected, 1e-4)


def test_clipping_inside_adamw_equals_clipping_before_it(parallel):
    results = []
    for inside in (True, False):
        chunks = build_chunks(ModelConfig(preset="tiny-llama", num_layers=1), parallel, vocab_size=50)
        initialize_parameters(chunks, seed=1, vocab_size=50)
        config = OptimizerConfig(lr=1e-2)
        wrapped = wrap_data_parallel(chunks, config, parallel)
        optimizer = build_optimizer(wrapped, config, parallel)
        for p in chunks[0].parameters():
            p.main_grad.copy_(torch.linspace(-1, 1, p.numel()).view(p.shape))
        optimizer.prepare_grads()
        norm = float(optimizer.get_grad_norm())
        assert norm > config.clip_grad
        if inside:
            clip_and_update(optimizer, norm)
        else:
            clip_grad_by_total_norm_fp32(optimizer.get_parameters(), config.clip_grad, norm)
            optimizer.step_with_ready_grads()
        results.append([p.detach().clone() for p in chunks[0].parameters()])
    for mine, reference in zip(*results, strict=True):
        close(mine, reference, 1e-6)
