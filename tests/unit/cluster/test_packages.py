"""A Python without the scripts' packages says so, whatever is started in it."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    "command",
    [
        ["pretrain.py", "--help"], ["sft_train.py", "--help"], ["prepare_data.py", "--help"],
        ["-m", "utils.jobs.launch_node", "pretrain.py"],
        ["-m", "utils.jobs.submit", ".", ".", "slurm/train_job.sh"],
    ],
)  # fmt: skip
def test_a_python_without_the_packages_says_so(command):
    done = subprocess.run(  # -S: without site-packages
        [sys.executable, "-S", *command], cwd=ROOT, check=False, text=True, capture_output=True
    )
    assert done.returncode == 69
    assert f"{sys.executable} has no torch" in done.stderr
    assert "activate the environment" in done.stderr
    assert "Traceback" not in done.stderr
