"""Which modules stand at each place of a layer: the `local` back-end, on CPU and on CUDA.

Shapes: s sequence, b batch, h hidden, n query heads, g key/value groups, d head dim, t TP size.
The classes are megatron-core's own, subclassed where they cost time or memory that they need not: linears in
models/local_linear.py and models/fp8_linear.py, attention is torch's scaled_dot_product_attention (no
[b, n, s, s] scores are kept), SwiGLU, RMSNorm and the rotary split are single autograd functions
(ops/fused.py), norms carry the sequence-parallel mark.

Attention and MLP take their sizes from the tensors and from `num_attention_heads_per_partition` and
`num_query_groups_per_partition`, so a linear that computes part of its rows (a subnet) changes both.
"""

import functools

from megatron_tlt import mcore  # noqa: F401  (before megatron.core)
from megatron_tlt.models.fp8_linear import Fp8ColumnParallelLinear, Fp8RowParallelLinear
from megatron_tlt.models.local_linear import LocalColumnParallelLinear, LocalRowParallelLinear
from megatron_tlt.ops.fp8_recipe import Recipe
from megatron_tlt.ops.fused import (
    Tables,
    cached_rotary_tables,
    packed_lengths,
    packed_rotary_tables,
    rms_norm,
    split_rotary,
    swiglu,
)
from megatron_tlt.ops.linear import embedding, gemm_dtype

import torch
import torch.nn.functional as F
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules


class LocalRMSNorm(torch.nn.RMSNorm):
    """torch's RMSNorm as one autograd function; torch's own is a chain of six on CPU."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.weight, self.eps)


class LocalNorm:
    """LayerNorm or RMSNorm by `config.normalization`, marked for sequence parallelism.

    megatron-core's own wrapper refuses sequence parallelism because torch's norms do not carry the
    `sequence_parallel` attribute by which gradients of replicated parameters are summed over TP.
    """

    def __new__(
        cls, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: object
    ) -> torch.nn.Module:
        kind = torch.nn.LayerNorm if config.normalization == "LayerNorm" else LocalRMSNorm
        norm = kind(hidden_size, eps=eps, dtype=config.params_dtype)
        for param in norm.parameters():
            param.sequence_parallel = config.sequence_parallel
        return norm


class LocalCoreAttention(MegatronModule):
    """Causal attention by `scaled_dot_product_attention`; grouped queries without repeating keys.

    Takes query `[s, b, n/t, d]`, key and value `[s, b, g/t, d]`, gives `[s, b, n/t * d]`. An
    `attention_mask` (bool, true = hidden, broadcastable to `[b, n, s, s]`) replaces the causal one. With
    `packed_seq_params` they are `[s, n/t, d]` and `[s, g/t, d]`, sequences laid end to end, and each
    sequence sees itself alone; gives `[s, 1, n/t * d]`.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: object = None,
    ) -> None:
        super().__init__(config=config)
        self.softmax_scale = softmax_scale
        dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        self.dropout = float(dropout)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> torch.Tensor:
        assert attention_bias is None, "not part of this back-end"
        attend = self._attend
        if packed_seq_params is not None:
            attend = functools.partial(self._attend_packed, packed_seq_params.cu_seqlens_q)
        if self.training and self.dropout > 0.0:
            with get_cuda_rng_tracker().fork():
                return attend(query, key, value, attention_mask)
        return attend(query, key, value, attention_mask)

    def _attend_packed(
        self,
        cu_seqlens: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: None,
    ) -> torch.Tensor:
        """One causal call a sequence: no score between two sequences is ever computed."""
        assert attention_mask is None, "packed sequences are causal"
        lengths = packed_lengths(cu_seqlens)
        sequences = zip(*(x.unsqueeze(1).split(lengths) for x in (query, key, value)), strict=True)
        return torch.cat([self._attend(q, k, v, None) for q, k, v in sequences])

    def _attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
    ) -> torch.Tensor:
        s, b, n, d = query.shape
        dtype = gemm_dtype(query)
        context = F.scaled_dot_product_attention(
            query.permute(1, 2, 0, 3).to(dtype),  # [b, n, s, d]
            key.permute(1, 2, 0, 3).to(dtype),
            value.permute(1, 2, 0, 3).to(dtype),
            attn_mask=None if attention_mask is None else ~attention_mask,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=attention_mask is None,
            scale=self.softmax_scale,
            enable_gqa=key.shape[2] != n,
        )
        return context.to(query.dtype).permute(2, 0, 1, 3).reshape(s, b, n * d)


