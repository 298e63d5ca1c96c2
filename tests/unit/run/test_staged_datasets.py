"""Copies of datasets on a node's own disk: made once, verified, shared by runs, and removed."""

import contextlib
import json
import logging
import multiprocessing
import os
import pickle
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tiny

from utils.config.settings import RunSettings, parse_pretraining
from utils.data.token_dataset import describe_split, open_token_dataset
from utils.launch.processes import LaunchFacts
from utils.run import staging
from utils.run.staging import DIGESTS, stage_data

ONE = LaunchFacts(0, 1, "single", ("n1",), "cpu")


@pytest.fixture
def data(tmp_path) -> Path:
    """Make a described split."""
    folder = tiny.save(tmp_path / "shared" / "documents", {"input_ids": tiny.documents(50, seed=0)})
    describe_split(folder)
    return folder


@pytest.fixture
def disk(tmp_path) -> Path:
    folder = tmp_path / "disk"
    folder.mkdir()
    return folder


def settings_of(stage: object, *data: Path, dry_run: object = None) -> RunSettings:
    given = {"train_data": [*data], "model_config": "model.yaml", "output_dir": "unused"}
    sizes = {"sequence_length": 64, "global_batch_size": 4, "per_device_train_batch_size": 1}
    return parse_pretraining(tiny.flags(**given, **sizes, stage_data=stage, dry_run=dry_run), "")


@contextlib.contextmanager
def started(stage: object, *data: Path) -> Iterator[Callable[[], dict]]:
    """Start another process, which ends with this block. The yielded function returns `staged`."""
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()

    def start() -> None:
        there.send(stage_data(settings_of(stage, *data), ONE).staged)
        there.recv()

    def copies() -> dict:
        assert here.poll(300)
        return here.recv()

    process = context.Process(target=start)
    process.start()
    try:
        yield copies
    finally:
        here.send(None)
        process.join()


@contextlib.contextmanager
def running(stage: object, *data: Path) -> Iterator[dict]:
    """Yield the copies of a run in another process, which ends with this block."""
    with started(stage, *data) as copies:
        yield copies()


def staged_by(stage: object, *data: Path) -> dict:
    with running(stage, *data) as copies:
        return copies


def states(folder: Path) -> dict[str, tuple[int, int]]:
    return {p.name: (p.stat().st_ino, p.stat().st_mtime_ns) for p in sorted(folder.iterdir())}


def copies_on(disk: Path) -> list[Path]:
    return sorted(p for p in disk.glob("stoker-data-*/*") if p.is_dir())


def test_a_copy_is_made_once_and_read_as_the_original(data, disk):
    copies = staged_by(disk, data)
    original, copy = copies[str(data), "train"]
    assert original == data.resolve()
    assert copy.parent == disk / f"stoker-data-{os.getuid()}"
    assert copy.parent.stat().st_mode & 0o777 == 0o700
    assert {p.name for p in copy.iterdir()} == {p.name for p in data.iterdir()} | {DIGESTS}
    made = states(copy)
    assert staged_by(disk, data) == copies
    assert states(copy) == made

    plain, staged = open_token_dataset(data), open_token_dataset(data, staged=(original, copy))
    assert staged.path == plain.path
    assert staged.description == plain.description
    shutil.rmtree(data)  # the original is read no more, here and in a data worker
    for opened in (staged, pickle.loads(pickle.dumps(staged))):
        assert opened.folder == copy
        for one, other in zip(opened.columns.values(), plain.columns.values(), strict=True):
            assert all(map(np.array_equal, one.values, other.values))


def test_off_and_in_a_dry_run_nothing_is_copied(data, disk, monkeypatch):
    monkeypatch.setenv("STOKER_STAGE_DIR", str(disk))
    for settings in (settings_of(None, data), settings_of(True, data, dry_run=True)):
        assert stage_data(settings, ONE).staged == {}
    assert not any(disk.iterdir())
    assert [copy.parents[1] for _, copy in staged_by(True, data).values()] == [disk]


def test_changed_data_get_another_copy(data, disk):
    _, before = staged_by(disk, data)[str(data), "train"]
    os.utime(data / "state.json")
    _, now = staged_by(disk, data)[str(data), "train"]
    assert now != before
    assert copies_on(disk) == sorted([before, now])


