"""The checkpoint to resume from, rotation and free space.

tests/exactness damages every file of whole checkpoints, and fills whole disks.
"""

import errno
import os
import shutil

import pytest
from made import RUN, commit, names, store, write_files

from utils.checkpoints import discovery
from utils.checkpoints.discovery import make_room, resume_point, rotate, taken_bytes
from utils.config.errors import StorageError


def damage(directory, name="optimizer.pt"):
    path = directory / name
    content = bytearray(path.read_bytes())
    content[5] ^= 4
    path.write_bytes(content)


def test_the_newest_committed_one_is_taken_by_its_number(tmp_path):
    """Older checkpoints are not read, and folders with similar names are ignored."""
    commit(tmp_path, 9, 10, 2)
    damage(tmp_path / "checkpoint-9")
    write_files(tmp_path, 18).rename(tmp_path / "checkpoint-18-backup")
    (tmp_path / "checkpoint-19").write_text("a file")
    (tmp_path / "checkpoint-20").symlink_to(tmp_path / "checkpoint-2")
    os.utime(tmp_path / "checkpoint-10", (0, 0))
    before = names(tmp_path)
    assert resume_point(tmp_path, RUN) == tmp_path / "checkpoint-10"
    assert names(tmp_path) == before


def test_damaged_and_uncommitted_ones_are_set_aside_with_a_log_line(tmp_path, caplog):
    assert resume_point(tmp_path, RUN) is None
    for _ in range(2):
        commit(tmp_path, 4, 6)
        damage(tmp_path / "checkpoint-6")
        write_files(tmp_path, 8)
        assert resume_point(tmp_path, RUN) == tmp_path / "checkpoint-4"
        shutil.rmtree(tmp_path / "incomplete.checkpoint-8")
    assert names(tmp_path) == [
        "checkpoint-4", "damaged.2.checkpoint-6", "damaged.checkpoint-6",
    ]  # fmt: skip
    assert "checkpoint-6 is damaged (optimizer.pt has other contents)" in caplog.text
    assert f"{tmp_path}/checkpoint-8 was not committed" in caplog.text
    commit(tmp_path, 6)
    (tmp_path / "checkpoint-6").rename(tmp_path / "checkpoint-9")
    assert resume_point(tmp_path, RUN) == tmp_path / "checkpoint-4"
    assert "manifest.json is of step 6" in caplog.text


def test_a_dry_run_reads_no_tensors_and_moves_nothing(tmp_path, caplog):
    commit(tmp_path, 4, 6)
    write_files(tmp_path, 8)
    damage(tmp_path / "checkpoint-6")
    assert resume_point(tmp_path, RUN, dry_run=True) == tmp_path / "checkpoint-6"
    damage(tmp_path / "checkpoint-6", "trainer_state.json")
    assert resume_point(tmp_path, RUN, dry_run=True) == tmp_path / "checkpoint-4"
    assert "checkpoint-6 is damaged (trainer_state.json" in caplog.text
    assert names(tmp_path) == ["checkpoint-4", "checkpoint-6", "checkpoint-8"]


def test_all_damaged_is_for_a_person_to_decide(tmp_path):
    commit(tmp_path, 4, 6)
    write_files(tmp_path, 8)
    damage(tmp_path / "checkpoint-4", "model.safetensors")
    (tmp_path / "checkpoint-6" / "manifest.json").write_text("")
    with pytest.raises(StorageError, match=r"(?s)checkpoint-6: .*checkpoint-4: .*step 0") as error:
        resume_point(tmp_path, RUN)
    assert len(error.value.problems) == 3
    assert names(tmp_path) == ["checkpoint-4", "checkpoint-6", "checkpoint-8"], "nothing moved"


def test_a_leftover_that_cannot_be_deleted_ends_no_start(tmp_path, monkeypatch, caplog):
    def refuse(*_args, **_options):
        raise OSError(errno.EIO, "Input/output error")

    commit(tmp_path, 4)
    for name in ("deleting.checkpoint-2", "resharded.checkpoint-2", "incomplete.checkpoint-6"):
        write_files(tmp_path, 6).rename(tmp_path / name)
    monkeypatch.setattr(shutil, "rmtree", refuse)
    assert resume_point(tmp_path, RUN) == tmp_path / "checkpoint-4"
    assert caplog.text.count("could not be deleted: [Errno 5] Input/output error") == 3
    assert len(names(tmp_path)) == 4
    monkeypatch.undo()
    assert resume_point(tmp_path, RUN) == tmp_path / "checkpoint-4"
    assert names(tmp_path) == ["checkpoint-4"]


