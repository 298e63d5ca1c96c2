"""Jobs that cannot work end within seconds, with a message that names host, reason and remedy."""

import re
import subprocess
import time
from pathlib import Path

import pytest
from training_jobs import TrainingJobs

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("idle")]

ONE_NODE = ("--nodes=1", "--gpus-per-node=2")
TWO_NODES = ("--nodes=2", "--gpus-per-node=2")


def refused(jobs: TrainingJobs, job, code: int, pattern: str, within_s: float = 60) -> str:
    """Check that the job failed with this exit code, once, in time, and said so last."""
    begin = time.monotonic()
    assert jobs.slurm.wait(job) == "FAILED", job.output()
    took = time.monotonic() - begin
    log = job.output()
    fields = jobs.slurm.fields(job)
    assert fields["ExitCode"] == f"{code}:0", log
    assert fields["Restarts"] == "0", log
    assert re.search(pattern, log, re.DOTALL), log
    last_lines = "\n".join(log.strip().splitlines()[-8:])
    assert re.search(pattern, last_lines, re.DOTALL), f"not at the end:\n{log}"
    assert took < within_s, log
    return log


def test_storage_that_cannot_be_written(jobs, tmp_path):
    """The launcher's refusals (devices, ports, addresses) are in test_node_launcher.py."""
    job = jobs.submit(Path("/proc/stoker-run"), *ONE_NODE)
    refused(jobs, job, 74, r"n[12].*/proc/stoker-run")
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=40m", "none", str(disk)], check=True)
    try:
        job = jobs.submit(disk / "run", *ONE_NODE)
        refused(jobs, job, 74, r"n[12].*MiB free")
    finally:
        jobs.slurm.wait_for_nodes()
        subprocess.run(["umount", str(disk)], check=True)


def test_a_node_that_does_not_see_the_directory(jobs, tmp_path):
    shared = tmp_path / "shared"
    shared.mkdir()
    jobs.slurm.stop_node("n2")
    jobs.slurm.start_node("n2", hidden=shared)
    try:
        jobs.slurm.wait_for_nodes()
        job = jobs.submit(shared / "run", *TWO_NODES)
        refused(jobs, job, 74, r"n2.*run", within_s=90)
    finally:
        jobs.slurm.wait_for_nodes()
        jobs.slurm.stop_node("n2")
        jobs.slurm.start_node("n2")
        jobs.slurm.wait_for_nodes()


def test_a_job_without_progress_stops_after_three_restarts(jobs, tmp_path):
    run = tmp_path / "run"
    env = {"STOKER_TEST_KILL_RANK_AT_STEP": "1:3"}
    job = jobs.submit(run, "--gpus-per-node=2", script="slurm/train_job.sh", env=env)
    assert jobs.slurm.wait(job) == "FAILED", job.output()
    log = job.output()
    assert jobs.slurm.fields(job)["ExitCode"] == "77:0", log
    assert jobs.slurm.fields(job)["Restarts"] == "3", log
    assert "reached no checkpoint beyond it" in "\n".join(log.splitlines()[-5:]), log


def test_wrong_settings_are_refused_once(jobs, tmp_path):
    job = jobs.submit(tmp_path / "run", *TWO_NODES, lerning_rate="1e-3")
    log = refused(jobs, job, 2, "lerning_rate.*learning_rate")
    assert log.count("lerning_rate") <= 6, log  # not once a rank
