"""Drafting with the EAGLE layer: a chain, a dynamic tree, or a tree with n-gram guesses grafted in.

The dynamic tree is EAGLE-2's (https://arxiv.org/abs/2406.16858, section 4): each level expands the `topk`
nodes with the best product of probabilities from the root, each into its `topk` likeliest tokens; the best
of all nodes are verified. A chain (`topk` 1) draws its guesses with the target's own random numbers instead.

Legend: b requests, h hidden, k branches, n candidates, v vocabulary.
"""

import math
from dataclasses import dataclass

import torch

from megatron_tlt.rollout.native.draft import Candidates, Draft, chain_draft, tree_draft
from megatron_tlt.rollout.native.drafters import ChainDraw, ngram_guesses, node_budget
from megatron_tlt.rollout.native.eagle import EagleRunner, tempered_log_probs
from megatron_tlt.rollout.native.request import Running
from megatron_tlt.rollout.native.runner import FEATURES
from megatron_tlt.types import Strategy


class EagleDrafter:
    """Chains and trees of one EAGLE layer; `hybrid` grafts n-gram guesses into the tree."""

    def __init__(
        self, runner: EagleRunner, *, max_nodes: int, hybrid: bool = False, rejection: bool = False
    ) -> None:
        self.runner, self.max_nodes, self.hybrid = runner, max_nodes, hybrid
        self.rejection = rejection
        self.model = runner.model

    def propose(self, running: Running, strategy: Strategy, *, levels: int) -> Draft | None:
        expanded = strategy.topk * (strategy.num_steps - 1)
        if expanded > self.max_nodes:
            raise ValueError(
                f"strategy {strategy} expands {expanded} draft nodes, max_draft_tokens is "
                f"{self.max_nodes}: raise it, or lower num_steps or topk"
            )
        plane = self.runner.cache.planes[FEATURES][0]
        features = plane[:, : self.model.config.feature_size]
        state, ready = self.runner.catch_up(running, features)
        if strategy.topk == 1 and not self.hybrid:
            return self._chain(running, strategy, state, levels=levels, ready=ready)
        candidates = self._tree(running, strategy, state, levels=levels)
        if not all(ready):
            waiting = torch.tensor([not r for r in ready], device=state.device)
            candidates.tokens[waiting] = -1
        total = node_budget(running, strategy)
        if self.hybrid:
            candidates = graft(candidates, running, ngram_guesses(running, count=levels))
        return tree_draft(running, candidates, total=total, cap=self.max_nodes)

    def _chain(
        self, running: Running, strategy: Strategy, state: torch.Tensor, *, levels: int,
        ready: list[bool],
    ) -> Draft | None:  # fmt: skip
        guesses, draw = [], ChainDraw(running, rejection=self.rejection)
        for index in range(levels):
            if index:
                state = self.runner.level(
                    running, guesses[-1][:, None], state[:, None], index=index - 1, ancestors=None
                )[:, 0]
            guess = draw(self.model.logits(state), offset=index)
            guesses.append(self.model.target_tokens(guess))
        chain = torch.stack(guesses, 1)
        if not all(ready):
            chain[torch.tensor([not r for r in ready], device=chain.device)] = -1
        probs = draw.distributions()
        return chain_draft(
            running, chain, total=node_budget(running, strategy),
            probs=None if probs is None else self.model.target_probs(probs),
        )  # fmt: skip

    def _tree(
        self, running: Running, strategy: Strategy, state: torch.Tensor, *, levels: int
    ) -> Candidates:
        """All nodes that the expansion met, in level order."""
        log_probs = tempered_log_probs(self.model.logits(state)[:, None], running.sampling)
        topk = min(strategy.topk, log_probs.shape[-1])
        scores, draft = log_probs[:, 0].topk(topk)
        levels_found = [_Level.of(self.model.target_tokens(draft), scores, parents=0)]
        frontier = _Frontier.root(levels_found[0], state)
        for index in range(levels - 1):
            out = self.runner.level(
                running, frontier.tokens, frontier.states, index=index, ancestors=frontier.ancestors
            )
            log_probs, draft = tempered_log_probs(
                self._logits(out), running.sampling
            ).topk(topk)  # [b, k, k]
            scores = (frontier.scores[..., None] + log_probs).flatten(1)
            parents = (frontier.nodes[..., None].expand_as(log_probs) + 1).flatten(1)
            tokens = self.model.target_tokens(draft).flatten(1)
            first = sum(level.tokens.shape[1] for level in levels_found)
            levels_found.append(_Level.of(tokens, scores, parents=parents))
            frontier = frontier.next(levels_found[-1], out, first=first)
        return _candidates(levels_found)

    def _logits(self, states: torch.Tensor) -> torch.Tensor:
        return self.model.logits(states.flatten(0, 1)).unflatten(0, states.shape[:2])


