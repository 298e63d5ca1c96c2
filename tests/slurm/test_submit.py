"""slurm/submit.sh on a real Slurm: it reads requests as sbatch does, checks, and hands in."""

import re
import shutil
import subprocess

import pytest
from launching import ROOT
from slurm_cluster import Job
from training_jobs import SMALL, TrainingJobs

from utils.submit.submit import read_request, read_submission

pytestmark = pytest.mark.slow

HEAD = """\
#!/bin/bash
#SBATCH --job-name="in 'quotes' # \\"too\\""   # it's a comment
#SBATCH --nodes=2 --ntasks-per-node=1  #it's "enough"
##SBATCH --nodes=1
#SBATCH --gpus-per-node=1

#SBATCH -t 01:00:00
#SBATCH --requeue
echo
#SBATCH --nodes=1
"""
SPELLINGS = [
    ([], {}),
    (["-N1"], {}),
    (["-N", "1", "--nodes=2"], {}),
    (["--gres=gpu:2"], {}),
    (["--gres=gpu:2", "--gpus-per-node=1"], {}),
    (["--gpus-per-node=0", "--gpus-per-task=2"], {}),
    (["--gpus-per-node=0", "-G4"], {}),
    (["--gres", "gpu"], {"SBATCH_TIMELIMIT": "7"}),
    (["-t1:30"], {"SBATCH_TIMELIMIT": "7"}),
    (["--time", "1-2"], {}),
    (["--time=1-2:3:4"], {}),
    (["--time=UNLIMITED"], {}),
    (["-vt", "90"], {"SBATCH_GRES": "gpu:2"}),
    (["-t-1", "--no-req"], {}),
    (["-k", "--nice", "--exclusive", "--mem", "1G"], {"SBATCH_NO_REQUEUE": "1"}),
    (["--requeue", "--comment", "-N1", "--"], {"SBATCH_NO_REQUEUE": "1"}),
]


def slurms_reading(fields: dict[str, str]) -> tuple[int, int, int, bool]:
    """(nodes, GPUs a node, time limit in seconds, requeue) as `scontrol show job` has them."""
    nodes = int(fields["NumNodes"].split("-")[0])

    def gpus(name: str) -> int:
        entries = [entry for entry in fields.get(name, "").split(",") if "gpu" in entry]
        # Of several entries that ask for GPUs Slurm gives what the last says.
        number = entries[-1].rpartition(":")[2] if entries else "0"
        return int(number) if number.isdecimal() else 1

    per_node = gpus("TresPerNode") or gpus("TresPerTask") or gpus("TresPerJob") // nodes
    limit = 0
    if fields["TimeLimit"] != "UNLIMITED":
        days, hours, minutes, seconds = re.fullmatch(
            r"(?:(\d+)-)?(\d+):(\d+):(\d+)", fields["TimeLimit"]
        ).groups()
        limit = ((int(days or 0) * 24 + int(hours)) * 60 + int(minutes)) * 60 + int(seconds)
    return nodes, per_node, limit, fields["Requeue"] == "1"


