"""A dry run without a launch is told strategy, GPUs and processes of the future launch."""

import os

import pytest
import tiny
from command_lines import BASE

from utils.config.assumed import GPUS, assumed_gpus
from utils.config.errors import ConfigurationError
from utils.config.settings import parse_pretraining
from utils.launch.processes import requested_strategy

LAUNCH = ("WORLD_SIZE", "ACCELERATE_CONFIG", "ACCELERATE_MIXED_PRECISION", "ACCELERATE_USE_FSDP")


@pytest.fixture(autouse=True)
def _no_launch(monkeypatch):
    for name in LAUNCH:
        monkeypatch.delenv(name, raising=False)


def parse(*words: str):
    return parse_pretraining([*tiny.flags(**BASE | {"use_cpu": None}), *words], "")


def test_assumed_gpus_are_parsed_with_nodes_and_known_figures():
    gpus = assumed_gpus("2x8xa100-40gb")
    assert (gpus.nodes, gpus.per_node, gpus.world_size) == (2, 8, 16)
    assert (gpus.memory_gib, gpus.flops, gpus.link) == (39.4, 312e12, 300e9)
    assert str(gpus) == "16 x A100-40GB, 2 nodes"
    assert str(assumed_gpus("1xRTX 4090-24GB")) == "1 x RTX4090-24GB"
    unknown = assumed_gpus("8x48GB")
    assert (unknown.flops, unknown.link) == (None, None)
    assert 40 < unknown.memory_gib < 48
    for name, (memory_gib, tflops, link_gb_s) in GPUS.items():
        on_the_box = int(name.rpartition("-")[2].removesuffix("GB"))
        assert 0.9 * on_the_box < memory_gib < on_the_box
        assert 50 < tflops < 3000
        assert link_gb_s >= 64


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("8xH100", "expected GPUs, or nodes x GPUs, as in 8xH100-80GB"),
        ("0xH100-80GB", "expected GPUs"),
        ("H100-80GB", "expected GPUs"),
        ("8xH100-81GB", "H100-81GB is not known here: take one of B200.* alone, 8x81GB, for"),
    ],
)
def test_gpus_that_nobody_knows_are_refused(text, problem):
    with pytest.raises(ConfigurationError, match=f"assume {text} .--assume.: {problem}"):
        parse("--dry_run", "--assume", text)
    assert "WORLD_SIZE" not in os.environ


def test_what_is_of_a_dry_run_is_refused_elsewhere(monkeypatch):
    for words in (["--assume", "1x48GB"], ["--suggest"]):
        with pytest.raises(ConfigurationError, match="is for a dry run: add --dry_run"):
            parse(*words)
    dry = ["--dry_run", "--assume", "2x48GB"]
    for words in (["--use_cpu"], ["--strategy", "cpu"]):
        with pytest.raises(ConfigurationError, match=r"assume 2x48GB .* does not go with"):
            parse(*dry, *words)
    with pytest.raises(ConfigurationError, match=r"strategy fsdp .*: no such .* you mean fsdp2"):
        parse("--strategy", "fsdp")
    monkeypatch.setenv("STOKER_SUBMITTING", "1")
    with pytest.raises(ConfigurationError, match="the job says which GPUs it has"):
        parse(*dry)


def test_a_dry_run_sees_the_launch_it_is_about():
    settings = parse("--dry_run", "--assume", "2x4x48GB", "--strategy", "fsdp2")
    assert requested_strategy(os.environ, 8) == "fsdp2"
    assert os.environ["WORLD_SIZE"] == "8"
    assert settings.training.per_device_train_batch_size == 1, "8 sequences divide over 8 ranks"
    assert settings.resolved["bf16"] is False, "on a GPU it is the user's to turn on"


def test_who_starts_the_dry_run_may_say_the_processes_and_a_launch_decides(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    parse("--dry_run", "--strategy", "zero2")
    assert requested_strategy(os.environ, 4) == "zero2"
    for name in ("ACCELERATE_USE_DEEPSPEED", "ACCELERATE_DEEPSPEED_ZERO_STAGE"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")  # accelerate launch sets it
    parse("--dry_run", "--strategy", "fsdp2")
    assert requested_strategy(os.environ, 4) == "ddp"
    monkeypatch.delenv("ACCELERATE_MIXED_PRECISION")
    parse("--strategy", "fsdp2")  # no dry run
    assert requested_strategy(os.environ, 4) == "ddp"
    monkeypatch.setenv("WORLD_SIZE", "1")
    parse("--dry_run", "--strategy", "fsdp2")
    assert requested_strategy(os.environ, 1) == "single"
