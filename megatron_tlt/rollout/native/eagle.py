"""The EAGLE drafter at inference: weights, a cache of its own beside the target's, chains and trees.

Row i of the drafter joins token i + 1 with the target's state at position i and predicts the state at i + 1
(see `models.drafter` for the two layouts). Its cache lags behind while speculation is off and catches up in
chunks when it is on; the target's cache is never touched. Drafts use the drafter's own output in place of the
target's state, and their rows are overwritten by the next catch-up.

Legend: b requests, w rows a request, t rows of a forward, h hidden, f features, k branches, v vocabulary.
"""

import torch
import torch.nn.functional as F

from megatron_tlt.models.drafter import DrafterConfig
from megatron_tlt.ops.sampling import SamplingTensors
from megatron_tlt.rollout.native.attention import Batch, Block, causal_mask, repeat_mask
from megatron_tlt.rollout.native.cache import SlotCache
from megatron_tlt.rollout.native.layers import Linear, Norm, rotary_table
from megatron_tlt.rollout.native.model import Attention, Mlp, NativeModel, TensorParallel
from megatron_tlt.rollout.native.request import Request, Running
from megatron_tlt.rollout.native.shape import ModelShape

DRAFT = "draft"


def drafter_shape(config: DrafterConfig) -> ModelShape:
    """The drafter's layer in the terms of the inference model."""
    return ModelShape(
        model_type="llama", num_layers=1, hidden_size=config.hidden_size,
        ffn_hidden_size=config.ffn_hidden_size, num_attention_heads=config.num_attention_heads,
        num_query_groups=config.num_query_groups, head_dim=config.head_dim,
        vocab_size=config.vocab_size, max_position_embeddings=config.max_position_embeddings,
        norm_epsilon=config.norm_epsilon, activation="silu", rotary_base=config.rotary_base,
        rope_scaling=(), qkv_bias=False, output_bias=False, mlp_bias=False, qk_norm=False, tied=False,
    )  # fmt: skip


class EagleModel:
    """The drafter's weights, and the target's embedding and head by reference. Every rank has all of it."""

    def __init__(self, config: DrafterConfig, target: NativeModel) -> None:
        size, vocab = target.shape.hidden_size, target.shape.vocab_size
        if (config.hidden_size, config.vocab_size) != (size, vocab):
            raise ValueError(
                f"a drafter of hidden_size={config.hidden_size}, vocab_size={config.vocab_size} does not "
                f"fit a target of {size}, {vocab}"
            )
        self.config, self.target, self.shape = config, target, drafter_shape(config)
        self.eagle3, self.tp = config.layout == "eagle3", TensorParallel()
        like, wide = target.embedding.new_empty(0), 2 if self.eagle3 else 1
        inputs = config.feature_size if self.eagle3 else 2 * size
        self.fc = Linear(inputs, size, bias=not self.eagle3, like=like)
        self.attention = Attention(self.shape, tp=self.tp, like=like, inputs=wide * size)
        self.mlp = Mlp(self.shape, tp=self.tp, like=like)
        norm = dict(epsilon=config.norm_epsilon, bias=False, like=like)
        self.norm2 = Norm(size, **norm)
        self.table = rotary_table(self.shape, device=target.device)
        if self.eagle3:
            self.embedding_norm, self.hidden_norm = Norm(size, **norm), Norm(size, **norm)
            self.norm = Norm(size, **norm)
            self.head = Linear(size, config.head_size, bias=False, like=like)
            self.draft_tokens = torch.arange(config.head_size, device=target.device)

    @property
    def kv_width(self) -> int:
        return 2 * self.shape.num_query_groups * self.shape.head_dim

    def linears(self) -> list[Linear]:
        own = [self.fc, self.attention.qkv, self.attention.out, self.mlp.up, self.mlp.down]
        return [*own, self.head] if self.eagle3 else own

    def norms(self) -> list[Norm]:
        return [self.norm2, self.embedding_norm, self.hidden_norm, self.norm] if self.eagle3 else [self.norm2]

    def forward(
        self, batch: Batch, states: torch.Tensor, cache: torch.Tensor, *, stride: int, first: bool
    ) -> torch.Tensor:
        """One row a token: `[t, h]`. `states`: the target's features `[t, f]` (`first`), or own output."""
        embedded = F.embedding(batch.tokens, self.target.embedding)
        if self.eagle3:
            residual = self.fc(states) if first else states
            inner = torch.cat((self.embedding_norm(embedded), self.hidden_norm(residual)), -1)
            x = residual.clone()
        else:
            x = inner = self.fc(torch.cat((embedded, states), -1))
        table = self.table[batch.positions][:, None]
        inner = self.attention(inner, batch, cache, stride=stride, table=table)
        x = self.attention.out.added_to(x, inner)
        return self.mlp.down.added_to(x, self.mlp.inner(self.norm2(x)))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """`[t, h]` to `[t, v]`, or to an EAGLE-3 drafter's own vocabulary."""
        return self.head(self.norm(hidden)) if self.eagle3 else self.target.logits(hidden)

    def target_tokens(self, draft: torch.Tensor) -> torch.Tensor:
        return self.draft_tokens[draft] if self.eagle3 else draft

    def target_probs(self, probs: torch.Tensor) -> torch.Tensor:
        """Distributions over the drafter's vocabulary, `[b, k, v]` over the target's."""
        if not self.eagle3:
            return probs
        whole = probs.new_zeros(*probs.shape[:-1], self.config.vocab_size)
        return whole.index_copy_(-1, self.draft_tokens, probs)


