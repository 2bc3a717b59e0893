"""`config.json` of Hugging Face <-> ModelConfig. What we cannot represent is refused by field and value.

Fields that a `config.json` leaves out take transformers' defaults for that architecture, listed here.
"""

from collections.abc import Mapping

from megatron_tlt.models.gpt import ModelConfig
from megatron_tlt.models.hf import ARCHITECTURES, Architecture

Config = Mapping[str, object]

# transformers' defaults for fields that change the result and may be absent from config.json.
_LLAMA_DEFAULTS = dict(
    hidden_act="silu", rms_norm_eps=1e-6, tie_word_embeddings=False, max_position_embeddings=2048,
    attention_bias=False, mlp_bias=False,
)  # fmt: skip
_DEFAULTS: dict[str, dict[str, object]] = {
    "GPT2LMHeadModel": dict(
        activation_function="gelu_new", layer_norm_epsilon=1e-5, tie_word_embeddings=True,
        n_positions=1024, scale_attn_weights=True, scale_attn_by_inverse_layer_idx=False,
        add_cross_attention=False,
    ),
    "LlamaForCausalLM": _LLAMA_DEFAULTS,
    "Qwen2ForCausalLM": _LLAMA_DEFAULTS | dict(max_position_embeddings=32768),
    "Qwen3ForCausalLM": _LLAMA_DEFAULTS | dict(max_position_embeddings=32768, head_dim=128),
}  # fmt: skip

# Fields that must have this value, for what they switch on is not built.
_REQUIRED: dict[str, dict[str, object]] = {
    "GPT2LMHeadModel": dict(
        scale_attn_weights=True, scale_attn_by_inverse_layer_idx=False, add_cross_attention=False
    ),
    "LlamaForCausalLM": dict(hidden_act="silu"),
    "Qwen2ForCausalLM": dict(hidden_act="silu", use_sliding_window=False),
    "Qwen3ForCausalLM": dict(hidden_act="silu", use_sliding_window=False, attention_bias=False),
}
_GELU = {"gelu": False, "gelu_new": True, "gelu_pytorch_tanh": True}  # -> openai_gelu
# The only Llama-3 scaling that megatron-core 0.16.1 knows; its factor is free.
_LLAMA3_SCALING = dict(
    low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192
)


def architecture_of_hf(config: Config) -> Architecture:
    """The table of `config["architectures"]`. Raises ValueError for an architecture we do not know."""
    names = config.get("architectures") or []
    if len(names) != 1 or names[0] not in ARCHITECTURES:
        raise ValueError(
            f"config.json: architectures={names!r} is not supported; supported: "
            f"{', '.join(ARCHITECTURES)}"
        )
    return ARCHITECTURES[names[0]]


def model_config_from_hf(config: Config, *, seq_length: int | None = None) -> ModelConfig:
    """The ModelConfig of a `config.json`; `seq_length` defaults to the longest the model can do.

    Raises ValueError, naming field and value, for what cannot be represented exactly.
    """
    architecture = architecture_of_hf(config)
    values = _DEFAULTS[architecture.name] | {k: v for k, v in config.items() if v is not None}
    for field, required in _REQUIRED[architecture.name].items():
        if values.get(field, required) != required:
            _refuse(field, values[field], f"only {required!r} is")
    if values.get("quantization_config"):
        _refuse("quantization_config", values["quantization_config"], "dequantise the weights first")
    convert = _from_gpt2 if architecture.name == "GPT2LMHeadModel" else _from_llama_like
    fields = convert(values, architecture)
    longest = fields["max_position_embeddings"]
    return ModelConfig(seq_length=longest if seq_length is None else seq_length, **fields)


def _refuse(field: str, value: object, remedy: str) -> None:
    raise ValueError(f"config.json: {field}={value!r} is not supported: {remedy}")


def _from_gpt2(values: dict[str, object], architecture: Architecture) -> dict[str, object]:
    activation = values["activation_function"]
    if activation not in _GELU:
        _refuse("activation_function", activation, f"only {sorted(_GELU)} are")
    return dict(
        num_layers=values["n_layer"],
        hidden_size=values["n_embd"],
        ffn_hidden_size=values.get("n_inner") or 4 * values["n_embd"],
        num_attention_heads=values["n_head"],
        max_position_embeddings=values["n_positions"],
        position_embedding_type="learned_absolute",
        normalization="LayerNorm",
        norm_epsilon=values["layer_norm_epsilon"],
        swiglu=False,
        openai_gelu=_GELU[activation],
        add_bias_linear=True,
        add_qkv_bias=True,
        untie_embeddings_and_output_weights=not values["tie_word_embeddings"],
    )


