"""A subnet layer computes what masks on the full layer would, forward and backward; one process."""

from itertools import combinations

import pytest

from megatron_tlt.models.backend import local_layer_spec
from megatron_tlt.models.gpt import ModelConfig, build_chunks
from megatron_tlt.models.initialize import initialize_parameters
from megatron_tlt.parallel import ParallelConfig, init_parallel
from megatron_tlt.subnet.config import EstConfig
from megatron_tlt.subnet.controller import EstSubnets
from megatron_tlt.subnet.draw import LayerPlan, draw_plan
from megatron_tlt.subnet.schedule import build_schedule
from megatron_tlt.subnet.shape import ModelShape
from megatron_tlt.subnet.spec import est_layer_spec

import torch

VOCAB = 96
SHAPES = {
    "GPT-2: MHA, GELU, biases": dict(preset="tiny-gpt2", num_layers=2, seq_length=16),
    "Llama: GQA, SwiGLU": dict(preset="tiny-llama", num_layers=2, seq_length=16),
    "Qwen: GQA, SwiGLU, QKV bias, norms of queries and keys": dict(
        preset="tiny-llama", num_layers=2, seq_length=16, add_qkv_bias=True, qk_layernorm=True
    ),
    "MHA, SwiGLU, biases": dict(
        preset="tiny-llama", num_layers=2, seq_length=16, num_query_groups=4, add_bias_linear=True
    ),
}
FULL_RATES = {"layers": 1, "heads": 1, "mlp": 1}
RATES = {
    "heads": {"heads": "1/2"},
    "mlp": {"mlp": "3/4"},
    "layers": {"layers": "1/2"},
    "together": {"layers": "1/2", "heads": "1/2", "mlp": "1/2"},
}


@pytest.fixture(scope="module")
def parallel():
    torch.set_num_threads(1)
    return init_parallel(ParallelConfig(), seed=1)


def build(parallel, spec, **shape):
    model = ModelConfig(**shape)
    (chunk,) = build_chunks(
        model, parallel, vocab_size=VOCAB, params_dtype=torch.float64, layer_spec=spec
    )
    initialize_parameters([chunk], seed=3, vocab_size=VOCAB)
    with torch.no_grad():  # biases that are zero could hide a wrong scale
        for name, param in sorted(chunk.named_parameters()):
            if name.endswith("bias"):
                param.copy_(torch.linspace(-0.5, 0.5, param.numel()))
    return model, chunk


def subnets_of(parallel, model, chunk, **options):
    options = {"schedule": "practical", "order": ["layers+heads+mlp"], "ends": [1]} | options
    schedule = build_schedule(
        EstConfig(**options),
        ModelShape.of(model, padded_vocab_size=128),
        train_iters=10,
        seed=5,
        tokens_after=lambda n: n,
    )
    subnets = EstSubnets(schedule, parallel)
    subnets.attach([chunk])
    return subnets


def loss_and_gradients(chunk):
    tokens = torch.arange(32).view(2, 16) * 7 % VOCAB
    positions = torch.arange(16)[None].expand(2, -1)
    chunk.zero_grad()
    losses = chunk(tokens, positions, None, labels=tokens.roll(-1, dims=1))
    losses.sum().backward()
    grads = {
        name: torch.zeros_like(p) if p.grad is None else p.grad
        for name, p in chunk.named_parameters()
    }
    return losses.detach(), grads


