"""Forward passes outside training: logits, token scores and incremental decoding under any TP and PP.

One batch at a time walks through the pipeline stages (no overlap); results come back to every rank, so
all ranks take the same decisions. Shapes: b batch, s sequence, v true vocabulary, t TP size, h hidden.
"""

from megatron_tlt import device
from megatron_tlt.models.gpt import GPT
from megatron_tlt.ops.cross_entropy import vocab_parallel_cross_entropy
from megatron_tlt.parallel import Parallel

import torch
import torch.distributed as dist
from megatron.core.inference.contexts import StaticInferenceContext


def run_stages(
    chunks: list[GPT],
    parallel: Parallel,
    tokens: torch.Tensor,
    *,
    dtype: torch.dtype,
    context: StaticInferenceContext | None = None,
) -> torch.Tensor | None:
    """tokens `[b, s]` -> logits on the ranks of the last stage, None elsewhere.

    Without `context`: `[b, s, v_padded/t]`, this TP rank's columns. With it, its cached keys and values
    come before `tokens` and the logits are those of the last position, `[b, 1, v_padded]`. `dtype` is
    that of the hidden states between stages.
    """
    b, s = tokens.shape
    start = 0 if context is None else context.sequence_len_offset
    positions = torch.arange(start, start + s, device=tokens.device)
    mask = None
    if start > 0:
        keys = torch.arange(start + s, device=tokens.device)
        mask = (keys > positions[:, None])[None, None]  # [1, 1, s, start + s], true = hidden
    pp, size = parallel.groups.pp, parallel.groups.pp.size()
    output = None
    for chunk in chunks:
        if not chunk.pre_process:
            tp = parallel.groups.tp.size() if chunk.config.sequence_parallel else 1
            hidden = torch.empty(
                s // tp, b, chunk.config.hidden_size, dtype=dtype, device=tokens.device
            )
            dist.recv(hidden, group=pp, group_src=(parallel.pp_rank - 1) % size)
            chunk.set_input_tensor(hidden)
        output = chunk(
            tokens,
            positions.expand(b, s),
            mask,
            inference_context=context,
            runtime_gather_output=context is not None,
        )
        if not chunk.post_process:
            dist.send(output.contiguous(), group=pp, group_dst=(parallel.pp_rank + 1) % size)
    return output if chunks[-1].post_process else None


def _to_all_stages(
    value: torch.Tensor | None, shape: tuple[int, ...], parallel: Parallel
) -> torch.Tensor:
    """`value` (float32) of the last stage on every pipeline rank."""
    size = parallel.groups.pp.size()
    if value is None:
        value = torch.empty(shape, dtype=torch.float32, device=device.device())
    if size > 1:
        value = value.contiguous()
        dist.broadcast(value, group=parallel.groups.pp, group_src=size - 1)
    return value


def compute_dtype(chunks: list[GPT]) -> torch.dtype:
    """Dtype of the weights as they are now."""
    return next(chunks[0].parameters()).dtype


@torch.no_grad()
def full_logits(
    chunks: list[GPT], parallel: Parallel, tokens: torch.Tensor, *, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """tokens `[b, s]` -> logits `[b, s, v]` over the true vocabulary, float32, on every rank.

    `dtype` of the hidden states where it is not that of the weights.
    """
    _check_length(chunks[0], tokens.shape[1])
    logits = run_stages(chunks, parallel, tokens, dtype=dtype or compute_dtype(chunks))
    vocab, tp = chunks[0].true_vocab_size, parallel.groups.tp
    if logits is not None:
        logits = logits.float().contiguous()
        if tp.size() > 1:
            parts = [torch.empty_like(logits) for _ in range(tp.size())]
            dist.all_gather(parts, logits, group=tp)
            logits = torch.cat(parts, dim=-1)
        logits = logits[..., :vocab]
    return _to_all_stages(logits, (*tokens.shape, vocab), parallel)


@torch.no_grad()
def score_tokens(
    chunks: list[GPT], parallel: Parallel, tokens: torch.Tensor, targets: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(log-probabilities, is-greedy) of `targets` after `tokens`, all `[b, s]`, on every rank.

    Log-probabilities in nats, float32; is-greedy is true where the target is the most likely token.
    The logits stay cut over the TP ranks.
    """
    _check_length(chunks[0], tokens.shape[1])
    logits = run_stages(chunks, parallel, tokens, dtype=compute_dtype(chunks))
    scores = None
    if logits is not None:
        group, vocab = parallel.groups.tp, chunks[0].true_vocab_size
        best = _vocab_parallel_argmax(logits, vocab_size=vocab, group=group)
        loss = vocab_parallel_cross_entropy(logits, targets, vocab_size=vocab, group=group)
        scores = torch.stack((-loss, (best == targets).float()))
    log_probs, greedy = _to_all_stages(scores, (2, *tokens.shape), parallel)
    return log_probs, greedy > 0.5


def _vocab_parallel_argmax(
    logits: torch.Tensor, *, vocab_size: int, group: dist.ProcessGroup
) -> torch.Tensor:
    """Token ids `[...]` of the largest logit; logits `[..., v_padded/t]`, padding left out."""
    first = group.rank() * logits.shape[-1]
    hidden = torch.arange(first, first + logits.shape[-1], device=logits.device) >= vocab_size
    value, index = logits.masked_fill(hidden, -torch.inf).max(dim=-1)
    if group.size() == 1:
        return index
    both = torch.stack((value.double(), (index + first).double()))  # [2, ...]; ids are exact
    parts = [torch.empty_like(both) for _ in range(group.size())]
    dist.all_gather(parts, both, group=group)
    values, indices = torch.stack(parts, dim=1)  # [t, ...] each
    return indices.gather(0, values.argmax(dim=0, keepdim=True)).squeeze(0).long()


def _check_length(chunk: GPT, length: int) -> None:
    longest = chunk.max_position_embeddings
    if length > longest and chunk.position_embedding_type == "learned_absolute":
        raise ValueError(
            f"{length} tokens exceed the model's table of {longest} positions: shorten the input"
        )


class IncrementalModel:
    """The model with a key/value cache for `batch_size` sequences of up to `max_length` tokens.

    megatron-core's static cache, one row of equal lengths; use a new object for a new batch. Puts the
    model in evaluation mode. Raises ValueError when the length exceeds a learned position table or
    sequence parallelism is on (a decoding step has one position).
    """

    def __init__(
        self, chunks: list[GPT], parallel: Parallel, *, batch_size: int, max_length: int
    ) -> None:
        _check_length(chunks[0], max_length)
        if parallel.config.sequence_parallel:
            raise ValueError("decoding needs parallel.sequence_parallel=false")
        self._chunks, self._parallel = chunks, parallel
        self._context = StaticInferenceContext(batch_size, max_length)
        for chunk in chunks:
            chunk.eval()

    @property
    def length(self) -> int:
        """Tokens in the cache."""
        return self._context.sequence_len_offset

    @torch.no_grad()
    def append(self, tokens: torch.Tensor) -> torch.Tensor:
        """Add tokens `[b, s]`; logits `[b, v]` of the position after the last, float32, every rank."""
        chunks, parallel = self._chunks, self._parallel
        logits = run_stages(
            chunks, parallel, tokens, dtype=compute_dtype(chunks), context=self._context
        )
        self._context.sequence_len_offset += tokens.shape[1]
        vocab = chunks[0].true_vocab_size
        if logits is not None:
            logits = logits[:, -1, :vocab].float()
        return _to_all_stages(logits, (tokens.shape[0], vocab), parallel)
