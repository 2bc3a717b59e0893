"""Sequences of unequal length into micro-batches: who computes what, and how it lies in the tensors.

Policy first (`plan_micro_batches`, plain integers), then layout (`build_micro_batch`, tensors). A plan
gives every data-parallel rank the same number of micro-batches, so that no rank waits in a collective that
another never enters; a rank without sequences gets empty ones, which `build_micro_batch` fills with padding
that runs forward and backward like any other and weighs nothing.

Shapes: b rows, s row length; `[1, s]` when packed.
"""

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

MicroBatchPlan = list[list[list[int]]]
"""plan[rank][micro_batch] = indices of its sequences."""


def plan_micro_batches(
    lengths: Sequence[int],
    *,
    max_tokens: int,
    num_ranks: int,
    quadratic: float = 0.0,
    multiple_of: int = 1,
) -> MicroBatchPlan:
    """Cut sequences of `lengths` (prompt and response) into micro-batches of at most `max_tokens` each.

    Every rank gets the same number of micro-batches, a multiple of `multiple_of` (interleaved pipelines
    ask for that); the fewest for which longest-first placement fits. Work is balanced over micro-batches and
    over ranks by cost = length + `quadratic` * length^2 (attention). A pure function of its arguments, so
    all ranks find the same plan without a word. Raises ValueError if a sequence exceeds `max_tokens`.
    """
    if max_tokens < 1 or num_ranks < 1 or multiple_of < 1:
        raise ValueError(
            f"max_tokens {max_tokens}, num_ranks {num_ranks} and multiple_of {multiple_of} must be >= 1"
        )
    longest = max(lengths, default=0)
    if longest > max_tokens:
        raise ValueError(
            f"a sequence of {longest} tokens does not fit max_tokens_per_gpu {max_tokens}: raise it to "
            "the longest prompt plus the longest response"
        )
    costs = [length * (1.0 + quadratic * length) for length in lengths]
    fewest = max(1, math.ceil(sum(lengths) / (max_tokens * num_ranks)))
    per_rank = math.ceil(fewest / multiple_of) * multiple_of
    while (bins := _fill(lengths, costs, max_tokens, per_rank * num_ranks)) is None:
        per_rank += multiple_of
    return _deal(bins, costs, num_ranks=num_ranks, per_rank=per_rank)


def _fill(
    lengths: Sequence[int], costs: Sequence[float], max_tokens: int, num_bins: int
) -> list[list[int]] | None:
    """Longest first into the cheapest bin that has room; None if one finds no room."""
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    heap = [(0.0, number, 0) for number in range(num_bins)]  # (cost, bin, tokens)
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        full = []
        while heap and heap[0][2] + lengths[index] > max_tokens:
            full.append(heapq.heappop(heap))
        if not heap:
            return None
        cost, number, tokens = heapq.heappop(heap)
        bins[number].append(index)
        heapq.heappush(heap, (cost + costs[index], number, tokens + lengths[index]))
        for entry in full:
            heapq.heappush(heap, entry)
    return bins


def _deal(
    bins: list[list[int]], costs: Sequence[float], *, num_ranks: int, per_rank: int
) -> MicroBatchPlan:
    """Most expensive bin to the rank with the least work among those that still lack one.

    Micro-batches of a rank go from expensive to cheap, so that step m costs about the same on all ranks.
    """
    weights = [sum(costs[i] for i in members) for members in bins]
    plan: MicroBatchPlan = [[] for _ in range(num_ranks)]
    work = [0.0] * num_ranks
    for number in sorted(range(len(bins)), key=lambda n: (-weights[n], n)):
        rank = min(
            (r for r in range(num_ranks) if len(plan[r]) < per_rank), key=lambda r: (work[r], r)
        )
        plan[rank].append(sorted(bins[number]))
        work[rank] += weights[number]
    return plan


@dataclass(frozen=True, kw_only=True, slots=True)
class PackingStats:
    """How good a plan is. Example: imbalance 1.04 means that the busiest rank has 4 % more than the mean."""

    num_micro_batches: int
    """Per rank."""
    imbalance: float
    """Tokens of the busiest rank over the mean."""
    fill: float
    """Tokens over (micro-batches * max_tokens)."""


