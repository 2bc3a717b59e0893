"""The subnet's place in the model: the decoder layer's spec with the subnet's classes put in."""

from dataclasses import replace

from megatron_tlt.models.backend import local_layer_spec
from megatron_tlt.ops.fp8_recipe import Recipe
from megatron_tlt.subnet.modules import (
    Fp8SubnetColumnParallelLinear, Fp8SubnetRowParallelLinear, SubnetColumnParallelLinear,
    SubnetRowParallelLinear, SubnetTransformerLayer,
)  # fmt: skip

from megatron.core.transformer.spec_utils import ModuleSpec


def est_layer_spec(*, qk_layernorm: bool = False, fp8: Recipe | None = None) -> ModuleSpec:
    """The `local` back-end's decoder layer, able to run a subnet, in FP8 where `fp8` says how; its
    parameters have the same names, so the checkpoint is an ordinary GPT checkpoint. Give it to
    `build_chunks(layer_spec=...)`."""
    column, row = SubnetColumnParallelLinear, SubnetRowParallelLinear
    if fp8 is not None:
        column, row = (
            ModuleSpec(module=module, params={"fp8": fp8})
            for module in (Fp8SubnetColumnParallelLinear, Fp8SubnetRowParallelLinear)
        )
    base = local_layer_spec(qk_layernorm=qk_layernorm)
    return with_linears(base, layer=SubnetTransformerLayer, column=column, row=row)


def with_linears(
    base: ModuleSpec, *, layer: type, column: type | ModuleSpec, row: type | ModuleSpec
) -> ModuleSpec:
    """The layer spec `base` with another layer class and other linears."""
    parts = base.submodules
    attention = replace(
        parts.self_attention,
        submodules=replace(
            parts.self_attention.submodules, linear_qkv=column, linear_proj=row
        ),
    )
    mlp = replace(
        parts.mlp, submodules=replace(parts.mlp.submodules, linear_fc1=column, linear_fc2=row)
    )
    return replace(
        base, module=layer, submodules=replace(parts, self_attention=attention, mlp=mlp)
    )
