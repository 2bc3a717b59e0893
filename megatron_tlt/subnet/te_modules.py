"""The decoder layer of a subnet on Transformer Engine's modules (TE): the same plan, the same slices.

A linear hands TE its slice through the one method by which TE reads weights, so the kernels, FP8 casts and
collectives are TE's own; the gradient of the slice comes back through autograd. TE keeps a quantised copy of
each weight over the micro-batches of a step and does not look at its shape: it is dropped when the slice
changes. TE's attention has its number of key/value heads from construction, so there is one for each number
that is kept.
"""

import copy

from megatron_tlt.models.te import (
    CheckpointedTEColumnParallelLinear, CheckpointedTERowParallelLinear, TEDotProductAttention,
    TELayerNormColumnParallelLinear, TERowParallelLinear, check_weight_source, te_layer_spec,
)  # fmt: skip
from megatron_tlt.ops.fp8_recipe import Recipe
from megatron_tlt.subnet.cuts import Cut, SlicedParameter
from megatron_tlt.subnet.modules import SubnetTransformerLayer
from megatron_tlt.subnet.spec import with_linears

import torch
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.spec_utils import ModuleSpec


class SubnetTEColumnParallelLinear(CheckpointedTEColumnParallelLinear):
    """Norm, then the selected output rows: `[s, b, h] -> [s, b, kept/t]`."""

    def __init__(self, *args: object, **options: object) -> None:
        super().__init__(*args, **options)
        self.sliced_weight, self.sliced_bias = SlicedParameter(), SlicedParameter()

    def set_cut(self, cut: Cut | None) -> None:
        """Rows to compute; None: all."""
        self.sliced_weight.set_cut(cut)
        self.sliced_bias.set_cut(cut)
        self._fp8_workspaces.clear()

    def renew(self) -> None:
        """The weights have changed."""
        self.sliced_weight.renew()
        self.sliced_bias.renew()

    def _get_weight_and_bias_tensors(self):
        weight, bias = super()._get_weight_and_bias_tensors()
        return self.sliced_weight.of(weight), self.sliced_bias.of(bias) if self.use_bias else bias


class SubnetTERowParallelLinear(CheckpointedTERowParallelLinear):
    """Reads the selected input columns and scales what it computed: `[s, b, kept/t] -> [s, b, h]`."""

    def __init__(self, *args: object, **options: object) -> None:
        super().__init__(*args, **options)
        self.sliced_weight = SlicedParameter()
        self.scale = self.bias_scale = 1.0

    def set_cut(self, cut: Cut | None, *, scale: float = 1.0, bias_scale: float = 1.0) -> None:
        """Columns to read (None: all) and the factors of the output and of the bias."""
        self.sliced_weight.set_cut(cut)
        self.scale, self.bias_scale = scale, bias_scale
        self._fp8_workspaces.clear()

    def renew(self) -> None:
        """The weights have changed."""
        self.sliced_weight.renew()

    def _get_weight_and_bias_tensors(self):
        weight, bias = super()._get_weight_and_bias_tensors()
        return self.sliced_weight.of(weight), bias

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        output, bias = super().forward(x)
        if self.scale != 1.0:
            output = output * self.scale
        return output, None if bias is None else bias * self.bias_scale


class SubnetTETransformerLayer(SubnetTransformerLayer):
    """A subnet's layer whose attention changes with the number of key/value heads that run."""

    def __init__(self, *args: object, **options: object) -> None:
        super().__init__(*args, **options)
        self._attentions = {self._full_heads: self.self_attention.core_attention}

    def _set_heads(self, counts: tuple[int, int]) -> None:
        super()._set_heads(counts)
        if counts not in self._attentions:
            config, ranks = copy.copy(self.config), self.tp_group.size()
            config.num_attention_heads, config.num_query_groups = (n * ranks for n in counts)
            self._attentions[counts] = TEDotProductAttention(
                config=config,
                layer_number=self.layer_number,
                attn_mask_type=AttnMaskType.causal,
                attention_type="self",
                pg_collection=self.self_attention.pg_collection,
            )
        self.self_attention.core_attention = self._attentions[counts]


def est_te_layer_spec(*, qk_layernorm: bool = False, fp8: Recipe | None = None) -> ModuleSpec:
    """TE's decoder layer, able to run a subnet. Raises RuntimeError for a TE release through which slices
    would not pass, and ValueError where there is none."""
    base = te_layer_spec(qk_layernorm=qk_layernorm, fp8=fp8)
    check_weight_source(TELayerNormColumnParallelLinear, TERowParallelLinear)
    return with_linears(
        base,
        layer=SubnetTETransformerLayer,
        column=SubnetTEColumnParallelLinear,
        row=SubnetTERowParallelLinear,
    )