class LocalSelfAttention(SelfAttention):
    """megatron-core's SelfAttention; with rotary embedding it splits and turns in one function.

    Everything else (norms of queries and keys, inference contexts, selective recompute) is the parent's.
    """

    _tables: Tables | None = None  # of the forward pass that is running

    def forward(self, hidden_states: torch.Tensor, *args: object, **options: object):
        """`[s, b, h]` -> (`[s, b, h]`, None)."""
        angles = options.get("rotary_pos_emb")
        if isinstance(angles, torch.Tensor) and self._turns_in_one(angles, options):
            options["rotary_pos_emb"] = None
            packed, dtype = options.get("packed_seq_params"), hidden_states.dtype
            self._tables = (
                cached_rotary_tables(angles, dtype)
                if packed is None
                else packed_rotary_tables(angles, packed.cu_seqlens_q, dtype)
            )
        try:
            return super().forward(hidden_states, *args, **options)
        finally:
            self._tables = None

    def _turns_in_one(self, angles: torch.Tensor, options: dict[str, object]) -> bool:
        return (
            options.get("inference_context") is None
            and options.get("inference_params") is None
            and angles.shape[-1] == self.hidden_size_per_attention_head
            and not self.config.rotary_interleaved
            and not self.config.qk_layernorm
        )

    def get_query_key_value_tensors(self, hidden_states: torch.Tensor, *args, **options):
        """Query `[s, b, n/t, d]`, key and value `[s, b, g/t, d]`."""
        if self._tables is None:
            return super().get_query_key_value_tensors(hidden_states, *args, **options)
        mixed, _ = self.linear_qkv(hidden_states)
        groups = self.num_query_groups_per_partition
        per_group = self.num_attention_heads_per_partition // groups
        return split_rotary(mixed, groups=groups, per_group=per_group, tables=self._tables)


class LocalMLP(MLP):
    """megatron-core's MLP, its SwiGLU one function that keeps fc1's output only."""

    def forward(self, hidden_states: torch.Tensor, per_token_scale=None, **options: object):
        """`[s, b, h]` -> (`[s, b, h]`, None)."""
        config = self.config
        is_swiglu = config.gated_linear_unit and config.activation_func is F.silu
        if not is_swiglu or per_token_scale is not None or config.activation_func_clamp_value:
            return super().forward(hidden_states, per_token_scale, **options)
        gate_up, _ = self.linear_fc1(hidden_states)
        return self.linear_fc2(swiglu(gate_up))


class LocalEmbedding(VocabParallelEmbedding):
    """`[b, s]` tokens -> `[b, s, h]`; on one TP rank its gradient touches the rows that occur only."""

    def forward(self, input_: torch.Tensor) -> torch.Tensor:
        if self.tp_group.size() > 1:
            return super().forward(input_)
        return embedding(input_, self.weight)


def use_local_ends(model: GPTModel) -> None:
    """Put our classes where GPTModel builds megatron's without asking a spec: embedding and head.

    The modules and their parameters, and what megatron-core has marked on them, stay the same objects.
    """
    if model.pre_process:
        model.embedding.word_embeddings.__class__ = LocalEmbedding
    if model.post_process:
        model.output_layer.__class__ = LocalColumnParallelLinear
    if model.pre_process and model.post_process and model.share_embeddings_and_output_weights:
        weight = model.shared_embedding_or_output_weight()
        # Both add to main_grad: nothing has to be zeroed, and the last of the two calls the hook.
        weight.zero_out_wgrad, weight.embedding_ends_gradient = False, True


def mark_tensor_parallel(model: torch.nn.Module) -> None:
    """Mark the split weights of `model` as megatron does while it draws them (which we do elsewhere).

    Clipping counts an unmarked weight on the first TP rank only, and initialisation cuts by these marks.
    A gated fc1 holds [gate; up] on each rank: two blocks, each split on its own (stride 2).
    """
    gated = {m.linear_fc1 for m in model.modules() if isinstance(m, MLP) and _is_gated(m)}
    for module in model.modules():
        if isinstance(module, (ColumnParallelLinear, VocabParallelEmbedding)):
            dim, stride = 0, 2 if module in gated else 1
        elif isinstance(module, RowParallelLinear):
            dim, stride = 1, 1
        else:
            continue
        if module.weight is not None and not hasattr(module.weight, "tensor_model_parallel"):
            set_tensor_model_parallel_attributes(module.weight, True, dim, stride)


def _is_gated(mlp: MLP) -> bool:
    return mlp.config.gated_linear_unit


def local_layer_spec(*, qk_layernorm: bool = False, fp8: Recipe | None = None) -> ModuleSpec:
    """The decoder layer of the `local` back-end, its linears in FP8 where `fp8` says how.

    Its norms are saved under the names that Transformer Engine's fused norm + linear uses, so
    checkpoints of the two back-ends are interchangeable.
    """
    column, row = LocalColumnParallelLinear, LocalRowParallelLinear
    if fp8 is not None:
        column, row = (
            ModuleSpec(module=module, params={"fp8": fp8})
            for module in (Fp8ColumnParallelLinear, Fp8RowParallelLinear)
        )
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=LocalNorm,
            self_attention=ModuleSpec(
                module=LocalSelfAttention,
                params={"attn_mask_type": AttnMaskType.causal},
                submodules=SelfAttentionSubmodules(
                    linear_qkv=column,
                    core_attention=LocalCoreAttention,
                    linear_proj=row,
                    q_layernorm=LocalNorm if qk_layernorm else IdentityOp,
                    k_layernorm=LocalNorm if qk_layernorm else IdentityOp,
                ),
            ),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=LocalNorm,
            mlp=ModuleSpec(
                module=LocalMLP, submodules=MLPSubmodules(linear_fc1=column, linear_fc2=row)
            ),
            mlp_bda=get_bias_dropout_add,
            sharded_state_dict_keys_map={
                "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
                "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
            },
        ),
    )


def block_spec(layer_specs: list[ModuleSpec], *, norm: type = LocalNorm) -> TransformerBlockSubmodules:
    """The layers of one pipeline chunk and the final norm."""
    return TransformerBlockSubmodules(layer_specs=layer_specs, layer_norm=norm)
