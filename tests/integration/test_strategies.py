"""Both scripts in two CPU processes, with every config, get the numbers of one process."""

from pathlib import Path

import pytest
import tiny
import torch
import yaml
from accelerate.commands.config.config_args import ClusterConfig
from accelerate.commands.launch import launch_command_parser
from launching import CONFIGS, run_processes, run_torchrun
from safetensors.torch import load_file
from torch.distributed.checkpoint import FileSystemReader
from transformers import AutoModelForCausalLM

pytestmark = pytest.mark.slow

# Config, its strategy, the recomputation, and whether layers are compiled.
WAYS = [
    ("multi_gpu", "ddp", "selective", False),
    ("cpu", "ddp", "none", False),  # by torchrun, like a user
    ("fsdp2", "fsdp2", "selective", True),
    ("zero1", "zero1", "none", False),
    ("zero2", "zero2", "full", False),
    ("zero3", "zero3", "auto", False),
]
LORA = {"use_peft": "true", "lora_r": 4, "lora_dropout": 0, "lora_target_modules": "all-linear"}
QLORA = LORA | {"load_in_4bit": "true", "use_bnb_nested_quant": "true"}
# The number of rows is odd, so that one rank evaluates padding.
ODD_ROWS = {"per_device_eval_batch_size": 3}


def assert_same_losses(run: Path, reference: Path, within: float = 2e-5) -> None:
    """Check for equal losses in training and evaluation, up to rounding."""
    assert tiny.losses(run) == pytest.approx(tiny.losses(reference), abs=within)
    evaluated, expected = (tiny.evaluations(each, "heldout") for each in (run, reference))
    assert evaluated == pytest.approx(expected, abs=within)


def assert_same_weights(run: Path, reference: Path) -> None:
    weights, expected = (
        AutoModelForCausalLM.from_pretrained(each / "final").state_dict()
        for each in (run, reference)
    )
    torch.testing.assert_close(weights, expected, rtol=0, atol=2e-3)


@pytest.fixture(scope="module")
def alone(pretrained, heldout, tmp_path_factory) -> Path:
    run = tmp_path_factory.mktemp("alone") / "run"
    return pretrained(run, per_device_train_batch_size=1, **heldout, **ODD_ROWS)


@pytest.mark.parametrize(("name", "strategy", "recomputation", "compiled"), WAYS)
def test_pretraining_in_two_processes_equals_one(
    name, strategy, recomputation, compiled, pretraining, heldout, alone, tmp_path
):
    """Recomputed and compiled layers train like plain layers in one process."""
    run = tmp_path / "run"
    settings = {"activation_checkpointing": recomputation, "compile": compiled}
    if name == "fsdp2":
        settings["callbacks"] = "tests.integration.sharded_gradients:GradientsAreSharded"
    argv = pretraining(run, **settings, per_device_train_batch_size=1, **heldout, **ODD_ROWS)
    launch = run_torchrun if name == "cpu" else run_processes
    shown = launch(name, "pretrain.py", argv).succeeded()
    assert f"activation checkpointing: {recomputation}" in shown
    assert ("compile: as requested, layer by layer, static shapes, kept in" in shown) == compiled
    assert "2 ranks x 2 accumulation" in shown
    assert ("gradients are sharded" in shown) == (name == "fsdp2")
    assert shown.count("step 6/6") == 1, "one line an event, not one a rank"
    start = tiny.starts(run)[0]
    assert start["compiled"] is compiled
    assert (start["launch"]["strategy"], start["launch"]["world_size"]) == (strategy, 2)
    memory = [line["memory_by_rank"] for line in tiny.train_lines(run)]
    assert {tuple(row["rank"] for row in rows) for rows in memory} == {(0, 1)}
    assert_same_losses(run, alone)
    assert_same_weights(run, alone)
    if name == "fsdp2":  # tests/exactness resumes other strategies on other numbers of processes
        tiny.cut(run, step=3)
        run_processes(name, "pretrain.py", argv, processes=1).succeeded()
        assert_same_losses(run, alone)
        assert_same_weights(run, alone)