def test_rotation_leaves_what_is_not_a_checkpoint_of_this_run(tmp_path):
    write_files(tmp_path, 3).rename(tmp_path / "damaged.checkpoint-3")
    commit(tmp_path, 4, 6, 8)
    others = ["checkpoint-1", "checkpoint-2-backup", "damaged.checkpoint-3"]
    for name in others[:2]:
        (tmp_path / name).mkdir()
    rotate(tmp_path, "run-2", 2)
    assert len(names(tmp_path)) == 6
    rotate(tmp_path, RUN, 2)
    assert names(tmp_path) == sorted([*others, "checkpoint-6", "checkpoint-8"])


@pytest.fixture
def disk(monkeypatch):
    """Set the free space of the disk; each deletion adds the deleted bytes."""
    free = [0]
    real = discovery.delete

    def delete(directory):
        free[0] += taken_bytes(directory)
        real(directory)

    monkeypatch.setattr(discovery, "free_disk_bytes", lambda _directory: free[0])
    monkeypatch.setattr(discovery, "delete", delete)
    monkeypatch.setattr(discovery, "RESERVE_BYTES", 0)
    return lambda size_bytes: free.__setitem__(0, size_bytes)


def test_room_goes_by_the_newest_checkpoint_or_the_estimate(tmp_path, disk, monkeypatch):
    disk(999)
    with pytest.raises(StorageError, match=r"of about 1\.0 KiB .*: 0\.0 KiB are missing"):
        store(tmp_path).begin(5)
    disk(1000)
    make_room(tmp_path, RUN, None, 1000)
    monkeypatch.setattr(discovery, "RESERVE_BYTES", 1)  # room for the records of the next start
    with pytest.raises(StorageError):
        make_room(tmp_path, RUN, None, 1000)
    commit(tmp_path, 2)
    with pytest.raises(StorageError, match=r"of about 20\.9 KiB"):
        make_room(tmp_path, RUN, None, 1000)


@pytest.mark.parametrize(
    ("saved", "keep", "best", "free", "left"),
    [
        ((2, 4, 6), 3, None, 10_000, (4, 6)),
        ((2, 4, 6, 8), 3, None, 10_000, (4, 6, 8)),  # not more is deleted than the save needs
        ((2, 4, 6), 2, 2, 10_000, (2, 6)),  # the best checkpoint is one of the two that stay
        ((2, 4), 2, None, 10_000, None),  # two stay until the next one is committed
        ((2, 4, 6), 3, None, 10, None),  # nothing is deleted if it would not help
    ],
)
def test_what_rotation_would_free_is_freed(saved, keep, best, free, left, tmp_path, disk, caplog):
    commit(tmp_path, *saved, best=best)
    if free == 10:
        (tmp_path / "checkpoint-2" / "optimizer.pt").write_bytes(b"smaller than the next one")
    disk(free)
    if left is None:
        with pytest.raises(StorageError, match="no checkpoint was touched"):
            make_room(tmp_path, RUN, keep, 1000)
    else:
        make_room(tmp_path, RUN, keep, 1000)
        assert ("is deleted before the save: its room is needed" in caplog.text) == (left != saved)
    assert names(tmp_path) == [f"checkpoint-{step}" for step in left or saved]


def test_what_is_no_checkpoint_goes_first(tmp_path, disk):
    commit(tmp_path, 2, 4, 8)
    for prefix in ("", "incomplete.", "deleting.", "resharded."):
        write_files(tmp_path, 6).rename(tmp_path / f"{prefix}checkpoint-6")
        (tmp_path / "damaged.checkpoint-1").mkdir(exist_ok=True)
        disk(10_000)
        make_room(tmp_path, RUN, 3, 1000)
        whole = ["checkpoint-2", "checkpoint-4", "checkpoint-8"]
        assert names(tmp_path) == [*whole, "damaged.checkpoint-1"]
