"""Transformer Engine's layers (TE), and the only importer of it: present on GPUs, optional everywhere.

megatron-core's wrappers are used as they are. What TE must offer beyond its public interface is the one
method through which a linear reads its weights; `check_weight_source` proves at start-up that the installed
release still does so. TE fuses the norm into the linear that follows; checkpoints name both alike.
"""

import importlib.metadata
import inspect

from megatron_tlt import mcore  # noqa: F401  (before megatron.core)
from megatron_tlt.device import is_cuda
from megatron_tlt.ops.fp8_recipe import Recipe

from megatron.core.extensions.transformer_engine import (
    HAVE_TE,
    TEDotProductAttention,
    TELayerNormColumnParallelLinear,
    TENorm,
    TERowParallelLinear,
)
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

TE_VERSION = "2.20.2"
"""The release whose construction tools/check_te_construction.py records."""
WEIGHT_SOURCE = "_get_weight_and_bias_tensors"
"""The method of TE's linears that gives the tensors of the products."""


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
                    linear_qkv=TELayerNormColumnParallelLinear,
                    core_attention=TEDotProductAttention,
                    linear_proj=TERowParallelLinear,
                    q_layernorm=TENorm if qk_layernorm else IdentityOp,
                    k_layernorm=TENorm if qk_layernorm else IdentityOp,
                ),
            ),
            self_attn_bda=get_bias_dropout_add,
            mlp=ModuleSpec(
                module=MLP,
                submodules=MLPSubmodules(
                    linear_fc1=TELayerNormColumnParallelLinear, linear_fc2=TERowParallelLinear
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