@pytest.mark.parametrize(
    ("name", "adapters"),
    [
        ("multi_gpu", {}), ("fsdp2", LORA), ("zero3", LORA),
        pytest.param("multi_gpu", QLORA, marks=pytest.mark.exhaustive),
        pytest.param("zero2", QLORA, marks=pytest.mark.exhaustive),
    ],
    ids=["full-multi_gpu", "lora-fsdp2", "lora-zero3", "qlora-multi_gpu", "qlora-zero2"],
)  # fmt: skip
def test_fine_tuning_in_two_processes_equals_one(
    name, adapters, fine_tuning, fine_tuned, chats_heldout, tmp_path
):
    settings = {**adapters, **chats_heldout, **ODD_ROWS}
    alone, run = fine_tuned(tmp_path / "alone", **settings), tmp_path / "run"
    run_processes(name, "sft_train.py", fine_tuning(run, **settings)).succeeded()
    assert_same_losses(run, alone)
    assert_same_weights(run, alone)


def test_weights_in_4_bits_are_sharded_and_resume(fine_tuning, fine_tuned, chats_heldout, tmp_path):
    """FSDP2 gathers the 4-bit weights as bfloat16 without changing a bit.

    Checkpoints do not contain these weights.
    """
    settings = QLORA | {"bf16": True, "use_cpu": True, "dtype": "bfloat16", "learning_rate": 1e-3}
    settings |= chats_heldout | ODD_ROWS
    alone, run = fine_tuned(tmp_path / "alone", **settings), tmp_path / "run"
    run_processes("fsdp2", "sft_train.py", fine_tuning(run, **settings)).succeeded()
    assert_same_losses(run, alone, within=1e-3)
    assert_same_weights(run, alone)
    cut = tiny.copied(run, tmp_path / "cut", step=3)
    run_processes("fsdp2", "sft_train.py", fine_tuning(cut, **settings)).succeeded()
    tiny.assert_same_run(cut, run)
    saved = FileSystemReader(run / "checkpoint-6" / "pytorch_model_fsdp_0").read_metadata()
    assert all(".lora_" in name for name in saved.state_dict_metadata)


def test_losses_in_bf16_are_not_rounded_to_it_by_a_strategy(
    pretraining, pretrained, heldout, tmp_path
):
    """Accelerate's policy for FSDP2 would return the loss in bf16, in steps of 0.03 here."""
    settings = {"bf16": True, "use_cpu": True, "learning_rate": 1e-3, **heldout, **ODD_ROWS}
    alone, run = pretrained(tmp_path / "alone", **settings), tmp_path / "run"
    run_processes("fsdp2", "pretrain.py", pretraining(run, **settings)).succeeded()
    assert_same_losses(run, alone, within=1e-3)


def test_a_cut_run_of_four_processes_resumes_exactly(pretraining, tmp_path):
    """The order of a sum matters for four ranks, not for two (tests/exactness tests two)."""
    whole, changes = tmp_path / "whole", {"per_device_train_batch_size": 1}
    run_processes("multi_gpu", "pretrain.py", pretraining(whole, **changes), processes=4)
    cut = tiny.copied(whole, tmp_path / "cut", step=3)
    done = run_processes("multi_gpu", "pretrain.py", pretraining(cut, **changes), processes=4)
    assert f"resuming from {cut / 'checkpoint-3'}" in done.succeeded()
    tiny.assert_same_run(cut, whole)


FOUR_IN_TWO_COPIES = {"dp_shard": 2, "global_batch_size": 8, "per_device_train_batch_size": 1}


def largest_difference(run: Path, reference: Path) -> tuple[float, float]:
    """Return the largest differences of training losses and of finished weights."""
    losses = zip(tiny.losses(run), tiny.losses(reference), strict=True)
    weights, expected = (load_file(each / "final/model.safetensors") for each in (run, reference))
    assert weights.keys() == expected.keys()
    return (
        max(abs(one - other) for one, other in losses),
        max(float((weights[name] - expected[name]).abs().max()) for name in weights),
    )


def launch_of(run: Path) -> tuple[str, int, int]:
    """Return strategy, processes and copies of the states in the last start of a run."""
    launch = tiny.starts(run)[-1]["launch"]
    return launch["strategy"], launch["world_size"], launch["replicas"]


