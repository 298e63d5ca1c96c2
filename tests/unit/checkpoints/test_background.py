"""Checkpoints written in the background, without a model and without other ranks."""

import errno
import os
import threading
from pathlib import Path

import pytest
from made import FACTS, FILES, names, store, write_files

from utils.checkpoints import files as copying
from utils.checkpoints import files as digests
from utils.checkpoints import staging
from utils.checkpoints.files import copy_and_record, flush_and_record
from utils.checkpoints.manifest import read_manifest
from utils.checkpoints.staging import BackgroundWriter, own_share
from utils.checkpoints.store import Checkpoints
from utils.config.errors import StorageError


@pytest.fixture
def memory(tmp_path, monkeypatch):
    directory = tmp_path / "memory"
    directory.mkdir()
    monkeypatch.setattr(staging, "MEMORY", directory)
    return directory


@pytest.fixture
def run(tmp_path, memory):
    directory = tmp_path / "run"
    directory.mkdir()
    return directory


@pytest.fixture
def checkpoints(run):
    made = Checkpoints(
        run, FACTS, 0, keep=2, estimated_bytes=1000, background=BackgroundWriter("run-1", 0)
    )
    yield made
    made.close()


def save(checkpoints, step):
    assert checkpoints.begin(step, None)
    write_files(checkpoints.run_dir, step)
    checkpoints.commit(step, tokens=step, best=None)


def test_a_copy_is_what_it_was_copied_from(tmp_path, monkeypatch):
    monkeypatch.setattr(copying, "PIECE_BYTES", 1000)
    monkeypatch.setattr(digests, "PART_BYTES", 3500)  # of two parts and of one, not of pieces
    source = write_files(tmp_path, 3)
    (source / "empty").touch()
    files = [*FILES, "empty"]
    records = copy_and_record(source, tmp_path / "target", files)
    assert records == flush_and_record(source, files)
    for name in files:
        assert (tmp_path / "target" / name).read_bytes() == (source / name).read_bytes()


def test_every_file_and_folder_is_brought_to_stable_storage(tmp_path, monkeypatch):
    source, flushed = write_files(tmp_path, 3), []
    monkeypatch.setattr(
        os, "fsync", lambda number: flushed.append(str(Path(f"/proc/self/fd/{number}").readlink()))
    )
    copy_and_record(source, tmp_path / "target", FILES)
    folders = {"", "/pytorch_model_fsdp_0"}
    assert set(flushed) == {
        f"{tmp_path}/target{path}" for path in folders | {f"/{n}" for n in FILES}
    }


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_each_staged_file_is_copied_by_one_rank(rank):
    """By its owner where it has it (several ranks may write one), else by whoever has it."""
    staged = [
        ["model.safetensors", "rng_state_0.pth", "rng_state_1.pth"],
        ["model.safetensors", "rng_state_1.pth", "extra"],
        ["rng_state_0.pth", "extra", "own"],
    ]
    expected = [["model.safetensors", "rng_state_0.pth"], ["rng_state_1.pth", "extra"], ["own"]]
    assert own_share(staged, rank) == expected[rank]


def test_a_save_is_under_way_when_commit_returns(checkpoints, run, memory, monkeypatch, caplog):
    caplog.set_level("INFO")
    go_on = threading.Event()
    real = copying._copy
    monkeypatch.setattr(copying, "_copy", lambda *paths: go_on.wait(30) and real(*paths))
    save(checkpoints, 4)
    assert checkpoints.writing
    assert not checkpoints.saves
    assert checkpoints.run_dir == run, "the next one is asked for first"
    (directory,) = memory.iterdir()
    assert names(directory) == ["checkpoint-4"]
    go_on.set()
    checkpoints.finish()
    assert not checkpoints.writing
    assert read_manifest(run / "checkpoint-4").files.keys() == FILES.keys()
    assert not names(directory), "the memory is given back"
    (entry,) = checkpoints.saves
    assert (entry.step, entry.size_bytes) == (4, read_manifest(run / "checkpoint-4").size_bytes)
    assert entry.total_s == entry.stall_s + entry.write_s > 0
    assert "checkpoint-4 committed (20.5 KiB, written in " in caplog.text
    assert not checkpoints.begin(4, None)
    checkpoints.close()
    assert not list(memory.iterdir())