class EagleRunner:
    """The drafter over its plane of the slot cache."""

    def __init__(self, model: EagleModel, cache: SlotCache, *, chunk: int) -> None:
        self.model, self.cache, self.chunk = model, cache, chunk
        self.last_position = model.shape.max_position_embeddings - 1
        self.repeats = model.shape.num_attention_heads // model.shape.num_query_groups
        self.size = model.config.hidden_size

    def _run(self, batch: Batch, states: torch.Tensor, *, first: bool) -> torch.Tensor:
        plane = self.cache.planes[DRAFT][0]
        return self.model.forward(batch, states, plane, stride=self.cache.stride, first=first)

    def catch_up(self, running: Running, features: torch.Tensor) -> tuple[torch.Tensor, list[bool]]:
        """Rows that the drafter lacks, at most `chunk` in one call, oldest slot first.

        `features` `[rows, f]`, the target's. Returns the newest row's output of each request `[b, h]`, and
        which requests are up to date (the others' rows mean nothing).
        """
        room, spans, ready = self.chunk, [], []
        for request in running.requests:
            start, stop = request.drafted_to, len(request.tokens) - 1
            stop = min(stop, start + room)
            room -= stop - start
            spans.append((start, stop))
            ready.append(stop == len(request.tokens) - 1 and stop > start)
        out = self._catch_up(running.requests, spans, features)
        newest, end = [], 0
        for request, (start, stop) in zip(running.requests, spans, strict=True):
            end += stop - start
            newest.append(max(end - 1, 0))
            request.drafted_to = stop
        return out[torch.tensor(newest, device=out.device)], ready

    def _catch_up(
        self, requests: list[Request], spans: list[tuple[int, int]], features: torch.Tensor
    ) -> torch.Tensor:
        device, stride = self.cache.device, self.cache.stride
        tokens, positions, rows, blocks = [], [], [], []
        for slot, (request, (start, stop)) in enumerate(zip(requests, spans, strict=True)):
            first = len(tokens)
            tokens += request.tokens[start + 1 : stop + 1]
            positions += range(start, stop)
            rows += range(slot * stride + start, slot * stride + stop)
            if stop > start:
                blocks.append(Block(first, slot, 1, stop - start, stop))
        widths = [block.width for block in blocks]
        if len(blocks) == len(requests) and max(widths) <= 16:
            blocks = [self._one_block(spans, widths)]
        else:
            for block in blocks:
                start = torch.tensor([block.kv_len - block.width], device=device)
                block.mask = self._causal(start, block.width, block.kv_len)
        columns = torch.tensor((tokens, positions, rows), device=device)
        columns[1].clamp_(max=self.last_position)
        return self._run(Batch(*columns, blocks), features[columns[2]], first=True)

    def _one_block(self, spans: list[tuple[int, int]], widths: list[int]) -> Block:
        """All requests in one attention call, padded to the widest."""
        device, width, count = self.cache.device, max(widths), len(spans)
        kv_len = max(start for start, _ in spans) + width
        starts = torch.tensor([start for start, _ in spans], device=device)
        block = Block(0, 0, count, width, kv_len, self._causal(starts, width, kv_len))
        if min(widths) < width:
            places = torch.tensor(
                [i * width + j for i, w in enumerate(widths) for j in range(w)], device=device
            )
            block.unpad = places
            block.pad = torch.zeros(count * width, dtype=torch.int64, device=device)
            block.pad[places] = torch.arange(len(places), device=device)
        return block

    def _causal(self, starts: torch.Tensor, width: int, kv_len: int) -> torch.Tensor | None:
        if width == 1 and len(starts) == 1:
            return None
        mask = causal_mask(starts, width=width, kv_len=kv_len, dtype=self.model.target.dtype)
        return repeat_mask(mask, repeats=self.repeats)

    def level(
        self, running: Running, tokens: torch.Tensor, states: torch.Tensor, *, index: int,
        ancestors: torch.Tensor | None,
    ) -> torch.Tensor:  # fmt: skip
        """Draft level `index` (from 0): `tokens` `[b, w]` on outputs `states` `[b, w, h]`; new ones `[b,
        w, h]`.

        `ancestors` bool `[b, w, (index + 1) * w]`: earlier drafts that a row sees, itself included; None for
        a chain.
        """
        count, width = tokens.shape
        device, lengths = tokens.device, running.lengths
        offset = index * width
        kv_len = running.longest + offset + width
        columns = torch.arange(width, device=device)
        rows = (lengths + self.cache.first_row[:count] + offset)[:, None] + columns
        positions = (lengths + index).clamp(max=self.last_position)[:, None].expand(-1, width)
        mask = None
        if ancestors is not None:
            place = torch.arange(kv_len, device=device) - lengths[:, None]  # [b, l]
            at = place.clamp(0, offset + width - 1)[:, None].expand(-1, width, -1)
            own = ancestors.gather(2, at) & (place < offset + width)[:, None]
            visible = (place < 0)[:, None] | own
            mask = torch.zeros(visible.shape, dtype=self.model.target.dtype, device=device)
            mask = mask.masked_fill_(~visible, float("-inf"))[:, None]
        elif not running.even:
            mask = causal_mask(
                lengths + offset, width=1, kv_len=kv_len, dtype=self.model.target.dtype
            )
        if mask is not None:
            mask = repeat_mask(mask, repeats=self.repeats)
        block = Block(0, 0, count, width, kv_len, mask)
        batch = Batch(tokens.flatten(), positions.flatten(), rows.flatten(), [block])
        out = self._run(batch, states.reshape(-1, self.size), first=False)
        return out.view(count, width, -1)


def tempered_log_probs(logits: torch.Tensor, sampling: SamplingTensors) -> torch.Tensor:
    """Log-probabilities `[b, w, v]` at each request's temperature (1 where greedy)."""
    scaled = logits.float()
    if sampling.temperature is not None:
        safe = torch.where(sampling.temperature > 0, sampling.temperature, 1.0)
        scaled = scaled / safe[:, None, None]
    return torch.log_softmax(scaled, -1)

