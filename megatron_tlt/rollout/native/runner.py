"""Forward passes of the target over the slot cache: prefill, decode, verify, and a subnet's decode.

Legend: b running requests, w tokens of each, v vocabulary, h hidden.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megatron_tlt.rollout.native.attention import Batch, Block, causal_mask, repeat_mask
from megatron_tlt.rollout.native.cache import SlotCache
from megatron_tlt.rollout.native.model import NativeModel
from megatron_tlt.rollout.native.request import Running


@dataclass(slots=True)
class Segment:
    """Positions [start, stop) of a prompt, on their way into a slot."""

    tokens: Sequence[int]
    slot: int
    start: int
    stop: int


class Runner:
    """Model and cache together. `chunk` bounds the tokens of one prefill forward."""

    def __init__(self, model: NativeModel, cache: SlotCache, *, chunk: int) -> None:
        self.model, self.cache, self.chunk = model, cache, chunk
        self.last_position = model.shape.max_position_embeddings - 1

    def decode(
        self, running: Running, tokens: torch.Tensor, *, offset: int = 0,
        layers: Sequence[int] | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """Hidden states `[b * w, h]` of `tokens` `[b, w]`, placed `offset` positions after the cached ones.

        Token j of a request sees its cached positions, and those before j.
        """
        count, width = tokens.shape
        starts = running.lengths + offset
        kv_len = running.longest + offset + width
        steps = torch.arange(width, device=tokens.device)
        positions = (starts[:, None] + steps).flatten()
        rows = (starts + self.cache.first_row[:count])[:, None] + steps
        mask = None
        if width > 1 or not running.even:
            mask = causal_mask(starts, width=width, kv_len=kv_len, dtype=self.model.dtype)
            mask = repeat_mask(mask, repeats=self.model.repeats)
        batch = Batch(
            tokens.flatten(),
            positions.clamp_(max=self.last_position),
            rows.flatten(),
            [Block(0, 0, count, width, kv_len, mask)],
        )
        return self.model.forward(
            batch, self.cache.data, stride=self.cache.stride, layers=layers
        )

    def prefill(self, prompts: Sequence[tuple[Sequence[int], int]]) -> torch.Tensor:
        """Fill (tokens, slot) pairs, at most `chunk` tokens a forward: last hidden states `[p, h]`."""
        last: list[torch.Tensor] = []
        for pack in self._packs(prompts):
            hidden, end = self._prefill(pack), 0
            for segment in pack:
                end += segment.stop - segment.start
                if segment.stop == len(segment.tokens):
                    last.append(hidden[end - 1])
        return torch.stack(last)

    def _packs(self, prompts: Sequence[tuple[Sequence[int], int]]) -> list[list[Segment]]:
        """Cut and pack prompts in order, so that their last chunks keep the order."""
        packs: list[list[Segment]] = [[]]
        room = self.chunk
        for tokens, slot in prompts:
            start = 0
            while start < len(tokens):
                if room == 0:
                    packs.append([])
                    room = self.chunk
                stop = min(len(tokens), start + room)
                packs[-1].append(Segment(tokens, slot, start, stop))
                room -= stop - start
                start = stop
        return packs

    def _prefill(self, pack: list[Segment]) -> torch.Tensor:
        device, stride = self.model.device, self.cache.stride
        tokens = [t for s in pack for t in s.tokens[s.start : s.stop]]
        positions = [p for s in pack for p in range(s.start, s.stop)]
        rows = [s.slot * stride + p for s in pack for p in range(s.start, s.stop)]
        blocks, first = [], 0
        for segment in pack:
            width = segment.stop - segment.start
            start = torch.tensor([segment.start], device=device)
            mask = causal_mask(start, width=width, kv_len=segment.stop, dtype=self.model.dtype)
            mask = repeat_mask(mask, repeats=self.model.repeats)
            blocks.append(Block(first, segment.slot, 1, width, segment.stop, mask))
            first += width
        batch = Batch(*torch.tensor((tokens, positions, rows), device=device), blocks)
        return self.model.forward(batch, self.cache.data, stride=stride)
