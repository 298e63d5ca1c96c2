"""status.py --space and --keep: sizes, purge, quota, unneeded checkpoints, verified copies."""

import json
import os
import shlex
import shutil
import time
from pathlib import Path

import pytest
from made_up_run import write_run

from utils.checkpoints.discovery import deletable_checkpoints
from utils.checkpoints.files import Manifest, flush_and_record, list_files, write_manifest
from utils.config.errors import ConfigurationError, StorageError
from utils.observe import space
from utils.observe.space import keep_run, show_space

DAY_S = 24 * 3600
WEIGHTS = b"weights" * 1000


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """No cache, quota command, purge or archive of this machine."""
    for name in [name for name in os.environ if name.startswith("STOKER_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "huggingface"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", str(tmp_path / "commands"))
    (tmp_path / "commands").mkdir()


@pytest.fixture
def run(tmp_path) -> Path:
    """A finished run of ten checkpoints, of which the third is the best."""
    run = write_run(tmp_path / "runs" / "a run")
    (run / "final" / "model.safetensors").write_bytes(WEIGHTS)
    for step in (10, 20, 30, 40, 50):
        commit(run, step, best=30)
    return run


def commit(run: Path, step: int, best: int) -> Path:
    directory = run / f"checkpoint-{step}"
    directory.mkdir()
    (directory / "model.safetensors").write_bytes(WEIGHTS + str(step).encode())
    state = {"best_model_checkpoint": f"/elsewhere/checkpoint-{best}"}
    (directory / "trainer_state.json").write_text(json.dumps(state))
    files = flush_and_record(directory, list_files(directory))
    write_manifest(directory, Manifest("r", 1, "single", 4, step=step, files=files))
    return directory


def command(tmp_path: Path, name: str, text: str) -> None:
    path = tmp_path / "commands" / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def line_of(shown: str, word: str) -> str:
    (line,) = [line for line in shown.splitlines() if word in line]
    return line


def test_each_run_dataset_and_cache_is_counted_once(run, tmp_path):
    home = tmp_path / "home"
    home.mkdir()
    (home / "runs").symlink_to(tmp_path / "runs")  # as on many clusters
    dataset = home / "data" / "mine" / "train"
    dataset.mkdir(parents=True)
    (dataset / "stoker.json").write_bytes(b"x" * 24)
    (dataset / "data.arrow").write_bytes(b"x" * 1000)
    os.link(dataset / "data.arrow", dataset / "again.arrow")
    (tmp_path / "huggingface" / "hub").mkdir(parents=True)
    (tmp_path / "huggingface" / "hub" / "blob").write_bytes(b"x" * 2048)
    (home / "other").write_bytes(b"x" * 9999)
    shown = show_space(home)
    assert line_of(shown, ": dataset").split() == [
        "1.0", "KiB", "3", f"{dataset}:", "dataset"
    ]  # fmt: skip
    assert line_of(shown, "huggingface: cache").split()[:3] == ["2.0", "KiB", "3"]
    line = line_of(shown, ": run, ")
    # The folder, eight files and folders of made_up_run, and four for each checkpoint.
    inodes = 1 + len([*run.rglob("*")])
    assert line.split()[2] == str(inodes)
    checkpoints = sum(path.stat().st_size for path in run.rglob("checkpoint-*/*"))
    assert f"checkpoints {checkpoints / 1024:.1f} KiB" in line
    assert f"final {len(WEIGHTS) / 1024:.1f} KiB" in line
    assert "finished" in line
    assert "quota: not known, neither `quota` nor `lfs` is here" in shown
    assert "purged" not in shown


def test_runs_that_come_with_the_repository_are_left_out(run, tmp_path, monkeypatch):
    monkeypatch.setattr(space, "__file__", str(tmp_path / "utils" / "observe" / "space.py"))
    results = tmp_path / "benchmarks" / "results"
    write_run(results / "real_text")
    monkeypatch.chdir(tmp_path)
    shown = show_space(Path())
    assert "runs/a run: run" in shown
    assert "real_text" not in shown
    assert "real_text" in show_space(results)


def test_the_oldest_file_decides_when_a_purge_damages_a_run(run, tmp_path, monkeypatch):
    now, old = time.time(), run / "config.yaml"
    monkeypatch.setenv("STOKER_PURGE_DAYS", "30")

    def shown_by(purged_by: str) -> str:
        for path in run.rglob("*"):
            os.utime(path, (now - DAY_S, now - 3 * DAY_S))
        os.utime(old, (now - 2 * DAY_S, now - 25 * DAY_S))
        monkeypatch.setenv("STOKER_PURGE_BY", purged_by)
        return show_space(tmp_path)

    for purged_by in ("", "mtime"):
        date = time.strftime("%Y-%m-%d", time.localtime(now + 5 * DAY_S))
        warning = line_of(shown_by(purged_by), "WARNING")
        assert f"{old} is purged from {date} on: python status.py --keep '{run}'" in warning
    shown = shown_by("atime")
    date = time.strftime("%Y-%m-%d", time.localtime(now + 28 * DAY_S))
    assert "WARNING" not in shown
    assert f"purged from {date} on" in line_of(shown, ": run, ")
    for name, wrong in (("STOKER_PURGE_BY", "ctime"), ("STOKER_PURGE_DAYS", "-3")):
        monkeypatch.setenv(name, wrong)
        with pytest.raises(ConfigurationError, match=wrong):
            show_space(tmp_path)


def test_a_purge_is_not_expected_at_home_and_an_unreadable_folder_is_named(
    run, tmp_path, monkeypatch
):
    home = tmp_path / "home"
    dataset, cached = home / "data" / "stoker.json", home / ".cache" / "huggingface" / "blob"
    for path in (dataset, cached):
        path.parent.mkdir(parents=True)
        path.touch()
        os.utime(path, (0, 0))
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.delenv("HF_HOME")
    monkeypatch.setenv("STOKER_PURGE_DAYS", "30")
    os.utime(run / "config.yaml", (0, 0))
    shown = show_space(tmp_path)
    assert "huggingface: cache" in shown
    assert line_of(shown, "WARNING").startswith(f"WARNING  {run / 'config.yaml'} is purged from")
    scan = os.scandir

    def refused(path):
        if str(path) == str(run.parent):
            raise PermissionError(13, "Permission denied", str(path))
        return scan(path)

    monkeypatch.setattr(os, "scandir", refused)  # as root every folder can be read
    assert f"Permission denied: '{run.parent}'" in line_of(show_space(tmp_path), "WARNING")


def test_what_the_quota_commands_say_is_shown_also_above_a_limit_and_without_an_answer(
    tmp_path, monkeypatch
):
    command(tmp_path, "quota", "echo 'blocks 99G* 90G'; exit 1")
    command(tmp_path, "lfs", f"[ \"$*\" = 'quota -h {tmp_path}' ] && echo 'Lustre 5T'")
    shown = show_space(tmp_path)
    assert "quota: blocks 99G* 90G" in shown
    assert "lfs: Lustre 5T" in shown
    monkeypatch.setattr(space, "QUOTA_S", 0.2)
    command(tmp_path, "lfs", "exec /bin/sleep 600")
    assert "lfs: " in show_space(tmp_path)
    assert "timed out after 0.2 seconds" in show_space(tmp_path)


def test_old_and_damaged_checkpoints_are_not_needed_but_the_newest_two_and_the_best(run, tmp_path):
    (run / "checkpoint-60").mkdir()  # perhaps a save that a process writes now
    (run / "damaged.checkpoint-7").mkdir()
    (run / "checkpoint-20" / "model.safetensors").unlink()
    (run / "checkpoint-15").mkdir()
    spare = [run / f"checkpoint-{step}" for step in (10, 20, 15)]
    spare.append(run / "damaged.checkpoint-7")
    assert deletable_checkpoints(run) == spare
    shown = line_of(show_space(tmp_path), "not needed")
    words = shlex.split(shown.partition(": ")[2])
    assert words == ["rm", "-r", "--", *map(str, spare)]
    # A purge cut the newest checkpoint: an older one is needed.
    (run / "checkpoint-50" / "trainer_state.json").unlink()
    assert run / "checkpoint-30" not in deletable_checkpoints(run)
    for step in (10, 30, 40):
        (run / f"checkpoint-{step}" / "model.safetensors").unlink()
    assert deletable_checkpoints(run) == []  # a person decides


def test_nothing_of_a_run_that_trains_is_offered(run, tmp_path):
    lock = run / ".lock" / "owner-3"
    content = json.loads(lock.read_text())
    content["left"] = False
    (run / ".lock" / "owner-4").write_text(json.dumps(content))  # beats now
    shown = show_space(tmp_path)
    assert ": run, running" in shown
    assert "not needed" not in shown


@pytest.fixture
def archive(tmp_path, monkeypatch) -> Path:
    archive = tmp_path / "archive"
    archive.mkdir()
    monkeypatch.setenv("STOKER_ARCHIVE", str(archive))
    return archive


def test_a_run_is_kept_and_kept_again_with_its_newest_checkpoint(run, archive):
    with (run / "metrics.jsonl").open("a") as journal:
        journal.write('{"event": "train", "st')  # the run writes this line now
    said: list[str] = []
    keep_run(run, said.append)
    copy = archive / run.name
    expected = ["config.yaml", "final/model.safetensors", "metrics.jsonl", "provenance.json"]
    parts = ("manifest.json", "model.safetensors", "trainer_state.json")
    inside = [f"checkpoint-{step}/{name}" for step in (30, 50) for name in parts]  # 30: the best
    copied = sorted(str(path.relative_to(copy)) for path in copy.rglob("*") if path.is_file())
    assert copied == sorted(expected + inside)
    assert all((copy / name).read_bytes() == (run / name).read_bytes() for name in copied)
    assert "KiB in 9 files" in said[0]
    assert "GiB free" in said[0]
    assert said[1] == f"kept: {copy}, all files read back and verified"
    commit(run, 60, best=60)
    keep_run(run, said.append)
    assert [path.name for path in copy.glob("checkpoint-*")] == ["checkpoint-60"]
    assert not [*(archive / ".incomplete" / run.name).iterdir()]


def test_a_run_whose_copy_has_all_its_logs_is_not_warned_of(run, archive, monkeypatch):
    monkeypatch.setenv("STOKER_PURGE_DAYS", "30")
    os.utime(run / "config.yaml", (0, 0))
    assert "--keep" in show_space(run.parent)
    keep_run(run, [].append)
    shown = show_space(run.parent)
    assert line_of(shown, ": run, ").endswith(f"; copied to {archive / run.name}")
    assert "--keep" not in shown
    with (run / "metrics.jsonl").open("a") as journal:
        journal.write("{}\n")
    assert "--keep" in show_space(run.parent), "the run has trained since"


def test_a_damaged_file_is_not_kept_and_the_earlier_copy_stays(run, archive):
    keep_run(run, print)
    commit(run, 60, best=60)
    weights = run / "checkpoint-60" / "model.safetensors"
    sound = weights.read_bytes()
    weights.write_bytes(b"W" + sound[1:])
    with pytest.raises(StorageError, match=r"model\.safetensors has other contents"):
        keep_run(run, print)
    assert (archive / run.name / "checkpoint-50").is_dir()
    assert not (archive / run.name / "checkpoint-60").exists()
    weights.write_bytes(sound)
    keep_run(run, print)
    assert (archive / run.name / "checkpoint-60").is_dir()
    assert not [*(archive / ".incomplete" / run.name).iterdir()]


@pytest.mark.parametrize("purged", ["final/model.safetensors", "config.yaml", "checkpoint-50"])
def test_the_copy_of_a_run_stays_when_a_purge_took_files_of_the_run(run, archive, purged):
    keep_run(run, print)
    copy = archive / run.name
    before = list_files(copy)
    if (run / purged).is_dir():
        shutil.rmtree(run / purged)
    else:
        (run / purged).unlink()
    with pytest.raises(StorageError, match=f"has lost {purged}, which its copy .* has: nothing"):
        keep_run(run, print)
    assert list_files(copy) == before
    shutil.move(copy, archive / "as it was")
    keep_run(run, print)
    assert not (copy / purged).exists()


def test_a_full_archive_is_named_and_gets_its_room_back(run, archive, monkeypatch):
    keep_run(run, print)

    def full(source, copy):
        Path(copy).write_bytes(b"half")
        raise OSError(28, "No space left on device", str(source), None, str(copy))

    monkeypatch.setattr(shutil, "copyfile", full)
    with pytest.raises(StorageError, match=r"not copied: No space left on device: .*/archive/"):
        keep_run(run, print)
    assert (archive / run.name / "final" / "model.safetensors").read_bytes() == WEIGHTS
    assert not [*(archive / ".incomplete" / run.name).iterdir()]


def test_runs_without_an_id_do_not_replace_each_other(run, archive, tmp_path):
    other = write_run(tmp_path / "elsewhere" / run.name)
    for each in (run, other):
        (each / "provenance.json").write_text("{")
    keep_run(run, print)
    with pytest.raises(ConfigurationError, match="is there and stays"):
        keep_run(other, print)


def test_what_cannot_be_kept_is_refused(run, archive, tmp_path, monkeypatch):
    for path, message in (
        (tmp_path / "runs" / "a ran", r"no run directory \(did you mean .*a run\?\)"),
        (write_run(tmp_path / "runs" / "new"), "neither final/ nor a whole checkpoint"),
    ):
        for empty in path.glob("final"):
            empty.rmdir()
        with pytest.raises(ConfigurationError, match=message):
            keep_run(path, print)
    other = write_run(archive / run.name)
    (other / "provenance.json").write_text(json.dumps({"run_id": "other", "starts": []}))
    for named, message in (
        (archive, "is there and stays"),
        (run.parent, "is there and stays"),
        (tmp_path / "absent", "is no folder"),
        ("", r"STOKER_ARCHIVE=\(not set\)"),
    ):
        monkeypatch.setenv("STOKER_ARCHIVE", str(named))
        with pytest.raises(ConfigurationError, match=message):
            keep_run(run, print)
    monkeypatch.setenv("STOKER_ARCHIVE", str(tmp_path / "commands"))
    monkeypatch.setattr("utils.checkpoints.discovery.free_disk_bytes", lambda _: 1000)
    with pytest.raises(StorageError, match=r"has too little room .*nothing was copied"):
        keep_run(run, print)
