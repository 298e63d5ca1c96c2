"""A sweep as a job array on a real Slurm: one point fails, submitted again only that one trains."""

import json
import subprocess

import pytest
import tiny
from launching import ROOT
from slurm_cluster import SlurmCluster
from training_jobs import SETTINGS, TrainingJobs

from utils.config.recipes import dump_yaml
from utils.submit.sweep import Sweep, read_sweep

pytestmark = pytest.mark.slow

OPTIONS = ["--gpus-per-node=0", "--cpus-per-task=1", "--mem=1G", "--time=10", "--wait"]


@pytest.fixture
def environment(slurm: SlurmCluster, jobs: TrainingJobs) -> dict[str, str]:
    """Each point is a process on the CPU."""
    chosen = slurm.environment(jobs.environment("cpu", {"STOKER_PROCESSES_PER_NODE": "1"}))
    chosen.pop("ACCELERATE_CONFIG")
    return chosen


@pytest.fixture
def run(environment):
    """Run a command in the repository."""

    def call(*command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command, cwd=ROOT, env=environment, text=True, timeout=240, check=False,
            capture_output=True,
        )  # fmt: skip

    return call


def finished(sweep: Sweep) -> list[bool]:
    return [(sweep.output_dir / name / "final").is_dir() for name in sweep.points]


def starts(run_directory) -> int:
    return len(json.loads((run_directory / "provenance.json").read_text())["starts"])


def test_a_sweep_runs_through_and_resumes_where_it_failed(slurm, jobs, run, idle, tmp_path):
    late = tmp_path / "late $(touch canary)"
    settings = SETTINGS | {
        "model_config": str(SETTINGS["model_config"]),
        "tokenizer_name_or_path": str(jobs.files / "tokenizer"),
        "eval_data": [f"heldout={jobs.files / 'heldout'}"],
        "max_steps": 2,
        "save_steps": 2,
        "eval_steps": 2,
    }
    documents = str(jobs.files / "documents")
    content = {
        "script": "pretrain.py",
        "settings": settings,
        "grid": {"train_data": [documents, str(late)]},
        "output_dir": str(tmp_path / "runs of it"),
    }
    file = tmp_path / "my sweep.yaml"
    file.write_text(dump_yaml(content))
    sweep = read_sweep(str(file))
    directories = [sweep.output_dir / name for name in sweep.points]
    log = f"--output={tmp_path}/%a.log"

    # One index more than there are points.
    done = run("sbatch", *OPTIONS, log, "--array=0-2", "slurm/sweep_job.sh", str(file))
    assert done.returncode == 2, "sbatch --wait returns the worst code of the array"
    logs = [(tmp_path / f"{index}.log").read_text() for index in range(3)]
    assert finished(sweep) == [True, False]
    assert (directories[0] / "final").is_dir(), logs
    assert f"refused to run: {late}: no such directory" in logs[1].splitlines()[-1]
    assert not directories[1].exists()
    assert "has 2 points, numbered from 0: there is no point 2. Give --array=0-1" in logs[2]
    assert not list(ROOT.glob("canary"))

    tiny.save(late, {"input_ids": tiny.documents(400, seed=4)})
    done = run("slurm/submit.sh", *OPTIONS, log, "slurm/sweep_job.sh", str(file))
    assert done.returncode == 0, done.stderr
    assert "array: 1\n" in done.stderr
    assert f"log:     {tmp_path}/%a.log" in done.stderr
    assert finished(sweep) == [True, True]
    assert [starts(path) for path in directories] == [1, 1]

    # Nothing is left: nothing is submitted.
    done = run("slurm/submit.sh", *OPTIONS, log, "slurm/sweep_job.sh", str(file))
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr == "nothing is left to run, nothing is submitted\n"
