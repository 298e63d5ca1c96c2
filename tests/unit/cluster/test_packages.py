"""Packages that are not there: of the scripts, and of single settings."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK
from transformers.training_args import OptimizerNames

from utils.cluster import packages
from utils.cluster.packages import OPTIMIZERS, REPORTERS, package_problems

ROOT = Path(__file__).parents[3]
PLAIN = {"report_to": "none", "optim": "adamw_torch", "attn_implementation": "auto"}
OF_TORCH = {
    "adamw_torch", "adamw_torch_fused", "adafactor", "sgd", "adagrad", "rmsprop",
}  # fmt: skip


@pytest.fixture
def nothing_installed(monkeypatch):
    monkeypatch.setattr(packages, "is_installed", lambda name: name == "torch")


@pytest.mark.parametrize(
    ("changes", "strategy", "said"),
    [
        ({"report_to": ["wandb", "mlflow"]}, "ddp", ["report_to wandb: .*wandb", "mlflow"]),
        ({"report_to": "tensorboard"}, "ddp", ["pip install tensorboard, or leave it out"]),
        ({"report_to": "tensorbord"}, "ddp", ["report_to tensorbord: expected azure_ml,"]),
        ({"optim": "paged_adamw_8bit"}, "ddp", ["is in bitsandbytes, .* optim_states: int8"]),
        ({"optim": "adamw_torch_8bit"}, "ddp", ["is in torchao"]),
        ({"optim": "galore_adamw_8bit"}, "ddp", ["is in galore_torch"]),
        ({"optim": OptimizerNames.SCHEDULE_FREE_ADAMW}, "ddp", ["is in schedulefree"]),
        ({"attn_implementation": "flash_attention_2"}, "ddp", ["is in flash_attn, .* use auto"]),
        ({}, "zero3", ["zero3 needs DeepSpeed"]),
        ({}, "fsdp2", []),
    ],
)
@pytest.mark.usefixtures("nothing_installed")
def test_a_setting_whose_package_is_missing_is_refused(changes, strategy, said):
    problems = list(package_problems(PLAIN | changes, strategy))
    assert len(problems) == len(said), problems
    assert all(re.search(*pair) for pair in zip(said, problems, strict=True)), problems


def test_every_reporter_and_every_optimizer_of_transformers_is_known():
    assert REPORTERS.keys() == INTEGRATION_TO_CALLBACK.keys()
    for optimizer in OptimizerNames:
        elsewhere = any(part in optimizer.value for part in OPTIMIZERS)
        assert elsewhere is (optimizer.value not in OF_TORCH), optimizer


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
