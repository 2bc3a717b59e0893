"""The subnet's place in the model: the decoder layer's spec with the subnet's classes put in."""

from dataclasses import replace

from megatron_tlt.models.backend import local_layer_spec
from megatron_tlt.subnet.modules import (
    SubnetColumnParallelLinear, SubnetRowParallelLinear, SubnetTransformerLayer,
)  # fmt: skip

from megatron.core.transformer.spec_utils import ModuleSpec


def est_layer_spec(*, qk_layernorm: bool = False) -> ModuleSpec:
    """The `local` back-end's decoder layer, able to run a subnet; its parameters have the same names, so
    the checkpoint is an ordinary GPT checkpoint. Give it to `build_chunks(layer_spec=...)`."""
    base = local_layer_spec(qk_layernorm=qk_layernorm)
    layer = base.submodules
    attention = replace(
        layer.self_attention,
        submodules=replace(
            layer.self_attention.submodules,
            linear_qkv=SubnetColumnParallelLinear,
            linear_proj=SubnetRowParallelLinear,
        ),
    )
    mlp = replace(
        layer.mlp,
        submodules=replace(
            layer.mlp.submodules,
            linear_fc1=SubnetColumnParallelLinear,
            linear_fc2=SubnetRowParallelLinear,
        ),
    )
    return replace(
        base,
        module=SubnetTransformerLayer,
        submodules=replace(layer, self_attention=attention, mlp=mlp),
    )
