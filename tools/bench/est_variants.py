"""What the EST study compares: model shapes, and the `est` section of each variant."""

_PREFIX = {"draw": "nested", "resample_interval": "stage", "tp_strata": 1, "pp_strata": 1}
"""Nested draws in one stratum: heads and neurons are a prefix of the weights, a view without a copy."""

VARIANTS: dict[str, dict] = {
    "dense": {"schedule": "dense"},
    # One subnet a stage, each containing the last: the practical schedule as we recommend it.
    "nested": {"schedule": "practical", "ends": ["1/4", "3/5"]} | _PREFIX,
    "nested_default_ends": {"schedule": "practical"} | _PREFIX,
    # The paper's reading: a new random subnet at every step, the published saving.
    "random_every_step": {"schedule": "practical"},
    "random_100_steps": {"schedule": "practical", "resample_interval": 100},
    "random_stage": {"schedule": "practical", "resample_interval": "stage"},
    "rotating_100_steps": {"schedule": "practical", "draw": "rotating", "resample_interval": 100},
    # What a user would pick instead.
    "progressive_layer_drop": {"schedule": "progressive_layer_drop", "pld_gamma": 0.01},
    "layer_drop": {"schedule": "layer_drop"},
    "depth_staged": {"schedule": "depth_staged", "ends": ["1/2"]},
    "fixed_then_full": {"schedule": "fixed_then_full"},
    # Around the recommended one: what helps and what does not.
    "nested_layers_only": {"schedule": "practical", "heads": 1, "mlp": 1, "order": ["layers"],
                           "ends": ["3/5"]} | _PREFIX,
    "nested_widths_only": {"schedule": "practical", "layers": 1, "order": ["heads+mlp"],
                           "ends": ["3/5"]} | _PREFIX,
    "nested_widths_first": {"schedule": "practical", "order": ["heads+mlp", "layers"],
                            "ends": ["1/4", "3/5"]} | _PREFIX,
    "nested_long": {"schedule": "practical", "ends": ["2/5", "3/4"]} | _PREFIX,
    "nested_frozen": {"schedule": "practical", "ends": ["1/4", "3/5"],
                      "idle_params": "frozen"} | _PREFIX,
    # No 1/p: growth then leaves the function almost as it was, where 1/p halves what the kept half gave.
    "nested_unscaled": {"schedule": "practical", "ends": ["1/4", "3/5"],
                        "output_scale": "none"} | _PREFIX,
    "nested_unscaled_long": {"schedule": "practical", "ends": ["2/5", "3/4"],
                             "output_scale": "none"} | _PREFIX,
    "nested_unscaled_frozen": {"schedule": "practical", "ends": ["1/4", "3/5"],
                               "output_scale": "none", "idle_params": "frozen"} | _PREFIX,
    "nested_layer_scale": {"schedule": "practical", "ends": ["1/4", "3/5"],
                           "layer_scale": "inverse_rate"} | _PREFIX,
}  # fmt: skip


def model_options(shape: str, *, hidden: int, layers: int, seq: int) -> dict:
    """Fields of a ModelConfig: `gpt2` (GELU, learned positions, tied) or `llama` (SwiGLU, RoPE, GQA)."""
    heads = max(4, hidden // 64)
    if shape == "gpt2":
        ffn, groups = 4 * hidden, heads
    else:
        ffn, groups = 64 * (hidden * 8 // 3 // 64 + 1), heads // 2
    return {
        "preset": f"tiny-{shape}", "num_layers": layers, "hidden_size": hidden, "seq_length": seq,
        "num_attention_heads": heads, "num_query_groups": groups, "ffn_hidden_size": ffn,
    }  # fmt: skip