def test_requests_are_read_as_slurm_reads_them(slurm, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    script = tmp_path / "job.sh"
    script.write_text(HEAD)
    for words, environment in SPELLINGS:
        command = ["--hold", *words, str(script)]
        job = slurm.submit(*command, cwd=tmp_path, log=tmp_path / "log", env=environment)
        theirs = slurms_reading(slurm.fields(job))
        slurm.run("scancel", job.id)
        ours = read_request(read_submission(command, environment), environment)[0]
        limit = ours.time_limit_s or 0
        read = (ours.nodes, ours.gpus_per_node, limit, ours.requeue is True)
        assert read == theirs, (words, environment)


@pytest.fixture
def submit(slurm, jobs: TrainingJobs, tmp_path):
    """Call slurm/submit.sh as a user would, on CPUs, one process a node."""

    def call(*words: str, **env: str) -> subprocess.CompletedProcess[str]:
        environment = slurm.environment(
            jobs.environment("cpu", {"STOKER_PROCESSES_PER_NODE": "1"} | env)
        )
        environment.pop("ACCELERATE_CONFIG")
        return subprocess.run(
            ["slurm/submit.sh", *words], cwd=ROOT, env=environment, text=True, timeout=120,
            capture_output=True, check=False,
        )  # fmt: skip

    return call


def queue(slurm) -> list[str]:
    return slurm.run("squeue", "--noheader", "--format=%i").stdout.split()


def test_a_sound_job_is_checked_handed_in_and_trains(slurm, jobs, submit, idle, tmp_path):
    run = tmp_path / "a run; $(touch canary)"
    small = [*SMALL, "--gpus-per-node=0", "--wait", f"--output={tmp_path}/%x %j.log"]
    flags = jobs.flags(run, max_steps=2, eval_steps=2, run_name="it's $(touch canary)")
    done = submit(*small, "-J", "my job", "slurm/train_job.sh", "pretrain.py", *flags)
    assert done.returncode == 0, done.stderr
    (number,) = re.fullmatch(r"Submitted batch job (\d+)\n", done.stdout).groups()
    log = tmp_path / f"my job {number}.log"
    assert f"squeue --job={number}\nlog:     {log}\nend it:  scancel {number}" in done.stderr
    assert f"touch '{run}/STOP'" in done.stderr
    assert "job: my job, 1 node of 1 process; strategy single" in done.stderr
    assert "stop signal after 5m00s" in done.stderr
    assert (run / "final" / "config.json").exists(), log.read_text()
    assert not list(ROOT.glob("canary"))


def test_what_the_dry_run_refuses_is_not_handed_in(slurm, jobs, submit, tmp_path):
    before = queue(slurm)
    flags = jobs.flags(tmp_path / "run", global_batch_size=3)
    options = [*SMALL, "--gpus-per-node=0", "--nodes=2"]
    done = submit(*options, "slurm/multinode_job.sh", "pretrain.py", *flags)
    assert done.returncode == 2
    assert "global_batch_size 3 does not divide over 2 ranks" in done.stderr
    done = submit("--nodes=1-2", "--gpus-per-node=0", "slurm/multinode_job.sh", "pretrain.py")
    assert done.returncode == 2
    assert "a range lets Slurm choose" in done.stderr
    assert done.stdout == ""
    assert queue(slurm) == before
    assert not (tmp_path / "run").exists()


def test_sbatch_own_refusals_pass_through(slurm, jobs, submit, tmp_path):
    flags = jobs.flags(tmp_path / "run", max_steps=2, eval_steps=2)
    options = [*SMALL, "--gpus-per-node=0", "--partition=absent"]
    done = submit(*options, "slurm/train_job.sh", "pretrain.py", *flags)
    assert done.returncode == 1
    assert "invalid partition specified: absent" in done.stderr
    assert "squeue --job" not in done.stderr


def test_the_repository_has_to_be_where_the_job_looks(slurm, jobs, tmp_path):
    """Without a dry run: it is refused before."""
    environment = slurm.environment(jobs.environment("cpu"))
    head = ["--gpus-per-node=0", str(ROOT / "slurm/train_job.sh"), "pretrain.py"]

    def call(**env: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [ROOT / "slurm/submit.sh", "--check", *head], cwd=tmp_path, env=environment | env,
            text=True, capture_output=True, timeout=60, check=False,
        )  # fmt: skip

    done = call()
    assert done.returncode == 2
    assert "the job will not find the repository" in done.stderr
    assert f"STOKER_ROOT={ROOT}" in done.stderr
    (tmp_path / "slurm").mkdir()
    shutil.copy(ROOT / "slurm/launch_node.sh", tmp_path / "slurm")
    done = call()
    assert f"the job will run the repository in {tmp_path}" in done.stderr
    assert "required" in call(STOKER_ROOT=str(ROOT)).stderr  # as far as the script's own settings


def test_a_preparation_is_checked_too(slurm, jobs, submit, tmp_path):
    before = queue(slurm)
    words = ["--sources", "x.jsonl", "--output_dir", str(tmp_path / "data")]
    done = submit("--array=0-3", "slurm/prepare_job.sh", *words)
    assert done.returncode == 2
    assert "no tokenizer: give --tokenizer_name_or_path DIR" in done.stderr
    assert queue(slurm) == before
    words += ["--tokenizer_name_or_path", "t"]
    done = submit("-H", "--array=0-3", "--mem=1G", "slurm/prepare_job.sh", *words)
    assert done.returncode == 0, done.stderr
    job = Job(done.stdout.split()[-1], tmp_path / "log")
    assert slurm.state(job) == "PENDING"
    assert f"squeue --job={job.id}\nlog:     prepare-N.log (N:" in done.stderr
    slurm.run("scancel", job.id)
