"""On a real Slurm: --when behind a long job; a job that sees purge and quota, and keeps a run."""

import os
import re
import shlex
import time

import pytest
from launching import ROOT, wait_until
from slurm_cluster import Job
from training_jobs import SMALL, TrainingJobs, job_environment

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("idle")]

DAY_S = 24 * 3600


@pytest.fixture(scope="module")
def trained(jobs: TrainingJobs, tmp_path_factory):
    """A finished run of ten steps, two checkpoints and one job."""
    run = tmp_path_factory.mktemp("when") / "run"
    steps = {"max_steps": 10, "save_steps": 2, "eval_strategy": "no", "eval_data": None}
    job = jobs.submit(run, "--nodes=1", "--gpus-per-node=0", save_total_limit=10, **steps)
    assert jobs.slurm.wait(job) == "COMPLETED", job.output()
    return run


def test_behind_a_long_job_two_nodes_start_later_than_one(slurm, jobs, call, trained, tmp_path):
    blocks = ["--nodes=1", "--exclusive", "--time=180", "--wrap=sleep 3600"]
    blocker = slurm.submit(*blocks, cwd=ROOT, log=tmp_path / "log")
    wait_until(lambda: slurm.state(blocker) == "RUNNING", "does not start", blocker.output)
    try:
        words = [*SMALL, "--gpus-per-node=0", "--nodes=2", "slurm/multinode_job.sh", "pretrain.py"]
        steps = {"max_steps": 200, "save_steps": 2, "eval_strategy": "no", "eval_data": None}
        words += jobs.flags(trained, save_total_limit=10, **steps)
        done = call("slurm/submit.sh", "--when", *words)
        assert done.returncode == 0, done.stderr
        print(done.stdout)
        assert slurm.run("squeue", "--noheader", "--format=%i").stdout.split() == [blocker.id]
    finally:
        slurm.run("scancel", blocker.id)
    time_of = r"(\d+-\d+-\d+ \d+:\d+)"
    row = rf"^ +(\d) +(\d+:\d+:00)  {time_of}  {time_of} +([\d.]+) +(\d+)$"
    rows = re.findall(row, done.stdout, re.MULTILINE)
    starts = {
        nodes: time.mktime(time.strptime(each, "%Y-%m-%d %H:%M")) for nodes, _, each, *_ in rows
    }
    assert starts.keys() == {"1", "2"}
    assert starts["2"] - starts["1"] > 2 * 3600
    assert {limit for _, limit, *_ in rows} >= {"1:00:00", "0:30:00"}
    assert "  4  allocation failure: Requested node configuration is not available" in done.stdout
    assert re.search(
        r"s a step on 2 ranks \(measured\).*; start-up \d+.* \(measured\)", done.stdout
    )
    (best,) = re.findall(r"^earliest end: (.*)", done.stdout, re.MULTILINE)
    assert " --nodes=1 --time=" in best
    assert "Nothing was submitted" in done.stdout


def test_a_job_sees_the_purge_and_the_quota_and_keeps_a_run(slurm, trained, tmp_path):
    now, old, commands = time.time(), trained / "config.yaml", tmp_path / "commands"
    os.utime(old, (now, now - 57 * DAY_S))
    commands.mkdir()
    (commands / "quota").write_text("#!/bin/sh\necho 'user me: 91G of 90G*, 6 days'\nexit 1\n")
    (commands / "quota").chmod(0o755)
    (tmp_path / "archive").mkdir()
    script = f"""\
set -eu
export PATH={shlex.quote(str(commands))}:$PATH
slurm/run_python.sh status.py --space {shlex.quote(str(trained.parent))}
slurm/run_python.sh status.py --keep {shlex.quote(str(trained))}
"""
    cluster = {"STOKER_PURGE_DAYS": "60", "STOKER_ARCHIVE": str(tmp_path / "archive")}
    cluster |= {"HF_HOME": str(tmp_path / "hub"), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    words = ["--time=10", "--chdir", str(ROOT), f"--wrap={script}"]
    log, env = tmp_path / "log", job_environment(cluster)
    job: Job = slurm.submit(*words, cwd=ROOT, log=log, env=env)
    assert slurm.wait(job) == "COMPLETED", job.output()
    print(job.output())
    date = time.strftime("%Y-%m-%d", time.localtime(now + 3 * DAY_S))
    assert f"WARNING  {old} is purged from {date} on: python status.py --keep" in job.output()
    assert "quota: user me: 91G of 90G*, 6 days" in job.output()
    spare = " ".join(str(trained / f"checkpoint-{step}") for step in (2, 4, 6))
    assert f"rm -r -- {spare}\n" in job.output()
    copy = tmp_path / "archive" / "run"
    assert f"kept: {copy}, all files read back and verified" in job.output()
    assert (copy / "final" / "config.json").is_file()
    assert (copy / "checkpoint-10" / "manifest.json").is_file()
