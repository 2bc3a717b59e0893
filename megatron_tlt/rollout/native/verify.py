"""One decode step of all running requests: plain, or with drafts to verify."""

from dataclasses import dataclass

import torch

from megatron_tlt.ops.sampling import SamplingTensors, sample, token_log_probs, uniforms
from megatron_tlt.rollout.native.request import Running
from megatron_tlt.rollout.native.runner import Runner


@dataclass(slots=True)
class StepOutput:
    """What the target drew: `tokens[i, : lengths[i]]` is emitted by request i."""

    tokens: torch.Tensor
    """`[b, w]`"""
    log_probs: torch.Tensor
    """`[b, w]`, the target's."""
    lengths: torch.Tensor
    """`[b]`, accepted drafts plus one."""
    hidden: torch.Tensor
    """`[b, w, h]`, final states from which the tokens were drawn."""


def draw(
    logits: torch.Tensor, sampling: SamplingTensors, *, seeds: torch.Tensor,
    counters: torch.Tensor, seen: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """(tokens, log-probs), both `[t]`, of `logits` `[t, v]`."""
    uniform = None if sampling.temperature is None else uniforms(seeds, counters)
    tokens = sample(logits, sampling, uniform=uniform, seen=seen)
    return tokens, token_log_probs(logits, tokens, temperature=sampling.temperature)


def step(runner: Runner, running: Running, drafts: torch.Tensor | None) -> StepOutput:
    """Run the target over the last token and `drafts` `[b, k]` (-1: none), and accept what agrees.

    The rule is the shared-randomness rule of `ops.speculative` for chains: draft j stays where all drafts up
    to j are the tokens that the target draws.
    """
    tokens = running.last[:, None]
    if drafts is not None:
        tokens = torch.cat((tokens, drafts), 1)
    count, width = tokens.shape
    hidden = runner.decode(running, tokens.clamp(min=0))
    logits = runner.model.logits(hidden)
    sampling, seeds, counters = running.sampling, running.seeds, running.counts
    if width > 1:
        steps = torch.arange(width, device=tokens.device)
        node = torch.arange(count, device=tokens.device).repeat_interleave(width)
        sampling, seeds = sampling.take(node), seeds[node]
        counters = (counters[:, None] + steps).flatten()
    seen = _seen(running, tokens) if sampling.repetition_penalty is not None else None
    drawn, log_probs = draw(logits, sampling, seeds=seeds, counters=counters, seen=seen)
    drawn = drawn.view(count, width)
    lengths = torch.ones_like(running.lengths)
    if width > 1:
        lengths += (tokens[:, 1:] == drawn[:, :-1]).long().cumprod(1).sum(1)
    return StepOutput(
        drawn, log_probs.view(count, width), lengths, hidden.view(count, width, -1)
    )


def _seen(running: Running, tokens: torch.Tensor) -> torch.Tensor:
    """Tokens that the context of each place holds, drafts before it included: bool `[b * w, v]`."""
    blank = torch.zeros_like(next(r.seen for r in running.requests if r.seen is not None))
    rows = torch.stack([blank if r.seen is None else r.seen for r in running.requests])
    places = [rows]
    for column in tokens[:, 1:].clamp(min=0).T:
        places.append(places[-1].scatter(1, column[:, None], True))
    return torch.stack(places, 1).flatten(0, 1)
