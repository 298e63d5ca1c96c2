"""A sweep as a job array on a real Slurm: one point fails; a second submission trains only that."""

import pytest
import tiny
from launching import ROOT
from training_jobs import SETTINGS

from utils.config.recipes import dump_yaml
from utils.submit.sweep import Sweep, read_sweep

pytestmark = pytest.mark.slow

OPTIONS = ["--gpus-per-node=0", "--cpus-per-task=1", "--mem=1G", "--time=10", "--wait"]


def finished(sweep: Sweep) -> list[bool]:
    return [(sweep.output_dir / name / "final").is_dir() for name in sweep.points]


def test_a_sweep_runs_through_and_resumes_where_it_failed(jobs, call, idle, tmp_path):
    late = tmp_path / "late $(touch canary)"
    settings = SETTINGS | {
        "model_config": str(jobs.files / "model.json"),
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

    # The array has one index more than there are points.
    done = call("sbatch", *OPTIONS, log, "--array=0-2", "slurm/sweep_job.sh", str(file))
    assert done.returncode == 2, "sbatch --wait returns the worst code of the array"
    logs = [(tmp_path / f"{index}.log").read_text() for index in range(3)]
    assert finished(sweep) == [True, False]
    assert (directories[0] / "final").is_dir(), logs
    assert f"ended: configuration error: {late}: no such directory" in logs[1].splitlines()[-1]
    assert not directories[1].exists()
    assert "has 2 points, numbered from 0: there is no point 2. Give --array=0-1" in logs[2]
    assert not list(ROOT.glob("canary"))

    tiny.save(late, {"input_ids": tiny.documents(400, seed=4)})
    done = call("slurm/submit.sh", *OPTIONS, log, "slurm/sweep_job.sh", str(file))
    assert done.returncode == 0, done.stderr
    assert "array: 1\n" in done.stderr
    assert f"log:     {tmp_path}/%a.log" in done.stderr
    assert finished(sweep) == [True, True]
    assert [len(tiny.starts(path)) for path in directories] == [1, 1]

    # No point is left, so nothing is submitted.
    done = call("slurm/submit.sh", *OPTIONS, log, "slurm/sweep_job.sh", str(file))
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr == "nothing is left to run, nothing is submitted\n"
