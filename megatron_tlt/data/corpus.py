"""Text documents from files: JSON lines and text (plain, .gz, .xz), parquet, folders of them.

`read_records` is what preprocessing, tokenizer training and `prepare_corpus` read through. A blank
or unreadable line is counted and its place remembered; it stops the run only when `strict`.
"""

import gzip
import json
import lzma
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

_OPENERS = {".gz": gzip.open, ".xz": lzma.open}
_JSON_SUFFIXES = {".jsonl", ".json", ".ndjson"}
_TEXT_SUFFIXES = {".txt", ".md", ".rst", ".py"}
_UNSUPPORTED = {".zst", ".zip", ".7z", ".tar"}
_MAX_PROBLEMS = 20


@dataclass(slots=True)
class ReadStats:
    """What reading met; filled while the iterator runs."""

    documents: int = 0
    """Records handed out."""
    text_bytes: int = 0
    """UTF-8 bytes of text in them."""
    blank_lines: int = 0
    """Lines without any character but white space."""
    invalid_lines: int = 0
    """Lines that are no JSON object, or lack a key."""
    problems: list[str] = field(default_factory=list)
    """The first places, as `file:line: reason`."""

    def count(self, record: tuple[str, ...]) -> None:
        self.text_bytes += sum(len(value.encode("utf-8")) for value in record)
        self.documents += 1

    def report(self, problem: str, *, strict: bool) -> None:
        if strict:
            raise ValueError(f"{problem} (--strict)")
        if len(self.problems) < _MAX_PROBLEMS:
            self.problems.append(problem)


def read_documents(
    path: str | Path, key: str = "text", *, stats: ReadStats | None = None, strict: bool = False
) -> Iterator[str]:
    """The text of each document under `path`, in file order; a folder's files in sorted order."""
    for record in read_records(path, (key,), stats=stats, strict=strict):
        yield record[0]


def read_records(
    path: str | Path, keys: Sequence[str], *, stats: ReadStats | None = None, strict: bool = False
) -> Iterator[tuple[str, ...]]:
    """For each document under `path` the values of `keys`.

    A plain-text file is one document with the key `text`. Raises ValueError for a kind of file that
    is not read, and with `strict` for the first bad line.
    """
    stats = ReadStats() if stats is None else stats
    for file in _files_under(Path(path)):
        kind = _suffix(file)
        if kind in _JSON_SUFFIXES:
            yield from _read_json_lines(file, keys, stats, strict)
        elif kind == ".parquet":
            yield from _read_parquet(file, keys, stats, strict)
        else:
            yield from _read_text(file, keys, stats, strict)


def _files_under(path: Path) -> list[Path]:
    if not path.exists():
        raise ValueError(f"input {path} does not exist")
    if path.is_dir():
        readable = _JSON_SUFFIXES | _TEXT_SUFFIXES | {".parquet"}
        files = [
            file for file in sorted(path.rglob("*")) if file.is_file() and _suffix(file) in readable
        ]
        if not files:
            raise ValueError(
                f"folder {path} holds no file of {sorted(readable)} (these also as .gz, .xz)"
            )
        return files
    if path.suffix in _UNSUPPORTED:
        raise ValueError(f"input {path}: {path.suffix} is not read; unpack it, or use .gz or .xz")
    return [path]


def _suffix(path: Path) -> str:
    """The suffix that tells the kind of content: that of `a.jsonl.gz` is `.jsonl`."""
    return Path(path.stem).suffix if path.suffix in _OPENERS else path.suffix


def _open(path: Path, mode: str):
    return _OPENERS.get(path.suffix, open)(path, mode)


def _read_json_lines(
    file: Path, keys: Sequence[str], stats: ReadStats, strict: bool
) -> Iterator[tuple[str, ...]]:
    with _open(file, "rb") as stream:
        for number, line in enumerate(stream, 1):
            if not line.strip():
                stats.blank_lines += 1
                stats.report(f"{file}:{number}: blank line", strict=strict)
                continue
            try:
                record = _values(json.loads(line), keys)
                stats.count(record)
            except ValueError as error:  # so are JSONDecodeError, UnicodeDecode- and EncodeError
                stats.invalid_lines += 1
                stats.report(f"{file}:{number}: {error}", strict=strict)
            else:
                yield record


def _values(record: object, keys: Sequence[str]) -> tuple[str, ...]:
    if not isinstance(record, dict):
        raise ValueError(f"not a JSON object but {type(record).__name__}")
    for key in keys:
        if not isinstance(record.get(key), str):
            found = (
                type(record[key]).__name__
                if key in record
                else f"absent (keys: {sorted(record)[:8]})"
            )
            raise ValueError(f"key {key!r} is no text: {found}")
    return tuple(record[key] for key in keys)


def _read_parquet(
    file: Path, keys: Sequence[str], stats: ReadStats, strict: bool
) -> Iterator[tuple[str, ...]]:
    from pyarrow import parquet  # 0.3 s to import, and only here needed

    with parquet.ParquetFile(file) as table:
        missing = sorted(set(keys) - set(table.schema_arrow.names))
        if missing:
            raise ValueError(f"{file} has no column {missing}, only {table.schema_arrow.names}")
        number = 0
        for batch in table.iter_batches(batch_size=256, columns=list(keys)):
            for row in zip(*(batch.column(key).to_pylist() for key in keys), strict=True):
                number += 1
                if all(isinstance(value, str) for value in row):
                    stats.count(row)
                    yield row
                    continue
                stats.invalid_lines += 1
                stats.report(f"{file}: row {number}: {list(keys)} are not all text", strict=strict)


def _read_text(
    file: Path, keys: Sequence[str], stats: ReadStats, strict: bool
) -> Iterator[tuple[str, ...]]:
    if tuple(keys) != ("text",):
        raise ValueError(f"{file} is plain text, which has the key 'text' only, not {list(keys)}")
    try:
        with _open(file, "rb") as stream:
            record = (stream.read().decode("utf-8"),)
    except UnicodeDecodeError as error:
        stats.invalid_lines += 1
        stats.report(f"{file}: {error}", strict=strict)
    else:
        stats.count(record)
        yield record
