"""Token files against megatron-core's own reader and writer."""

import pickle

import numpy as np
import pytest

from megatron_tlt import mcore  # noqa: F401  (before megatron.core)
from megatron_tlt.data.indexed import IndexedDataset, IndexedDatasetWriter, token_dtype

import torch  # isort: skip
from megatron.core.datasets import indexed_dataset as megatron_indexed  # isort: skip

DOCUMENTS = [[5, 6, 7], [1], [], [9, 8, 7, 6, 300], list(range(100))]


def write(prefix, documents=DOCUMENTS, dtype=np.uint16):
    with IndexedDatasetWriter(prefix, dtype=dtype) as writer:
        for tokens in documents:
            writer.add_document(tokens)
    return str(prefix)


def write_with_megatron(prefix, documents=DOCUMENTS, dtype=np.uint16):
    builder = megatron_indexed.IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype)
    for tokens in documents:
        builder.add_document(torch.tensor(tokens, dtype=torch.int64), [len(tokens)])
    builder.finalize(f"{prefix}.idx")
    return str(prefix)


def contents(prefix):
    return [open(f"{prefix}.{suffix}", "rb").read() for suffix in ("bin", "idx")]


@pytest.mark.parametrize("dtype", [np.uint16, np.int32, np.int64])
def test_files_equal_megatrons_byte_for_byte(tmp_path, dtype):
    ours = write(tmp_path / "ours", dtype=dtype)
    assert contents(ours) == contents(write_with_megatron(tmp_path / "theirs", dtype=dtype))


def test_documents_of_several_sequences_equal_megatrons(tmp_path):
    builder = megatron_indexed.IndexedDatasetBuilder(str(tmp_path / "theirs.bin"), dtype=np.int32)
    with IndexedDatasetWriter(tmp_path / "ours", dtype=np.int32) as writer:
        for lengths in ([2, 3], [1], [4, 0, 1]):
            tokens = np.arange(sum(lengths))
            builder.add_document(torch.from_numpy(tokens), lengths)
            writer.add_document(tokens, lengths)
    builder.finalize(str(tmp_path / "theirs.idx"))
    assert contents(tmp_path / "ours") == contents(tmp_path / "theirs")
    assert IndexedDataset(tmp_path / "ours").document_indices.tolist() == [0, 2, 3, 6]


def test_each_reads_what_the_other_wrote(tmp_path):
    theirs = IndexedDataset(write_with_megatron(tmp_path / "theirs"))
    assert [theirs[i].tolist() for i in range(len(theirs))] == DOCUMENTS
    ours = megatron_indexed.IndexedDataset(write(tmp_path / "ours"))
    assert [ours[i].tolist() for i in range(len(ours))] == DOCUMENTS
    assert theirs.get(3, 1, 2).tolist() == ours.get(3, 1, 2).tolist() == [8, 7]


def test_appending_an_index_equals_megatron(tmp_path):
    parts = [write(tmp_path / "a"), write(tmp_path / "b", [[1, 2], [3]])]
    builder = megatron_indexed.IndexedDatasetBuilder(str(tmp_path / "theirs.bin"), dtype=np.uint16)
    with IndexedDatasetWriter(tmp_path / "ours", dtype=np.uint16) as writer:
        for part in parts:
            builder.add_index(part)
            writer.add_index(part)
    builder.finalize(str(tmp_path / "theirs.idx"))
    assert contents(tmp_path / "ours") == contents(tmp_path / "theirs")


def test_batches_of_documents_equal_single_ones(tmp_path):
    one_by_one = write(tmp_path / "a")
    with IndexedDatasetWriter(tmp_path / "b", dtype=np.uint16) as writer:
        tokens = np.concatenate([np.array(tokens, np.uint16) for tokens in DOCUMENTS])
        writer.add_documents(tokens.tobytes(), [len(tokens) for tokens in DOCUMENTS])
    assert contents(one_by_one) == contents(tmp_path / "b")


@pytest.mark.parametrize("cut", ["bin", "idx"])
def test_truncated_file_is_refused_with_its_name_and_sizes(tmp_path, cut):
    prefix = write(tmp_path / "data")
    path = tmp_path / f"data.{cut}"
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(ValueError, match=rf"data\.{cut}.*{size - 2} bytes.*{size}"):
        IndexedDataset(prefix)


@pytest.mark.parametrize(
    ("offset", "value", "message"),
    [
        (0, b"X", "not a token index"),
        (9, b"\x02", "version 2"),
        (17, b"\x63", "type code 99"),
        (34, b"\xff\xff\xff\xff", "sequence 0 has length -1"),
        (54, b"\x01", "start at byte 1,"),
        (94, b"\x09", "document boundaries"),
    ],
)
def test_damaged_index_is_refused(tmp_path, offset, value, message):
    prefix = write(tmp_path / "data")
    raw = bytearray((tmp_path / "data.idx").read_bytes())
    raw[offset : offset + len(value)] = value
    (tmp_path / "data.idx").write_bytes(raw)
    with pytest.raises(ValueError, match=message):
        IndexedDataset(prefix)


def test_missing_file_names_the_path(tmp_path):
    with pytest.raises(ValueError, match=r"nowhere\.idx does not exist"):
        IndexedDataset(tmp_path / "nowhere")


def test_nothing_appears_when_writing_fails(tmp_path):
    with (
        pytest.raises(RuntimeError),
        IndexedDatasetWriter(tmp_path / "data", dtype=np.uint16) as writer,
    ):
        writer.add_document([1, 2])
        raise RuntimeError("disk full")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("tokens", [[70000], [-1], np.array([65536])])
def test_ids_that_the_type_cannot_hold_are_refused(tmp_path, tokens):
    with (
        pytest.raises(ValueError, match="do not fit uint16"),
        IndexedDatasetWriter(tmp_path / "data", dtype=np.uint16) as writer,
    ):
        writer.add_document(tokens)


def test_types_of_appended_files_must_agree(tmp_path):
    other = write(tmp_path / "other", dtype=np.int32)
    with (
        pytest.raises(ValueError, match="other holds int32 tokens"),
        IndexedDatasetWriter(tmp_path / "data", dtype=np.uint16) as writer,
    ):
        writer.add_index(other)


def test_token_type_is_megatrons_choice():
    for vocab_size in (100, 65499, 65500, 151936):
        theirs = megatron_indexed.DType.optimal_dtype(vocab_size)
        assert token_dtype(vocab_size) == np.dtype(theirs)


def test_reader_survives_pickling_for_loader_processes(tmp_path):
    data = pickle.loads(pickle.dumps(IndexedDataset(write(tmp_path / "data"))))
    assert data[3].tolist() == DOCUMENTS[3]


def test_fingerprint_follows_lengths_not_place(tmp_path):
    first = IndexedDataset(write(tmp_path / "a")).fingerprint
    assert IndexedDataset(write(tmp_path / "b")).fingerprint == first
    assert IndexedDataset(write(tmp_path / "c", DOCUMENTS[:-1])).fingerprint != first