def test_the_next_save_waits_for_the_one_before(checkpoints, run, monkeypatch):
    real, running, most = copying._copy, [], []

    def copy(source, target):
        running.append(source.parent)
        most.append(len({path.name for path in running}))
        record = real(source, target)
        running.remove(source.parent)
        return record

    monkeypatch.setattr(copying, "COPY_THREADS", 1)
    monkeypatch.setattr(copying, "_copy", copy)
    for step in (2, 4, 6):
        save(checkpoints, step)
    checkpoints.finish()
    assert max(most) == 1
    assert names(run) == ["checkpoint-4", "checkpoint-6"], "rotated, too"


def test_what_fails_is_raised_by_whoever_waits_and_commits_nothing(checkpoints, run, monkeypatch):
    def fail(*_paths):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(run / "x"))

    save(checkpoints, 2)
    checkpoints.finish()
    monkeypatch.setattr(copying, "_copy", fail)
    save(checkpoints, 4)
    checkpoints.background.thread.join()
    assert checkpoints.failed
    with pytest.raises(StorageError, match=r"no space .* is left on the device"):
        checkpoints.begin(6, None)
    assert not checkpoints.failed, "said once"
    checkpoints.finish()
    assert not checkpoints.is_committed(4)
    assert checkpoints.is_committed(2)


def test_a_bug_in_the_background_is_not_swallowed(checkpoints, monkeypatch):
    monkeypatch.setattr(copying, "_copy", lambda *_paths: 1 / 0)
    save(checkpoints, 2)
    with pytest.raises(ZeroDivisionError):
        checkpoints.finish()


def test_without_room_in_memory_a_save_is_written_at_once(checkpoints, run, monkeypatch, caplog):
    """The first by what a checkpoint is estimated to take, later ones by what was written."""
    for free, written_at_once in ((999, True), (10_000, True), (40_000, False)):
        monkeypatch.setattr("utils.checkpoints.staging.free_bytes", lambda free=free: free)
        caplog.clear()
        step = free // 10
        assert checkpoints.begin(step, None)
        assert (checkpoints.run_dir == run) == written_at_once
        said = f"the checkpoint of step {step} is written before training goes on: "
        assert (said in caplog.text) == written_at_once
        write_files(checkpoints.run_dir, step)
        checkpoints.commit(step, tokens=0, best=None)
        assert (checkpoints.saves[-1:] != [] and not checkpoints.writing) or not written_at_once
        checkpoints.finish()
    assert [save.write_s > 0 for save in checkpoints.saves] == [False, False, True]


def test_a_store_without_background_has_nothing_to_wait_for(tmp_path):
    plain = store(tmp_path)
    assert not plain.writing
    assert not plain.failed
    plain.finish()
    plain.close()


@pytest.mark.parametrize(
    ("rooms", "short_of_room"),
    [
        ([("n1", None, 1000), ("n2", None, 1000)], None),  # what a rank writes is not known yet
        ([("n1", None, 1000), ("n2", None, 999)], "n2"),
        ([("n1", 400, 900), ("n1", 400, 900), ("n2", 90, 100)], None),
        ([("n1", 400, 900), ("n1", 500, 900), ("n2", 90, 100)], "n1"),
        ([("n1", 400, 900), ("n2", 100, 101)], "n2"),  # it may grow a little
        ([("n1", 400, 2000), ("n1", None, 2000)], None),
    ],
)
def test_each_node_needs_room_for_what_its_own_ranks_write(
    rooms, short_of_room, memory, monkeypatch, caplog
):
    answers = iter([rooms, ["rank 0's place", *rooms[1:]]])
    monkeypatch.setattr("utils.checkpoints.staging.on_every_rank", lambda _: next(answers))
    place = BackgroundWriter("run-1", 0).place(7, rooms[0][1], 1000)
    if short_of_room is None:
        assert place == "rank 0's place"
        assert not caplog.text
    else:
        assert place is None
        assert f"is written before training goes on: {short_of_room} has " in caplog.text
