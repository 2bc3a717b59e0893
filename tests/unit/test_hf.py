"""Names, transforms and configuration of the Hugging Face bridge; no process group."""

import pytest
import torch

from megatron_tlt.models.gpt import ModelConfig
from megatron_tlt.models.hf import (
    ARCHITECTURES,
    Geometry,
    hf_shapes,
    interleave_qkv,
    pad_vocab,
    place_of,
    read_part,
    split_qkv,
    whole_tensors,
)
from megatron_tlt.models.hf_config import (
    architecture_of_model,
    hf_config_from_model,
    model_config_from_hf,
)

GEOMETRY = Geometry(num_attention_heads=4, num_query_groups=2, kv_channels=3, vocab_size=10)
LLAMA = dict(
    architectures=["LlamaForCausalLM"], vocab_size=32000, hidden_size=64, intermediate_size=96,
    num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, rms_norm_eps=1e-5,
    rope_theta=50000.0, max_position_embeddings=128, hidden_act="silu", tie_word_embeddings=False,
)  # fmt: skip
GPT2 = dict(
    architectures=["GPT2LMHeadModel"], vocab_size=301, n_embd=64, n_layer=2, n_head=4, n_positions=32
)


def test_qkv_rows_are_group_major():
    """Megatron's documented order for n=4, g=2: q0 q1 k0 v0 q2 q3 k1 v1."""
    q = torch.tensor([[0], [1], [2], [3]]).repeat_interleave(3, 0)
    k = torch.tensor([[10], [11]]).repeat_interleave(3, 0)
    v = torch.tensor([[20], [21]]).repeat_interleave(3, 0)
    fused = interleave_qkv(q, k, v, num_query_groups=2)
    assert fused[::3, 0].tolist() == [0, 1, 10, 20, 2, 3, 11, 21]
    for got, want in zip(split_qkv(fused, num_query_groups=2, kv_channels=3), (q, k, v), strict=True):
        assert torch.equal(got, want)


def test_padding_appends_zero_rows():
    assert pad_vocab(torch.ones(3, 2), 5).tolist() == [[1, 1]] * 3 + [[0, 0]] * 2


PARAMETERS = [
    # Megatron name, TP-1 shape with h=8, f=6 (16 padded vocabulary rows)
    ("embedding.word_embeddings.weight", (16, 8)),
    ("decoder.layers.3.self_attention.linear_qkv.weight", (24, 8)),
    ("decoder.layers.3.self_attention.linear_qkv.bias", (24,)),
    ("decoder.layers.3.self_attention.linear_proj.weight", (8, 12)),
    ("decoder.layers.3.mlp.linear_fc1.weight", (12, 8)),
    ("decoder.layers.3.mlp.linear_fc2.weight", (8, 6)),
    ("decoder.layers.3.input_layernorm.weight", (8,)),
    ("decoder.layers.3.self_attention.linear_qkv.layer_norm_weight", (8,)),
]


@pytest.mark.parametrize("name,shape", PARAMETERS)
@pytest.mark.parametrize("tp_size", [1, 2])
def test_parts_of_all_tp_ranks_make_up_the_whole_tensors(name, shape, tp_size):
    place = place_of(ARCHITECTURES["LlamaForCausalLM"], name)
    local = list(shape)
    if place.layout != "replicated":
        local[1 if place.layout == "columns" else 0] //= tp_size
    shapes = hf_shapes(place, tuple(local), GEOMETRY, tp_size=tp_size)
    weights = {n: torch.randn(s) for n, s in zip(place.hf, shapes, strict=True)}
    pieces = [
        read_part(place, weights, tuple(local), GEOMETRY, tp_rank=rank, tp_size=tp_size)
        for rank in range(tp_size)
    ]
    assert all(tuple(piece.shape) == tuple(local) for piece in pieces)
    for hf_name, whole in whole_tensors(place, torch.stack(pieces), GEOMETRY):
        assert torch.equal(whole, weights.pop(hf_name))
    assert not weights


@pytest.mark.parametrize(
    "suffix,hf_shape",
    [("self_attention.linear_qkv", (8, 36)), ("mlp.linear_fc1", (8, 6)), ("mlp.linear_fc2", (6, 8))],
)
def test_gpt2_conv1d_weights_are_stored_transposed(suffix, hf_shape):
    place = place_of(ARCHITECTURES["GPT2LMHeadModel"], f"decoder.layers.0.{suffix}.weight")
    heads = Geometry(num_attention_heads=4, num_query_groups=4, kv_channels=3, vocab_size=10)
    weights = {place.hf[0]: torch.randn(hf_shape)}
    part = read_part(place, weights, hf_shape[::-1], heads, tp_rank=0, tp_size=1)
    ((_, back),) = whole_tensors(place, part[None], heads)
    assert torch.equal(back, weights[place.hf[0]])
    if suffix.endswith("qkv"):  # head 1's query rows are c_attn columns 3..6, Megatron rows 9..12
        assert torch.equal(part[9:12], weights[place.hf[0]][:, 3:6].t())


