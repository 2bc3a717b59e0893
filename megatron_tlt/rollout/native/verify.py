"""One decode step of all running requests: plain, or with drafts to verify.

Legend: b running requests, t tree nodes, m nodes of all trees, v vocabulary, h hidden, f features.
"""

from dataclasses import dataclass

import torch

from megatron_tlt.ops.sampling import (
    ACCEPT_STREAM,
    FINAL_STREAM,
    SamplingTensors,
    penalize,
    sample,
    target_probs,
    token_log_probs,
    uniforms,
)
from megatron_tlt.ops.speculative import accepted_path, match_tree, reject_chain
from megatron_tlt.rollout.native.draft import Draft
from megatron_tlt.rollout.native.request import Running
from megatron_tlt.rollout.native.runner import FEATURES, TARGET, Runner


@dataclass(slots=True)
class StepOutput:
    """What the target drew: `tokens[i, : lengths[i]]` is emitted by request i."""

    tokens: torch.Tensor
    """`[b, t]`"""
    log_probs: torch.Tensor
    """`[b, t]`, the target's."""
    lengths: torch.Tensor
    """`[b]`, accepted drafts plus one."""

    def last(self) -> torch.Tensor:
        """Each request's newest token, `[b]`."""
        return self.tokens.gather(1, self.lengths[:, None] - 1).squeeze(1)


