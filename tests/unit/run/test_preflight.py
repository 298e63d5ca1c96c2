"""Storage is checked on every host before a run. Refusals name the host and the remedy."""

import contextlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from utils.checkpoints import discovery
from utils.checkpoints.files import CONFIG, REPORT
from utils.config.errors import ConfigurationError, StorageError
from utils.host.run_lock import LOCK_FOLDER
from utils.launch.processes import LaunchFacts
from utils.run import preflight
from utils.run.preflight import check_output_room, check_storage, has_run_files

MIB = 2**20


def plan_of(output_dir: Path, checkpoint_bytes: int, keep: int | None = 3, saves: int = 1) -> Any:
    settings = SimpleNamespace(
        output_dir=output_dir,
        run=SimpleNamespace(max_gpu_hours=None),
        training=SimpleNamespace(save_total_limit=keep),
    )
    return SimpleNamespace(
        checkpoint_bytes=checkpoint_bytes, total_steps=10, scheduled_saves=saves, settings=settings
    )


def check(output_dir: Path, checkpoint_bytes: int) -> None:
    check_storage(plan_of(output_dir, checkpoint_bytes), LaunchFacts(0, 1, "ddp", ("n1",), "cpu"))


@pytest.fixture(autouse=True)
def on_n1(monkeypatch):
    monkeypatch.setenv("SLURMD_NODENAME", "n1")


def test_a_host_that_does_not_see_the_directory_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(preflight, "SIGHT_LIMIT_S", 0.0)
    for path in (tmp_path / "absent", tmp_path):
        told = rf"n1: --output_dir {path} is not the directory that rank 0 made on another host"
        with pytest.raises(StorageError, match=told):
            preflight._append_to_mark(path / "mark")
    (tmp_path / "mark").touch()
    preflight._append_to_mark(tmp_path / "mark")


def test_a_file_system_without_room_for_a_file_is_refused(small_disk, monkeypatch):
    """A quota looks like this: the disk has free space, but a write fails."""
    monkeypatch.setattr(discovery, "free_disk_bytes", lambda _: 2**40)
    with contextlib.suppress(OSError):
        (small_disk / "full").write_bytes(bytes(2**20))
    with pytest.raises(StorageError, match=r"n1: .*cannot be written to \(No space left"):
        check(small_disk / "x", 2**20)


def test_a_directory_that_cannot_be_made_is_refused(tmp_path, monkeypatch):
    (tmp_path / "x").write_text("")
    with pytest.raises(ConfigurationError, match="is a file: name a directory") as caught:
        check(tmp_path / "x", 1)
    assert caught.value.exit_code == 2
    monkeypatch.setattr(preflight.os, "access", lambda *_: False)
    with pytest.raises(StorageError, match=rf"n1: --output_dir {tmp_path}/y cannot be written to"):
        check(tmp_path / "y", 1)


def test_a_new_run_needs_as_many_as_will_be_there_at_once(tmp_path, monkeypatch):
    """For a resumed run tests/exactness/test_full_disks.py tests the free space."""
    monkeypatch.setattr(discovery, "RESERVE_BYTES", 0)
    monkeypatch.setattr(discovery, "free_disk_bytes", free := mock.Mock())
    for keep, saves, most in ((2, 10, 3), (5, 10, 5), (5, 4, 4), (2, 0, 1), (None, 10, 2)):
        plan = plan_of(tmp_path, MIB, keep, saves)
        free.return_value = most * MIB
        check_output_room(plan)
        free.return_value -= 2000
        told = rf"n1: {most} more .* of about 1.0 MiB.* KiB are missing. Make room"
        with pytest.raises(StorageError, match=told):
            check_output_room(plan)


def test_a_run_directory_whose_files_lead_elsewhere_is_refused(tmp_path):
    """Otherwise a start would read or append to a link's target, or lock another folder."""
    (tmp_path / "metrics.jsonl").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigurationError, match=r"/metrics.jsonl is a link.*remove it"):
        has_run_files(tmp_path)
    (tmp_path / "metrics.jsonl").unlink()
    (tmp_path / ".lock").touch()
    with pytest.raises(ConfigurationError, match=r"/\.lock is no folder.*remove it"):
        has_run_files(tmp_path)


def test_a_start_that_ended_before_its_record_was_written_can_start_again(tmp_path):
    """On a full disk a first start can end after config.yaml, with a report of its failure."""
    (tmp_path / LOCK_FOLDER).mkdir()
    for name in (CONFIG, REPORT):
        (tmp_path / name).write_text("")
    assert not has_run_files(tmp_path)
    (tmp_path / LOCK_FOLDER).rmdir()
    with pytest.raises(ConfigurationError, match="holds no run of Stoker"):
        has_run_files(tmp_path)