def test_unknown_parameter_and_wrong_shape_are_refused_by_name():
    llama = ARCHITECTURES["LlamaForCausalLM"]
    with pytest.raises(ValueError, match="q_layernorm"):
        place_of(llama, "decoder.layers.0.self_attention.q_layernorm.weight")
    place = place_of(llama, "decoder.final_layernorm.weight")
    with pytest.raises(ValueError, match=r"model.norm.weight has shape \(4,\).*\(8,\)"):
        read_part(place, {"model.norm.weight": torch.ones(4)}, (8,), GEOMETRY, tp_rank=0, tp_size=1)


def test_every_field_of_a_llama_config_arrives():
    model = model_config_from_hf(LLAMA | dict(head_dim=32))
    assert (model.num_layers, model.hidden_size, model.ffn_hidden_size) == (2, 64, 96)
    assert (model.num_attention_heads, model.num_query_groups, model.kv_channels) == (4, 2, 32)
    assert (model.rotary_base, model.norm_epsilon, model.max_position_embeddings) == (
        50000, 1e-5, 128,
    )  # fmt: skip
    assert model.untie_embeddings_and_output_weights and model.swiglu and not model.add_qkv_bias


def test_transformers_5_rope_parameters_are_read():
    scaled = dict(
        rope_theta=500000.0, rope_type="llama3", factor=32.0, low_freq_factor=1.0,
        high_freq_factor=4.0, original_max_position_embeddings=8192,
    )  # fmt: skip
    config = {k: v for k, v in LLAMA.items() if k != "rope_theta"} | dict(rope_parameters=scaled)
    model = model_config_from_hf(config)
    assert (model.rotary_base, model.rotary_scaling_factor) == (500000, 32.0)


@pytest.mark.parametrize(
    "change,named",
    [
        (dict(rope_scaling=dict(type="yarn", factor=4.0)), "yarn"),
        (dict(rope_scaling=dict(rope_type="linear", factor=2.0)), "linear"),
        (dict(rope_scaling=dict(rope_type="llama3", factor=8.0, low_freq_factor=2.0)), "2.0"),
        (dict(partial_rotary_factor=0.5), "partial_rotary_factor=0.5"),
        (dict(rope_theta=10000.5), "10000.5"),
        (dict(hidden_act="gelu"), "hidden_act='gelu'"),
        (dict(attention_bias=True), "attention_bias=True"),
        (dict(quantization_config=dict(bits=4)), "quantization_config"),
        (dict(architectures=["MixtralForCausalLM"]), "MixtralForCausalLM"),
        (dict(architectures=["Qwen2ForCausalLM"], use_sliding_window=True), "use_sliding_window"),
        (dict(architectures=["Qwen3ForCausalLM"], attention_bias=True), "attention_bias"),
        (GPT2 | dict(activation_function="relu"), "relu"),
        (GPT2 | dict(scale_attn_by_inverse_layer_idx=True), "scale_attn_by_inverse_layer_idx"),
    ],
)
def test_what_cannot_be_represented_is_refused_by_field_and_value(change, named):
    with pytest.raises(ValueError, match=named):
        model_config_from_hf(LLAMA | change)


MODELS = {
    "GPT2LMHeadModel": dict(preset="tiny-gpt2"),
    "LlamaForCausalLM": dict(preset="tiny-llama", kv_channels=32, rotary_scaling_factor=8.0),
    "Qwen2ForCausalLM": dict(preset="tiny-llama", add_qkv_bias=True, norm_epsilon=1e-6),
    "Qwen3ForCausalLM": dict(preset="tiny-llama", qk_layernorm=True, kv_channels=32),
}


@pytest.mark.parametrize("architecture", MODELS)
def test_model_config_survives_the_way_out_and_back(architecture):
    model = ModelConfig(**MODELS[architecture])
    assert architecture_of_model(model).name == architecture
    config = hf_config_from_model(model, vocab_size=301, eos_token_id=2)
    assert config["vocab_size"] == 301 and config["eos_token_id"] == 2
    back = model_config_from_hf(config, seq_length=model.seq_length)
    model.preset = None
    assert back == model


def test_models_without_an_architecture_are_refused_by_field():
    with pytest.raises(ValueError, match="swiglu=False"):
        architecture_of_model(ModelConfig(preset="tiny-llama", swiglu=False))
    with pytest.raises(ValueError, match="kv_channels"):
        architecture_of_model(ModelConfig(preset="tiny-llama", add_qkv_bias=True, kv_channels=32))
