"""Parameters, memory and FLOPs of a model under a layout, by arithmetic: nothing is built."""

from dataclasses import dataclass

from megatron_tlt.models.gpt import ModelConfig
from megatron_tlt.parallel import ParallelConfig
from megatron_tlt.subnet.flops import dense_flops
from megatron_tlt.subnet.shape import ModelShape


@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterCount:
    """Parameters of the parts of a model, each as (split over TP, replicated on every TP rank)."""

    layer: tuple[int, int]
    embedding: tuple[int, int]
    final_norm: tuple[int, int]
    head: tuple[int, int]
    """Zero when tied to the embedding."""
    num_layers: int

    @property
    def total(self) -> int:
        return self.num_layers * sum(self.layer) + sum(
            sum(part) for part in (self.embedding, self.final_norm, self.head)
        )

    def on_rank(self, pp_rank: int, parallel: ParallelConfig) -> int:
        """Parameters that one rank of pipeline stage `pp_rank` holds."""
        tp, pp = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
        parts = [self.layer] * (self.num_layers // pp)
        if pp_rank == 0:
            parts.append(self.embedding)
        if pp_rank == pp - 1:
            parts += [self.final_norm, self.head]
            if pp > 1 and self.head == (0, 0):
                parts.append((self.embedding[0], 0))  # the tied head's copy of the table
        return sum(split // tp + replicated for split, replicated in parts)


def count_parameters(model: ModelConfig, *, padded_vocab_size: int) -> ParameterCount:
    """Parameters of `model`, padded vocabulary rows included."""
    h, f, d = model.hidden_size, model.ffn_hidden_size, model.kv_channels
    n, g = model.num_attention_heads, model.num_query_groups
    norm = 2 * h if model.normalization == "LayerNorm" else h
    qkv, fc1 = (n + 2 * g) * d, f * (2 if model.swiglu else 1)
    split = h * qkv + n * d * h + h * fc1 + f * h
    replicated = 2 * norm
    if model.add_qkv_bias:
        split += qkv
    if model.add_bias_linear:
        split += fc1
        replicated += 2 * h
    if model.qk_layernorm:
        replicated += 2 * (2 * d if model.normalization == "LayerNorm" else d)
    positions = model.max_position_embeddings * h
    return ParameterCount(
        layer=(split, replicated),
        embedding=(
            padded_vocab_size * h,
            positions if model.position_embedding_type == "learned_absolute" else 0,
        ),
        final_norm=(0, norm),
        head=(padded_vocab_size * h if model.untie_embeddings_and_output_weights else 0, 0),
        num_layers=model.num_layers,
    )


def state_bytes(num_params: int, *, bf16: bool, optimizer_shards: int) -> int:
    """Weights, fp32 gradient sums and Adam state of `num_params`; the optimizer's part is divided over
    `optimizer_shards` data-parallel ranks (1 without the distributed optimizer)."""
    weights_and_gradients = (2 if bf16 else 4) + 4
    optimizer = (4 if bf16 else 0) + 8  # fp32 master weights, two moments
    return num_params * weights_and_gradients + num_params * optimizer // optimizer_shards


def activation_bytes(
    model: ModelConfig,
    parallel: ParallelConfig,
    *,
    micro_batch_size: int,
    bf16: bool,
    padded_vocab_size: int,
    kept: tuple[float, float, float] = (1.0, 1.0, 1.0),
) -> int:
    """Rough activation memory of the first stage, plus the logits of the last, per rank.

    Counted per token of a layer: two norms' inputs and outputs and two residuals (6 h), q, k, v twice
    (before and after the rotary embedding), the attention output, and the MLP's inner activations; no
    s x s scores, as attention is fused. In flight: one micro-batch a stage (1F1B), or Megatron's
    pp + (pp - 1) / vp for the interleaved schedule. A subnet keeps the fractions `kept` of layers, query
    heads and neurons.
    """
    tp, pp = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    h, d, f = model.hidden_size, model.kv_channels, model.ffn_hidden_size
    n, g = model.num_attention_heads, model.num_query_groups
    outer = 6 * h // (tp if parallel.sequence_parallel else 1)
    n, f = n * kept[1], f * kept[2]
    inner = (2 * (n + 2 * g) * d + n * d + (3 if model.swiglu else 2) * f) / tp
    layers = model.num_layers * kept[0] / pp
    per_token = layers * (outer + inner)
    if model.recompute_granularity == "full":
        per_token = layers * h + outer + inner
    virtual = parallel.num_model_chunks
    in_flight = 1.0 if pp == 1 else pp if virtual == 1 else pp + (pp - 1) / virtual
    tokens = micro_batch_size * model.seq_length
    logits = tokens * padded_vocab_size // tp * (4 + 4)  # fp32 probabilities and their gradient
    return int(tokens * per_token * in_flight * (2 if bf16 else 4)) + logits


def flops_per_token(model: ModelConfig, *, padded_vocab_size: int) -> float:
    """FLOPs of forward and backward per token, 2 per multiply-add, backward twice forward.

    Attention scores and values are counted for the causal half only, the output head with the padded
    vocabulary, recomputation not at all (so MFU is not raised by it).
    """
    return dense_flops(ModelShape.of(model, padded_vocab_size=padded_vocab_size)).total
