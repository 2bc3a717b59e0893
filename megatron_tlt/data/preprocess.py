"""Documents to `<prefix>_<key>_document.{bin,idx}`, with any number of worker processes.

Results are written in input order, so the files have the same bytes for any number of workers; at
most a few megabytes per worker wait at a time. Megatron's preprocess_data.py adds empty documents
to the index and lets a broken line end the run; here both are skipped and counted.
"""

import dataclasses
import functools
import multiprocessing
import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field

import numpy as np

from megatron_tlt.data.corpus import ReadStats, read_records
from megatron_tlt.data.files import expand_inputs
from megatron_tlt.data.indexed import IndexedDatasetWriter, token_dtype
from megatron_tlt.data.provenance import write_provenance
from megatron_tlt.data.tokenizer import Tokenizer, TokenizerConfig, build_tokenizer, require_eod

Batch = list[tuple[str, ...]]
Settings = tuple[tuple[str, str | int | None], ...]

_BATCH_CHARACTERS = 1 << 20
_BATCHES_PER_WORKER = 4


@dataclass(kw_only=True, slots=True)
class PreprocessConfig:
    """What to tokenize and how (Megatron's names)."""

    input: list[str]
    """Files, folders or globs; see `corpus`."""
    output_prefix: str
    """Output is `<output_prefix>_<key>_document.{bin,idx}`."""
    json_keys: list[str] = field(default_factory=lambda: ["text"])
    """Keys of each document to tokenize, each into files of its own."""
    append_eod: bool = False
    """End each document with the tokenizer's end-of-document token."""
    workers: int = 1
    """Processes; 1 works in the calling process."""
    strict: bool = False
    """Stop at the first blank or invalid line."""


@dataclass(slots=True)
class PreprocessReport:
    """Counts so far; complete when `preprocess` returns."""

    read: ReadStats = field(default_factory=ReadStats)
    empty_documents: int = 0
    """Texts without a token, left out."""
    documents: int = 0
    """Documents written, over all keys."""
    tokens: int = 0
    """Tokens written, end-of-document tokens included."""
    text_bytes: int = 0
    """UTF-8 bytes of the texts that were tokenized."""
    seconds: float = 0.0
    prefixes: list[str] = field(default_factory=list)

    def megabytes_per_second(self) -> float:
        return self.text_bytes / 1e6 / max(self.seconds, 1e-9)


@dataclass(frozen=True, slots=True)
class _Encoded:
    """The documents of one key in one batch: their tokens end to end, and lengths."""

    tokens: bytes
    lengths: list[int]
    empty: int
    text_bytes: int


def preprocess(
    config: PreprocessConfig,
    tokenizer_config: TokenizerConfig,
    *,
    progress: Callable[[PreprocessReport], None] = lambda report: None,
) -> PreprocessReport:
    """Tokenize; `progress` is called after every batch.

    Raises ValueError before any work for missing inputs and for `append_eod` without such a token,
    and at the end when there was no document at all.
    """
    files = expand_inputs(config.input)
    tokenizer = build_tokenizer(tokenizer_config)
    if config.append_eod:
        require_eod(tokenizer)
    started = time.perf_counter()
    report = PreprocessReport(
        prefixes=[f"{config.output_prefix}_{key}_document" for key in config.json_keys]
    )
    records = (
        record
        for file in files
        for record in read_records(file, config.json_keys, stats=report.read, strict=config.strict)
    )
    with ExitStack() as stack:
        dtype = token_dtype(tokenizer.vocab_size)
        writers = [
            stack.enter_context(IndexedDatasetWriter(prefix, dtype=dtype))
            for prefix in report.prefixes
        ]
        for encoded in _encode_all(_batches(records), config, tokenizer_config):
            for writer, part in zip(writers, encoded, strict=True):
                writer.add_documents(part.tokens, part.lengths)
                report.documents += len(part.lengths)
                report.tokens += sum(part.lengths)
                report.empty_documents += part.empty
                report.text_bytes += part.text_bytes
            report.seconds = time.perf_counter() - started
            progress(report)
        if not report.documents:
            raise ValueError(
                f"no document in {config.input}: {report.empty_documents} empty, "
                f"{report.read.blank_lines} blank lines, {report.read.invalid_lines} invalid lines "
                f"({'; '.join(report.read.problems[:3])})"
            )
    _write_provenance(report, tokenizer, append_eod=config.append_eod)
    return report


def _write_provenance(report: PreprocessReport, tokenizer: Tokenizer, *, append_eod: bool) -> None:
    for prefix in report.prefixes:
        write_provenance(prefix, {"tokenizer": tokenizer.identity(), "append_eod": append_eod})


def _batches(records: Iterator[tuple[str, ...]]) -> Iterator[Batch]:
    batch, characters = [], 0
    for record in records:
        batch.append(record)
        characters += sum(map(len, record))
        if characters >= _BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _encode_all(
    batches: Iterator[Batch], config: PreprocessConfig, tokenizer_config: TokenizerConfig
) -> Iterator[list[_Encoded]]:
    """Encode each batch, in order, keeping a bounded number of them in flight."""
    encode = functools.partial(
        _encode, tuple(dataclasses.asdict(tokenizer_config).items()), append_eod=config.append_eod
    )
    if config.workers <= 1:
        yield from map(encode, batches)
        return
    pool = ProcessPoolExecutor(
        config.workers, mp_context=multiprocessing.get_context("spawn"), initializer=_start_worker
    )
    with pool:
        pending = deque()
        try:
            for batch in batches:
                pending.append(pool.submit(encode, batch))
                if len(pending) >= _BATCHES_PER_WORKER * config.workers:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:
            for future in pending:
                future.cancel()


def _start_worker() -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the workers are the parallelism


@functools.cache
def _tokenizer(settings: Settings) -> Tokenizer:
    return build_tokenizer(TokenizerConfig(**dict(settings)))


def _encode(settings: Settings, batch: Batch, *, append_eod: bool) -> list[_Encoded]:
    """Runs in a worker; builds the tokenizer on its first batch. One result per key."""
    tokenizer = _tokenizer(settings)
    dtype = token_dtype(tokenizer.vocab_size)
    results = []
    for texts in zip(*batch, strict=True):
        documents = [tokenizer.tokenize(text) for text in texts]
        kept = [ids for ids in documents if ids]
        if append_eod:
            for ids in kept:
                ids.append(tokenizer.eod)
        arrays = [np.array(ids, dtype) for ids in kept]
        results.append(
            _Encoded(
                tokens=b"".join(array.tobytes() for array in arrays),
                lengths=[len(ids) for ids in kept],
                empty=len(documents) - len(kept),
                text_bytes=sum(len(text.encode("utf-8")) for text in texts),
            )
        )
    return results
