"""Jobs that cannot work end without a requeue, and name host, reason and remedy."""

import re
import subprocess

import pytest
from launching import ROOT, wait_until
from training_jobs import TrainingJobs

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("idle")]

ONE_NODE = ("--nodes=1", "--gpus-per-node=2")
TWO_NODES = ("--nodes=2", "--gpus-per-node=2")
ONE = {"STOKER_PROCESSES_PER_NODE": "1"}


def refused(jobs: TrainingJobs, job, code: int, pattern: str) -> str:
    """Check that the job failed once, with this exit code and this message at the end."""
    assert jobs.slurm.wait(job) == "FAILED", job.output()
    log = job.output()
    fields = jobs.slurm.fields(job)
    assert fields["ExitCode"] == f"{code}:0", log
    assert fields["Restarts"] == "0", log
    assert re.search(pattern, log, re.DOTALL), log
    last_lines = "\n".join(log.strip().splitlines()[-8:])
    assert re.search(pattern, last_lines, re.DOTALL), f"not at the end:\n{log}"
    return log


def test_jobs_that_cannot_work_end_at_once_with_the_reason(jobs, tmp_path):
    """The launcher's refusals (devices, ports, addresses) are in test_node_launcher.py."""
    disks, shared = {"ro": tmp_path / "read-only", "size=40m": tmp_path / "disk"}, tmp_path / "both"
    for options, disk in disks.items():
        disk.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", str(disk)], check=True)
    try:
        # A checkpoint of this model has 45 MiB.
        settings = {"env": ONE, "model_config": ROOT / "recipes/model/llama_6m.yaml"}
        submitted = [jobs.submit(disk / "run", *ONE_NODE, **settings) for disk in disks.values()]
        for job, reason in zip(submitted, ("read-only/run cannot be", "MiB free"), strict=True):
            refused(jobs, job, 74, f"n[12].*{reason}")
    finally:
        wait_until(lambda: on_main(jobs) == "", "jobs are left")
        for disk in disks.values():
            subprocess.run(["umount", str(disk)], check=True)

    killed = ONE | {"STOKER_TEST_KILL_RANK_AT_STEP": "0:3"}
    options = ("--gpus-per-node=2", "--partition=other")
    endless = jobs.submit(tmp_path / "run", *options, script="slurm/train_job.sh", env=killed)

    shared.mkdir()
    jobs.slurm.stop_node("n2")
    jobs.slurm.start_node("n2", hidden=shared)
    try:
        job = jobs.submit(shared / "run", *TWO_NODES, env=ONE)
        refused(jobs, job, 74, r"n2.*run")
    finally:
        wait_until(lambda: on_main(jobs) == "", "jobs are left")
        jobs.slurm.stop_node("n2")
        jobs.slurm.start_node("n2")

    job = jobs.submit(tmp_path / "wrong", *TWO_NODES, lerning_rate="1e-3")
    log = refused(jobs, job, 2, "lerning_rate.*learning_rate")
    assert log.count("lerning_rate") <= 6, log  # not once per rank

    # This run makes no progress between its restarts, the first of each start inside the job.
    assert jobs.slurm.wait(endless) == "FAILED", endless.output()
    log = endless.output()
    assert jobs.slurm.fields(endless)["ExitCode"] == "77:0", log
    assert jobs.slurm.fields(endless)["Restarts"] == "3", log
    assert log.count("; restart 1 of at most 3 inside the job") == 3, log
    assert "reached no checkpoint beyond it" in "\n".join(log.splitlines()[-5:]), log


def on_main(jobs: TrainingJobs) -> str:
    return jobs.slurm.run("squeue", "--noheader", "--partition=main").stdout.strip()
