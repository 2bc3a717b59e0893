"""Checkpoint files: damage is found and named, and nothing in them can run code or leave its folder."""

import json
import os
import pickle

import pytest

from megatron_tlt.mcore_reader import TrustedReader, check_backend, read_index
from megatron_tlt.train.checkpoint_format import TrainState, read_train_state
from megatron_tlt.train.manifest import (
    MANIFEST, file_record, is_plain_name, problems_in, read_manifest, write_manifest,
)  # fmt: skip
from megatron_tlt.train.publish import clean_leftovers

from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex


@pytest.fixture
def folder(tmp_path):
    """A folder of two files under a manifest."""
    folder = tmp_path / "iter_0000001"
    folder.mkdir()
    (folder / "a.distcp").write_bytes(bytes(range(256)) * 8)
    (folder / "b.json").write_text("{}")
    manifest = {name: file_record(folder / name) for name in ("a.distcp", "b.json")}
    write_manifest(folder, manifest, iteration=1)
    return folder


def test_a_whole_folder_has_no_problems(folder):
    assert problems_in(folder) == []
    assert read_manifest(folder)["b.json"].bytes == 2


def test_every_single_flipped_byte_of_a_file_or_of_the_manifest_is_found(folder):
    for name in ("b.json", MANIFEST):
        whole = (folder / name).read_bytes()
        for place in range(len(whole)):
            damaged = bytearray(whole)
            damaged[place] ^= 0x10
            (folder / name).write_bytes(damaged)
            (problem, *_) = problems_in(folder)
            assert name in problem
        (folder / name).write_bytes(whole)
    assert problems_in(folder) == []


@pytest.mark.parametrize(
    "damage,words",
    [
        (lambda f: f.unlink(), "is missing"),
        (lambda f: f.write_bytes(f.read_bytes()[:100]), "100 bytes, its manifest says 2048"),
        (lambda f: f.write_bytes(bytes(2048)), "SHA-256"),
    ],
)
def test_the_problem_names_the_file_and_the_numbers(folder, damage, words):
    damage(folder / "a.distcp")
    (problem,) = problems_in(folder)
    assert str(folder / "a.distcp") in problem and words in problem


def test_sizes_alone_do_not_find_a_flip(folder):
    (folder / "a.distcp").write_bytes(bytes(2048))
    assert problems_in(folder, checksum=False) == []


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "a/b", "..", ".", "", "a\\b", "a\0b"])
def test_a_manifest_that_names_a_file_elsewhere_is_refused(folder, name):
    assert not is_plain_name(name)
    write_manifest(folder, {name: file_record(folder / "b.json")}, iteration=1)
    with pytest.raises(ValueError, match="not a file in that folder: refused"):
        read_manifest(folder)


class Malicious:
    """Would run a command where it is unpickled without care."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (str(self.marker),)


def index_of(relative_path):
    storage = {MetadataIndex("w"): _StorageInfo(relative_path, 0, 1)}
    return Metadata(state_dict_metadata={}, storage_data=storage)


def test_an_index_that_would_run_code_is_refused_before_it_runs(tmp_path):
    marker = tmp_path / "was_here"
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Malicious(marker)))
    with pytest.raises(ValueError, match=r"\.metadata is refused.*mkdir"):
        TrustedReader(tmp_path).read_metadata()
    assert not marker.exists()


@pytest.mark.parametrize("path", ["../secret", "/etc/passwd", "a/../../b", ".."])
def test_an_index_that_points_outside_its_folder_is_refused(tmp_path, path):
    (tmp_path / ".metadata").write_bytes(pickle.dumps(index_of(path)))
    with pytest.raises(ValueError, match="outside its folder"):
        read_index(tmp_path)


@pytest.mark.parametrize("content", [b"", b"garbage", pickle.dumps([1, 2]), pickle.dumps(index_of("x"))[:40]])
def test_what_is_no_index_is_refused(tmp_path, content):
    (tmp_path / ".metadata").write_bytes(content)
    with pytest.raises(ValueError, match="is refused"):
        read_index(tmp_path)


def test_an_ordinary_index_is_read(tmp_path):
    (tmp_path / ".metadata").write_bytes(pickle.dumps(index_of("__0_0.distcp")))
    (info,) = read_index(tmp_path).storage_data.values()
    assert info.relative_path == "__0_0.distcp"


def test_another_format_is_refused(tmp_path):
    (tmp_path / "metadata.json").write_text(json.dumps({"sharded_backend": "zarr"}))
    with pytest.raises(ValueError, match="zarr.*torch_dist"):
        check_backend(tmp_path)


def test_a_state_file_of_another_release_is_refused_by_its_fields(tmp_path):
    (tmp_path / "train_state.json").write_text('{"format_version": 1, "iteration": 3, "colour": 1}')
    with pytest.raises(ValueError, match="fields .'colour'."):
        read_train_state(tmp_path)
    (tmp_path / "train_state.json").write_text('{"format_version": 1, "iteration": 3}')
    assert read_train_state(tmp_path) == TrainState(iteration=3)


def test_what_killed_saves_left_is_cleaned_and_a_set_aside_checkpoint_comes_back(tmp_path):
    for name in (".iter_0000001.ab12cd34.partial", ".iter_0000002.deleted", ".iter_0000003.retired",
                 ".iter_0000004.retired", "iter_0000004", "other", ".hidden"):  # fmt: skip
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text(name)
    clean_leftovers(tmp_path)
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"iter_0000003", "iter_0000004", "other", ".hidden"}
    assert (tmp_path / "iter_0000003" / "file").read_text() == ".iter_0000003.retired"
    assert (tmp_path / "iter_0000004" / "file").read_text() == "iter_0000004"
