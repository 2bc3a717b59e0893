"""Forward passes of the target over the slot cache: prefill, decode, verify, and a subnet's decode.

Legend: b running requests, w tokens of each, t tree nodes, m nodes of all trees, v vocabulary, h hidden, f
features.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megatron_tlt.ops.speculative import ancestor_mask, tree_mask
from megatron_tlt.rollout.native.attention import Batch, Block, causal_mask, repeat_mask
from megatron_tlt.rollout.native.cache import SlotCache
from megatron_tlt.rollout.native.draft import Draft
from megatron_tlt.rollout.native.model import NativeModel
from megatron_tlt.rollout.native.request import Running

TARGET, FEATURES = "target", "features"


@dataclass(slots=True)
class Segment:
    """Positions [start, stop) of a sequence, on their way into a slot."""

    tokens: Sequence[int]
    slot: int
    start: int
    stop: int


class Runner:
    """Model and cache together. `chunk` bounds the tokens of one prefill forward.

    `feature_layers`: layers whose input states are features, before the final state; none: that alone.
    """

    def __init__(
        self, model: NativeModel, cache: SlotCache, *, chunk: int,
        feature_layers: tuple[int, ...] = (),
    ) -> None:  # fmt: skip
        self.model, self.cache, self.chunk = model, cache, chunk
        self.feature_layers = feature_layers
        self.last_position = model.shape.max_position_embeddings - 1

    @property
    def keeps_features(self) -> bool:
        return FEATURES in self.cache.shapes

    def forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(final states after the norm `[t, h]`, features `[t, f]` if they are kept)."""
        wanted = self.keeps_features
        capture = dict.fromkeys(self.feature_layers) if wanted else None
        hidden = self.model.forward(
            batch, self.cache.planes[TARGET], stride=self.cache.stride, capture=capture
        )
        final = self.model.norm(hidden)
        if not wanted or not capture:
            return final, final if wanted else None
        return final, torch.cat((*capture.values(), final), -1)

    def decode(self, running: Running) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Every request's last token: final states `[b, h]`, features `[b, f]`."""
        return self.forward(self._last(running, running.last, offset=0))

    def draft(
        self, running: Running, tokens: torch.Tensor, *, offset: int, layers: Sequence[int]
    ) -> torch.Tensor:
        """Final states `[b, h]` of `tokens` `[b]` at `offset` after the cached ones, from some layers."""
        batch = self._last(running, tokens, offset=offset)
        hidden = self.model.forward(
            batch, self.cache.planes[TARGET], stride=self.cache.stride, layers=layers
        )
        return self.model.norm(hidden)

    def _last(self, running: Running, tokens: torch.Tensor, *, offset: int) -> Batch:
        """One token a request."""
        count = len(tokens)
        starts = running.lengths + offset if offset else running.lengths
        kv_len = running.longest + offset + 1
        mask = None
        if not running.even:
            mask = causal_mask(starts, width=1, kv_len=kv_len, dtype=self.model.dtype)
        rows = starts + self.cache.first_row[:count]
        positions = starts if not offset else starts.clamp(max=self.last_position)
        return Batch(tokens, positions, rows, [Block(0, 0, count, 1, kv_len, mask)])

    def verify(
        self, running: Running, draft: Draft, nodes: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """All nodes of all trees, each seeing its request's cached positions and its own path.

        `nodes` `[m]` are the places of the real nodes in the flattened grid `[b * t]`; only these are
        computed. Final states `[m, h]`, features `[m, f]`. Node i's key and value stand at cached position i.
        """
        count, width = draft.tokens.shape
        lengths, kv_len = running.lengths, running.longest + width
        columns = torch.arange(width, device=nodes.device)
        rows = (lengths + self.cache.first_row[:count])[:, None] + columns
        positions = (lengths[:, None] + draft.depths).clamp_(max=self.last_position)
        if draft.is_chain:
            mask = causal_mask(lengths, width=width, kv_len=kv_len, dtype=self.model.dtype)
        else:
            sees = ancestor_mask(draft.parents, depth=draft.levels)
            mask = tree_mask(sees, lengths, kv_len=kv_len, dtype=self.model.dtype)
        block = Block(0, 0, count, width, kv_len, repeat_mask(mask, repeats=self.model.repeats))
        grids = (draft.tokens.flatten(), positions.flatten(), rows.flatten())
        if len(nodes) < count * width:
            grids = tuple(grid[nodes] for grid in grids)
            block.unpad = nodes
            block.pad = torch.zeros(count * width, dtype=torch.int64, device=nodes.device)
            block.pad[nodes] = torch.arange(len(nodes), device=nodes.device)
        return self.forward(Batch(*grids, [block]))

    def prefill(self, prompts: Sequence[tuple[Sequence[int], int]]) -> torch.Tensor:
        """Fill (tokens, slot) pairs, at most `chunk` tokens a forward: last final states `[p, h]`."""
        last: list[torch.Tensor] = []
        for pack in packs(prompts, chunk=self.chunk):
            batch, end = segments_batch(pack, self.cache, self.model), 0
            final, features = self.forward(batch)
            if features is not None:
                self.cache.planes[FEATURES][0].index_copy_(0, batch.rows, features)
            for segment in pack:
                end += segment.stop - segment.start
                if segment.stop == len(segment.tokens):
                    last.append(final[end - 1])
        return torch.stack(last)


def packs(
    sequences: Sequence[tuple[Sequence[int], int]], *, chunk: int
) -> list[list[Segment]]:
    """Cut and pack (tokens, slot) pairs in order, so that their last chunks keep the order."""
    result: list[list[Segment]] = [[]]
    room = chunk
    for tokens, slot in sequences:
        start = 0
        while start < len(tokens):
            if room == 0:
                result.append([])
                room = chunk
            stop = min(len(tokens), start + room)
            result[-1].append(Segment(tokens, slot, start, stop))
            room -= stop - start
            start = stop
    return result


def segments_batch(pack: list[Segment], cache: SlotCache, model: NativeModel) -> Batch:
    """One forward over several segments, each attending to its own slot."""
    device, stride = cache.device, cache.stride
    tokens = [t for s in pack for t in s.tokens[s.start : s.stop]]
    positions = [p for s in pack for p in range(s.start, s.stop)]
    rows = [s.slot * stride + p for s in pack for p in range(s.start, s.stop)]
    blocks, first = [], 0
    for segment in pack:
        width = segment.stop - segment.start
        start = torch.tensor([segment.start], device=device)
        mask = causal_mask(start, width=width, kv_len=segment.stop, dtype=model.dtype)
        mask = repeat_mask(mask, repeats=model.repeats)
        blocks.append(Block(first, segment.slot, 1, width, segment.stop, mask))
        first += width
    return Batch(*torch.tensor((tokens, positions, rows), device=device), blocks)