def draw(
    logits: torch.Tensor, sampling: SamplingTensors, *, seeds: torch.Tensor,
    counters: torch.Tensor, seen: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """(tokens, log-probs), both `[t]`, of `logits` `[t, v]`."""
    uniform = None if sampling.temperature is None else uniforms(seeds, counters)
    tokens = sample(logits, sampling, uniform=uniform, seen=seen)
    return tokens, token_log_probs(logits, tokens, temperature=sampling.temperature)


def step(runner: Runner, running: Running, draft: Draft | None) -> StepOutput:
    """Run the target over the last token and the draft, and accept what agrees.

    The rule is the shared-randomness rule of `ops.speculative`: a node stays where its whole path is what
    the target draws; or p/q rejection for a chain that says what it was drawn from. Keys, values and
    features of the accepted path end up where plain decoding would have put them.
    """
    return _plain(runner, running) if draft is None else _verify(runner, running, draft)


def _plain(runner: Runner, running: Running) -> StepOutput:
    final, features = runner.decode(running)
    sampling = running.sampling
    seen = _seen(running, None) if sampling.repetition_penalty is not None else None
    tokens, log_probs = draw(
        runner.model.logits(final), sampling, seeds=running.seeds, counters=running.counts, seen=seen
    )
    if features is not None:
        rows = running.lengths + runner.cache.first_row[: len(tokens)]
        runner.cache.planes[FEATURES][0].index_copy_(0, rows, features)
    return StepOutput(tokens[:, None], log_probs[:, None], torch.ones_like(running.lengths))


def _verify(runner: Runner, running: Running, draft: Draft) -> StepOutput:
    shape, width = draft.tokens.shape, draft.tokens.shape[1]
    nodes = (draft.tokens >= 0).flatten().nonzero().squeeze(1)  # [m]
    final, features = runner.verify(running, draft, nodes)
    owner = nodes // width
    sampling = running.sampling.take(owner)
    counters = (running.counts[:, None] + draft.depths).flatten()[nodes]
    seen = None
    if sampling.repetition_penalty is not None:
        seen = _seen(running, draft)[nodes]
    logits = runner.model.logits(final)
    if draft.probs is not None:
        drawn, log_probs, lengths = _reject(running, draft, logits, sampling, nodes=nodes, seen=seen)
        _keep_path(runner, running, draft.depths, lengths, nodes=nodes, features=features)
        return StepOutput(drawn, log_probs, lengths)
    drawn, log_probs = draw(
        logits, sampling, seeds=running.seeds[owner], counters=counters, seen=seen
    )
    drawn, log_probs = (_grid(x, nodes, shape) for x in (drawn, log_probs))
    accepted = match_tree(draft.tokens, draft.parents, drawn, depth=draft.levels)
    if draft.is_chain:
        path, lengths = draft.depths, accepted.sum(1)
    else:
        path, lengths = accepted_path(accepted, draft.depths)
        drawn, log_probs = drawn.gather(1, path), log_probs.gather(1, path)
    _keep_path(runner, running, path, lengths, nodes=nodes, features=features)
    return StepOutput(drawn, log_probs, lengths)


def _reject(
    running: Running, draft: Draft, logits: torch.Tensor, sampling: SamplingTensors, *,
    nodes: torch.Tensor, seen: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """p/q rejection of chains: tokens and log-probs `[b, t]`, and how many of them are emitted `[b]`."""
    shape, columns = draft.tokens.shape, torch.arange(draft.tokens.shape[1] - 1, device=nodes.device)
    shaped = logits
    if sampling.repetition_penalty is not None:
        shaped = penalize(logits, seen=seen, penalty=sampling.repetition_penalty)
    probs = target_probs(shaped, sampling)
    whole = probs.new_zeros(shape.numel(), probs.shape[-1]).index_copy_(0, nodes, probs)
    drafted = draft.drafted()
    places = running.counts[:, None] + columns
    accepted, last = reject_chain(
        draft.tokens[:, 1:].clamp(min=0), draft.probs, whole.view(*shape, -1),
        accept_uniform=uniforms((running.seeds ^ ACCEPT_STREAM)[:, None], places),
        final_uniform=uniforms(running.seeds ^ FINAL_STREAM, running.counts), drafted=drafted,
    )  # fmt: skip
    tokens = torch.cat((draft.tokens[:, 1:].clamp(min=0), torch.zeros_like(last)[:, None]), 1)
    tokens.scatter_(1, accepted[:, None], last[:, None])
    log_probs = token_log_probs(
        logits, tokens.flatten()[nodes], temperature=sampling.temperature
    )
    return tokens, _grid(log_probs, nodes, shape), accepted + 1


def _grid(values: torch.Tensor, nodes: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Values of nodes `[m]` to the padded grid `[b, t]`."""
    if len(nodes) == shape.numel():
        return values.view(shape)
    return values.new_zeros(shape.numel()).index_copy_(0, nodes, values).view(shape)


def _keep_path(
    runner: Runner, running: Running, path: torch.Tensor, lengths: torch.Tensor, *,
    nodes: torch.Tensor, features: torch.Tensor | None,
) -> None:  # fmt: skip
    """Move keys and values of accepted nodes `path` `[b, t]` to the front, and store their features."""
    count, width = path.shape
    columns = torch.arange(width, device=path.device)
    first = (running.lengths + runner.cache.first_row[:count])[:, None]
    kept = columns < lengths[:, None]
    moved = kept & (path != columns)
    if moved.any():
        sources, targets = (first + path)[moved], (first + columns)[moved]
        runner.cache.move_rows(TARGET, sources, targets)
    if features is not None:
        packed = torch.zeros(count * width, dtype=torch.int64, device=path.device)
        packed[nodes] = torch.arange(len(nodes), device=path.device)
        places = (path + width * torch.arange(count, device=path.device)[:, None])[kept]
        plane = runner.cache.planes[FEATURES][0]
        plane.index_copy_(0, (first + columns)[kept], features[packed[places]])


def _seen(running: Running, draft: Draft | None) -> torch.Tensor:
    """Tokens that the context of each node holds, its path included: bool `[b * t, v]`."""
    blank = torch.zeros_like(next(r.seen for r in running.requests if r.seen is not None))
    rows = torch.stack([blank if r.seen is None else r.seen for r in running.requests])
    if draft is None:
        return rows
    every = torch.arange(len(rows), device=rows.device)
    places = [rows]
    for column in range(1, draft.tokens.shape[1]):
        above = torch.stack(places, 1)[every, draft.parents[:, column]]
        token = draft.tokens[:, column].clamp(min=0)
        places.append(above.scatter(1, token[:, None], True))
    return torch.stack(places, 1).flatten(0, 1)
