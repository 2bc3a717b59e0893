"""Loss and bits per byte of documents, under any TP, PP and DP.

A document is scored in windows of `seq_length` tokens of which the last `stride` count, so that each
token counts once, after up to `seq_length - stride` tokens of context that counted before. The
end-of-document token stands before a document, as in pretraining data, so that its first token counts
too. Bits per byte divides by the bytes of the text: models with different tokenizers are comparable.
"""

import math
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from megatron_tlt import device
from megatron_tlt.bridge.load import LoadedModel
from megatron_tlt.data.corpus import read_documents
from megatron_tlt.data.indexed import IndexedDataset, idx_path
from megatron_tlt.data.tokenizer import Tokenizer, build_tokenizer
from megatron_tlt.models.logits import score_tokens
from megatron_tlt.parallel import Parallel

import torch
import torch.distributed as dist
from tqdm import tqdm


@dataclass(kw_only=True, slots=True)
class ScoringConfig:
    """Which text, and how it is cut."""

    data_path: str
    """Text (.jsonl, .jsonl.gz, .jsonl.xz, .parquet, .txt, a folder of these), or prefix of .bin and .idx."""
    json_key: str = "text"
    """Field of a JSON line, or parquet column, that holds the text."""
    seq_length: int | None = None
    """Tokens per window; default: the model's longest, at most 2048."""
    stride: int | None = None
    """Tokens of a window that count; default seq_length, the fastest; fewer give each more context."""
    micro_batch_size: int = 4
    """Windows per forward pass."""
    max_documents: int | None = None
    """Take this many first documents; default all."""
    max_bytes_per_document: int | None = None
    """Take this many first bytes of a text document (whole characters); default all."""

    def __post_init__(self) -> None:
        for name in ("seq_length", "stride", "micro_batch_size", "max_documents"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}={value} must be at least 1")
        if self.max_bytes_per_document is not None and self.max_bytes_per_document < 4:
            raise ValueError(f"max_bytes_per_document={self.max_bytes_per_document} must be at least 4")


@dataclass(frozen=True, kw_only=True, slots=True)
class Score:
    """What a model makes of a text. Example: loss 2.9, bits_per_byte 1.26, num_tokens 7000."""

    load: str
    iteration: int | None
    """Training step of a checkpoint; None for a Hugging Face folder."""
    loss: float
    """Mean over tokens, nats."""
    perplexity: float
    bits_per_byte: float
    num_documents: int
    num_tokens: int
    num_bytes: int
    seconds: float
    """Of the forward passes."""


@dataclass(frozen=True, slots=True)
class Document:
    """Token ids without begin or end, and the bytes of the text that they spell."""

    ids: list[int]
    num_bytes: int


def read_scored_documents(config: ScoringConfig, tokenizer: Tokenizer) -> Iterator[Document]:
    """The documents of `config.data_path`.

    Raises ValueError when there is no such file, or an indexed one has ids that the tokenizer has not.
    """
    if idx_path(config.data_path).is_file():
        if config.max_bytes_per_document is not None:
            raise ValueError("max_bytes_per_document is for text, not for .bin and .idx files")
        yield from _indexed_documents(config, tokenizer)
        return
    limit = config.max_bytes_per_document
    for number, text in enumerate(read_documents(config.data_path, config.json_key)):
        if number == config.max_documents:
            return
        if limit is not None:
            text = text.encode()[:limit].decode(errors="ignore")
        yield Document(tokenizer.tokenize(text), len(text.encode()))


def _indexed_documents(config: ScoringConfig, tokenizer: Tokenizer) -> Iterator[Document]:
    data = IndexedDataset(config.data_path)
    bounds = data.document_indices
    for number in range(min(data.num_documents, config.max_documents or data.num_documents)):
        sequences = range(int(bounds[number]), int(bounds[number + 1]))
        ids = [int(i) for sequence in sequences for i in data[sequence]]
        while ids and ids[-1] == tokenizer.eod:
            ids.pop()
        if ids and max(ids) >= tokenizer.vocab_size:
            raise ValueError(
                f"{config.data_path} has the id {max(ids)}, the tokenizer only {tokenizer.vocab_size} "
                "ids: it was made with another tokenizer"
            )
        yield Document(ids, len(tokenizer.detokenize(ids).encode()))


@dataclass(frozen=True, slots=True)
class Window:
    """`ids[:-1]` go in, `ids[1:]` are predicted; the last `counted` predictions count."""

    ids: list[int]
    counted: int


