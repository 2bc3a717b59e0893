"""Reading documents of every kind, and the offline corpora made of them."""

import gzip
import json
import lzma
import os

import pytest
from pyarrow import Table, parquet

from megatron_tlt.data.corpus import ReadStats, read_documents, read_records
from megatron_tlt.data.files import expand_inputs
from megatron_tlt.data.prepare import prepare_corpus

TEXTS = ["first\nline", "", "日本"]


def json_lines(texts=TEXTS, key="text"):
    return "".join(json.dumps({key: text, "id": 1}) + "\n" for text in texts).encode()


def write_as(path, kind):
    """TEXTS in a file of `kind`; returns its path."""
    file = path / f"data.{kind}"
    if kind == "parquet":
        parquet.write_table(Table.from_pydict({"text": TEXTS, "id": [1, 2, 3]}), file)
    elif kind.endswith(".gz"):
        file.write_bytes(gzip.compress(json_lines()))
    elif kind.endswith(".xz"):
        file.write_bytes(lzma.compress(json_lines()))
    else:
        file.write_bytes(json_lines())
    return file


@pytest.mark.parametrize("kind", ["jsonl", "json", "jsonl.gz", "jsonl.xz", "parquet"])
def test_documents_of_every_kind_are_read_in_order(tmp_path, kind):
    stats = ReadStats()
    assert list(read_documents(write_as(tmp_path, kind), stats=stats)) == TEXTS
    assert (stats.documents, stats.text_bytes) == (3, len("first\nline日本".encode()))


def test_folder_is_read_file_by_file_in_name_order(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "2.txt").write_text("two")
    (tmp_path / "a.jsonl").write_bytes(json_lines(["one"]))
    (tmp_path / "c.md").write_text("three")
    (tmp_path / "picture.png").write_bytes(b"\x89PNG")
    assert list(read_documents(tmp_path)) == ["one", "two", "three"]


def test_bad_lines_are_counted_with_their_place_and_not_fatal(tmp_path):
    lines = [
        b'{"text": "good"}\n',
        b"\n",
        b'{"text": "cut\n',
        b'{"body": "no key"}\n',
        b"[1]\n",
        b'{"text": 5}\n',
        b'{"text": "\xff"}\n',
        b'{"text": "\\ud800"}\n',
        b'{"text": "last"}',
    ]
    file = tmp_path / "data.jsonl"
    file.write_bytes(b"".join(lines))
    stats = ReadStats()
    assert list(read_documents(file, stats=stats)) == ["good", "last"]
    assert (stats.documents, stats.blank_lines, stats.invalid_lines) == (2, 1, 6)
    places = [problem.removeprefix(f"{file}:").split(":")[0] for problem in stats.problems]
    assert places == ["2", "3", "4", "5", "6", "7", "8"]
    assert "'body'" in stats.problems[2]


@pytest.mark.parametrize("line", [b"\n", b"{oops\n", b'{"other": "x"}\n'])
def test_strict_stops_at_the_first_bad_line(tmp_path, line):
    file = tmp_path / "data.jsonl"
    file.write_bytes(b'{"text": "good"}\n' + line)
    with pytest.raises(ValueError, match=r"data\.jsonl:2: .*--strict"):
        list(read_documents(file, strict=True))


def test_several_keys_give_one_record_each(tmp_path):
    file = tmp_path / "data.jsonl"
    file.write_text('{"question": "1+1", "answer": "2"}\n')
    assert list(read_records(file, ("answer", "question"))) == [("2", "1+1")]


@pytest.mark.parametrize(
    ("name", "message"),
    [("data.jsonl.zst", "zst is not read"), ("missing.jsonl", "does not exist"), ("", "holds no")],
)
def test_unreadable_inputs_are_refused(tmp_path, name, message):
    if name.endswith("zst"):
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(ValueError, match=message):
        list(read_documents(tmp_path / name))


