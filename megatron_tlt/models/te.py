"""Transformer Engine's layers (TE), and the only importer of it: present on GPUs, optional everywhere.

megatron-core's wrappers are used, with their scales in the checkpoint under the names of our layers. What TE
must offer beyond its public interface is the one method through which a linear reads its weights;
`check_weight_source` proves at start-up that the installed release still does so. TE fuses the norm into the
linear that follows; checkpoints name both alike.
"""

import importlib.metadata
import inspect

from megatron_tlt import mcore  # noqa: F401  (before megatron.core)
from megatron_tlt.device import is_cuda
from megatron_tlt.ops.fp8_recipe import Recipe

import torch
from megatron.core.extensions.transformer_engine import (
    HAVE_TE,
    TEDotProductAttention,
    TELayerNormColumnParallelLinear,
    TENorm,
    TERowParallelLinear,
)
from megatron.core.fp8_utils import get_fp8_recipe
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

TE_VERSION = "2.20.2"
"""The release whose construction tools/check_te_construction.py records."""
WEIGHT_SOURCE = "_get_weight_and_bias_tensors"
"""The method of TE's linears that gives the tensors of the products."""


_FORWARD, _BACKWARD = 2, 1
"""TE's tensors of a linear: input, weight (and output) forward, output gradient (and input gradient)
backward; the first ones, in this order, are those of our layers."""


class CheckpointedTEColumnParallelLinear(TELayerNormColumnParallelLinear):
    """Norm and column-parallel linear whose delayed scaling is in the checkpoint as tensors."""

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata=None):
        state = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        return state | _sharded_scales(self, prefix, sharded_offsets, metadata)

    def _load_from_state_dict(self, state_dict, prefix: str, *args: object) -> None:
        _take_scales(self, state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args)


class CheckpointedTERowParallelLinear(TERowParallelLinear):
    """Row-parallel linear whose delayed scaling is in the checkpoint as tensors."""

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata=None):
        state = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        return state | _sharded_scales(self, prefix, sharded_offsets, metadata)

    def _load_from_state_dict(self, state_dict, prefix: str, *args: object) -> None:
        _take_scales(self, state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args)


def delayed_state(linear: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Scales `[3]` and amax history `[h, 3]` of a TE linear, as our layers hold them; empty for others.

    TE saves them as a pickle in `_extra_state`, which no other layout and no other back-end can read.
    """
    if linear.config.fp8 is None or linear.config.fp8_recipe != "delayed":
        return {}
    forward, backward = _meta(linear)
    return {
        "scale": torch.cat([forward.scale[:_FORWARD], backward.scale[:_BACKWARD]]),
        "amax_history": torch.cat(
            [forward.amax_history[:, :_FORWARD], backward.amax_history[:, :_BACKWARD]], dim=1
        ),
    }


def load_delayed_state(linear: torch.nn.Module, state: dict[str, torch.Tensor]) -> None:
    """The other way."""
    forward, backward = _meta(linear)
    for name, value in state.items():
        getattr(forward, name)[..., :_FORWARD].copy_(value[..., :_FORWARD])
        getattr(backward, name)[..., :_BACKWARD].copy_(value[..., _FORWARD:])


def _meta(linear: torch.nn.Module) -> tuple[object, object]:
    """TE's state of a linear's forward and backward tensors, which it makes at the first forward pass."""
    if "scaling_fwd" not in linear.fp8_meta:
        recipe = get_fp8_recipe(linear.config)
        linear.fp8_meta.update(num_gemms=1, recipe=recipe)
        linear.init_fp8_meta_tensors(recipe)
    return linear.fp8_meta["scaling_fwd"], linear.fp8_meta["scaling_bwd"]


def _sharded_scales(linear, prefix: str, sharded_offsets: tuple, metadata: dict) -> dict[str, object]:
    """The same on every TP and DP rank, since TE reduces amax over both."""
    return make_sharded_tensors_for_checkpoint(
        {f"fp8.{name}": value for name, value in delayed_state(linear).items()},
        prefix,
        {},
        sharded_offsets,
        tp_group=linear._tp_group,
        dp_cp_group=metadata["dp_cp_group"],
    )


def _take_scales(linear: torch.nn.Module, state_dict: dict, prefix: str) -> None:
    names = [name for name in ("scale", "amax_history") if f"{prefix}fp8.{name}" in state_dict]
    if names:
        load_delayed_state(linear, {n: state_dict.pop(f"{prefix}fp8.{n}") for n in names})


def is_available() -> bool:
    """Whether TE's layers can run here: it is installed and there is a GPU."""
    return HAVE_TE and is_cuda()


def check_installed() -> None:
    """Raise ValueError where Transformer Engine is not installed."""
    if not HAVE_TE:
        raise ValueError(
            "precision.transformer_impl=transformer_engine needs Transformer Engine: pip install -r "
            "requirements-gpu.txt on a machine with an NVIDIA GPU, or take transformer_impl=local"
        )


def te_layer_spec(*, qk_layernorm: bool = False, fp8: Recipe | None = None) -> ModuleSpec:
    """The decoder layer of TE's modules. Raises ValueError where it is not installed.

    `fp8` is not for it: megatron-core puts each layer's forward pass into TE's autocast, as its own
    configuration says (`PrecisionConfig.megatron_fields`).
    """
    check_installed()
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            self_attention=ModuleSpec(
                module=SelfAttention,
                params={"attn_mask_type": AttnMaskType.causal},
                submodules=SelfAttentionSubmodules(
                    linear_qkv=CheckpointedTEColumnParallelLinear,
                    core_attention=TEDotProductAttention,
                    linear_proj=CheckpointedTERowParallelLinear,
                    q_layernorm=TENorm if qk_layernorm else IdentityOp,
                    k_layernorm=TENorm if qk_layernorm else IdentityOp,
                ),
            ),
            self_attn_bda=get_bias_dropout_add,
            mlp=ModuleSpec(
                module=MLP,
                submodules=MLPSubmodules(
                    linear_fc1=CheckpointedTEColumnParallelLinear,
                    linear_fc2=CheckpointedTERowParallelLinear,
                ),
            ),
            mlp_bda=get_bias_dropout_add,
        ),
    )


def check_weight_source(*linears: type) -> None:
    """Raise RuntimeError when the forward pass of a TE linear does not read its weights through the one
    method that a subnet's linear overrides; then a subnet would silently compute the whole layer."""
    for linear in linears:
        base = next(c for c in linear.__mro__ if c.__module__.startswith("transformer_engine."))
        has_source = WEIGHT_SOURCE in vars(base)
        if not has_source or f"self.{WEIGHT_SOURCE}()" not in inspect.getsource(base.forward):
            installed = importlib.metadata.version("transformer-engine")
            raise RuntimeError(
                f"Transformer Engine {installed}: {base.__name__}.forward does not call {WEIGHT_SOURCE}, "
                f"through which subnets hand it their slices; {TE_VERSION} does. Install that release, or "
                "train subnets with precision.transformer_impl=local"
            )
