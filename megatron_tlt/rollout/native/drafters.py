"""Drafters: each proposes tokens that may follow the last one of every running request.

A draft is accepted where it equals the token that the target draws with that position's own random number
(`ops.speculative`), so a drafter may guess in any way it likes without touching what comes out.
"""

from collections.abc import Sequence
from typing import Protocol

import torch

from megatron_tlt.ops.sampling import sample, uniforms
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


def draw_draft(
    logits: torch.Tensor, running: Running, *, offset: int
) -> torch.Tensor:
    """One guess a request `[b]` with the random number that the target will use `offset` tokens ahead.

    That couples the two draws: the closer drafter and target, the likelier they agree at any temperature.
    """
    uniform = None
    if running.sampling.temperature is not None:
        uniform = uniforms(running.seeds, running.counts + offset)
    # Repetition penalty is left out: it would only make some guesses better.
    return sample(logits, running.sampling.without_penalty(), uniform=uniform)


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

    def __init__(self, runner: Runner, *, layers: Sequence[int]) -> None:
        total = runner.model.shape.num_layers
        kept = sorted(set(layers))
        if not kept or kept[0] < 0 or kept[-1] >= total or len(kept) == total:
            raise ValueError(
                f"subnet layers {list(layers)}: name some, not all, of the layers 0 to {total - 1}"
            )
        self.runner, self.layers = runner, kept

    def propose(self, running: Running, strategy: Strategy, *, levels: int) -> Draft | None:
        token, guesses = running.last, []
        for offset in range(levels):
            final = self.runner.draft(running, token, offset=offset, layers=self.layers)
            token = draw_draft(self.runner.model.logits(final), running, offset=offset)
            guesses.append(token)
        return chain_draft(
            running, torch.stack(guesses, 1), total=node_budget(running, strategy)
        )