def test_parquet_without_the_column_names_the_ones_there(tmp_path):
    with pytest.raises(ValueError, match=r"no column \['body'\], only \['text', 'id'\]"):
        list(read_documents(write_as(tmp_path, "parquet"), "body"))


def test_globs_are_sorted_and_must_name_something(tmp_path):
    for name in ("b.txt", "a.txt"):
        (tmp_path / name).write_text(name)
    assert [path.name for path in expand_inputs([f"{tmp_path}/*.txt"])] == ["a.txt", "b.txt"]
    with pytest.raises(ValueError, match="names no file"):
        expand_inputs([f"{tmp_path}/*.parquet"])


def read_split(folder, split):
    return list(read_documents(folder / f"{split}.jsonl"))


def test_library_corpus_is_deterministic_disjoint_and_without_tests(tmp_path):
    first = prepare_corpus("python_stdlib", tmp_path / "a", data_dir=None)
    second = prepare_corpus("python_stdlib", tmp_path / "b", data_dir=None)
    assert first == second
    splits = {split: read_split(tmp_path / "a", split) for split in ("train", "valid", "test")}
    texts = [text for documents in splits.values() for text in documents]
    assert len(texts) == len(set(texts)) > 300
    assert all(len(documents) > 3 for documents in splits.values())
    assert sum(map(len, texts)) > 5_000_000
    assert not any("import unittest" in text[:300] for text in splits["valid"])


def test_split_of_a_document_depends_on_nothing_but_its_text(tmp_path):
    texts = [f"document {i}" for i in range(300)]
    (tmp_path / "all.jsonl").write_bytes(json_lines(texts))
    (tmp_path / "half.jsonl").write_bytes(json_lines([*texts[::2], texts[0], ""]))
    for name in ("all", "half"):
        prepare_corpus(str(tmp_path / f"{name}.jsonl"), tmp_path / name, data_dir=None)
    for split in ("train", "valid", "test"):
        whole, half = (read_split(tmp_path / name, split) for name in ("all", "half"))
        assert half == [text for text in whole if text in set(texts[::2])]
        assert whole


def test_complete_corpus_is_left_alone_and_a_damaged_one_made_again(tmp_path):
    source = tmp_path / "in.jsonl"
    source.write_bytes(json_lines([f"document {i}" for i in range(100)]))
    manifest = prepare_corpus(str(source), tmp_path / "out", data_dir=None)
    train = tmp_path / "out" / "train.jsonl"
    inode = train.stat().st_ino
    assert prepare_corpus(str(source), tmp_path / "out", data_dir=None) == manifest
    assert train.stat().st_ino == inode
    whole = train.read_bytes()
    train.write_bytes(whole[:-5])
    assert prepare_corpus(str(source), tmp_path / "out", data_dir=None) == manifest
    assert train.read_bytes() == whole


def test_books_keep_their_own_splits(tmp_path):
    (tmp_path / "books").mkdir()
    for split in ("train", "valid", "test"):
        file = tmp_path / "books" / f"{split}.jsonl.xz"
        file.write_bytes(lzma.compress(json_lines([f"book of {split}"])))
    prepare_corpus("books", tmp_path / "out", data_dir=str(tmp_path))
    assert read_split(tmp_path / "out", "valid") == ["book of valid"]


def test_bundled_books_are_readable():
    folder = os.environ.get("MEGATRON_TLT_DATA")
    if folder is None:
        pytest.skip("MEGATRON_TLT_DATA is unset")
    stats = ReadStats()
    assert len(list(read_documents(f"{folder}/books/test.jsonl.xz", stats=stats))) == 14
    assert (stats.blank_lines, stats.invalid_lines) == (0, 0)


@pytest.mark.parametrize(
    ("source", "message"),
    [("nowhere", "neither python_stdlib, books nor"), ("books", "MEGATRON_TLT_DATA")],
)
def test_unknown_source_is_refused_before_anything_is_written(tmp_path, source, message):
    with pytest.raises(ValueError, match=message):
        prepare_corpus(source, tmp_path / "out", data_dir=None)
    assert not (tmp_path / "out").exists()
