"""Offline corpora: train, validation and test documents as JSON lines, with a manifest."""

import hashlib
import json
import os
import sysconfig
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

from megatron_tlt.data.corpus import ReadStats, read_documents
from megatron_tlt.data.files import publish, sha256_of_files
from megatron_tlt.files import write_json

SPLITS = ("train", "valid", "test")
MANIFEST = "manifest.json"
# Of 100 documents, by the hash of their text.
_VALID_SHARE, _TEST_SHARE = 10, 3
_NOT_LIBRARY = {"test", "tests", "idlelib", "site-packages", "dist-packages", "__pycache__"}


def prepare_corpus(
    source: str, output_dir: str | Path, *, data_dir: str | None
) -> dict[str, object]:
    """Write `train.jsonl`, `valid.jsonl`, `test.jsonl` and `manifest.json`; returns the manifest.

    `source` is `python_stdlib` (the standard library's source on this machine, PSF licence, no
    tests), `books` (public-domain books in `data_dir`/books, split by author), or a path that
    `corpus` reads. The first and last are split by the hash of each document's text, exact repeats
    dropped. Nothing is written when the manifest is there, names the same source and its digests
    match the files. Raises ValueError for an unknown source and for one that gives no training
    documents.
    """
    folder = Path(output_dir)
    ready = _complete_manifest(folder, source)
    if ready is not None:
        return ready
    stats = ReadStats()
    documents = _documents(source, data_dir, stats)
    folder.mkdir(parents=True, exist_ok=True)
    counts = dict.fromkeys(SPLITS, 0)
    with ExitStack() as stack:
        streams = {
            split: stack.enter_context(
                open(stack.enter_context(publish(folder / f"{split}.jsonl")), "w", encoding="utf-8")
            )
            for split in SPLITS
        }
        for split, text in documents:
            streams[split].write(json.dumps({"text": text}, ensure_ascii=False) + "\n")
            counts[split] += 1
        if not counts["train"]:
            raise ValueError(f"source {source} gave no training document ({stats})")
    manifest = {
        "source": source,
        "invalid_lines": stats.invalid_lines,
        "blank_lines": stats.blank_lines,
        "splits": {split: _facts(folder / f"{split}.jsonl", counts[split]) for split in SPLITS},
    }
    write_json(folder / MANIFEST, manifest)
    return manifest


def _facts(path: Path, documents: int) -> dict[str, object]:
    return {
        "file": path.name,
        "documents": documents,
        "bytes": path.stat().st_size,
        "sha256": sha256_of_files(path),
    }


def _complete_manifest(folder: Path, source: str) -> dict[str, object] | None:
    path = folder / MANIFEST
    if not path.is_file():
        return None
    manifest = json.loads(path.read_text())
    facts = manifest["splits"].values()
    complete = manifest["source"] == source and all(
        (folder / fact["file"]).is_file()
        and sha256_of_files(folder / fact["file"]) == fact["sha256"]
        for fact in facts
    )
    return manifest if complete else None


def _documents(source: str, data_dir: str | None, stats: ReadStats) -> Iterator[tuple[str, str]]:
    """(split, text) in a fixed order. Checks the source at once, reads later."""
    if source == "python_stdlib":
        return _split_by_hash(_stdlib_texts(Path(sysconfig.get_path("stdlib")), stats))
    if source == "books":
        if data_dir is None:
            raise ValueError("source books needs the data folder: set MEGATRON_TLT_DATA")
        return (
            (split, text)
            for split in SPLITS
            for text in read_documents(Path(data_dir) / "books" / f"{split}.jsonl.xz", stats=stats)
        )
    if not Path(source).exists():
        raise ValueError(f"source {source} is neither python_stdlib, books nor an existing path")
    return _split_by_hash(read_documents(source, stats=stats))


def _split_by_hash(texts: Iterator[str]) -> Iterator[tuple[str, str]]:
    """Drop empty and repeated texts; give each to a split that depends on nothing but itself."""
    seen = set()
    for text in texts:
        digest = hashlib.sha256(text.encode("utf-8")).digest()
        if text.strip() and digest not in seen:
            seen.add(digest)
            place = int.from_bytes(digest[:8], "big") % 100
            yield _split_of(place), text


def _split_of(place: int) -> str:
    if place < _VALID_SHARE:
        return "valid"
    return "test" if place < _VALID_SHARE + _TEST_SHARE else "train"


def _stdlib_texts(root: Path, stats: ReadStats) -> Iterator[str]:
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = sorted(set(subfolders) - _NOT_LIBRARY)
        for name in sorted(names):
            if name.endswith(".py"):
                yield from read_documents(Path(folder, name), stats=stats)