@pytest.mark.parametrize("damage", ["a bit", "cut", "missing", "unfinished", "no JSON"])
def test_a_damaged_copy_is_made_again(data, disk, damage, caplog):
    _, copy = staged_by(disk, data)[str(data), "train"]
    whole = {p.name: p.read_bytes() for p in copy.iterdir()}
    (arrow,) = copy.glob("*.arrow")
    state = arrow.stat()
    if damage == "a bit":
        content = bytearray(whole[arrow.name])
        content[len(content) // 2] ^= 1
        arrow.write_bytes(content)
        os.utime(arrow, ns=(state.st_atime_ns, state.st_mtime_ns))
    elif damage == "cut":
        arrow.write_bytes(whole[arrow.name][:-8])
    elif damage == "missing":
        arrow.unlink()
    elif damage == "unfinished":
        (copy / DIGESTS).unlink()
    else:
        (copy / DIGESTS).write_bytes(b"\xff[")
    with caplog.at_level(logging.WARNING):
        assert stage_data(settings_of(disk, data), ONE).staged[str(data), "train"][1] == copy
    assert "is damaged or cut short: it is made again" in caplog.text
    assert {p.name: p.read_bytes() for p in copy.iterdir()} == whole


def test_a_damaged_copy_that_a_run_uses_stays_and_others_read_the_original(data, disk, caplog):
    with running(disk, data) as copies:
        _, copy = copies[str(data), "train"]
        (copy / "state.json").write_text("{}")
        with caplog.at_level(logging.WARNING):
            assert stage_data(settings_of(disk, data), ONE).staged == {}
    assert "is damaged, and another job uses it" in caplog.text
    assert (copy / "state.json").read_text() == "{}"


def test_of_several_jobs_at_once_one_copies_and_the_others_wait(
    data, disk, tmp_path, monkeypatch, caplog
):
    make, made = staging._make_copy, tmp_path / "made"

    def noted(*words: Any) -> None:
        with made.open("a") as file:
            file.write(f"{words[0]}\n")
        make(*words)

    monkeypatch.setattr(staging, "_make_copy", noted)
    with contextlib.ExitStack() as jobs:
        starts = [jobs.enter_context(started(disk, data)) for _ in range(4)]
        copies = [start() for start in starts]
    assert copies == copies[:1] * 4
    assert made.read_text().splitlines() == [str(copies[0][str(data), "train"][1])]
    assert not caplog.text


def test_room_is_made_by_removing_the_oldest_copy_that_no_run_uses(data, disk, monkeypatch, caplog):
    others = [Path(shutil.copytree(data, data.with_name(name))) for name in "abc"]
    size = sum(p.stat().st_size for p in data.iterdir())
    copies = []
    for used, other in enumerate(others, 1):
        _, copy = staged_by(disk, other)[str(other), "train"]
        copies.append(copy)
        os.utime(copy.with_suffix(".lock"), (used, used))
    free = staging._free_bytes

    def small(folder: Path) -> int:
        """Return the room of a disk of three copies."""
        return min(free(folder), size * (3 - len(copies_on(disk))))

    monkeypatch.setattr(staging, "_free_bytes", small)
    with running(disk, others[0]):
        os.utime(copies[0].with_suffix(".lock"), (1, 1))
        _, copy = staged_by(disk, data)[str(data), "train"]
        assert copies_on(disk) == sorted([copies[0], copies[2], copy])
    # Not even without the copies: a warning with the numbers, and no copy is removed in vain.
    monkeypatch.setattr(staging, "_free_bytes", lambda _: -4 * size)
    kept = copies_on(disk)
    os.utime(data / "state.json")
    with caplog.at_level(logging.WARNING):
        assert stage_data(settings_of(disk, data), ONE).staged == {}
    assert f"stage_data: {data} is read where it is: " in caplog.text
    assert f"KiB do not fit, {copy.parent} has " in caplog.text
    assert len(kept) == 3
    assert copies_on(disk) == kept


def test_a_failed_copy_leaves_nothing_and_no_lock(data, disk, caplog, monkeypatch):
    digest = staging._copy_with_digest

    def full(source: Path, target: Path = Path(os.devnull)) -> str:
        if target.suffix == ".arrow":
            raise OSError(28, "No space left on device")
        return digest(source, target)

    monkeypatch.setattr(staging, "_copy_with_digest", full)
    with caplog.at_level(logging.WARNING):
        assert stage_data(settings_of(disk, data), ONE).staged == {}
    assert "No space left on device" in caplog.text
    assert copies_on(disk) == []
    monkeypatch.undo()
    assert len(staged_by(disk, data)) == 1


def test_data_that_change_during_the_copy_are_read_where_they_are(data, disk, caplog, monkeypatch):
    copystat = shutil.copystat

    def edit(source: Path, target: Path) -> None:
        copystat(source, target)
        os.utime(data / "stoker.json")

    monkeypatch.setattr(shutil, "copystat", edit)
    assert stage_data(settings_of(disk, data), ONE).staged == {}
    assert "its files changed while they were copied" in caplog.text
    assert copies_on(disk) == []


def test_a_disk_that_is_not_there_is_named(data, tmp_path, caplog):
    assert stage_data(settings_of(tmp_path / "absent", data), ONE).staged == {}
    assert f"{tmp_path / 'absent'} is no folder on this node" in caplog.text


def test_a_folder_that_others_can_write_is_not_used(data, disk, tmp_path, caplog):
    folder, elsewhere = disk / f"stoker-data-{os.getuid()}", tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    folder.symlink_to(elsewhere)
    assert stage_data(settings_of(disk, data), ONE).staged == {}
    assert "is not yours alone" in caplog.text
    assert not any(elsewhere.iterdir())
    folder.unlink()
    folder.mkdir()
    folder.chmod(0o770)
    assert stage_data(settings_of(disk, data), ONE).staged == {}
    folder.chmod(0o700)
    disk.chmod(0o777)
    assert stage_data(settings_of(disk, data), ONE).staged == {}
    disk.chmod(0o1777)
    assert len(staged_by(disk, data)) == 1
    if os.getuid() == 0:
        os.chown(folder, 1, -1)
        assert stage_data(settings_of(disk, data), ONE).staged == {}


def test_the_folder_is_on_the_disk_of_the_job_unless_one_is_named(monkeypatch, tmp_path, caplog):
    systems = {"/tmp": "ext4", str(tmp_path / "job"): "xfs", str(tmp_path / "network"): "nfs4"}
    monkeypatch.setattr(staging, "_file_system", lambda path: systems.get(str(path), "tmpfs"))
    for name in ("job", "network", "named", "set"):
        (tmp_path / name).mkdir()
    name = f"stoker-data-{os.getuid()}"
    monkeypatch.setenv("STOKER_NODE_DIR", str(tmp_path / "job" / "stoker-n1+7-x"))
    assert staging._folder(True) == tmp_path / "job" / name
    monkeypatch.setenv("STOKER_NODE_DIR", str(tmp_path / "network" / "stoker-n1+7-x"))
    assert staging._folder(True) == Path("/tmp") / name
    monkeypatch.setenv("STOKER_STAGE_DIR", str(tmp_path / "set"))
    assert staging._folder(True) == tmp_path / "set" / name
    assert staging._folder(str(tmp_path / "named")) == tmp_path / "named" / name
    monkeypatch.delenv("STOKER_STAGE_DIR")
    systems["/tmp"] = "tmpfs"
    with pytest.raises(OSError, match="network and /tmp are on no disk of this node"):
        staging._folder(True)


def test_half_of_the_memory_and_a_twentieth_of_a_disk_stay_free(monkeypatch, tmp_path):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(1000, 600, 400))
    monkeypatch.setattr(staging, "memory_room_bytes", lambda: 300)
    for system, free in (("ext4", 350), ("tmpfs", 150)):
        monkeypatch.setattr(staging, "_file_system", lambda _, system=system: system)
        assert staging._free_bytes(tmp_path) == free


