"""slurm/submit.sh on a real Slurm holds a job, checks what Slurm read, releases or cancels it."""

import functools
import re
import shlex

import pytest
import tiny
from launching import ROOT
from slurm_cluster import Job
from training_jobs import SMALL

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("idle")]

HEAD = """\
#!/bin/bash
#SBATCH --job-name="in 'quotes' # \\"too\\""   # it's a comment
#SBATCH --nodes=2 --ntasks-per-node=1  #it's "enough"
##SBATCH --nodes=1
#SBATCH --gpus-per-node=1

#SBATCH -t 01:00:00
#SBATCH --requeue --signal=B:USR1@300
echo
#SBATCH --nodes=1
"""
# Options and variables; expected result: nodes, GPUs per node, time limit, requeue.
SPELLINGS = [
    (["-N1", "--gres=gpu:2"], {}, (1, 2, "1:00:00", True)),
    (
        ["--gpus-per-node=0", "--gpus-per-task=2", "--no-requeue", "--time=UNLIMITED"],
        {"SBATCH_TIMELIMIT": "7"}, (2, 2, None, False),
    ),
    (["--gpus-per-node=0", "-G4", "-t", "1-2", "--array=0-3%2"], {}, (2, 2, "1-02:00:00", True)),
    (["-vt", "90", "-J", "a\nb"], {"SBATCH_GRES": "gpu:2"}, (2, 2, "1:30:00", True)),
    (["-k", "--nice", "--exclusive"], {"SBATCH_TIMELIMIT": "7"}, (2, 1, "7:00", True)),
]  # fmt: skip


@pytest.fixture
def submit(call):
    return functools.partial(call, "slurm/submit.sh")


def queue(slurm) -> list[str]:
    return slurm.run("squeue", "--noheader", "--format=%i").stdout.split()


def test_the_check_has_what_slurm_understood(slurm, submit, tmp_path):
    script, plan = tmp_path / "job.sh", tmp_path / "plan.py"
    script.write_text(HEAD)
    # This script takes the place of the training script; its dry run refuses.
    plan.write_text("raise SystemExit(2)  # dry_run\n")
    for words, environment, (nodes, gpus, limit, requeued) in SPELLINGS:
        done = submit(*words, str(script), str(plan), "a b", **environment)
        assert done.returncode == 2, done.stderr
        name = "a\nb" if "a\nb" in words else "in 'quotes' # \"too\""
        assert f"job:     {name}, {nodes} node(s) of {gpus} GPU(s)" in done.stderr, words
        assert ("not queued again" in done.stderr) != requeued
        if limit is not None:
            assert f"limit:   {limit}; Slurm's stop signal comes 300 s before it" in done.stderr
    assert queue(slurm) == []


def test_a_valid_job_is_released_and_trains(slurm, jobs, submit, tmp_path):
    run = tmp_path / "a run; $(touch canary)"
    small = [*SMALL, "--gpus-per-node=0", "--wait", f"--output={tmp_path}/%x %j.log"]
    flags = jobs.flags(run, max_steps=2, eval_steps=2, run_name="it's $(touch canary)")
    words = [*small, "-J", "my job", "slurm/train_job.sh", "pretrain.py", *flags]
    done = submit(*words, STOKER_PROCESSES_PER_NODE="2")
    assert done.returncode == 0, done.stderr
    (number,) = re.fullmatch(r"Submitted batch job (\d+)\n", done.stdout).groups()
    log = tmp_path / f"my job {number}.log"
    assert f"log:     {log}\n" in done.stderr
    assert f"status.py --watch\ncancel:  scancel {number}" in done.stderr
    assert f"touch '{run}/STOP'" in done.stderr
    assert "job:     my job, 1 node(s) of 2 process(es)" in done.stderr
    assert "stop signal comes 300 s before it" in done.stderr
    assert (run / "final" / "config.json").exists(), log.read_text()
    start = tiny.starts(run)[0]
    assert start["launch"]["world_size"] == 2
    variables, command = start["slurm"]["command"].split("slurm/submit.sh ")
    assert {"ACCELERATE_USE_CPU=true", "STOKER_PROCESSES_PER_NODE=2"} <= {*variables.split()}
    assert shlex.split(command) == words
    assert not list(ROOT.glob("canary"))


