"""A dry run learns the planned strategy, GPUs and processes from settings and WORLD_SIZE."""

import os

import pytest
import tiny
from command_lines import BASE

from utils.config.errors import ConfigurationError
from utils.config.settings import parse_pretraining
from utils.config.strategy import assumed_gpus
from utils.launch.processes import requested_replicas, requested_strategy

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


def described(*words):
    """Return the number of processes and the strategy that a command line sees as its launch."""
    values = parse(*words).values
    return values.world_size, requested_strategy(values.environment, values.world_size)


def test_a_dry_run_sees_the_launch_it_is_about_and_leaves_the_process_alone():
    before = dict(os.environ)
    words = "--dry_run", "--assume", "2x4x48GB", "--strategy", "fsdp2"
    assert described(*words) == (8, "fsdp2")
    hybrid = [*words[:-1], "hsdp"]
    assert described(*hybrid) == (8, "fsdp2")
    for more, copies in (([], 2), (["--dp_shard", "2"], 4), (["--dp_shard", "8"], 1)):
        assert requested_replicas(parse(*hybrid, *more).values.environment) == copies
    settings = parse(*words)
    assert settings.training.per_device_train_batch_size == 1, "8 sequences divide over 8 ranks"
    assert settings.resolved["bf16"] is True, "the assumed GPUs have it"
    assert os.environ == before


def test_who_starts_the_dry_run_may_say_the_processes_and_a_launch_decides(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert described("--dry_run", "--strategy", "zero2") == (4, "zero2")
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")  # accelerate launch sets it
    assert described("--dry_run", "--strategy", "fsdp2") == (4, "ddp")
    monkeypatch.delenv("ACCELERATE_MIXED_PRECISION")
    assert described("--strategy", "fsdp2") == (4, "ddp"), "no dry run"
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert described("--dry_run", "--strategy", "fsdp2") == (1, "single")
