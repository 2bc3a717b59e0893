"""What drafters hand to the verification: one tree of guesses a request, in a padded grid.

Legend: b requests, t tree nodes, n candidates, v vocabulary.
"""

from dataclasses import dataclass

import torch

from megatron_tlt.ops.speculative import best_nodes
from megatron_tlt.rollout.native.request import Running

# Scores of guesses are logarithms of survival probabilities; none is taken for more certain than this.
_SUREST = 0.999


@dataclass(slots=True)
class Draft:
    """Column 0 is the last emitted token; parents come before their children."""

    tokens: torch.Tensor
    """`[b, t]` int64; -1 where there is no node."""
    parents: torch.Tensor
    """`[b, t]`, column of the parent (0 for node 0 and for no node)."""
    depths: torch.Tensor
    """`[b, t]`, levels below the root."""
    levels: int
    """Largest depth."""
    is_chain: bool
    """Whether every node is the child of the one before it."""
    probs: torch.Tensor | None = None
    """`[b, t - 1, v]`, what each guess was drawn from, 0 where there is none: asks for p/q rejection."""

    def drafted(self) -> torch.Tensor:
        """Guesses of each request `[b]`, the root not counted."""
        return (self.tokens[:, 1:] >= 0).sum(1)

    def levels_of(self) -> torch.Tensor:
        """Levels that each request's tree has, `[b]`."""
        return torch.where(self.tokens >= 0, self.depths, 0).amax(1)


def chain_draft(
    running: Running, guesses: torch.Tensor, *, total: int, probs: torch.Tensor | None = None
) -> Draft | None:
    """Chains `[b, k]` (-1: nothing from there on), cut to the `total` guesses likeliest to survive.

    A request's acceptance so far is the survival probability of one position, so a request whose drafts
    hold gets longer chains than one whose drafts fail (what it drafted now plays no role, which rejection
    needs). `probs` `[b, k, v]` as in `Draft`. None where nothing is left.
    """
    count = guesses.shape[1]
    rates = torch.tensor([min(r.accept_rate, _SUREST) for r in running.requests])
    steps = torch.arange(1, count + 1, device=guesses.device)
    scores = rates.to(guesses.device).log()[:, None] * steps
    scores = scores.masked_fill(guesses < 0, float("-inf"))
    kept = torch.where(best_nodes(scores, total=total), guesses, -1)
    width = int((kept >= 0).sum(1).max())
    if not width:
        return None
    tokens = torch.cat((running.last[:, None], kept[:, :width]), 1)
    depths = torch.arange(width + 1, device=tokens.device).expand_as(tokens)
    if probs is not None:
        probs = torch.where((kept[:, :width] >= 0)[..., None], probs[:, :width], 0.0)
    return Draft(tokens, (depths - 1).clamp(min=0), depths, width, is_chain=True, probs=probs)


@dataclass(slots=True)
class Candidates:
    """Guesses to choose a tree from, parents before children."""

    tokens: torch.Tensor
    """`[b, n]`; -1 where there is none."""
    parents: torch.Tensor
    """`[b, n]`: 0 for children of the root, i + 1 for children of candidate i."""
    depths: torch.Tensor
    """`[b, n]`"""
    scores: torch.Tensor
    """`[b, n]`, log of the probability that the node survives; never above its parent's."""


def tree_draft(running: Running, candidates: Candidates, *, total: int, cap: int) -> Draft | None:
    """The `total` best candidates of all requests together, at most `cap` of each (EAGLE-2, section 4.2)."""
    scores = candidates.scores.masked_fill(candidates.tokens < 0, float("-inf"))
    keep = best_nodes(scores, total=total, cap=cap)
    width = int(keep.sum(1).max())
    if not width:
        return None
    order = (~keep).long().argsort(dim=1, stable=True)[:, :width]
    place = torch.nn.functional.pad(keep.long().cumsum(1), (1, 0))  # old parent to new column
    kept = keep.gather(1, order)

    def pick(values: torch.Tensor, missing: int) -> torch.Tensor:
        return torch.where(kept, values.gather(1, order), missing)

    def with_root(values: torch.Tensor, root: torch.Tensor) -> torch.Tensor:
        return torch.cat((root[:, None], values), 1)

    zero = torch.zeros_like(running.last)
    parents = with_root(pick(place.gather(1, candidates.parents), 0), zero)
    depths = with_root(pick(candidates.depths, 0), zero)
    return Draft(
        with_root(pick(candidates.tokens, -1), running.last), parents, depths, int(depths.max()),
        is_chain=False,
    )  # fmt: skip
