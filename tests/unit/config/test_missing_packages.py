"""Settings whose package is not there."""

import re

import pytest
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK
from transformers.training_args import OptimizerNames

from utils.config import checks as packages
from utils.config.checks import OPTIMIZERS, REPORTERS, check_packages

PLAIN = {"report_to": "none", "optim": "adamw_torch", "attn_implementation": "auto"}
OF_TORCH = {
    "adamw_torch", "adamw_torch_fused", "adafactor", "sgd", "adagrad", "rmsprop",
}  # fmt: skip


@pytest.fixture
def nothing_installed(monkeypatch):
    monkeypatch.setattr(packages, "is_installed", lambda name: name == "torch")


@pytest.mark.parametrize(
    ("changes", "launched", "said"),
    [
        ({"report_to": ["wandb", "mlflow"]}, "false", ["report_to wandb: .*wandb", "mlflow"]),
        ({"report_to": "tensorboard"}, "false", ["pip install tensorboard, or leave it out"]),
        ({"report_to": "tensorbord"}, "false", ["report_to tensorbord: expected azure_ml,"]),
        ({"optim": "paged_adamw_8bit"}, "false", ["is in bitsandbytes, .* optim_states: int8"]),
        ({"optim": "adamw_torch_8bit"}, "false", ["is in torchao"]),
        ({"optim": "galore_adamw_8bit"}, "false", ["is in galore_torch"]),
        ({"optim": OptimizerNames.SCHEDULE_FREE_ADAMW}, "false", ["is in schedulefree"]),
        ({"attn_implementation": "flash_attention_2"}, "false", ["is in flash_attn, .* use auto"]),
        ({}, "true", ["the accelerate config asks for DeepSpeed"]),
        ({}, "false", []),
    ],
)
@pytest.mark.usefixtures("nothing_installed")
def test_a_setting_whose_package_is_missing_is_refused(changes, launched, said, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", launched)
    problems = list(check_packages(PLAIN | changes))
    assert len(problems) == len(said), problems
    assert all(re.search(*pair) for pair in zip(said, problems, strict=True)), problems


def test_every_reporter_and_every_optimizer_of_transformers_is_known():
    assert REPORTERS.keys() == INTEGRATION_TO_CALLBACK.keys()
    for optimizer in OptimizerNames:
        elsewhere = any(part in optimizer.value for part in OPTIMIZERS)
        assert elsewhere is (optimizer.value not in OF_TORCH), optimizer
