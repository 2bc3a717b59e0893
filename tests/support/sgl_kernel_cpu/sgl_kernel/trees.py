"""Draft trees: how they are laid out, and the greedy walk through them.

A tree of one request has `n` nodes, node 0 being the last token that was emitted. `retrive_next_token` holds
a node's first child, `retrive_next_sibling` its next sibling, -1 where there is none; `retrive_index` its
place in the flat batch. (The spelling is SGLang's.)
"""

import torch

_QLEN_ONLY = 1
"""Tree mask mode: `[b, n, n]` among the nodes. Mode 0 puts the whole rows `[n, l + n]` one after another."""
_NO_PARENT = -1


def verify_tree_greedy_cpu(
    predicts: torch.Tensor, accept_index: torch.Tensor, accept_token_num: torch.Tensor,
    candidates: torch.Tensor, retrive_index: torch.Tensor, retrive_next_token: torch.Tensor,
    retrive_next_sibling: torch.Tensor, target_predict: torch.Tensor,
) -> None:  # fmt: skip
    """Follow the target's own choices down each tree.

    Writes `accept_index` `[b, steps + 1]` (flat places of the root and of the accepted nodes),
    `accept_token_num` `[b]` (the root not counted) and the emitted tokens into `predicts` at those places.
    """
    chosen = target_predict.reshape(-1).tolist()
    for row in range(accept_index.shape[0]):
        children, siblings = retrive_next_token[row].tolist(), retrive_next_sibling[row].tolist()
        tokens, places = candidates[row].tolist(), retrive_index[row].tolist()
        path = [0]
        while len(path) < accept_index.shape[1]:
            wanted, node = chosen[places[path[-1]]], children[path[-1]]
            while node != -1 and tokens[node] != wanted:
                node = siblings[node]
            if node == -1:
                break
            path.append(node)
        for i, node in enumerate(path):
            accept_index[row, i] = places[node]
            predicts[places[node]] = chosen[places[node]]
        accept_token_num[row] = len(path) - 1


def build_tree_kernel_efficient_cpu(
    parent_list: torch.Tensor, selected_index: torch.Tensor, seq_len: torch.Tensor, tree_mask: torch.Tensor,
    positions: torch.Tensor, retrive_index: torch.Tensor, retrive_next_token: torch.Tensor,
    retrive_next_sibling: torch.Tensor, topk: int, depth: int, draft_token_num: int, tree_mask_mode: int,
) -> None:  # fmt: skip
    """Lay out the chosen drafts as trees, in place.

    `selected_index` `[b, n - 1]`: candidates, ascending; candidate c is one of the `topk` children of beam
    c // topk, whose own candidate is `parent_list[c // topk]` (beam 0 is the root). A candidate whose parent
    was not chosen (equal scores at the cut) hangs nowhere and is never accepted.
    """
    count, offset = draft_token_num, 0
    for row, length in enumerate(seq_len.tolist()):
        parents = _parents(selected_index[row].tolist(), parent_list[row].tolist(), topk)
        mask, depths = _ancestors(parents)
        positions.view(-1, count)[row] = torch.tensor(depths) + length
        retrive_index[row] = torch.arange(row * count, (row + 1) * count)
        _link(parents, retrive_next_token[row], retrive_next_sibling[row])
        if tree_mask_mode == _QLEN_ONLY:
            tree_mask.view(-1, count, count)[row] = mask
        else:
            size = count * (length + count)
            tree_mask.view(-1)[offset : offset + size].view(count, length + count)[:, length:] = mask
            offset += size


def _parents(selected: list[int], beams: list[int], topk: int) -> list[int]:
    """Parent node of every node."""
    place = {candidate: node for node, candidate in enumerate(selected, 1)}
    parents = [_NO_PARENT]
    for candidate in selected:
        beam = candidate // topk
        parents.append(place.get(beams[beam], _NO_PARENT) if beam else 0)
    return parents


def _ancestors(parents: list[int]) -> tuple[torch.Tensor, list[int]]:
    """bool `[n, n]`, row i true at i, its ancestors and the root; and each node's depth."""
    mask, depths = torch.eye(len(parents), dtype=torch.bool), [0] * len(parents)
    mask[:, 0] = True
    for node in range(1, len(parents)):  # a parent has a smaller number than its children
        if parents[node] != _NO_PARENT:
            mask[node] |= mask[parents[node]]
            depths[node] = depths[parents[node]] + 1
    return mask, depths


def _link(parents: list[int], children: torch.Tensor, siblings: torch.Tensor) -> None:
    """First children and next siblings, in ascending order of the nodes."""
    children.fill_(-1)
    siblings.fill_(-1)
    for node in range(len(parents) - 1, 0, -1):
        if parents[node] != _NO_PARENT:
            siblings[node] = children[parents[node]].clone()
            children[parents[node]] = node


def reconstruct_indices_from_tree_mask_cpu(
    tree_mask: torch.Tensor, seq_len: torch.Tensor, positions: torch.Tensor, retrive_index: torch.Tensor,
    retrive_next_token: torch.Tensor, retrive_next_sibling: torch.Tensor, batch_size: int,
    draft_token_num: int,
) -> None:  # fmt: skip
    """The layout of `build_tree_kernel_efficient_cpu` from masks `[b, n, n]` (n-gram trees), in place."""
    count = draft_token_num
    masks = tree_mask.view(batch_size, count, count).bool()
    for row, length in enumerate(seq_len.tolist()):
        above = [masks[row, node, :node].nonzero().flatten().tolist() for node in range(count)]
        parents = [nodes[-1] if nodes else _NO_PARENT for nodes in above]
        depths = torch.tensor([len(nodes) for nodes in above])
        positions.view(batch_size, count)[row] = depths + length
        retrive_index[row] = torch.arange(row * count, (row + 1) * count)
        _link(parents, retrive_next_token[row], retrive_next_sibling[row])
