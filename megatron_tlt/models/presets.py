"""Model shapes by name: one line a model. Vocabulary size comes from the tokenizer, not from here."""

_GPT2 = dict(
    normalization="LayerNorm", norm_epsilon=1e-5, swiglu=False, add_bias_linear=True,
    add_qkv_bias=True, position_embedding_type="learned_absolute",
    untie_embeddings_and_output_weights=False, openai_gelu=True, seq_length=1024,
)  # fmt: skip
_LLAMA = dict(
    normalization="RMSNorm", norm_epsilon=1e-5, swiglu=True, add_bias_linear=False,
    add_qkv_bias=False, position_embedding_type="rope", rotary_base=10000,
    untie_embeddings_and_output_weights=True, seq_length=2048,
)  # fmt: skip
_QWEN25 = _LLAMA | dict(norm_epsilon=1e-6, add_qkv_bias=True, rotary_base=1000000)


def _shape(layers: int, hidden: int, heads: int, groups: int, ffn: int) -> dict[str, int]:
    return dict(
        num_layers=layers, hidden_size=hidden, num_attention_heads=heads, num_query_groups=groups,
        ffn_hidden_size=ffn,
    )  # fmt: skip


# name: layers, hidden, heads, key/value groups, ffn
PRESETS: dict[str, dict[str, object]] = {
    "gpt2-124m": _GPT2 | _shape(12, 768, 12, 12, 3072),  # the "117M" of the GPT-2 and EST papers
    "gpt2-355m": _GPT2 | _shape(24, 1024, 16, 16, 4096),
    "gpt2-774m": _GPT2 | _shape(36, 1280, 20, 20, 5120),
    "gpt2-1.5b": _GPT2 | _shape(48, 1600, 25, 25, 6400),
    "tinyllama-1.1b": _LLAMA | _shape(22, 2048, 32, 4, 5632),
    "llama3-8b": _LLAMA | _shape(32, 4096, 32, 8, 14336) | dict(rotary_base=500000, seq_length=8192),
    "qwen2.5-0.5b": _QWEN25
    | _shape(24, 896, 14, 2, 4864)
    | dict(untie_embeddings_and_output_weights=False),
    "qwen2.5-1.5b": _QWEN25
    | _shape(28, 1536, 12, 2, 8960)
    | dict(untie_embeddings_and_output_weights=False),
    "qwen2.5-7b": _QWEN25 | _shape(28, 3584, 28, 4, 18944),
    "smollm2-135m": _LLAMA
    | _shape(30, 576, 9, 3, 1536)
    | dict(rotary_base=100000, untie_embeddings_and_output_weights=False)
    | dict(max_position_embeddings=8192),
    "tiny-gpt2": _GPT2 | _shape(4, 64, 4, 4, 256) | dict(seq_length=64),
    "tiny-llama": _LLAMA | _shape(4, 64, 4, 2, 192) | dict(seq_length=64),
}
