"""Which checkpoints stay, and what goes for the next one's room."""

import os
import shutil

import pytest
from made import RUN, commit, names, store, write_files

from utils.checkpoints import space
from utils.checkpoints.space import make_room, most_at_once, rotate, taken_bytes
from utils.config.errors import StorageError


def steps(output_dir):
    return sorted(int(name.split("-")[1]) for name in names(output_dir))


@pytest.mark.parametrize(
    ("keep", "best", "left"), [(2, None, [6, 8]), (None, None, [2, 4, 6, 8]), (2, 2, [2, 6, 8])]
)
def test_the_newest_and_the_best_stay(keep, best, left, tmp_path):
    commit(tmp_path, 2, 4, 6, 8, keep=keep, best=best)
    assert steps(tmp_path) == left


@pytest.mark.parametrize("state", ["{}", "no JSON", "[]", '{"best_model_checkpoint": null}'])
def test_steps_count_not_times(state, tmp_path):
    commit(tmp_path, 8, 10, 12)
    (tmp_path / "checkpoint-12" / "trainer_state.json").write_text(state)
    for age, step in enumerate((12, 10, 8)):
        os.utime(tmp_path / f"checkpoint-{step}", (age, age))
    rotate(tmp_path, RUN, 2)
    assert steps(tmp_path) == [10, 12]


def test_only_committed_checkpoints_of_this_run_and_incomplete_ones_go(tmp_path):
    write_files(tmp_path, 1).rename(tmp_path / "incomplete.checkpoint-1")
    write_files(tmp_path, 3).rename(tmp_path / "damaged.checkpoint-3")
    commit(tmp_path, 4, 6, 8)
    others = ["checkpoint-1", "checkpoint-2-backup"]
    for name in others:
        (tmp_path / name).mkdir()
    rotate(tmp_path, "run-2", 2)
    assert len(names(tmp_path)) == 6
    rotate(tmp_path, RUN, 2)
    assert names(tmp_path) == sorted(
        [*others, "checkpoint-6", "checkpoint-8", "damaged.checkpoint-3"]
    )


def test_a_deletion_that_fails_is_logged_and_nothing_else(tmp_path, monkeypatch, caplog):
    def fail(path, **_options):
        raise OSError(13, "Permission denied")

    commit(tmp_path, 2, 4, 6)
    monkeypatch.setattr(shutil, "rmtree", fail)
    rotate(tmp_path, RUN, 2)
    assert "checkpoint-2 could not be deleted: [Errno 13] Permission denied" in caplog.text
    assert {"checkpoint-4", "checkpoint-6"} <= set(names(tmp_path))


@pytest.fixture
def disk(monkeypatch):
    """Sets what is free; deleting gives back what was deleted."""
    free = [0]
    real = space.delete_if_possible

    def delete(directory):
        free[0] += taken_bytes([directory])
        real(directory)

    monkeypatch.setattr(space, "free_bytes", lambda _directory: free[0])
    monkeypatch.setattr(space, "delete_if_possible", delete)
    monkeypatch.setattr(space, "RESERVE_BYTES", 0)
    return lambda size_bytes: free.__setitem__(0, size_bytes)


def test_room_goes_by_the_newest_checkpoint_or_the_estimate(tmp_path, disk, monkeypatch):
    disk(999)
    with pytest.raises(StorageError, match=r"checkpoint takes 1\.0 KiB, .*0\.0 KiB are missing"):
        store(tmp_path).begin(5)
    disk(1000)
    make_room(tmp_path, RUN, None, 1000)
    monkeypatch.setattr(space, "RESERVE_BYTES", 1)  # for the notes of a next start
    with pytest.raises(StorageError):
        make_room(tmp_path, RUN, None, 1000)
    commit(tmp_path, 2)
    (tmp_path / "damaged.checkpoint-1").mkdir()
    with pytest.raises(StorageError, match=r"takes 20\.9 KiB.*/damaged\.checkpoint-1 if"):
        make_room(tmp_path, RUN, None, 1000)


@pytest.mark.parametrize(
    ("saved", "keep", "best", "free", "left"),
    [
        ((2, 4, 6), 3, None, 10_000, (4, 6)),
        ((2, 4, 6, 8), 3, None, 10_000, (4, 6, 8)),  # no more than the save needs
        ((2, 4, 6), 2, 2, 10_000, (2, 6)),  # the best is one of the two that stay
        ((2, 4, 6), 2, None, 100_000, (2, 4, 6)),  # there is room
        ((2, 4), 2, None, 10_000, None),  # two stay until the next is there
        ((2, 4), 3, None, 10_000, None),
        ((2, 6), 2, 2, 10_000, None),
        ((2, 4, 6), 3, None, 10, None),  # nothing is deleted if it would not help
    ],
)
def test_what_rotation_would_free_is_freed(saved, keep, best, free, left, tmp_path, disk, caplog):
    commit(tmp_path, *saved, best=best)
    if free == 10:
        (tmp_path / "checkpoint-2" / "optimizer.pt").write_bytes(b"smaller than the next one")
    disk(free)
    if left is None:
        with pytest.raises(StorageError, match=r"2 stay until it is there"):
            make_room(tmp_path, RUN, keep, 1000)
    else:
        make_room(tmp_path, RUN, keep, 1000)
        assert ("is deleted before the save: its room is needed" in caplog.text) == (left != saved)
    assert steps(tmp_path) == sorted(left or saved)


@pytest.mark.parametrize("prefix", ["incomplete.", "deleting.", "resharded."])
def test_what_is_no_checkpoint_goes_first(prefix, tmp_path, disk):
    commit(tmp_path, 2, 4, 8)
    write_files(tmp_path, 6).rename(tmp_path / f"{prefix}checkpoint-6")
    disk(10_000)
    make_room(tmp_path, RUN, 3, 1000)
    assert names(tmp_path) == ["checkpoint-2", "checkpoint-4", "checkpoint-8"]


def test_how_many_are_there_at_once():
    assert most_at_once(None, 7) == 7
    assert [most_at_once(keep, 7) for keep in (2, 3, 4, 9)] == [3, 3, 4, 7]
    assert most_at_once(2, 1) == 1
