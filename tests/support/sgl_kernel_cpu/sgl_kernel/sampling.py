"""Sampled verification of draft trees against the target's distribution alone, and its truncation.

The CPU build of the real package has none of these three; they follow the CUDA build's contracts.
"""

import torch


def tree_speculative_sampling_target_only(
    predicts: torch.Tensor, accept_index: torch.Tensor, accept_token_num: torch.Tensor,
    candidates: torch.Tensor, retrive_index: torch.Tensor, retrive_next_token: torch.Tensor,
    retrive_next_sibling: torch.Tensor, uniform_samples: torch.Tensor,
    uniform_samples_for_final_sampling: torch.Tensor, target_probs: torch.Tensor,
    draft_probs: torch.Tensor, threshold_single: float = 1.0, threshold_acc: float = 1.0,
    deterministic: bool = True,
) -> None:  # fmt: skip
    """Walk down each tree: a child is taken with the target's probability of its token `[b, n, v]`.

    One uniform number a level chooses among the children, in their order; where it falls on none, the token
    is drawn from what is left. With thresholds of 1 the emitted tokens have the target's distribution exactly.
    Outputs as those of `verify_tree_greedy_cpu`.
    """
    for row in range(accept_index.shape[0]):
        tokens, places = candidates[row].tolist(), retrive_index[row].tolist()
        children, siblings = retrive_next_token[row].tolist(), retrive_next_sibling[row].tolist()
        coin, node, count = float(uniform_samples[row, 0]), 0, 0
        left = target_probs[row, 0].clone()
        accept_index[row, 0] = places[0]
        while count + 1 < accept_index.shape[1]:
            child, mass = children[node], 0.0
            while child != -1:
                chance = float(target_probs[row, node, tokens[child]])
                mass += chance
                if coin <= mass / threshold_acc or chance >= threshold_single:
                    break
                left[tokens[child]] = 0.0
                child = siblings[child]
            if child == -1:
                break
            predicts[places[node]] = tokens[child]
            node, count, coin = child, count + 1, float(uniform_samples[row, child])
            left = target_probs[row, node].clone()
            accept_index[row, count] = places[node]
        accept_token_num[row] = count
        sums = left.cumsum(0)
        drawn = torch.searchsorted(
            sums, sums[-1] * uniform_samples_for_final_sampling[row], right=True
        )
        predicts[places[node]] = int(drawn.clamp_max(len(sums) - 1))


def top_k_renorm_prob(probs: torch.Tensor, top_k: torch.Tensor) -> torch.Tensor:
    """Rows `[r, v]` with all but the `top_k[r]` largest set to 0, summing to 1."""
    order = probs.argsort(dim=-1, descending=True, stable=True)
    ranks = torch.empty_like(order).scatter_(-1, order, torch.arange(probs.shape[-1]).expand_as(order))
    kept = probs.masked_fill(ranks >= top_k[:, None], 0.0)
    return kept / kept.sum(-1, keepdim=True)


def top_p_renorm_prob(probs: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Rows `[r, v]` cut to the smallest set of largest values that reaches `top_p[r]`, summing to 1."""
    values, order = probs.sort(dim=-1, descending=True, stable=True)
    before = values.cumsum(-1) - values
    values = values.masked_fill(before >= top_p[:, None], 0.0)
    kept = torch.zeros_like(probs).scatter_(-1, order, values)
    return kept / kept.sum(-1, keepdim=True)