@dataclass(slots=True)
class _Level:
    """Nodes of one depth: `[b, n]` each; parents as in `Candidates`."""

    tokens: torch.Tensor
    scores: torch.Tensor
    parents: torch.Tensor

    @staticmethod
    def of(tokens: torch.Tensor, scores: torch.Tensor, *, parents: torch.Tensor | int) -> "_Level":
        if isinstance(parents, int):
            parents = torch.full_like(tokens, parents)
        return _Level(tokens, scores, parents)


def _candidates(levels: list[_Level]) -> Candidates:
    depths = torch.cat([torch.full_like(x.tokens, i + 1) for i, x in enumerate(levels)], 1)
    tokens, parents, scores = (
        torch.cat([getattr(level, name) for level in levels], 1)
        for name in ("tokens", "parents", "scores")
    )
    return Candidates(tokens, parents, depths, scores)


@dataclass(slots=True)
class _Frontier:
    """The nodes to expand next: `[b, k]`, with what each of them sees of the expanded ones."""

    tokens: torch.Tensor
    scores: torch.Tensor
    nodes: torch.Tensor
    """Index among all candidates."""
    states: torch.Tensor
    """`[b, k, h]`, the parents' outputs."""
    ancestors: torch.Tensor
    """bool `[b, k, expanded]`, itself included."""

    @staticmethod
    def root(level: _Level, state: torch.Tensor) -> "_Frontier":
        count, topk = level.tokens.shape
        own = torch.eye(topk, dtype=torch.bool, device=state.device).expand(count, -1, -1)
        nodes = torch.arange(topk, device=state.device).expand(count, -1)
        states = state[:, None].expand(-1, topk, -1)
        return _Frontier(level.tokens, level.scores, nodes, states, own)

    def next(self, level: _Level, out: torch.Tensor, *, first: int) -> "_Frontier":
        """The best nodes of `level` (whose first candidate is `first`); `out` are this frontier's outputs."""
        topk = self.tokens.shape[1]
        scores, best = level.scores.topk(topk)
        parent = best // topk  # candidate j of the level came from frontier node j // topk
        own = torch.eye(topk, dtype=torch.bool, device=out.device).expand(len(best), -1, -1)
        seen = self.ancestors.gather(1, parent[..., None].expand(-1, -1, self.ancestors.shape[2]))
        return _Frontier(
            level.tokens.gather(1, best), scores, best + first,
            out.gather(1, parent[..., None].expand(-1, -1, out.shape[2])),
            torch.cat((seen, own), 2),
        )  # fmt: skip


def graft(
    candidates: Candidates, running: Running, guesses: list[list[int]]
) -> Candidates:
    """Add each request's n-gram chain `guesses[i]` (-1: ends) to its tree, sharing the nodes that agree.

    A grafted node survives its parent with the request's own acceptance rate.
    """
    count = candidates.tokens.shape[1]
    device = candidates.tokens.device
    known = [dict() for _ in guesses]
    for row, (tokens, parents) in enumerate(
        zip(candidates.tokens.tolist(), candidates.parents.tolist(), strict=True)
    ):
        known[row] = {(p, t): i + 1 for i, (p, t) in enumerate(zip(parents, tokens, strict=True))}
    scores = candidates.scores.tolist()
    added = []
    for row, guess in enumerate(guesses):
        rate = math.log(min(running.requests[row].accept_rate, 0.999))
        parent, score, new = 0, 0.0, []
        for depth, token in enumerate(guess, 1):
            if token < 0:
                break
            node = known[row].get((parent, token))
            if node is None:
                score += rate
                node = count + len(new) + 1
                new.append((token, parent, depth, score))
            else:
                score = max(score + rate, scores[row][node - 1])
                scores[row][node - 1] = score
            parent = node
        added.append(new)
    width = max(map(len, added))
    filler = (-1, 0, 1, -math.inf)
    rows = [new + [filler] * (width - len(new)) for new in added]
    tokens, parents, depths, fresh = (
        torch.tensor([[node[i] for node in row] for row in rows], device=device).view(len(rows), width)
        for i in range(4)
    )
    merged = torch.tensor(scores, device=device)
    return Candidates(
        torch.cat((candidates.tokens, tokens.long()), 1),
        torch.cat((candidates.parents, parents.long()), 1),
        torch.cat((candidates.depths, depths.long()), 1),
        torch.cat((merged, fresh.float()), 1),
    )