def test_the_file_system_of_a_path():
    assert staging._file_system(Path("/proc/self")) == "proc"
    assert staging._file_system(Path("/dev/shm")) == "tmpfs"


def test_what_is_no_dataset_is_left_to_the_error_of_the_start(disk, tmp_path, caplog):
    assert stage_data(settings_of(disk, tmp_path / "missing"), ONE).staged == {}
    assert "no such directory" in caplog.text
    nested = tmp_path / "nested"
    tiny.save(nested, {"input_ids": tiny.documents(5, seed=0)})
    (nested / "inside").mkdir()
    (arrow,) = nested.glob("*.arrow")
    arrow.rename(nested / "inside" / arrow.name)
    state = json.loads((nested / "state.json").read_text())
    state["_data_files"] = [{"filename": f"inside/{arrow.name}"}]
    (nested / "state.json").write_text(json.dumps(state))
    assert stage_data(settings_of(disk, nested), ONE).staged == {}
    assert "its Arrow files are in other folders" in caplog.text


def test_cached_results_of_datasets_are_not_copied(data, disk):
    (data / "cache-1f2e.arrow").write_bytes(bytes(9))
    _, copy = staged_by(disk, data)[str(data), "train"]
    assert {p.name for p in copy.iterdir()} == {
        p.name for p in data.iterdir() if p.name != "cache-1f2e.arrow"
    } | {DIGESTS}
    (data / "cache-1f2e.arrow").unlink()
    assert staged_by(disk, data)[str(data), "train"][1] == copy


def test_a_dataset_that_changed_before_all_nodes_had_it_is_read_where_it_is(
    data, disk, caplog, monkeypatch
):
    other = Path(shutil.copytree(data, data.with_name("other")))
    copy_of = staging._locked_copy

    def append_meanwhile(original: Path, folder: Path) -> tuple[Path, Path]:
        made = copy_of(original, folder)
        if original == data:
            os.utime(data / "stoker.json")
        return made

    monkeypatch.setattr(staging, "_locked_copy", append_meanwhile)
    two = replace(ONE, world_size=2, hosts=("n1", "n2"))
    assert [*stage_data(settings_of(disk, data, other), two).staged] == [(str(other), "train")]
    assert f"stage_data: {data} is read where it is: it has changed" in caplog.text


def test_of_mounts_at_one_path_the_last_counts_and_an_unknown_user_is_no_folder(
    monkeypatch, tmp_path, data, caplog
):
    mounts = [("/", "ext4"), (str(tmp_path), "xfs"), (str(tmp_path), "tmpfs")]
    found = [SimpleNamespace(mountpoint=path, fstype=kind) for path, kind in mounts]
    monkeypatch.setattr(staging.psutil, "disk_partitions", lambda **_: found)
    assert staging._file_system(tmp_path / "a") == "tmpfs"
    assert stage_data(settings_of("~no-such-user/copies", data), ONE).staged == {}
    assert "is read where it is: " in caplog.text
