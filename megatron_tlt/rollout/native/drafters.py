"""Drafters: each proposes a chain of tokens after the last one of every running request.

A draft is accepted where it equals the token that the target draws with that position's own random number
(`ops.speculative`), so a drafter may guess in any way it likes without touching what comes out.
"""

from collections.abc import Sequence
from typing import Protocol

import torch

from megatron_tlt.ops.sampling import sample, uniforms
from megatron_tlt.rollout.native.request import Running
from megatron_tlt.rollout.native.runner import Runner


class Drafter(Protocol):
    """One way to guess."""

    def propose(self, running: Running, *, count: int) -> torch.Tensor:
        """`[b, count]` int64 guesses; -1 where there is none (then nothing follows in that row)."""


class NgramDrafter:
    """Looks the last tokens up in what the prompt and its samples said so far. Needs no weights."""

    def __init__(self, *, device: torch.device) -> None:
        self.device = device

    def propose(self, running: Running, *, count: int) -> torch.Tensor:
        rows = []
        for request in running.requests:
            guess = request.group.index.propose(request.tokens, count=count)
            rows.append(guess + [-1] * (count - len(guess)))
        return torch.tensor(rows, device=self.device)


class SubnetDrafter:
    """Self-speculation: some layers of the target itself, reading and writing the target's own cache.

    The kept layers' keys and values of emitted tokens are the target's, so there is no catch-up; what the
    drafter writes beyond them is overwritten by the verification. It draws with the random numbers that
    the target will use, which makes agreement likely at temperature > 0 too.
    """

    def __init__(self, runner: Runner, *, layers: Sequence[int]) -> None:
        total = runner.model.shape.num_layers
        kept = sorted(set(layers))
        if not kept or kept[0] < 0 or kept[-1] >= total or len(kept) == total:
            raise ValueError(
                f"subnet layers {list(layers)}: name some, not all, of the layers 0 to {total - 1}"
            )
        self.runner, self.layers = runner, kept

    def propose(self, running: Running, *, count: int) -> torch.Tensor:
        token, guesses = running.last, []
        for offset in range(count):
            hidden = self.runner.decode(
                running, token[:, None], offset=offset, layers=self.layers
            )
            logits = self.runner.model.logits(hidden)
            uniform = None
            if running.sampling.temperature is not None:
                uniform = uniforms(running.seeds, running.counts + offset)
            # Repetition penalty is left out: it would only make some guesses better.
            sampling = running.sampling.without_penalty()
            token = sample(logits, sampling, uniform=uniform)
            guesses.append(token)
        return torch.stack(guesses, 1)