def test_refused_jobs_are_cancelled_with_the_reason(slurm, jobs, submit, tmp_path):
    options = ["--gpus-per-node=0", "--nodes=2", "slurm/multinode_job.sh", "pretrain.py"]
    short = [*SMALL, "--time=5", *options, *jobs.flags(tmp_path / "run")]
    no_gpu, small = [*SMALL, "--gpus-per-node=0"], SMALL[:2]
    options = [*SMALL, *options]
    preparation = ["slurm/prepare_job.sh", "--sources", "x.jsonl", "--output_dir", "data"]
    for words, code, message in [
        ([*options, *jobs.flags(tmp_path / "run", global_batch_size=3)], 2, "divide over 2 ranks"),
        (["--array=0-3", *SMALL, *preparation], 2, "tokenizer_name_or_path is required"),
        (["--partition=absent", *options], 1, "invalid partition specified: absent"),
        (short, 2, "would stop as it starts"),
        ([*SMALL, "--gpus-per-node=3", *preparation], 69, "at most --gpus-per-node=2"),
        (["--mem=5G", *preparation], 69, "at most --mem=4000M --cpus-per-task=2. A node has: 2 co"),
        (["--nodes=3", *no_gpu, *options[-2:]], 69, "3 nodes, but partition main allows 2"),
        (["-N2", *no_gpu, "slurm/train_job.sh"], 2, "for one node, not 2: slurm/multinode_job"),
        (["-pother", *small, "--time=1-0", *preparation], 69, "Give --time=04:00:00: a job that"),
        (["--constraint=absent", *preparation], 1, "AVAIL_FEATURES"),
        (["slurm/train_jobs.sh", "pretrain.py"], 2, "no job script slurm/train_jobs.sh in"),
    ]:
        done = submit(*words)
        assert (done.returncode, done.stdout) == (code, ""), done.stderr
        assert message in done.stderr
        assert "status.py --watch" not in done.stderr
        assert "log: " not in done.stderr
    assert queue(slurm) == []
    assert not (tmp_path / "run").exists()


def test_a_job_that_waits_for_nodes_is_not_refused(slurm, submit, tmp_path):
    words = ["slurm/prepare_job.sh", "--sources", "x.jsonl", "--tokenizer_name_or_path", "t"]
    words += ["--output_dir", str(tmp_path / "data")]
    slurm.run("scontrol", "update", "node=n1", "state=drain", "reason=test")
    try:
        log = tmp_path / "logs/x.log"
        done = submit("--check", *SMALL, "--nodelist=n1", "--wait", f"--output={log}", *words)
        assert done.returncode == 0, done.stderr
        assert "too few nodes that fit are up now" in done.stderr
        assert f"made:    {log.parent}" in done.stderr
        assert log.parent.is_dir()
        done = submit("--gpus-per-node=3", *SMALL, *words)
        assert done.returncode == 69, done.stderr
        assert queue(slurm) == []
    finally:
        slurm.run("scontrol", "update", "node=n1", "state=resume")


def test_a_job_that_the_user_holds_stays_on_hold(slurm, submit, tmp_path):
    words = ["--sources", "x.jsonl", "--output_dir", str(tmp_path / "data")]
    words += ["--tokenizer_name_or_path", "t"]
    longer = "--partition=other", "--time=1-0", "--time-min=10"  # the partition allows 4 hours
    done = submit("-H", "--array=0-3", *SMALL, *longer, "slurm/prepare_job.sh", *words)
    assert done.returncode == 0, done.stderr
    job = Job(done.stdout.split()[-1], tmp_path / "log")
    assert slurm.fields(job)["Reason"] == "JobHeldUser"
    assert "log:     " in done.stderr
    slurm.run("scancel", job.id)
