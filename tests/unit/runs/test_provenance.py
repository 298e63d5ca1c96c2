import errno
import json
import os
import subprocess
import sys

import pytest

from utils.checkpoints.files import Manifest, write_manifest
from utils.config.errors import ConfigurationError
from utils.launch.processes import LaunchFacts
from utils.runs.provenance import (
    git_state,
    package_versions,
    slurm_job,
    warn_of_other_versions,
    write_provenance,
)

FACTS = LaunchFacts(0, 3, "fsdp2", hosts=("n1", "n1", "n2"), device="cpu")


def write(path, **changes):
    known = {"script": "pretrain", "run_id": "a1"}
    known |= {"data": {"train": "abc"}, "attention": {"kernel": "sdpa", "reason": "a CPU"}}
    return write_provenance(path, FACTS, **(known | changes))


def test_a_start_records_where_it_comes_from(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["pretrain.py", "--hub_token", "canary", "--seed", "1"])
    entry = write(tmp_path / "provenance.json")
    (read,) = json.loads((tmp_path / "provenance.json").read_text())["starts"]
    assert read == entry
    assert read["script"] == "pretrain"
    assert read["argv"] == ["pretrain.py", "--hub_token", "***", "--seed", "1"]
    assert read["launch"] == {
        "strategy": "fsdp2", "world_size": 3, "hosts": ["n1", "n2"], "devices": ["cpu"],
    }  # fmt: skip
    assert read["versions"]["torch"].startswith("2.")
    assert read["data"] == {"train": "abc"}
    assert read["attention"]["kernel"] == "sdpa"
    assert read["resumed_from"] is None


def test_each_start_is_kept(tmp_path):
    path = tmp_path / "provenance.json"
    write(path)
    write(path, resumed_from="checkpoint-3")
    starts = json.loads(path.read_text())["starts"]
    assert [start["resumed_from"] for start in starts] == [None, "checkpoint-3"]
    assert list(tmp_path.iterdir()) == [path], "no draft is left"


def test_a_failed_write_leaves_the_old_file_whole(tmp_path):
    path = tmp_path / "provenance.json"
    write(path)
    before = path.read_text()
    with pytest.raises(TypeError):
        write(path, data={"train": object()})
    assert path.read_text() == before


def test_a_full_disk_leaves_the_old_file_whole(tmp_path, monkeypatch):
    path = tmp_path / "provenance.json"
    write(path)
    before = path.read_text()

    def fail(_descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="No space left"):
        write(path)
    assert path.read_text() == before


@pytest.mark.parametrize("content", ["{", "[]", "{}"])
def test_a_file_that_is_something_else_is_not_overwritten(tmp_path, content):
    path = tmp_path / "provenance.json"
    path.write_text(content)
    with pytest.raises(ConfigurationError, match="is not the JSON"):
        write(path)
    assert path.read_text() == content


def test_secrets_are_in_no_entry(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "canary-0123456789")
    monkeypatch.setattr(sys, "argv", ["pretrain.py", "--run_name", "canary-0123456789"])
    write(tmp_path / "provenance.json")
    assert "canary" not in (tmp_path / "provenance.json").read_text()


def test_other_versions_than_those_of_the_checkpoint_are_one_line(tmp_path, caplog):
    now = package_versions()
    older = now | {"torch": "1.13", "trl": None, "gone": "3"}
    del older["datasets"]
    for step, versions in enumerate([now, older]):
        directory = tmp_path / f"checkpoint-{step}"
        directory.mkdir()
        write_manifest(
            directory, Manifest("1", step, 0, 0, 1, "single", 4, {}, versions, "now", {})
        )
        warn_of_other_versions(str(directory))
    (record,) = caplog.records
    assert record.getMessage().startswith(
        f"{tmp_path}/checkpoint-1 was written with other versions: torch 1.13 -> {now['torch']}, "
        f"trl none -> {now['trl']}. "
    )


def test_slurm_facts_are_the_jobs(tmp_path):
    assert slurm_job({}) is None
    job = {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "2", "SLURM_JOB_NODELIST": "n[1-2]"}
    facts = slurm_job(job)
    assert (facts["job_id"], facts["restart_count"], facts["node_list"]) == ("7", "2", "n[1-2]")
    assert facts["partition"] is None


def git(folder, *command):
    identity = ["-c", "user.name=t", "-c", "user.email=t@t"]
    subprocess.run(["git", *identity, "-C", folder, *command], check=True, capture_output=True)


def test_git_tells_commit_and_changes(tmp_path):
    git(tmp_path, "init", "-q")
    (tmp_path / "a").write_text("1")
    git(tmp_path, "add", "a")
    git(tmp_path, "commit", "-qm", "one")
    clean = git_state(tmp_path)
    assert len(clean["commit"]) == 40
    assert not clean["dirty"]
    (tmp_path / "a").write_text("2")
    assert git_state(tmp_path) == clean | {"dirty": True}


def test_a_copy_inside_another_repository_has_no_commit_of_its_own(tmp_path):
    git(tmp_path, "init", "-q")
    git(tmp_path, "commit", "-qm", "one", "--allow-empty")
    (tmp_path / "stoker").mkdir()
    assert git_state(tmp_path / "stoker") is None


def test_without_git_there_is_no_state(tmp_path, monkeypatch):
    assert git_state(tmp_path) is None
    monkeypatch.setenv("PATH", str(tmp_path))
    assert git_state(tmp_path) is None
