"""A start is refused where its checkpoints cannot fit, and only there."""

import dataclasses
import json
import logging
from pathlib import Path

import pytest

from utils.checkpoints.files import FileRecord
from utils.checkpoints.manifest import PROVENANCE, Manifest, write_manifest
from utils.checkpoints.space import Room, free_room, taken_room
from utils.config.errors import StorageError
from utils.planning.job import Saves
from utils.runs import preflight as storage_room
from utils.runs.preflight import StorageNeeds, check_room

MIB = 2**20
RUN = "run-1"


def needs(keep: int | None = 3, saves: int = 10, checkpoint_bytes: int = MIB) -> StorageNeeds:
    """A run that saves every 10 steps."""
    return StorageNeeds(checkpoint_bytes, 1, Saves(10, 0, False, False, keep), 10 * saves)


@pytest.fixture
def free(monkeypatch):
    """Sets what is free, in checkpoints."""

    def set_free(checkpoints: float, files: float = 10_000) -> None:
        room = Room(checkpoints * MIB, files)
        monkeypatch.setattr(storage_room, "free_room", lambda _directory: room)

    monkeypatch.setattr(storage_room, "RESERVE", Room(0, 0))
    return set_free


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The directory of a run that was started."""
    (tmp_path / PROVENANCE).write_text(json.dumps({"run_id": RUN, "starts": []}))
    return tmp_path


def written(run: Path, name: str, size_bytes: int = MIB) -> Path:
    """A directory of one sparse file."""
    directory = run / name
    directory.mkdir()
    with (directory / "weights").open("wb") as file:
        file.truncate(size_bytes)
    return directory


def commit(run: Path, *steps: int, run_id: str = RUN, best: int | None = None) -> None:
    for step in steps:
        directory = written(run, f"checkpoint-{step}")
        state = {"best_model_checkpoint": best and f"{run}/checkpoint-{best}"}
        (directory / "trainer_state.json").write_text(json.dumps(state))
        files = {"weights": FileRecord(int(MIB / 1.02), "")}
        write_manifest(directory, Manifest(run_id, step, 0, 0, 1, "single", 8, {}, {}, "", files))


@pytest.mark.parametrize(
    ("keep", "saves", "most"),
    [(2, 10, 3), (3, 10, 3), (5, 10, 5), (5, 4, 4), (2, 1, 1), (2, 2, 2), (None, 10, 2)],
)
def test_a_new_run_needs_as_many_as_will_be_there_at_once(keep, saves, most, tmp_path, free):
    free(most)
    check_room(tmp_path, needs(keep, saves))
    free(most - 0.01)
    with pytest.raises(StorageError, match=r"has .* free, but .* are missing. Make room there"):
        check_room(tmp_path, needs(keep, saves))


def test_the_refusal_says_why_a_limit_of_two_needs_three(tmp_path, free):
    free(2.5)
    with pytest.raises(
        StorageError,
        match=r"has 2.5 MiB free, but 3 checkpoints of this run take about 3.0 MiB "
        r"\(save_total_limit 2: older ones stay while the next is written\): 512.0 KiB are missing"
        r"\. Make room there .*, or name an --output_dir",
    ):
        check_room(tmp_path, needs(keep=2))


@pytest.mark.parametrize("keep", [3, 5, None])
def test_a_run_goes_on_where_the_next_checkpoint_fits(keep, run, free):
    commit(run, 10, 20)
    free(1)
    check_room(run, needs(keep))
    free(0.99)
    with pytest.raises(
        StorageError,
        match=r"has .* the next checkpoint of this run takes about .* start the same command",
    ):
        check_room(run, needs(keep))


def test_what_rotation_frees_before_the_next_save_counts(run, free):
    commit(run, 10, 20, 30)
    free(0.1)
    check_room(run, needs(keep=3))
    with pytest.raises(StorageError, match=r"free, but"):
        check_room(run, needs(keep=4))
    commit(run, 40)
    check_room(run, needs(keep=4))
    check_room(run, needs(keep=2))


def test_a_limit_of_two_leaves_nothing_to_free(run, free):
    commit(run, 10, 20)
    free(0.99)
    with pytest.raises(StorageError, match=r"KiB free, but"):
        check_room(run, needs(keep=2))


def test_the_best_one_is_not_counted_on(run, free):
    commit(run, 10, 20, 30, best=10)
    free(0.1)
    with pytest.raises(StorageError):
        check_room(run, needs(keep=3))
    commit(run, 40, best=10)
    check_room(run, needs(keep=3))


@pytest.mark.parametrize(
    "name",
    ["checkpoint-30", "incomplete.checkpoint-10", "deleting.checkpoint-10",
     "deleting.incomplete.checkpoint-10", "resharded.checkpoint-20"],
)  # fmt: skip
def test_what_a_killed_start_left_counts(name, run, free):
    commit(run, 20)
    free(0.5)
    with pytest.raises(StorageError):
        check_room(run, needs())
    written(run, name, MIB // 2)
    check_room(run, needs())


def test_a_part_of_the_first_checkpoint_counts(run, free):
    written(run, "checkpoint-10")
    free(2)
    check_room(run, needs(keep=2))


def test_nothing_that_stays_counts(run, free):
    commit(run, 20)
    written(run, "damaged.checkpoint-10")
    written(run, "checkpoint-5-backup")
    commit(run, 30, run_id="run-2")
    free(0.5)
    with pytest.raises(StorageError):
        check_room(run, needs())


def test_the_directory_of_no_run_gives_nothing_back(tmp_path, free):
    written(tmp_path, "checkpoint-10")
    free(2)
    with pytest.raises(StorageError):
        check_room(tmp_path, needs())


def test_a_run_whose_last_checkpoint_is_there_needs_none(run, free):
    commit(run, 20)
    free(0)
    assert check_room(run, needs(saves=2)) == "0.0 KiB free (all checkpoints are there)"
    with pytest.raises(StorageError):
        check_room(run, needs(saves=3))


def test_later_checkpoints_that_will_not_fit_are_said(run, free, caplog):
    commit(run, 20)
    free(1)
    check_room(run, needs(keep=2))
    [line] = [one.getMessage() for one in caplog.records if one.levelno == logging.WARNING]
    assert (
        "has 1.0 MiB free, but 2 checkpoints of this run take about 2.0 MiB (save_total_l" in line
    )
    assert "1.0 MiB are missing, and the run will end with 74 when they are needed" in line
    caplog.clear()
    free(2)
    check_room(run, needs(keep=2))
    assert not caplog.records


def test_without_a_limit_the_room_for_all_is_said_not_demanded(tmp_path, free, caplog):
    free(9)
    check_room(tmp_path, needs(keep=None))
    assert "10 checkpoints of this run take about 10.0 MiB (save_total_limit null keeps all)" in (
        caplog.text
    )


def test_a_reserve_is_left_for_the_notes_of_a_start(tmp_path, free, monkeypatch):
    monkeypatch.setattr(storage_room, "RESERVE", Room(MIB, 8))
    free(3.99)
    with pytest.raises(StorageError):
        check_room(tmp_path, needs())
    free(4)
    check_room(tmp_path, needs())


def test_inodes_count_and_those_that_are_given_back(run, free):
    free(10, files=3 * 34 - 1)
    with pytest.raises(StorageError, match=r"101 inodes .* take about 102 .*: 1 are missing"):
        check_room(run, needs())
    commit(run, 10)
    free(10, files=3)
    with pytest.raises(StorageError, match=r"3 inodes .* takes about 4"):
        check_room(run, needs())
    written(run, "checkpoint-20")
    check_room(run, needs())


def test_a_real_file_system_gives_back_what_is_counted(disks):
    disk = disks(size_kib=512, files=64)
    empty = free_room(disk.path)
    assert empty.size_bytes == 512 * 1024
    directory = disk.path / "checkpoint-1"
    (directory / "folder").mkdir(parents=True)
    for name in ("a", "folder/b"):
        (directory / name).write_bytes(bytes(65_536))
    taken = taken_room([directory])
    left = free_room(disk.path)
    assert left.size_bytes == empty.size_bytes - taken.size_bytes
    assert left.files == empty.files - taken.files
    assert taken == Room(2 * 65_536, 4)
    assert dataclasses.replace(taken, files=9).holds(taken)