def mask_layer(layer, plan, pools):
    """The same subnet by masks on a full layer: inputs of linear_proj and linear_fc2 times 0 or the scale."""
    config = layer.config
    if plan is None:
        layer.register_forward_hook(
            lambda module, args, kwargs, out: (kwargs["hidden_states"], None), with_kwargs=True
        )
        return
    for linear, units, total, scale in (
        (layer.self_attention.linear_proj, plan.heads, pools.heads.total, plan.head_scale),
        (layer.mlp.linear_fc2, plan.mlp, pools.mlp.total, plan.mlp_scale),
    ):
        width = config.num_attention_heads * config.kv_channels
        width = width if linear is layer.self_attention.linear_proj else config.ffn_hidden_size
        mask = torch.zeros(total, width // total, dtype=torch.float64)
        mask[list(range(total) if units is None else units)] = scale
        linear.register_forward_pre_hook(lambda _, args, mask=mask.flatten(): (args[0] * mask,))


@pytest.mark.parametrize("gqa_unit", ["heads", "groups"])
@pytest.mark.parametrize("draw", ["random", "nested"])
@pytest.mark.parametrize("rates", RATES)
@pytest.mark.parametrize("shape", SHAPES)
def test_slices_equal_masks_in_outputs_and_gradients(parallel, shape, rates, draw, gqa_unit):
    model, ours = build(parallel, est_layer_spec, **SHAPES[shape])
    options = FULL_RATES | RATES[rates] | {"draw": draw, "gqa_unit": gqa_unit}
    subnets = subnets_of(parallel, model, ours, **options)
    plan = subnets.begin_step(2)
    assert not plan.is_full
    _, masked = build(parallel, local_layer_spec, **SHAPES[shape])
    for layer, layer_plan in zip(masked.decoder.layers, plan.layers, strict=True):
        mask_layer(layer, layer_plan, subnets.schedule.pools)
    losses, grads = loss_and_gradients(ours)
    expected_losses, expected = loss_and_gradients(masked)
    torch.testing.assert_close(losses, expected_losses, rtol=0, atol=1e-6)
    assert grads.keys() == expected.keys()
    for name in grads:
        torch.testing.assert_close(grads[name], expected[name], rtol=0, atol=1e-6, msg=name)
    dense_losses, _ = loss_and_gradients(build(parallel, local_layer_spec, **SHAPES[shape])[1])
    assert (losses - dense_losses).abs().max() > 1e-3


@pytest.mark.parametrize("shape", SHAPES)
def test_the_mean_over_all_draws_is_the_full_output(parallel, shape):
    """Every choice of heads and of blocks, each with its scale: C(n, k) outputs average to the full one."""
    model, chunk = build(parallel, est_layer_spec, **SHAPES[shape])
    groups = subnets_of(parallel, model, chunk, mlp_block_size=model.ffn_hidden_size // 4,
                        gqa_unit="groups", tp_strata=1)  # fmt: skip
    pools, layer = groups.schedule.pools, chunk.decoder.layers[0]
    x = torch.randn(16, 2, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for module, name, total in (
        (layer.self_attention, "heads", pools.heads.total), (layer.mlp, "mlp", pools.mlp.total)
    ):  # fmt: skip
        call = {"attention_mask": None} if name == "heads" else {}
        layer.set_full()
        full = module(x, **call)[0]
        for count in range(1, total):
            outputs = []
            for units in combinations(range(total), count):
                scale = {"head_scale" if name == "heads" else "mlp_scale": total / count}
                plan = {"heads": None, "mlp": None, "head_scale": 1.0, "mlp_scale": 1.0}
                layer.set_plan(LayerPlan(layer=0, **(plan | {name: units} | scale)), pools)
                outputs.append(module(x, **call)[0])
            mean = torch.stack(outputs).mean(dim=0)
            torch.testing.assert_close(mean, full, rtol=0, atol=1e-6)
            assert (outputs[0] - full).abs().max() > 1e-6


def test_query_heads_inside_groups_average_to_the_full_output_too(parallel):
    shape = SHAPES["Llama: GQA, SwiGLU"]
    model, chunk = build(parallel, est_layer_spec, **shape)
    subnets = subnets_of(parallel, model, chunk, gqa_unit="heads")
    pools, layer = subnets.schedule.pools, chunk.decoder.layers[0]
    x = torch.randn(16, 2, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    full = layer.self_attention(x, attention_mask=None)[0]
    outputs = []
    for units in [(a, b) for a in (0, 1) for b in (2, 3)]:  # one of two heads in each of two groups
        plan = LayerPlan(layer=0, heads=units, mlp=None, head_scale=2.0, mlp_scale=1.0)
        layer.set_plan(plan, pools)
        outputs.append(layer.self_attention(x, attention_mask=None)[0])
    torch.testing.assert_close(torch.stack(outputs).mean(dim=0), full, rtol=0, atol=1e-6)


def test_layer_scale_makes_the_expected_residual_branch_whole(parallel):
    """With one of two layers kept and scaled by 2, biases included, the mean over both choices of the sum of
    branches at a fixed input is the sum of both branches."""
    model, chunk = build(parallel, est_layer_spec, **SHAPES["GPT-2: MHA, GELU, biases"])
    subnets = subnets_of(parallel, model, chunk, heads=1, mlp=1, layer_scale="inverse_rate",
                         pp_strata=1)  # fmt: skip
    plans = {draw_plan(subnets.schedule, step).layers for step in range(10)}
    assert len(plans) == 2
    x = torch.randn(16, 2, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    attentions = [layer.self_attention for layer in chunk.decoder.layers]
    both = sum(attention(x, attention_mask=None)[0] for attention in attentions)
    total = 0
    for layers in plans:
        for layer, plan in zip(chunk.decoder.layers, layers):
            if plan is not None:
                layer.set_plan(plan, subnets.schedule.pools)
                total = total + layer.self_attention(x, attention_mask=None)[0]
    torch.testing.assert_close(total / 2, both, rtol=0, atol=1e-6)


def test_the_parameters_are_those_of_an_ordinary_model(parallel):
    shape = SHAPES["Llama: GQA, SwiGLU"]
    model, ours = build(parallel, est_layer_spec, **shape)
    _, plain = build(parallel, local_layer_spec, **shape)
    subnets_of(parallel, model, ours).begin_step(0)
    assert {n: p.shape for n, p in ours.named_parameters()} == {
        n: p.shape for n, p in plain.named_parameters()
    }
    metadata = {"dp_cp_group": parallel.groups.dp_cp}
    assert ours.sharded_state_dict(metadata=metadata).keys() == (
        plain.sharded_state_dict(metadata=metadata).keys()
    )


def test_full_model_is_exactly_the_dense_model_and_the_plan_comes_back(parallel):
    model, ours = build(parallel, est_layer_spec, **SHAPES["Llama: GQA, SwiGLU"])
    _, plain = build(parallel, local_layer_spec, **SHAPES["Llama: GQA, SwiGLU"])
    subnets = subnets_of(parallel, model, ours)
    subnets.begin_step(0)
    small = loss_and_gradients(ours)[0]
    with subnets.full_model():
        assert torch.equal(loss_and_gradients(ours)[0], loss_and_gradients(plain)[0])
    assert torch.equal(loss_and_gradients(ours)[0], small)


def test_a_model_without_subnet_layers_is_refused(parallel):
    model, plain = build(parallel, local_layer_spec, **SHAPES["Llama: GQA, SwiGLU"])
    with pytest.raises(ValueError, match="no subnet layers: build it with layer_spec=est_layer_spec"):
        subnets_of(parallel, model, plain)


def test_skipped_rows_and_layers_are_really_not_computed(parallel):
    """Multiply-adds that torch counts in forward and backward equal the FLOPs meter's, but for attention,
    whose kernel is counted by hand: so nothing is computed and thrown away."""
    from torch.utils.flop_counter import FlopCounterMode

    model, ours = build(parallel, est_layer_spec, **SHAPES["GPT-2: MHA, GELU, biases"])
    subnets = subnets_of(parallel, model, ours)
    counts = {}
    for name in ("full", "subnet"):
        if name == "subnet":
            subnets.begin_step(0)
        with FlopCounterMode(display=False) as counter:
            loss_and_gradients(ours)
        by_op = counter.get_flop_counts()["Global"]
        counts[name] = sum(v for op, v in by_op.items() if "attention" not in str(op))
    head = 6 * 64 * 128 * 32
    assert counts["subnet"] - head == pytest.approx((counts["full"] - head) / 4)
