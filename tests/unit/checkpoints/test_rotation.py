import os
import shutil

import pytest
from made import commit, names, store, write_files

from utils.checkpoints import rotation
from utils.checkpoints.rotation import make_room, rotate
from utils.config.errors import StorageError

RUN = "run-1"


def steps(output_dir):
    return sorted(int(name.split("-")[1]) for name in names(output_dir))


def test_the_newest_stay(tmp_path):
    commit(tmp_path, 2, 4, 6, 8, keep=2)
    assert steps(tmp_path) == [6, 8]


def test_without_a_limit_all_stay(tmp_path):
    commit(tmp_path, 2, 4, 6)
    assert steps(tmp_path) == [2, 4, 6]


def test_the_best_one_stays_too(tmp_path):
    commit(tmp_path, 2, 4, 6, 8, keep=2, best=2)
    assert steps(tmp_path) == [2, 6, 8]


def test_steps_count_not_times(tmp_path):
    commit(tmp_path, 8, 10, 12)
    for age, step in enumerate((12, 10, 8)):
        os.utime(tmp_path / f"checkpoint-{step}", (age, age))
    rotate(tmp_path, RUN, 2, None)
    assert steps(tmp_path) == [10, 12]


def test_only_committed_checkpoints_of_this_run_go(tmp_path):
    commit(tmp_path, 2, 4, 6)
    write_files(tmp_path, 1)
    (tmp_path / "checkpoint-2-backup").mkdir()
    rotate(tmp_path, "run-2", 2, None)
    assert len(names(tmp_path)) == 5
    rotate(tmp_path, RUN, 2, None)
    assert names(tmp_path) == [
        "checkpoint-1",
        "checkpoint-2-backup",
        "checkpoint-4",
        "checkpoint-6",
    ]


def test_what_was_set_aside_as_incomplete_goes_after_the_next_commit(tmp_path):
    write_files(tmp_path, 1).rename(tmp_path / "incomplete.checkpoint-1")
    write_files(tmp_path, 3).rename(tmp_path / "damaged.checkpoint-3")
    commit(tmp_path, 4)
    assert names(tmp_path) == ["checkpoint-4", "damaged.checkpoint-3"]


def test_the_oldest_goes_first_even_where_one_was_left_half_deleted(tmp_path, monkeypatch):
    commit(tmp_path, 2, 4, 6, 8)
    write_files(tmp_path, 1).rename(tmp_path / "deleting.checkpoint-2")
    gone = []
    real = shutil.rmtree

    def rmtree(path, **options):
        gone.append(path.name)
        real(path, **options)

    monkeypatch.setattr(shutil, "rmtree", rmtree)
    rotate(tmp_path, RUN, 2, None)
    assert gone[-1] == "deleting.checkpoint-4"
    assert names(tmp_path) == ["checkpoint-6", "checkpoint-8"]


def test_a_deletion_that_fails_is_said_and_nothing_else(tmp_path, monkeypatch, caplog):
    def fail(path, **_options):
        raise OSError(13, "Permission denied")

    commit(tmp_path, 2, 4, 6)
    monkeypatch.setattr(shutil, "rmtree", fail)
    rotate(tmp_path, RUN, 2, None)
    assert "checkpoint-2 could not be deleted: [Errno 13] Permission denied" in caplog.text
    assert {"checkpoint-4", "checkpoint-6"} <= set(names(tmp_path))


@pytest.fixture
def disk(monkeypatch):
    """Sets what is free; deleting gives back what was deleted."""
    free = [0]
    real = rotation.delete

    def delete(directory):
        free[0] += rotation._size_bytes(directory)
        real(directory)

    monkeypatch.setattr(rotation, "_free_bytes", lambda _directory: free[0])
    monkeypatch.setattr(rotation, "delete", delete)

    def set_free(size_bytes):
        free[0] = size_bytes

    return set_free


def test_room_goes_by_the_newest_checkpoint_or_the_estimate(tmp_path, disk):
    disk(999)
    with pytest.raises(StorageError, match=r"a checkpoint takes 1\.0 KiB: make room"):
        make_room(tmp_path, RUN, None, None, 1000)
    disk(1000)
    make_room(tmp_path, RUN, None, None, 1000)
    commit(tmp_path, 2)
    with pytest.raises(StorageError, match="checkpoints before are untouched"):
        make_room(tmp_path, RUN, None, None, 1000)


def test_just_what_rotation_would_free_is_freed(tmp_path, disk, caplog):
    commit(tmp_path, 2, 4, 6)
    disk(10_000)
    make_room(tmp_path, RUN, 3, None, 0)
    assert steps(tmp_path) == [4, 6]
    assert "checkpoint-2 is deleted before the save: its room is needed" in caplog.text


def test_nothing_is_deleted_when_it_would_not_help(tmp_path, disk):
    commit(tmp_path, 2, 4, 6)
    (tmp_path / "checkpoint-2" / "optimizer.pt").write_bytes(b"smaller than the next one")
    disk(10)
    with pytest.raises(StorageError, match=r"free, .* KiB with what rotation frees, a checkpoint"):
        make_room(tmp_path, RUN, 3, None, 0)
    assert steps(tmp_path) == [2, 4, 6]


def test_the_best_and_the_one_to_go_on_from_are_not_freed(tmp_path, disk):
    commit(tmp_path, 2, 4)
    disk(10_000)
    with pytest.raises(StorageError):
        make_room(tmp_path, RUN, 2, tmp_path / "checkpoint-2", 0)
    assert steps(tmp_path) == [2, 4]


def test_nothing_is_freed_while_there_is_room(tmp_path, disk):
    commit(tmp_path, 2, 4, 6)
    disk(100_000)
    make_room(tmp_path, RUN, 2, None, 0)
    assert steps(tmp_path) == [2, 4, 6]


def test_incomplete_ones_go_first(tmp_path, disk):
    commit(tmp_path, 2, 4)
    write_files(tmp_path, 6).rename(tmp_path / "incomplete.checkpoint-6")
    disk(10_000)
    make_room(tmp_path, RUN, None, None, 0)
    assert names(tmp_path) == ["checkpoint-2", "checkpoint-4"]


def test_the_store_makes_room_before_a_save(tmp_path, disk):
    disk(999)
    with pytest.raises(StorageError, match="a checkpoint takes"):
        store(tmp_path).begin(5, None)
