"""bf16 left open: on where a CPU that is fast at it is known to train, else off; kept."""

import os

import pytest
import torch
from command_lines import parse, parse_training_settings, problems_of

from utils.config import precision as cpu_precision
from utils.config.recipes import dump_yaml
from utils.config.trainer_arguments import FineTuneConfig, PretrainConfig

LAUNCHER = (
    "WORLD_SIZE", "ACCELERATE_MIXED_PRECISION", "ACCELERATE_USE_CPU", "ACCELERATE_USE_FSDP",
    "ACCELERATE_USE_DEEPSPEED",
)  # fmt: skip


@pytest.fixture(autouse=True)
def machine(monkeypatch, tmp_path):
    """A CPU with AMX and no accelerator, and this process alone."""
    for name in LAUNCHER:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    monkeypatch.setattr(cpu_precision, "has_amx", lambda: True)
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("training_class", [PretrainConfig, FineTuneConfig])
@pytest.mark.parametrize("use_cpu", ["true", None])
def test_a_cpu_with_amx_computes_in_bf16(training_class, use_cpu, tmp_path):
    settings = parse(training_class, use_cpu=use_cpu)
    training = settings.instances[3]
    assert (training.bf16, training.mixed_precision) == (True, "bf16")
    assert settings.sources["bf16"] == cpu_precision.AMX
    # What is kept is the run's: as a recipe, it gives the same settings again, on any machine.
    (tmp_path / "config.yaml").write_text(dump_yaml(settings.as_dict()))
    again = parse_training_settings(training_class, ["--config", "config.yaml"])
    assert again.as_dict() == settings.as_dict()


@pytest.mark.parametrize("training_class", [PretrainConfig, FineTuneConfig])
@pytest.mark.parametrize("fast", [True, False])
def test_a_cpu_without_amx_needs_bf16_of_its_own(training_class, fast, monkeypatch):
    monkeypatch.setattr(cpu_precision, "has_amx", lambda: False)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: fast)
    settings = parse(training_class)
    assert settings.instances[3].mixed_precision == ("bf16" if fast else "no")
    assert settings.as_dict()["bf16"] is fast
    reasons = {True: cpu_precision.AVX512_BF16, False: "this CPU has neither AMX nor AVX512-BF16"}
    assert settings.sources["bf16"] == reasons[fast]


@pytest.mark.parametrize(
    ("changes", "environment"),
    [
        ({"bf16": "false"}, {}),
        ({"dtype": "bfloat16"}, {}),  # computed with as they are
        ({"use_cpu": None, "dry_run": "true"}, {}),  # a login node, for nodes unknown
        ({"use_cpu": None}, {"WORLD_SIZE": "1", "ACCELERATE_USE_FSDP": "true"}),
    ],
)
def test_what_is_decided_elsewhere_stays(changes, environment, monkeypatch):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert parse(**changes).as_dict()["bf16"] is False


def test_beside_an_accelerator_it_stays_off_unless_the_cpu_is_asked_for(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    assert parse(use_cpu="true").as_dict()["bf16"] is True
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert parse(use_cpu=None, dry_run="true").as_dict()["bf16"] is False


def test_processes_of_a_launcher_are_on_the_cpu_only_if_they_are_told(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    settings = parse(use_cpu=None, dry_run="true", per_device_train_batch_size="1")
    assert settings.as_dict()["bf16"] is False
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    settings = parse(use_cpu=None, dry_run="true", per_device_train_batch_size="1")
    assert settings.as_dict()["bf16"] is True


def test_bf16_that_is_asked_for_still_needs_the_cpu_to_be_asked_for():
    """A recipe for GPUs says so; on a node that should have one and has not, AMX is no reason."""
    (problem,) = problems_of(bf16="true", use_cpu=None)
    assert "bf16 needs a GPU, and no accelerator is visible here" in problem


@pytest.mark.parametrize("training_class", [PretrainConfig, FineTuneConfig])
def test_the_accelerate_config_decides_where_the_settings_leave_it_open(
    training_class, monkeypatch, tmp_path
):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    settings = parse(training_class)
    assert settings.instances[3].mixed_precision == "bf16"
    assert settings.sources["bf16"] == cpu_precision.BY_LAUNCH
    (tmp_path / "config.yaml").write_text(dump_yaml(settings.as_dict()))
    again = parse_training_settings(training_class, ["--config", "config.yaml"])
    assert again.as_dict() == settings.as_dict()


@pytest.mark.parametrize("training_class", [PretrainConfig, FineTuneConfig])
@pytest.mark.parametrize("dry_run", ["true", "false"])
def test_bf16_false_wins_over_the_accelerate_config(training_class, dry_run, monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    settings = parse(training_class, bf16="false", dry_run=dry_run)
    assert settings.instances[3].mixed_precision == "no"
    (note,) = [note for note in settings.notes if "accelerate" in note]
    assert note == (
        "mixed_precision bf16 of the accelerate config has no effect: bf16 False (--bf16)"
    )


def test_the_environment_is_as_it_was_after_the_arguments_are_built(monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    parse(bf16="false")
    assert os.environ["ACCELERATE_MIXED_PRECISION"] == "bf16"
    monkeypatch.delenv("ACCELERATE_MIXED_PRECISION")
    parse()
    assert "ACCELERATE_MIXED_PRECISION" not in os.environ
