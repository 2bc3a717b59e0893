"""Drafters: each proposes tokens that may follow the last one of every running request.

A draft is accepted where it equals the token that the target draws with that position's own random number
(`ops.speculative`), so a drafter may guess in any way it likes without touching what comes out.
"""

from collections.abc import Sequence
from typing import Protocol

import torch

from megatron_tlt.ops.sampling import DRAFT_STREAM, inverse_cdf, sample, target_probs, uniforms
from megatron_tlt.rollout.native.draft import Draft, chain_draft
from megatron_tlt.rollout.native.request import Running
from megatron_tlt.rollout.native.runner import Runner
from megatron_tlt.types import Strategy


class Drafter(Protocol):
    """One way to guess."""

    def propose(self, running: Running, strategy: Strategy, *, levels: int) -> Draft | None:
        """Trees of at most `levels` levels, on average `strategy.num_draft_tokens` nodes a request."""


def node_budget(running: Running, strategy: Strategy) -> int:
    """Guesses of all requests together, roots not counted."""
    return len(running.requests) * (strategy.num_draft_tokens - 1)


class ChainDraw:
    """Draws the guesses of one chain, and remembers what rejection needs to know of them."""

    def __init__(self, running: Running, *, rejection: bool) -> None:
        # Repetition penalty is left out: it would only make some guesses better.
        self.running, self.sampling = running, running.sampling.without_penalty()
        self.rejection = rejection and running.sampling.temperature is not None
        self.probs: list[torch.Tensor] = []

    def __call__(self, logits: torch.Tensor, *, offset: int) -> torch.Tensor:
        """One guess a request `[b]` from `logits` `[b, v]`, `offset` tokens ahead.

        Without rejection with the random number that the target will use, which couples the two draws: the
        closer drafter and target, the likelier they agree. With rejection independently.
        """
        counters = self.running.counts + offset
        if self.rejection:
            probs = target_probs(logits, self.sampling)
            self.probs.append(probs)
            return inverse_cdf(probs, uniforms(self.running.seeds ^ DRAFT_STREAM, counters))
        uniform = None
        if self.sampling.temperature is not None:
            uniform = uniforms(self.running.seeds, counters)
        return sample(logits, self.sampling, uniform=uniform)

    def distributions(self) -> torch.Tensor | None:
        """`[b, k, v]`, or None where nothing is to be rejected."""
        return torch.stack(self.probs, 1) if self.probs else None


class NgramDrafter:
    """Looks the last tokens up in what the prompt and its samples said so far. Needs no weights."""

    def __init__(self, *, device: torch.device) -> None:
        self.device = device

    def propose(self, running: Running, strategy: Strategy, *, levels: int) -> Draft | None:
        guesses = torch.tensor(ngram_guesses(running, count=levels), device=self.device)
        return chain_draft(running, guesses, total=node_budget(running, strategy))


def ngram_guesses(running: Running, *, count: int) -> list[list[int]]:
    """`count` guesses a request, -1 where there is none; the indexes learn what was said first."""
    for request in running.requests:
        request.learn_ngrams()
    rows = []
    for request in running.requests:
        guess = request.group.index.propose(request.tokens, count=count)
        rows.append(guess + [-1] * (count - len(guess)))
    return rows


class SubnetDrafter:
    """Self-speculation: some layers of the target itself, reading and writing the target's own cache.

    The kept layers' keys and values of emitted tokens are the target's, so there is no catch-up; what the
    drafter writes beyond them is overwritten by the verification.
    """

    def __init__(
        self, runner: Runner, *, layers: Sequence[int], rejection: bool = False
    ) -> None:
        total = runner.model.shape.num_layers
        kept = sorted(set(layers))
        if not kept or kept[0] < 0 or kept[-1] >= total or len(kept) == total:
            raise ValueError(
                f"subnet layers {list(layers)}: name some, not all, of the layers 0 to {total - 1}"
            )
        self.runner, self.layers, self.rejection = runner, kept, rejection

    def propose(self, running: Running, strategy: Strategy, *, levels: int) -> Draft | None:
        token, guesses = running.last, []
        draw = ChainDraw(running, rejection=self.rejection)
        for offset in range(levels):
            final = self.runner.draft(running, token, offset=offset, layers=self.layers)
            token = draw(self.runner.model.logits(final), offset=offset)
            guesses.append(token)
        return chain_draft(
            running, torch.stack(guesses, 1), total=node_budget(running, strategy),
            probs=draw.distributions(),
        )  # fmt: skip