def packing_stats(
    plan: MicroBatchPlan, lengths: Sequence[int], *, max_tokens: int
) -> PackingStats:
    """Balance and fill of a plan in tokens."""
    per_rank = [sum(lengths[i] for batch in batches for i in batch) for batches in plan]
    total, count = sum(per_rank), len(plan[0])
    return PackingStats(
        num_micro_batches=count,
        imbalance=max(per_rank) * len(plan) / total if total else 1.0,
        fill=total / (count * len(plan) * max_tokens),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatch:
    """Tensors of one micro-batch of n sequences, and where each response token lies in them.

    The value that belongs to a response token (log-probability, advantage) stands at the position that
    *predicts* it, one before the token itself; `place` lists those positions.
    """

    tokens: torch.Tensor
    """`[b, s]` int64."""
    labels: torch.Tensor
    """`[b, s]` int64: the token that follows in its sequence; 0 at the last one and at padding."""
    position_ids: torch.Tensor
    """`[b, s]` int64, from 0 in each sequence."""
    segments: torch.Tensor
    """`[b, s]` int64, 0 .. n - 1: which sequence; padding belongs to the last one of its row, masked."""
    response_mask: torch.Tensor
    """`[b, s]` float32: 1 where a response token is predicted."""
    cu_seqlens: torch.Tensor
    """`[n + 1]` or `[n + 2]` (padding last) int32: borders of the packed sequences; `[b + 1]` for rows."""
    indices: tuple[int, ...]
    """Which sequences of the batch these are."""
    place: torch.Tensor
    """`[t]` int64: flat position of each response token, sequence after sequence."""
    response_lengths: tuple[int, ...]
    """Response tokens of each of `indices`; they sum to t."""
    packed: bool
    """Whether several sequences may share a row, which needs `attention_mask`."""

    def scatter(self, values: Sequence[torch.Tensor], *, fill: float = 0.0) -> torch.Tensor:
        """Per-token values of each sequence's response (list of `[length]`) as `[b, s]`."""
        flat = torch.full((self.tokens.numel(),), fill, dtype=torch.float32, device=self.tokens.device)
        if len(self.place):
            flat[self.place] = torch.cat(list(values)).to(flat)
        return flat.view(self.tokens.shape)

    def gather(self, values: torch.Tensor) -> list[torch.Tensor]:
        """The inverse of `scatter`: `[b, s]` back to one `[length]` a sequence."""
        return list(values.reshape(-1)[self.place].split(list(self.response_lengths)))

    def attention_mask(self) -> torch.Tensor | None:
        """`[1, 1, s, s]` bool, True = may not see: causal within each sequence (Megatron's convention).

        None for rows, where plain causal attention is already right (padding comes last).
        """
        if not self.packed:
            return None
        borders = torch.repeat_interleave(self.cu_seqlens.diff().long())
        size = len(borders)
        same = borders[:, None] == borders[None, :]
        causal = torch.ones(size, size, dtype=torch.bool, device=borders.device).tril()
        return ~(same & causal)[None, None]


def build_micro_batch(
    prompts: Sequence[Sequence[int]],
    responses: Sequence[Sequence[int]],
    indices: Sequence[int],
    *,
    packed: bool,
    pad_to: int = 0,
    pad_multiple: int = 1,
) -> MicroBatch:
    """Micro-batch of the sequences `indices`: token ids in `prompts[i] + responses[i]`.

    `packed`: end to end in one row; otherwise one row each (the slow twin: padding is computed too).
    Rows are padded to the largest of their content, `pad_to` and 1, rounded up to `pad_multiple`
    (sequence parallelism needs a multiple of the TP size; a pipeline one length for all micro-batches).
    """
    lengths = [len(prompts[i]) + len(responses[i]) for i in indices]
    rows = [list(range(len(indices)))] if packed else [[j] for j in range(len(indices))] or [[]]
    content = max(sum(lengths[j] for j in row) for row in rows)
    width = math.ceil(max(content, pad_to, 1) / pad_multiple) * pad_multiple
    shape = (len(rows), width)
    tokens, labels, positions, segments = (torch.zeros(shape, dtype=torch.long) for _ in range(4))
    places = []
    for r, row in enumerate(rows):
        start = 0
        for j in row:
            prompt, response = prompts[indices[j]], responses[indices[j]]
            if not prompt:
                raise ValueError(f"sequence {indices[j]} has an empty prompt: nothing predicts its response")
            end = start + lengths[j]
            ids = torch.tensor([*prompt, *response])
            tokens[r, start:end], labels[r, start : end - 1] = ids, ids[1:]
            positions[r, start:end] = torch.arange(lengths[j])
            segments[r, start:] = j
            first = r * width + start + len(prompt) - 1
            places.append(torch.arange(first, first + len(response)))
            start = end
        positions[r, start:] = torch.arange(width - start) if packed else torch.arange(start, width)
    place = torch.cat(places) if places else torch.zeros(0, dtype=torch.long)
    mask = torch.zeros(tokens.numel())
    mask[place] = 1.0
    return MicroBatch(
        tokens=tokens,
        labels=labels,
        position_ids=positions,
        segments=segments,
        response_mask=mask.view(shape),
        cu_seqlens=_borders(lengths, shape, packed=packed),
        indices=tuple(indices),
        place=place,
        response_lengths=tuple(len(responses[i]) for i in indices),
        packed=packed,
    )


def _borders(lengths: list[int], shape: tuple[int, int], *, packed: bool) -> torch.Tensor:
    rows, width = shape
    sizes = [*lengths, width - sum(lengths)] if packed else [width] * rows
    ends = torch.tensor([0, *(size for size in sizes if size)]).cumsum(0)
    return ends.to(torch.int32)
