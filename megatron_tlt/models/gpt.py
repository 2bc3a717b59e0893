"""GPT-2- and Llama-shaped models: their configuration, and their construction on megatron-core."""

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial
from typing import Literal

from megatron_tlt import device
from megatron_tlt.models.backend import (
    block_spec, local_layer_spec, mark_tensor_parallel, use_local_ends,
)  # fmt: skip
from megatron_tlt.models.precision import PrecisionConfig
from megatron_tlt.models.presets import PRESETS
from megatron_tlt.ops.cross_entropy import vocab_parallel_cross_entropy
from megatron_tlt.parallel import Parallel, ParallelConfig

import torch
import torch.nn.functional as F
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset


@dataclass(kw_only=True, slots=True)
class ModelConfig:
    """Shape of the model (Megatron's spelling). A preset fills every field that is not given."""

    preset: str | None = None
    """Name of a shape in models/presets.py, e.g. gpt2-124m, tinyllama-1.1b, tiny-llama."""
    num_layers: int | None = None
    """Decoder layers."""
    hidden_size: int | None = None
    """Width of the residual stream (h)."""
    ffn_hidden_size: int | None = None
    """MLP neurons; default 4 x hidden_size."""
    num_attention_heads: int | None = None
    """Query heads (n)."""
    num_query_groups: int | None = None
    """Key/value heads (g); default num_attention_heads, that is no grouping."""
    kv_channels: int | None = None
    """Head dimension (d); default hidden_size / num_attention_heads."""
    seq_length: int | None = None
    """Tokens per training sample (s)."""
    max_position_embeddings: int | None = None
    """Rows of the learned position table; default seq_length."""
    position_embedding_type: Literal["learned_absolute", "rope"] | None = None
    """Learned absolute positions (GPT-2) or rotary embedding (Llama); default rope."""
    rotary_base: int | None = None
    """Base of the rotary frequencies; default 10000."""
    rotary_scaling_factor: float | None = None
    """Llama-3.1 frequency scaling factor; default none."""
    normalization: Literal["LayerNorm", "RMSNorm"] | None = None
    """Kind of norm; default RMSNorm."""
    norm_epsilon: float | None = None
    """Epsilon of the norms; default 1e-5."""
    swiglu: bool | None = None
    """Gated MLP with SiLU instead of GELU; default true."""
    openai_gelu: bool | None = None
    """Tanh approximation of GELU (GPT-2's own) instead of the exact one; default false."""
    add_bias_linear: bool | None = None
    """Biases in all linear layers; default false."""
    add_qkv_bias: bool | None = None
    """Bias in the query/key/value projection (Qwen2); default add_bias_linear."""
    qk_layernorm: bool = False
    """Normalise queries and keys per head (Qwen3)."""
    untie_embeddings_and_output_weights: bool | None = None
    """Give the output head weights of its own; default true."""
    make_vocab_size_divisible_by: int = 128
    """The vocabulary is padded to a multiple of this times the TP size; padding never enters the softmax."""
    init_method_std: float = 0.02
    """Standard deviation of the initial weights; output projections get it over sqrt(2 num_layers)."""
    hidden_dropout: float = 0.0
    """Dropout after embedding, attention and MLP."""
    attention_dropout: float = 0.0
    """Dropout of attention probabilities."""
    recompute_granularity: Literal["full", "selective"] | None = None
    """Recompute activations in the backward pass: whole layers, or the modules named below."""
    recompute_method: Literal["uniform", "block"] | None = None
    """For full recompute: every recompute_num_layers layers, or the first recompute_num_layers."""
    recompute_num_layers: int | None = None
    """Layers per recomputed chunk (uniform) or recomputed layers per stage (block)."""
    recompute_modules: list[str] | None = None
    """For selective recompute: core_attn (default), layernorm, mlp."""

    def __post_init__(self) -> None:
        for name, value in self._preset().items():
            if getattr(self, name) is None:
                setattr(self, name, value)
        for name, value in _DEFAULTS.items():
            if getattr(self, name) is None:
                setattr(self, name, value)
        self._check_required()
        self._derive()
        self._check()

    def _preset(self) -> dict[str, object]:
        if self.preset is None:
            return {}
        if self.preset not in PRESETS:
            raise ValueError(f"model.preset={self.preset!r} is unknown; known: {sorted(PRESETS)}")
        return PRESETS[self.preset]

    def _check_required(self) -> None:
        required = ("num_layers", "hidden_size", "num_attention_heads", "seq_length")
        missing = [name for name in required if getattr(self, name) is None]
        if missing:
            raise ValueError(f"model.{', model.'.join(missing)} must be given, or model.preset")
        for name in required:
            if getattr(self, name) < 1:
                raise ValueError(f"model.{name}={getattr(self, name)} must be at least 1")

    def _derive(self) -> None:
        if self.ffn_hidden_size is None:
            self.ffn_hidden_size = 4 * self.hidden_size
        if self.num_query_groups is None:
            self.num_query_groups = self.num_attention_heads
        if self.kv_channels is None:
            if self.hidden_size % self.num_attention_heads:
                raise ValueError(
                    f"model.hidden_size={self.hidden_size} is not divisible by num_attention_heads="
                    f"{self.num_attention_heads}: change one or give kv_channels"
                )
            self.kv_channels = self.hidden_size // self.num_attention_heads
        if self.max_position_embeddings is None:
            self.max_position_embeddings = self.seq_length
        if self.add_qkv_bias is None:
            self.add_qkv_bias = self.add_bias_linear

    def _check(self) -> None:
        if self.num_attention_heads % self.num_query_groups:
            raise ValueError(
                f"model.num_attention_heads={self.num_attention_heads} is not divisible by "
                f"num_query_groups={self.num_query_groups}"
            )
        if self.position_embedding_type == "rope" and self.kv_channels % 2:
            raise ValueError(f"rotary embedding needs an even kv_channels, got {self.kv_channels}")
        if self.max_position_embeddings < self.seq_length:
            raise ValueError(
                f"model.seq_length={self.seq_length} exceeds max_position_embeddings="
                f"{self.max_position_embeddings}"
            )
        if self.openai_gelu and self.swiglu:
            raise ValueError("model.openai_gelu needs model.swiglu=false")
        for name in ("hidden_dropout", "attention_dropout"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise ValueError(f"model.{name}={getattr(self, name)} must be in [0, 1)")
        self._check_recompute()

    def _check_recompute(self) -> None:
        if self.recompute_granularity == "full" and self.recompute_method is None:
            self.recompute_method, self.recompute_num_layers = "uniform", 1
        if self.recompute_granularity != "full" and self.recompute_method is not None:
            raise ValueError("model.recompute_method needs model.recompute_granularity=full")
        known = {"core_attn", "layernorm", "mlp"}
        if self.recompute_modules and not set(self.recompute_modules) <= known:
            raise ValueError(
                f"model.recompute_modules={self.recompute_modules}: known are {sorted(known)}"
            )

    def check_layout(self, parallel: ParallelConfig) -> None:
        """Raise ValueError, with both numbers, when this shape cannot be cut that way."""
        tp, pp = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
        if tp > self.num_query_groups:
            raise ValueError(
                f"tensor_model_parallel_size={tp} exceeds num_query_groups={self.num_query_groups}: a "
                f"rank would hold no key/value head of its own; use at most {self.num_query_groups}"
            )
        for name in ("num_attention_heads", "num_query_groups", "ffn_hidden_size"):
            if getattr(self, name) % tp:
                raise ValueError(
                    f"model.{name}={getattr(self, name)} is not divisible by "
                    f"tensor_model_parallel_size={tp}"
                )
        if parallel.sequence_parallel and self.seq_length % tp:
            raise ValueError(
                f"sequence_parallel needs model.seq_length={self.seq_length} divisible by "
                f"tensor_model_parallel_size={tp}"
            )
        chunks = pp * parallel.num_model_chunks
        if self.num_layers % chunks:
            raise ValueError(
                f"model.num_layers={self.num_layers} is not divisible by pipeline_model_parallel_size="
                f"{pp} x virtual_pipeline_model_parallel_size={parallel.num_model_chunks} = {chunks}"
            )

    def padded_vocab_size(self, vocab_size: int, tensor_model_parallel_size: int) -> int:
        """Smallest multiple of make_vocab_size_divisible_by x TP that holds `vocab_size` rows."""
        multiple = self.make_vocab_size_divisible_by * tensor_model_parallel_size
        return math.ceil(vocab_size / multiple) * multiple


_DEFAULTS: dict[str, object] = dict(
    position_embedding_type="rope",
    rotary_base=10000,
    normalization="RMSNorm",
    norm_epsilon=1e-5,
    swiglu=True,
    openai_gelu=False,
    add_bias_linear=False,
    untie_embeddings_and_output_weights=True,
)


def transformer_config(
    model: ModelConfig,
    parallel: ParallelConfig,
    *,
    params_dtype: torch.dtype,
    precision: PrecisionConfig = PrecisionConfig(),
) -> TransformerConfig:
    """megatron-core's configuration of this model. Fusions that need CUDA or a compiler are off."""
    return TransformerConfig(
        **precision.megatron_fields(),
        **_shape_fields(model),
        **_parallel_fields(parallel),
        recompute_granularity=model.recompute_granularity,
        recompute_method=model.recompute_method,
        recompute_num_layers=model.recompute_num_layers,
        recompute_modules=model.recompute_modules or ["core_attn"],
        params_dtype=params_dtype,
        bf16=params_dtype == torch.bfloat16,
        pipeline_dtype=params_dtype,
        # Weights are drawn by models/initialize.py, independently of the layout.
        perform_initialization=False,
        use_cpu_initialization=not device.is_cuda(),
        # The loss is normalised over the tokens of the whole global batch.
        calculate_per_token_loss=True,
        attention_softmax_in_fp32=True,
        gradient_accumulation_fusion=False,
        # gloo sends from the tensor's own memory, without a stream to wait on: freeing it after an
        # asynchronous send corrupts what the next stage receives.
        deallocate_pipeline_outputs=device.is_cuda() and parallel.pipeline_model_parallel_size > 1,
    )


def _shape_fields(model: ModelConfig) -> dict[str, object]:
    same = (
        "num_layers hidden_size ffn_hidden_size num_attention_heads num_query_groups kv_channels "
        "normalization add_bias_linear add_qkv_bias qk_layernorm init_method_std hidden_dropout "
        "attention_dropout"
    ).split()
    return {name: getattr(model, name) for name in same} | dict(
        layernorm_epsilon=model.norm_epsilon,
        gated_linear_unit=model.swiglu,
        activation_func=_activation(model),
    )


def _activation(model: ModelConfig) -> Callable[[torch.Tensor], torch.Tensor]:
    if model.swiglu:
        return F.silu
    return partial(F.gelu, approximate="tanh") if model.openai_gelu else F.gelu


def _parallel_fields(parallel: ParallelConfig) -> dict[str, object]:
    chunks = parallel.num_model_chunks
    return dict(
        tensor_model_parallel_size=parallel.tensor_model_parallel_size,
        pipeline_model_parallel_size=parallel.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None,
        sequence_parallel=parallel.sequence_parallel,
        overlap_p2p_comm=parallel.overlap_p2p_comm,
        batch_p2p_comm=parallel.batch_p2p_comm,
    )


class GPT(GPTModel):
    """megatron-core's GPTModel whose loss leaves the padded part of the vocabulary out."""

    def __init__(self, *, true_vocab_size: int, **options: object) -> None:
        super().__init__(**options)
        self.true_vocab_size = true_vocab_size
        use_local_ends(self)
        mark_tensor_parallel(self)

    def compute_language_model_loss(
        self, labels: torch.Tensor, logits: torch.Tensor
    ) -> torch.Tensor:
        """labels `[b, s]`, logits `[s, b, v/t]` -> loss per token `[b, s]`, float32, in nats."""
        loss = vocab_parallel_cross_entropy(
            logits,
            labels.transpose(0, 1),
            vocab_size=self.true_vocab_size,
            group=self.pg_collection.tp,
            consume_logits=True,
        )
        return loss.transpose(0, 1)


def build_chunks(
    model: ModelConfig,
    parallel: Parallel,
    *,
    vocab_size: int,
    params_dtype: torch.dtype = torch.float32,
    layer_spec: Callable[..., ModuleSpec] = local_layer_spec,
    precision: PrecisionConfig = PrecisionConfig(),
) -> list[GPT]:
    """This rank's part of the model: one GPT per virtual pipeline stage, with undrawn weights.

    `vocab_size` is the tokenizer's; `layer_spec(qk_layernorm=..., fp8=...)` gives a decoder layer, so another
    layer (a subnet's) is put in here without touching the model; `precision`: default no FP8.
    Raises ValueError for a bad layout.
    """
    model.check_layout(parallel.config)
    config = transformer_config(
        model, parallel.config, params_dtype=params_dtype, precision=precision
    )
    virtual = parallel.config.num_model_chunks
    padded = model.padded_vocab_size(vocab_size, parallel.config.tensor_model_parallel_size)
    chunks = []
    for stage in range(virtual):
        vp_stage = stage if virtual > 1 else None
        first = get_transformer_layer_offset(config, vp_stage, parallel.pp_rank)
        count = get_num_layers_to_build(config, vp_stage, parallel.pp_rank)
        recipes = [precision.layer_recipe(first + n, model.num_layers) for n in range(count)]
        chunks.append(
            GPT(
                true_vocab_size=vocab_size,
                config=config,
                transformer_layer_spec=block_spec(
                    [layer_spec(qk_layernorm=model.qk_layernorm, fp8=fp8) for fp8 in recipes]
                ),
                vocab_size=padded,
                max_sequence_length=model.max_position_embeddings,
                pre_process=parallel.is_first_stage and stage == 0,
                post_process=parallel.is_last_stage and stage == virtual - 1,
                share_embeddings_and_output_weights=not model.untie_embeddings_and_output_weights,
                position_embedding_type=model.position_embedding_type,
                rotary_base=model.rotary_base,
                rope_scaling=model.rotary_scaling_factor is not None,
                rope_scaling_factor=model.rotary_scaling_factor or 8.0,
                pg_collection=parallel.groups,
                vp_stage=vp_stage,
            ).to(device.device())
        )
    return chunks


def model_identity(model: ModelConfig) -> dict[str, object]:
    """What must agree for a checkpoint to be the same model: shape and semantics, no layout."""
    leave_out = {"preset", "seq_length", "hidden_dropout", "attention_dropout", "init_method_std"}
    return {
        f.name: getattr(model, f.name)
        for f in fields(model)
        if f.name not in leave_out and not f.name.startswith("recompute_")
    }