def _from_llama_like(values: dict[str, object], architecture: Architecture) -> dict[str, object]:
    base, scaling = _rotary(values)
    bias = _linear_bias(values, architecture)
    return dict(
        num_layers=values["num_hidden_layers"],
        hidden_size=values["hidden_size"],
        ffn_hidden_size=values["intermediate_size"],
        num_attention_heads=values["num_attention_heads"],
        num_query_groups=values.get("num_key_value_heads"),
        kv_channels=values.get("head_dim"),
        max_position_embeddings=values["max_position_embeddings"],
        position_embedding_type="rope",
        rotary_base=base,
        rotary_scaling_factor=scaling,
        normalization="RMSNorm",
        norm_epsilon=values["rms_norm_eps"],
        swiglu=True,
        add_bias_linear=bias,
        add_qkv_bias=bias or architecture.name == "Qwen2ForCausalLM",
        qk_layernorm=architecture.name == "Qwen3ForCausalLM",
        untie_embeddings_and_output_weights=not values["tie_word_embeddings"],
    )


def _linear_bias(values: dict[str, object], architecture: Architecture) -> bool:
    """Whether all linears have biases; only Llama can, and only all or none."""
    if architecture.name != "LlamaForCausalLM":
        return False
    attention, mlp = values["attention_bias"], values["mlp_bias"]
    if attention != mlp:
        raise ValueError(
            f"config.json: attention_bias={attention!r} with mlp_bias={mlp!r} is not supported: "
            "the biases of all linear layers go together"
        )
    return bool(attention)


def rotary_fields(config: Config) -> dict[str, object]:
    """Rotary settings of any transformers version: `rope_theta` + `rope_scaling` as files up to
    transformers 4 spell them, or the one `rope_parameters` of version 5. Example: {"rope_type":
    "default", "rope_theta": 10000.0}."""
    merged = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    merged["rope_type"] = merged.pop("rope_type", None) or merged.pop("type", None) or "default"
    merged.pop("type", None)
    merged.setdefault("rope_theta", config.get("rope_theta") or 10000.0)
    partial = config.get("partial_rotary_factor")
    merged.setdefault("partial_rotary_factor", 1.0 if partial is None else partial)
    return merged


def _rotary(values: Config) -> tuple[int, float | None]:
    """(base, Llama-3 scaling factor or None)."""
    rope = rotary_fields(values)
    if rope["partial_rotary_factor"] != 1.0:
        _refuse("partial_rotary_factor", rope["partial_rotary_factor"], "only 1.0 is")
    if int(rope["rope_theta"]) != rope["rope_theta"]:
        _refuse("rope_theta", rope["rope_theta"], "only whole numbers are")
    if rope["rope_type"] == "default":
        return int(rope["rope_theta"]), None
    if rope["rope_type"] != "llama3":
        _refuse("rope_scaling.rope_type", rope["rope_type"], "only 'default' and 'llama3' are")
    for field, required in _LLAMA3_SCALING.items():
        if rope.get(field) != required:
            _refuse(f"rope_scaling.{field}", rope.get(field), f"only {required} is")
    return int(rope["rope_theta"]), float(rope["factor"])


