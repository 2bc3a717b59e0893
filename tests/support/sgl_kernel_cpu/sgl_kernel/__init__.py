"""Stand-in for the compiled package sgl_kernel: what SGLang 0.5.21 asks of it on a CPU, in plain torch.

It is for tests and demonstrations, not for speed. Put its folder on PYTHONPATH only where the real package
cannot be imported (`tests/support/stand_ins.py` decides so). A name that is not here raises
NotImplementedError when it is called, so that nothing is skipped unseen.
"""

from collections.abc import Callable

from .attention import register_attention_operators
from .caches import (
    assign_draft_cache_locs_contiguous_cpu,
    assign_extend_cache_locs_cpu,
    assign_req_to_token_pool_cpu,
    build_draft_decode_metadata_cpu,
    copy_all_layer_kv_cache_cpu,
    fill_accept_out_cache_loc_cpu,
    fill_bonus_tokens_cpu,
    rotate_input_ids_cpu,
)
from .sampling import (
    top_k_renorm_prob,
    top_p_renorm_prob,
    tree_speculative_sampling_target_only,
)
from .trees import (
    build_tree_kernel_efficient_cpu,
    reconstruct_indices_from_tree_mask_cpu,
    verify_tree_greedy_cpu,
)

__version__ = "0.0.0+torch"
__all__ = [
    "assign_draft_cache_locs_contiguous_cpu",
    "assign_extend_cache_locs_cpu",
    "assign_req_to_token_pool_cpu",
    "build_draft_decode_metadata_cpu",
    "build_tree_kernel_efficient_cpu",
    "copy_all_layer_kv_cache_cpu",
    "fill_accept_out_cache_loc_cpu",
    "fill_bonus_tokens_cpu",
    "reconstruct_indices_from_tree_mask_cpu",
    "rotate_input_ids_cpu",
    "top_k_renorm_prob",
    "top_p_renorm_prob",
    "tree_speculative_sampling_target_only",
    "verify_tree_greedy_cpu",
]

_OPERATORS = register_attention_operators()

# Present in SGLang's CPU build for AMX only: SGLang asks for it to find out whether it may repack weights.
_ABSENT = ("convert_weight_packed",)


def __getattr__(name: str) -> Callable:
    if name.startswith("__") or name in _ABSENT:
        raise AttributeError(name)

    def missing(*_: object, **__: object) -> None:
        raise NotImplementedError(f"sgl_kernel.{name} has no stand-in on the CPU")

    return missing
