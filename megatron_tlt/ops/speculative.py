"""Verification of draft tokens: which are accepted, and which token follows.

Two rules, both exact: emitted tokens are distributed as if the target alone had drawn them.

*Shared-randomness rule* (`match_tree`), the engine's. The target draws its token at every node with
the random number of that node's position, and a draft is accepted where it is that very token. So
the tokens are *identical* to those of a run without speculation at the same seed, at any
temperature, however the draft came about: it may even use the same random numbers, which couples
the two draws and raises acceptance. A draft that does not use them is accepted with the probability
that the target gives it, as in SGLang's target-only sampling.

*Rejection rule* (`reject_chain`, `reject_siblings`), for drafts sampled from the drafter's
distribution q: accept with probability min(1, p/q), else draw from the normalised positive part of
p - q (Leviathan et al. 2023, https://arxiv.org/abs/2211.17192, algorithm 1; siblings as in
SpecInfer, https://arxiv.org/abs/2305.09781).

Shapes: b requests, t tree nodes in an order where parents come first (node 0 is the last emitted token,
its own parent), k draft tokens of a chain, c siblings, v vocabulary.
"""

import torch

from megatron_tlt.ops.sampling import inverse_cdf


def match_tree(
    draft_tokens: torch.Tensor, parents: torch.Tensor, sampled: torch.Tensor, *, depth: int
) -> torch.Tensor:
    """Nodes whose whole path agrees with the target's own draws: bool `[b, t]`, node 0 always True.

    `sampled[b, i]` is the token that the target drew after node i. Siblings must differ, so at most one
    path survives. `depth` is the number of tree levels below the root.
    """
    agrees = draft_tokens == sampled.gather(1, parents)
    agrees[:, 0] = True
    accepted = torch.zeros_like(agrees)
    accepted[:, 0] = True
    for _ in range(depth):
        accepted = agrees & accepted.gather(1, parents)
    return accepted


def residual(target: torch.Tensor, draft: torch.Tensor) -> torch.Tensor:
    """Distribution after a rejection: normalised max(p - q, 0), over the last dimension.

    Where p and q agree to rounding a rejection has probability zero; p stands in to keep it defined.
    """
    left = (target - draft).clamp(min=0)
    mass = left.sum(-1, keepdim=True)
    return torch.where(mass > 0, left / mass.clamp(min=1e-30), target)


