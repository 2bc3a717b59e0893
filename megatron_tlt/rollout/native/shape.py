"""What the inference model must know of a Hugging Face `config.json`."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_GATED = ("llama", "qwen2", "qwen3")
_ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_new": "gelu_tanh",
                "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu"}  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """Sizes and variants of a decoder. `rotary_base` 0 means learned absolute positions."""

    model_type: str
    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    norm_epsilon: float
    activation: str
    rotary_base: float
    rope_scaling: tuple[tuple[str, Any], ...]
    qkv_bias: bool
    output_bias: bool
    """Bias of the attention's output projection and of the MLP."""
    mlp_bias: bool
    qk_norm: bool
    tied: bool

    @property
    def gated(self) -> bool:
        return self.model_type in _GATED

    def check_tensor_parallel(self, size: int) -> None:
        """Raises ValueError unless heads, groups and neurons divide by `size`."""
        for name in ("num_attention_heads", "num_query_groups", "ffn_hidden_size"):
            if getattr(self, name) % size:
                raise ValueError(
                    f"{name}={getattr(self, name)} does not divide by tensor parallel size {size}: "
                    "use a smaller size"
                )


def shape_from_hf(config: Mapping[str, Any]) -> ModelShape:
    """Read a GPT-2, Llama, Qwen2 or Qwen3 configuration. Raises ValueError for what is not supported."""
    kind = config.get("model_type")
    if kind == "gpt2":
        return _gpt2(config)
    if kind in _GATED:
        return _llama_like(config, kind=str(kind))
    raise ValueError(
        f"model_type {kind!r} is not supported: the native engine knows gpt2, llama, qwen2 and qwen3; "
        "use the sglang engine for others"
    )


def _activation(name: str) -> str:
    if name not in _ACTIVATIONS:
        raise ValueError(f"activation {name!r} is not one of {sorted(_ACTIVATIONS)}")
    return _ACTIVATIONS[name]


def _gpt2(config: Mapping[str, Any]) -> ModelShape:
    hidden, heads = config["n_embd"], config["n_head"]
    if config.get("scale_attn_by_inverse_layer_idx"):
        raise ValueError("scale_attn_by_inverse_layer_idx is not supported: set it to false")
    return ModelShape(
        model_type="gpt2", num_layers=config["n_layer"], hidden_size=hidden,
        ffn_hidden_size=config.get("n_inner") or 4 * hidden, num_attention_heads=heads,
        num_query_groups=heads, head_dim=hidden // heads, vocab_size=config["vocab_size"],
        max_position_embeddings=config["n_positions"],
        norm_epsilon=config.get("layer_norm_epsilon", 1e-5),
        activation=_activation(config.get("activation_function", "gelu_new")), rotary_base=0.0,
        rope_scaling=(), qkv_bias=True, output_bias=True, mlp_bias=True, qk_norm=False,
        tied=config.get("tie_word_embeddings", True),
    )  # fmt: skip


def _llama_like(config: Mapping[str, Any], *, kind: str) -> ModelShape:
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    if config.get("use_sliding_window"):
        raise ValueError("use_sliding_window=true is not supported: set it to false")
    bias = bool(config.get("attention_bias", False))
    base, scaling = _rope(config)
    return ModelShape(
        model_type=kind, num_layers=config["num_hidden_layers"], hidden_size=hidden,
        ffn_hidden_size=config["intermediate_size"], num_attention_heads=heads,
        num_query_groups=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or hidden // heads, vocab_size=config["vocab_size"],
        max_position_embeddings=config["max_position_embeddings"],
        norm_epsilon=config["rms_norm_eps"], activation=_activation(config["hidden_act"]),
        rotary_base=base, rope_scaling=scaling, qkv_bias=bias or kind == "qwen2",
        output_bias=bias and kind != "qwen2", mlp_bias=bool(config.get("mlp_bias", False)),
        qk_norm=kind == "qwen3", tied=bool(config.get("tie_word_embeddings", False)),
    )  # fmt: skip


def _rope(config: Mapping[str, Any]) -> tuple[float, tuple[tuple[str, Any], ...]]:
    """Base and scaling, from `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling`."""
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    base = float(rope.pop("rope_theta", config.get("rope_theta", 10000.0)))
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "linear", "llama3"):
        raise ValueError(f"rope type {kind!r} is not supported: use default, linear or llama3")
    return base, () if kind == "default" else tuple(sorted(rope.items()))
