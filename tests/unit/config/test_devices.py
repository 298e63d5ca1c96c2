"""Settings beside what the launch and the machine have: ranks, GPUs, half precision."""

import pytest
import torch
from command_lines import parse, problems_of

from utils.config.arguments import RunArguments
from utils.config.checks import check_hardware, missing_devices
from utils.config.declarations import SettingValues, declared_settings
from utils.config.errors import UnfitClusterError
from utils.config.trainer_arguments import FineTuneConfig, PretrainConfig

pytestmark = pytest.mark.usefixtures("started_alone")


def test_the_ranks_of_the_launch_count():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WORLD_SIZE", "3")
        (problem,) = problems_of()
    assert "global_batch_size 8 does not divide over 3 ranks of 8 sequences each" in problem
    assert "started alone" not in problem


@pytest.mark.parametrize("training_class", [PretrainConfig, FineTuneConfig])
def test_a_dry_run_checks_a_recipe_for_gpus_on_a_machine_without(no_accelerator, training_class):
    settings = parse(training_class, bf16="true", tf32="true", use_cpu=None, dry_run="true")
    training = settings.instances[3]
    assert training.device.type == "cpu"
    assert training.bf16 is True
    assert settings.as_dict()["use_cpu"] is False, "the settings stay the user's"
    assert settings.as_dict()["tf32"] is True


@pytest.mark.parametrize(("use_cpu", "faults"), [(False, 0), (True, 2)])
def test_half_precision_is_refused_beside_an_accelerator_only_if_it_is_not_used(
    monkeypatch, use_cpu, faults
):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    given = {"fp16": True, "tf32": True, "use_cpu": use_cpu}
    values = SettingValues(declared_settings([RunArguments, PretrainConfig]), given, {})
    assert len(list(check_hardware(values))) == faults


TORCHRUN = {"TORCHELASTIC_RUN_ID": "none", "LOCAL_WORLD_SIZE": "4"}


@pytest.mark.parametrize(
    ("environment", "visible_gpus", "message"),
    [
        (
            TORCHRUN | {"LOCAL_RANK": "0", "CUDA_VISIBLE_DEVICES": "0,1"},
            2,
            r"has 4 processes .*local rank 0\), but torch sees 2 GPUs \(CUDA_VISIBLE_DEVICES=0,1\)",
        ),
        (TORCHRUN, 1, r"torch sees 1 GPU \(CUDA_VISIBLE_DEVICES is not set\).*--gpus-per-node"),
        ({"LOCAL_WORLD_SIZE": "4", "LOCAL_RANK": "2"}, 2, r"local rank 2\), but torch sees 2"),
    ],
)
def test_more_processes_than_gpus_are_refused(monkeypatch, environment, visible_gpus, message):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible_gpus)
    with pytest.raises(UnfitClusterError, match=message) as caught:
        parse(use_cpu=None)
    assert caught.value.exit_code == 69


@pytest.mark.parametrize(
    "changes", [{"use_cpu": "true"}, {"use_cpu": None, "dry_run": "true"}], ids=["cpu", "dry run"]
)
def test_gpus_do_not_matter_where_none_is_used(monkeypatch, no_accelerator, changes):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    assert parse(**changes).instances[3].device.type == "cpu"


@pytest.mark.parametrize(
    ("environment", "visible_gpus"),
    [
        (TORCHRUN, 4),
        (TORCHRUN | {"ACCELERATE_USE_CPU": "True"}, 1),
        ({}, 1),
        ({"LOCAL_WORLD_SIZE": "4", "LOCAL_RANK": "0"}, 1),  # each task of srun sees its own
    ],
)
def test_processes_that_have_their_gpu_are_not(environment, visible_gpus):
    assert missing_devices(environment, visible_gpus) is None


def test_memory_is_pinned_only_where_there_is_a_device_to_copy_to():
    training = parse(use_cpu=None).instances[3]
    assert training.dataloader_pin_memory is (training.device.type != "cpu")