def architecture_of_model(model: ModelConfig) -> Architecture:
    """The Hugging Face architecture that can hold this model.

    Raises ValueError naming the fields that fit no architecture.
    """
    kind = (model.normalization, model.position_embedding_type, model.swiglu)
    head_dim = model.hidden_size // model.num_attention_heads
    plain_heads = model.kv_channels * model.num_attention_heads == model.hidden_size
    if kind == ("LayerNorm", "learned_absolute", False):
        grouped = model.num_query_groups != model.num_attention_heads
        if model.qk_layernorm or not (model.add_bias_linear and model.add_qkv_bias):
            _no_architecture(model, "qk_layernorm", "add_bias_linear", "add_qkv_bias")
        if grouped or not plain_heads:
            _no_architecture(model, "num_query_groups", "num_attention_heads", "kv_channels")
        return ARCHITECTURES["GPT2LMHeadModel"]
    if kind != ("RMSNorm", "rope", True):
        _no_architecture(model, "normalization", "position_embedding_type", "swiglu")
    if model.qk_layernorm:
        if model.add_bias_linear or model.add_qkv_bias:
            _no_architecture(model, "qk_layernorm", "add_bias_linear", "add_qkv_bias")
        return ARCHITECTURES["Qwen3ForCausalLM"]
    if model.add_bias_linear == model.add_qkv_bias:
        return ARCHITECTURES["LlamaForCausalLM"]
    if model.add_bias_linear:
        _no_architecture(model, "add_bias_linear", "add_qkv_bias")
    if not plain_heads:
        raise ValueError(
            f"Qwen2ForCausalLM has no head_dim of its own: model.kv_channels={model.kv_channels} "
            f"must be hidden_size / num_attention_heads = {head_dim}"
        )
    return ARCHITECTURES["Qwen2ForCausalLM"]


def _no_architecture(model: ModelConfig, *fields: str) -> None:
    values = ", ".join(f"model.{name}={getattr(model, name)!r}" for name in fields)
    raise ValueError(f"no Hugging Face architecture of {', '.join(ARCHITECTURES)} has {values}")


def hf_config_from_model(
    model: ModelConfig, *, vocab_size: int, torch_dtype: str = "float32", **special: int | None
) -> dict[str, object]:
    """A `config.json` that transformers 4 and 5, vLLM and SGLang read; `vocab_size` is the true one.

    `special` are token ids: bos_token_id, eos_token_id, pad_token_id. Raises ValueError when no Hugging
    Face architecture can hold the model.
    """
    architecture = architecture_of_model(model)
    to_hf = _to_gpt2 if architecture.name == "GPT2LMHeadModel" else _to_llama_like
    return {
        "architectures": [architecture.name],
        "model_type": architecture.model_type,
        "vocab_size": vocab_size,
        **to_hf(model, architecture),
        "tie_word_embeddings": not model.untie_embeddings_and_output_weights,
        "initializer_range": model.init_method_std,
        "bos_token_id": special.get("bos_token_id"),
        "eos_token_id": special.get("eos_token_id"),
        "pad_token_id": special.get("pad_token_id"),
        "torch_dtype": torch_dtype,
        "use_cache": True,
    }


def _to_gpt2(model: ModelConfig, architecture: Architecture) -> dict[str, object]:
    return dict(
        n_layer=model.num_layers,
        n_embd=model.hidden_size,
        n_inner=model.ffn_hidden_size,
        n_head=model.num_attention_heads,
        n_positions=model.max_position_embeddings,
        n_ctx=model.max_position_embeddings,
        activation_function="gelu_new" if model.openai_gelu else "gelu",
        layer_norm_epsilon=model.norm_epsilon,
        resid_pdrop=model.hidden_dropout,
        embd_pdrop=model.hidden_dropout,
        attn_pdrop=model.attention_dropout,
    )


def _to_llama_like(model: ModelConfig, architecture: Architecture) -> dict[str, object]:
    fields: dict[str, object] = dict(
        num_hidden_layers=model.num_layers,
        hidden_size=model.hidden_size,
        intermediate_size=model.ffn_hidden_size,
        num_attention_heads=model.num_attention_heads,
        num_key_value_heads=model.num_query_groups,
        head_dim=model.kv_channels,
        max_position_embeddings=model.max_position_embeddings,
        hidden_act="silu",
        rms_norm_eps=model.norm_epsilon,
        rope_theta=float(model.rotary_base),
        rope_scaling=None,
        attention_dropout=model.attention_dropout,
    )
    if model.rotary_scaling_factor is not None:
        fields["rope_scaling"] = dict(
            rope_type="llama3", factor=model.rotary_scaling_factor, **_LLAMA3_SCALING
        )
    if architecture.name == "LlamaForCausalLM":
        fields |= dict(attention_bias=model.add_bias_linear, mlp_bias=model.add_bias_linear)
    elif architecture.name == "Qwen2ForCausalLM":
        fields |= dict(use_sliding_window=False)
    else:
        fields |= dict(use_sliding_window=False, attention_bias=False)
    return fields