def test_two_copies_of_two_shards_train_like_one_process(
    pretraining, pretrained, heldout, pytestconfig, tmp_path
):
    """HSDP with accumulation; its checkpoint resumes bit for bit, and under FSDP2 on two ranks."""
    settings = FOUR_IN_TWO_COPIES | heldout | ODD_ROWS
    alone = pretrained(tmp_path / "alone", **settings | {"dp_shard": None})
    run = tmp_path / "run"
    shown = run_processes("hsdp", "pretrain.py", pretraining(run, **settings), processes=4)
    assert "hsdp: 2 x the states, each sharded over 2 ranks" in shown.succeeded()
    assert launch_of(run) == ("hsdp", 4, 2)
    assert_same_losses(run, alone)
    losses, weights = largest_difference(run, alone)
    assert losses <= 5e-7
    assert weights <= 1e-6
    cut = tiny.copied(run, tmp_path / "cut", step=3)
    argv = pretraining(cut, **settings)
    assert "resuming from" in run_processes("hsdp", "pretrain.py", argv, processes=4).succeeded()
    tiny.assert_same_run(cut, run)
    for ranks in (2, 4) if pytestconfig.getoption("--exhaustive") else (2,):
        other = tiny.copied(run, tmp_path / f"on {ranks}", step=3)
        argv = pretraining(other, **settings | {"dp_shard": None})
        run_processes("fsdp2", "pretrain.py", argv, processes=ranks).succeeded()
        assert launch_of(other) == ("fsdp2", ranks, 1)
        losses, weights = largest_difference(other, alone)
        assert losses <= 5e-7
        assert weights <= 1e-6


def test_adapters_on_two_copies_of_two_shards_train_like_one_process(
    fine_tuning, fine_tuned, chats_heldout, tmp_path
):
    settings = LORA | FOUR_IN_TWO_COPIES | chats_heldout | ODD_ROWS
    alone = fine_tuned(tmp_path / "alone", **settings | {"dp_shard": None})
    argv = fine_tuning(tmp_path / "run", **settings)
    run_processes("hsdp", "sft_train.py", argv, processes=4).succeeded()
    assert_same_losses(tmp_path / "run", alone)
    losses, weights = largest_difference(tmp_path / "run", alone)
    assert losses <= 5e-7
    assert weights <= 1e-6


FSDP2_AS_DDP, NOT_CONNECTED = {"ACCELERATE_USE_CPU": "true"}, {}


@pytest.mark.parametrize(
    ("config", "environment", "changes", "said"),
    [
        ("fsdp2", FSDP2_AS_DDP, {}, "asked for fsdp2, but accelerate runs ddp"),
        ("multi_gpu", NOT_CONNECTED, {}, "started 2 processes, but accelerate connected 1"),
        ("cpu", FSDP2_AS_DDP, {"train_data": "/none"}, "/none: no such directory"),
    ],
)
def test_a_refusal_in_two_processes_ends_both(
    config, environment, changes, said, pretraining, tmp_path
):
    """FSDP and DeepSpeed on a CPU would silently become DDP, or ranks would train separately."""
    run = tmp_path / "run"
    argv = pretraining(run, **changes)
    done = run_processes(config, "pretrain.py", argv, env=environment, cpu_environment=False)
    assert 0 not in done.codes
    assert said in done.stdout
    assert done.stdout.count(said) == 1 or environment is NOT_CONNECTED
    assert 'Traceback (most recent call last):\n  File "pretrain' not in done.stdout
    if changes:  # the other refusals come when the trainer is built
        assert not run.exists()


NAMES = sorted(path.stem for path in CONFIGS.glob("*.yaml"))


def test_every_config_is_trained_by_a_test():
    assert sorted([*(name for name, *_ in WAYS), "hsdp", "single_gpu"]) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_a_config_has_only_keys_that_accelerate_reads(name):
    text = (CONFIGS / f"{name}.yaml").read_text()
    assert text.startswith("# "), "when to use it"
    assert f"accelerate launch --config_file accelerate_configs/{name}.yaml" in text
    content = yaml.safe_load(text)
    assert content["mixed_precision"] == "no", "precision is left to the recipe"
    # Unknown keys at the top are refused by accelerate itself ...
    assert ClusterConfig.from_yaml_file(CONFIGS / f"{name}.yaml").num_machines == 1
    # ... unknown keys of a nested block silently become attributes of the launcher's arguments.
    arguments = {action.dest for action in launch_command_parser()._actions}
    for block in ("fsdp_config", "deepspeed_config", "parallelism_config"):
        prefix = "fsdp_" if block == "fsdp_config" else ""
        assert all({key, prefix + key} & arguments for key in content.get(block, {}))
    # These two keys only work on the command line; in a file they would do nothing.
    assert not {"rdzv_backend", "same_network"} & set(content)
