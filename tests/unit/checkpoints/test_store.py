"""A save from its begin to its commit, at once and in the background, without a model."""

import concurrent.futures
import errno
import os
import shutil
import threading

import pytest
import torch
from made import FACTS, FILES, commit, names, store, write_files

from utils.checkpoints import staging
from utils.checkpoints.files import read_manifest
from utils.checkpoints.staging import BackgroundWriter
from utils.checkpoints.store import Checkpoints
from utils.config.errors import ConfigurationError, StorageError


def test_a_commit_holds_every_file_and_none_that_no_rank_wrote(tmp_path, caplog):
    caplog.set_level("INFO")
    commit(tmp_path, 12)
    manifest = read_manifest(tmp_path / "checkpoint-12")
    assert (manifest.step, manifest.samples, manifest.tokens) == (12, 96, 1200)
    assert manifest.files.keys() == FILES.keys()
    assert "checkpoint-12 committed (20.5 KiB" in caplog.text
    directory = write_files(tmp_path, 4)
    (directory / "rng_state_7.pth").touch()
    with pytest.raises(StorageError, match=r"no rank wrote \(rng_state_7\.pth\)"):
        store(tmp_path).commit(4, tokens=0)
    assert not store(tmp_path).is_committed(4)


def test_a_best_checkpoint_that_is_damaged_or_not_torchs_is_not_loaded(tmp_path):
    directory = write_files(tmp_path, 4)
    (directory / "pytorch_model_fsdp_0" / "__0_0.distcp").unlink()
    torch.save({"moments": torch.zeros(3)}, directory / "optimizer.pt")
    store(tmp_path).commit(4, tokens=0)
    store(tmp_path).check(directory)
    (directory / "optimizer.pt").write_bytes(b"")
    with pytest.raises(StorageError, match=r"checkpoint-4 is damaged \(optimizer.pt has 0 bytes"):
        store(tmp_path).check(directory)
    commit(tmp_path, 6)
    with pytest.raises(ConfigurationError, match=r"optimizer\.pt is nothing that torch\.save"):
        store(tmp_path).check(tmp_path / "checkpoint-6")


@pytest.fixture
def checkpoints(tmp_path, monkeypatch):
    run, memory = tmp_path / "run", tmp_path / "memory"
    run.mkdir()
    memory.mkdir()
    monkeypatch.setattr(staging, "MEMORY", memory)
    background = BackgroundWriter("run-1", 0)
    made = Checkpoints(run, FACTS, 0, keep=2, estimated_bytes=1000, background=background)
    yield made
    made.close()


def save(checkpoints, step):
    assert checkpoints.begin(step)
    write_files(checkpoints.run_dir, step)
    checkpoints.commit(step, tokens=step)


def test_a_save_is_under_way_when_commit_returns(checkpoints, monkeypatch, caplog):
    caplog.set_level("INFO")
    run, memory, resume = checkpoints.output_dir, staging.MEMORY, threading.Event()
    real = shutil.copyfile
    monkeypatch.setattr(shutil, "copyfile", lambda *paths: resume.wait(30) and real(*paths))
    save(checkpoints, 4)
    assert checkpoints.writing
    assert not checkpoints.saves
    assert checkpoints.run_dir == run, "the next one is asked for first"
    (directory,) = memory.iterdir()
    assert names(directory) == ["checkpoint-4"]
    resume.set()
    checkpoints.finish()
    assert not checkpoints.writing
    assert read_manifest(run / "checkpoint-4").files.keys() == FILES.keys()
    assert not names(directory), "the memory is given back"
    (entry,) = checkpoints.saves
    assert (entry.step, entry.size_bytes) == (4, read_manifest(run / "checkpoint-4").size_bytes)
    assert entry.write_s > 0 < entry.stall_s
    assert "checkpoint-4 committed (20.5 KiB, written in " in caplog.text
    assert not checkpoints.begin(4)
    checkpoints.close()
    assert not list(memory.iterdir())


def test_what_fails_is_raised_by_whoever_waits_and_commits_nothing(checkpoints, monkeypatch):
    def fail(*_paths):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(checkpoints.output_dir / "x"))

    save(checkpoints, 2)
    checkpoints.finish()
    monkeypatch.setattr(shutil, "copyfile", fail)
    save(checkpoints, 4)
    concurrent.futures.wait([checkpoints.work])
    assert checkpoints.failed
    with pytest.raises(StorageError, match="No space left on device"):
        checkpoints.begin(6)
    assert not checkpoints.failed, "raised once"
    checkpoints.finish()
    assert not checkpoints.is_committed(4)
    assert checkpoints.is_committed(2)
    monkeypatch.setattr(shutil, "copyfile", lambda *_paths: 1 / 0)  # nor is a bug swallowed
    save(checkpoints, 6)
    with pytest.raises(ZeroDivisionError):
        checkpoints.finish()
