import os
import shutil

import pytest
from made import commit, names, store, write_files

from utils.checkpoints import space as rotation
from utils.checkpoints.space import (
    Room,
    best_checkpoint,
    make_room,
    most_at_once,
    rotate,
    taken_room,
)
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
    free = [Room(0, 100)]
    real = rotation.delete_if_possible

    def delete(directory):
        free[0] += taken_room([directory])
        real(directory)

    monkeypatch.setattr(rotation, "free_room", lambda _directory: free[0])
    monkeypatch.setattr(rotation, "delete_if_possible", delete)
    monkeypatch.setattr(rotation, "RESERVE", Room(0, 0))

    def set_free(size_bytes, files=100):
        free[0] = Room(size_bytes, files)

    return set_free


ESTIMATE = Room(1000, 5)


def test_room_goes_by_the_newest_checkpoint_or_the_estimate(tmp_path, disk):
    disk(999)
    with pytest.raises(StorageError, match=r"checkpoint takes 1\.0 KiB: 0\.0 KiB are missing"):
        make_room(tmp_path, RUN, None, None, ESTIMATE)
    disk(1000)
    make_room(tmp_path, RUN, None, None, ESTIMATE)
    commit(tmp_path, 2)
    with pytest.raises(StorageError, match=r"20\.9 KiB, and the committed one stays .* touched"):
        make_room(tmp_path, RUN, None, None, ESTIMATE)


def test_files_are_counted_too(tmp_path, disk):
    disk(10**6, files=4)
    with pytest.raises(StorageError, match=r"4 inodes \(files\) free, .* takes 5: 1 are missing"):
        make_room(tmp_path, RUN, None, None, ESTIMATE)
    disk(10**6, files=5)
    make_room(tmp_path, RUN, None, None, ESTIMATE)
    commit(tmp_path, 2, 4, 6)
    make_room(tmp_path, RUN, 3, None, ESTIMATE)
    assert steps(tmp_path) == [4, 6], "a checkpoint has seven files and folders"


def test_a_save_leaves_room_for_the_notes_of_a_next_start(tmp_path, disk, monkeypatch):
    monkeypatch.setattr(rotation, "RESERVE", Room(500, 0))
    disk(1499)
    with pytest.raises(StorageError):
        make_room(tmp_path, RUN, None, None, ESTIMATE)


def test_what_rotation_would_free_is_freed(tmp_path, disk, caplog):
    commit(tmp_path, 2, 4, 6)
    disk(10_000)
    make_room(tmp_path, RUN, 3, None, ESTIMATE)
    assert steps(tmp_path) == [4, 6]
    assert "checkpoint-2 is deleted before the save: its room is needed" in caplog.text


def test_no_more_is_freed_than_the_save_needs(tmp_path, disk):
    commit(tmp_path, 2, 4, 6, 8)
    disk(10_000)
    make_room(tmp_path, RUN, 3, None, ESTIMATE)
    assert steps(tmp_path) == [4, 6, 8]


@pytest.mark.parametrize("keep", [2, 3])
def test_two_committed_ones_stay_until_the_next_is_there(keep, tmp_path, disk):
    commit(tmp_path, 2, 4)
    disk(10_000)
    with pytest.raises(StorageError, match=r"2 committed ones stay until it is there: 11\.\d KiB"):
        make_room(tmp_path, RUN, keep, None, ESTIMATE)
    assert steps(tmp_path) == [2, 4]


def test_nothing_is_deleted_when_it_would_not_help(tmp_path, disk):
    commit(tmp_path, 2, 4, 6)
    (tmp_path / "checkpoint-2" / "optimizer.pt").write_bytes(b"smaller than the next one")
    disk(10)
    with pytest.raises(StorageError, match=r"KiB more with what goes, .* 2 committed ones stay"):
        make_room(tmp_path, RUN, 3, None, ESTIMATE)
    assert steps(tmp_path) == [2, 4, 6]


def test_the_best_is_one_of_those_that_stay(tmp_path, disk):
    """With a limit of 2 the best and the newest one are two."""
    commit(tmp_path, 2, 4, 6)
    disk(10_000)
    make_room(tmp_path, RUN, 2, tmp_path / "checkpoint-2", ESTIMATE)
    assert steps(tmp_path) == [2, 6]
    disk(10_000)
    with pytest.raises(StorageError):
        make_room(tmp_path, RUN, 2, tmp_path / "checkpoint-2", ESTIMATE)
    assert steps(tmp_path) == [2, 6]


def test_nothing_is_freed_while_there_is_room(tmp_path, disk):
    commit(tmp_path, 2, 4, 6)
    disk(100_000)
    make_room(tmp_path, RUN, 2, None, ESTIMATE)
    assert steps(tmp_path) == [2, 4, 6]


@pytest.mark.parametrize("prefix", ["incomplete.", "deleting.", "resharded."])
def test_what_is_no_checkpoint_goes_first(prefix, tmp_path, disk):
    commit(tmp_path, 2, 4, 8)
    write_files(tmp_path, 6).rename(tmp_path / f"{prefix}checkpoint-6")
    disk(10_000)
    make_room(tmp_path, RUN, 3, None, ESTIMATE)
    assert names(tmp_path) == ["checkpoint-2", "checkpoint-4", "checkpoint-8"]


def test_a_damaged_one_stays_and_is_named_as_what_may_go(tmp_path, disk):
    commit(tmp_path, 2)
    (tmp_path / "checkpoint-2").rename(tmp_path / "damaged.checkpoint-2")
    disk(10)
    with pytest.raises(StorageError, match=r"such as .*/damaged\.checkpoint-2 if you"):
        make_room(tmp_path, RUN, 2, None, ESTIMATE)


def test_the_store_makes_room_before_a_save(tmp_path, disk):
    disk(999)
    with pytest.raises(StorageError, match="the next checkpoint takes"):
        store(tmp_path).begin(5, None)


def test_how_many_are_there_at_once():
    assert most_at_once(None, 7) == 7
    assert [most_at_once(keep, 7) for keep in (2, 3, 4, 9)] == [3, 3, 4, 7]
    assert most_at_once(2, 1) == 1


def test_the_best_is_where_the_newest_one_says(tmp_path):
    commit(tmp_path, 4)
    checkpoint, state = tmp_path / "checkpoint-4", tmp_path / "checkpoint-4" / "trainer_state.json"
    for text in ("{}", "no JSON", "[]", '{"best_model_checkpoint": null}'):
        state.write_text(text)
        assert best_checkpoint(checkpoint) is None
    state.write_text('{"best_model_checkpoint": "/moved/run/checkpoint-2"}')
    assert best_checkpoint(checkpoint) == tmp_path / "checkpoint-2"