def reject_chain(
    draft_tokens: torch.Tensor,
    draft_probs: torch.Tensor,
    target_probs: torch.Tensor,
    *,
    accept_uniform: torch.Tensor,
    final_uniform: torch.Tensor,
    drafted: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """p/q rejection on sampled chains: (accepted drafts `[b]`, token that follows `[b]`).

    `draft_tokens` `[b, k]` drawn from `draft_probs` `[b, k, v]`; `target_probs` `[b, k + 1, v]`;
    uniforms `[b, k]` and `[b]`, independent of the draft's own. After the first rejection the
    residual is drawn, after none the target at the end of the chain. `drafted` `[b]` are the chains' own
    lengths where they differ; `draft_probs` must be 0 beyond them.
    """
    index = draft_tokens[..., None]
    p = target_probs[:, :-1].gather(-1, index).squeeze(-1)
    q = draft_probs.gather(-1, index).squeeze(-1)
    accepted = (accept_uniform * q < p).long().cumprod(-1).sum(-1)  # [b]
    if drafted is not None:
        accepted = torch.minimum(accepted, drafted)
    # A zero distribution after the chain makes "residual at k" the plain target there.
    padded = torch.cat((draft_probs, torch.zeros_like(draft_probs[:, :1])), 1)
    at = accepted[:, None, None].expand(-1, 1, target_probs.shape[-1])
    final = residual(target_probs.gather(1, at), padded.gather(1, at)).squeeze(1)
    return accepted, inverse_cdf(final, final_uniform)


def reject_siblings(
    candidates: torch.Tensor,
    draft_probs: torch.Tensor,
    target_probs: torch.Tensor,
    *,
    accept_uniform: torch.Tensor,
) -> tuple[int, torch.Tensor]:
    """p/q rejection among siblings drawn without replacement: (accepted index or -1, what is left of p).

    `candidates` `[c]` in the order drawn, `draft_probs` and `target_probs` `[v]`, `accept_uniform`
    `[c]`. Candidate i was drawn from q with the earlier candidates removed and renormalised; each
    rejection replaces p by the residual against that same q. If none is accepted, the token must be
    drawn from the returned distribution.
    """
    p, q = target_probs, draft_probs.clone()
    for i, token in enumerate(candidates.tolist()):
        q = q / q.sum()
        if accept_uniform[i] * q[token] < p[token]:
            return i, p
        p = residual(p, q)
        q[token] = 0
    return -1, p


def reject_tree(
    draft_tokens: torch.Tensor,
    parents: list[int],
    draft_probs: torch.Tensor,
    target_probs: torch.Tensor,
    *,
    uniform: torch.Tensor,
) -> tuple[list[int], int]:
    """p/q rejection down one sampled tree: (accepted nodes from the root on, token that follows).

    `draft_tokens` `[t]` with siblings in the order drawn; `draft_probs[i]` and `target_probs[i]`
    `[v]` are the distributions after node i; `uniform` `[t + 1]`: entry i decides node i, the last
    one draws the final token.
    """
    path, node = [0], 0
    while True:
        children = [i for i, parent in enumerate(parents) if parent == node and i > 0]
        chosen, left = -1, target_probs[node]
        if children:
            chosen, left = reject_siblings(
                draft_tokens[children],
                draft_probs[node],
                target_probs[node],
                accept_uniform=uniform[children],
            )
        if chosen < 0:
            return path, int(inverse_cdf(left[None], uniform[-1:]))
        node = children[chosen]
        path.append(node)


def ancestor_mask(parents: torch.Tensor, *, depth: int) -> torch.Tensor:
    """Which nodes each node sees, itself included: bool `[b, t, t]` from parents `[b, t]`."""
    count = parents.shape[1]
    mask = torch.eye(count, dtype=torch.bool, device=parents.device).expand(len(parents), -1, -1)
    for _ in range(depth):
        above = mask.gather(1, parents[..., None].expand(-1, -1, count))
        mask = mask | above
    return mask


def accepted_path(accepted: torch.Tensor, depths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(nodes of the accepted path `[b, t]`, its length `[b]`) from `match_tree`'s answer.

    Path nodes come first, by depth; the rest is filler. The root counts, so lengths start at 1.
    """
    order = torch.where(accepted, depths, depths.new_tensor(accepted.shape[1] + 1)).argsort(
        dim=1, stable=True
    )
    return order, accepted.sum(1)


def best_nodes(scores: torch.Tensor, *, total: int, cap: int | None = None) -> torch.Tensor:
    """The `total` best of `scores` `[b, n]` over all rows, at most `cap` a row: bool `[b, n]`.

    Scores are logarithms of survival probabilities, parents in lower columns than their children and never
    below them, so the choice holds a node's whole path; equal scores go to the lower column. -inf is never
    chosen. This is the draft budget of a batch spent where it is likeliest to be accepted.
    """
    keep = scores > float("-inf")
    if cap is not None and cap < scores.shape[1]:
        keep &= _first(scores, count=cap)
    if int(keep.sum()) > total:
        allowed = scores.masked_fill(~keep, float("-inf"))
        # Column by column, so that between equal scores every request gets its first nodes first.
        keep &= _first(allowed.T.reshape(1, -1), count=total).view(scores.shape[1], -1).T
    return keep


def _first(scores: torch.Tensor, *, count: int) -> torch.Tensor:
    """The `count` largest of each row, lower columns first among equals."""
    order = scores.argsort(dim=1, descending=True, stable=True)[:, :count]
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(1, order, True)


def tree_mask(
    ancestors: torch.Tensor, lengths: torch.Tensor, *, kv_len: int, dtype: torch.dtype
) -> torch.Tensor:
    """Additive attention mask `[b, 1, t, l]`: each node sees its request's cached positions and its path.

    `ancestors` bool `[b, t, t]`; node i stands at cache position lengths + i.
    """
    count = ancestors.shape[1]
    place = torch.arange(kv_len, device=lengths.device) - lengths[:, None]  # [b, l]
    inside = (place >= 0) & (place < count)
    index = place.clamp(0, count - 1)[:, None].expand(-1, count, -1)
    visible = (place < 0)[:, None] | (inside[:, None] & ancestors.gather(2, index))
    mask = torch.zeros(visible.shape, dtype=dtype, device=lengths.device)
    return mask.masked_fill_(~visible, float("-inf"))[:, None]