def cut_windows(ids: Sequence[int], *, seq_length: int, stride: int) -> Iterator[Window]:
    """Windows in which every token of `ids` but the first is predicted and counted once."""
    for start in range(1, len(ids), stride):
        end = min(start + stride, len(ids))
        yield Window(list(ids[max(0, end - seq_length - 1) : end]), end - start)


def score_text(
    loaded: LoadedModel, parallel: Parallel, config: ScoringConfig, *, load: str
) -> Score:
    """Score the documents of `config`; the same result on every rank. Collective over the world.

    Raises ValueError for a model without tokenizer, sequence parallelism, windows that the model cannot
    take, and data without a token.
    """
    seq_length, stride = _window_sizes(loaded, parallel, config)
    if loaded.tokenizer is None:
        raise ValueError(f"{load} names no tokenizer: give tokenizer.tokenizer_type")
    tokenizer = build_tokenizer(loaded.tokenizer)
    first = [] if tokenizer.eod is None else [tokenizer.eod]
    windows: list[Window] = []
    num_documents = num_bytes = 0
    for document in read_scored_documents(config, tokenizer):
        windows += cut_windows(first + document.ids, seq_length=seq_length, stride=stride)
        num_documents, num_bytes = num_documents + 1, num_bytes + document.num_bytes
    num_tokens = sum(window.counted for window in windows)
    if num_tokens == 0:
        raise ValueError(f"{config.data_path} holds no token to score")
    for chunk in loaded.chunks:
        chunk.eval()
    start = time.perf_counter()
    nats = _score_windows(loaded, parallel, windows, batch_size=config.micro_batch_size)
    loss = nats / num_tokens
    return Score(
        load=load,
        iteration=loaded.state.iteration if loaded.state else None,
        loss=loss,
        perplexity=math.exp(min(loss, 700.0)),
        bits_per_byte=nats / math.log(2) / num_bytes,
        num_documents=num_documents,
        num_tokens=num_tokens,
        num_bytes=num_bytes,
        seconds=time.perf_counter() - start,
    )


def _window_sizes(
    loaded: LoadedModel, parallel: Parallel, config: ScoringConfig
) -> tuple[int, int]:
    """(seq_length, stride), checked."""
    longest = loaded.model.max_position_embeddings
    seq_length = min(longest, 2048) if config.seq_length is None else config.seq_length
    stride = seq_length if config.stride is None else config.stride
    if seq_length > longest:
        raise ValueError(f"seq_length={seq_length} exceeds the model's longest, {longest}")
    if stride > seq_length:
        raise ValueError(f"stride={stride} exceeds seq_length={seq_length}: tokens would be left out")
    if parallel.config.sequence_parallel:
        raise ValueError("evaluation needs parallel.sequence_parallel=false")
    return seq_length, stride


def _score_windows(
    loaded: LoadedModel, parallel: Parallel, windows: list[Window], *, batch_size: int
) -> float:
    """Nats over all counted tokens; each data-parallel replica takes its share of the batches."""
    # Windows of like length share a batch: little padding.
    order = sorted(range(len(windows)), key=lambda i: (-len(windows[i].ids), i))
    batches = [order[i : i + batch_size] for i in range(0, len(order), batch_size)]
    total = torch.zeros((), dtype=torch.float64)
    mine = batches[parallel.dp_rank :: parallel.dp_size]
    for batch in tqdm(mine, desc="scoring", unit="batch", delay=2.0, disable=parallel.rank != 0):
        total += _nats_of_batch(loaded, parallel, [windows[i] for i in batch])
    total = total.to(device.device())
    dist.all_reduce(total, group=parallel.groups.dp)
    return float(total)


def _nats_of_batch(loaded: LoadedModel, parallel: Parallel, batch: Iterable[Window]) -> float:
    """Padding stands on the right, where the causal mask hides it, and does not count."""
    longest = max(len(window.ids) for window in batch)
    padded = torch.tensor([w.ids + [0] * (longest - len(w.ids)) for w in batch])
    counts = torch.zeros(len(padded), longest - 1)
    for row, window in enumerate(batch):
        last = len(window.ids) - 1
        counts[row, last - window.counted : last] = 1.0
    padded = padded.to(device.device())
    log_probs, _ = score_tokens(loaded.chunks, parallel, padded[:, :-1], padded[:, 1:])
    return -float((log_probs.cpu().double() * counts).sum())
