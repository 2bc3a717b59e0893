"""The index cache: one builder for each file system, shared by jobs, never rewritten."""

import os
import socket
import threading
from dataclasses import dataclass

import numpy as np
import pytest

from megatron_tlt.data import index_cache
from megatron_tlt.data.index_cache import IndexRequest, SingleProcess, load_indices


@dataclass
class FakeRank:
    """A rank of a job whose ranks are threads; `folder` is the disk that it sees."""

    folder: object
    is_builder: bool
    is_local_builder: bool
    meeting: threading.Barrier
    builds: int = 0

    def barrier(self):
        self.meeting.wait(timeout=20)

    def load(self):
        def build():
            self.builds += 1
            return {"numbers": np.arange(5)}

        request = IndexRequest(key={"kind": "test"}, build=build, shapes={"numbers": (5,)})
        try:
            self.result = load_indices([request], cache_path=self.folder, sync=self)[0]["numbers"]
        except ValueError as error:
            self.result = error


def run_ranks(ranks):
    threads = [threading.Thread(target=rank.load) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
        assert not thread.is_alive(), "a rank hangs"


def make_job(folders, builders):
    """Ranks on `folders`; rank 0 builds for the job, those in `builders` for their node."""
    meeting = threading.Barrier(len(folders))
    return [
        FakeRank(folder, rank == 0, rank in builders, meeting)
        for rank, folder in enumerate(folders)
    ]


def test_each_file_system_gets_its_index_from_one_builder(tmp_path):
    shared, other = tmp_path / "node0", tmp_path / "node1"
    ranks = make_job([shared, shared, other, other], builders={0, 2})
    run_ranks(ranks)
    assert [rank.builds for rank in ranks] == [1, 0, 1, 0]
    for rank in ranks:
        assert rank.result.tolist() == [0, 1, 2, 3, 4]


def test_shared_file_system_is_built_once(tmp_path):
    ranks = make_job([tmp_path] * 4, builders={0, 2})
    run_ranks(ranks)
    assert [rank.builds for rank in ranks] == [1, 0, 0, 0]


def test_rank_that_sees_no_index_names_path_and_host(tmp_path, monkeypatch):
    monkeypatch.setattr(index_cache, "_SECONDS_FOR_VISIBILITY", 0.1)
    ranks = make_job([tmp_path / "node0", tmp_path / "lost"], builders={0})
    run_ranks(ranks)
    assert ranks[0].result.tolist() == [0, 1, 2, 3, 4]
    assert str(tmp_path / "lost") in str(ranks[1].result)
    assert socket.gethostname() in str(ranks[1].result)


def test_jobs_that_share_a_cache_never_rewrite_an_entry(tmp_path):
    """Two jobs build the same entry at once: the second to finish takes the first one's."""
    values = {"numbers": np.arange(3)}
    shapes = {"numbers": (3,)}
    rival = IndexRequest(key={"kind": "test"}, build=lambda: values, shapes=shapes)
    entry = tmp_path / rival.folder_name()

    def build_while_the_other_job_publishes():
        # A process of another job has another temporary name.
        other = index_cache.temporary_name(entry).with_suffix(".other")
        other.mkdir(parents=True)
        np.save(other / "numbers.npy", values["numbers"])
        os.rename(other, entry)
        return values

    request = IndexRequest(
        key={"kind": "test"}, build=build_while_the_other_job_publishes, shapes=shapes
    )
    first = load_indices([request], cache_path=tmp_path, sync=SingleProcess())
    stamp = (entry / "numbers.npy").stat()
    again = load_indices([request], cache_path=tmp_path, sync=SingleProcess())
    assert first[0]["numbers"].tolist() == again[0]["numbers"].tolist() == [0, 1, 2]
    assert (entry / "numbers.npy").stat().st_ino == stamp.st_ino
    assert [path.name for path in tmp_path.iterdir()] == [entry.name]


@pytest.mark.parametrize("damage", ["truncate", "remove", "reshape"])
def test_damaged_entry_is_refused_with_its_path(tmp_path, damage):
    request = IndexRequest(
        key={"kind": "test"},
        build=lambda: {"numbers": np.arange(1000)},
        shapes={"numbers": (1000,)},
    )
    load_indices([request], cache_path=tmp_path, sync=SingleProcess())
    file = tmp_path / request.folder_name() / "numbers.npy"
    if damage == "truncate":
        file.write_bytes(file.read_bytes()[:-8])
    elif damage == "remove":
        file.unlink()
    else:
        np.save(file, np.arange(999))
    with pytest.raises(ValueError, match=r"numbers\.npy.*delete"):
        load_indices([request], cache_path=tmp_path, sync=SingleProcess())


def test_failing_builder_raises_its_own_error_and_leaves_nothing(tmp_path):
    def build():
        raise ZeroDivisionError("from the builder")

    request = IndexRequest(key={"kind": "test"}, build=build, shapes={})
    with pytest.raises(ZeroDivisionError, match="from the builder"):
        load_indices([request], cache_path=tmp_path, sync=SingleProcess())
    assert list(tmp_path.iterdir()) == []


def test_unwritable_cache_says_which_setting_helps(tmp_path):
    (tmp_path / "file").write_text("")
    request = IndexRequest(key={"kind": "test"}, build=dict, shapes={})
    with pytest.raises(ValueError, match="--data-cache-path"):
        load_indices([request], cache_path=tmp_path / "file" / "sub", sync=SingleProcess())
