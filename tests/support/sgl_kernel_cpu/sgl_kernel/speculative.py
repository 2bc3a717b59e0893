"""The submodule from which SGLang's n-gram worker takes its one operation."""

import torch

from .trees import reconstruct_indices_from_tree_mask_cpu


def reconstruct_indices_from_tree_mask(
    tree_mask: torch.Tensor, verified_seq_len: torch.Tensor, positions: torch.Tensor,
    retrive_index: torch.Tensor, retrive_next_token: torch.Tensor, retrive_next_sibling: torch.Tensor,
    batch_size: int, draft_token_num: int,
) -> None:  # fmt: skip
    """See `reconstruct_indices_from_tree_mask_cpu`."""
    reconstruct_indices_from_tree_mask_cpu(
        tree_mask, verified_seq_len, positions, retrive_index, retrive_next_token, retrive_next_sibling,
        batch_size, draft_token_num,
    )  # fmt: skip
