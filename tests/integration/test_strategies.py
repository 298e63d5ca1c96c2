"""Both scripts in two CPU processes, with every config, get the numbers of one process."""

import shutil
from pathlib import Path

import pytest
import tiny
import torch
from launching import run_processes, run_two_processes
from torch.distributed.checkpoint import FileSystemReader
from transformers import AutoModelForCausalLM

import pretrain
import sft_train

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


def succeed(done) -> str:
    assert done.returncode == 0, done.stdout[-6000:]
    return done.stdout


def evaluation(workspace: Path, split: str) -> dict[str, object]:
    """Return evaluation settings with an odd number of rows, so that one rank evaluates padding."""
    settings = {"eval_strategy": "steps", "eval_steps": 3, "per_device_eval_batch_size": 3}
    return {"eval_data": f"heldout={workspace / split}", **settings}


def assert_same_losses(run: Path, reference: Path, within: float = 2e-5) -> None:
    """Check for equal losses in training and evaluation, up to rounding."""
    assert tiny.losses(run) == pytest.approx(tiny.losses(reference), abs=within)
    assert tiny.evaluations(run, "heldout") == pytest.approx(
        tiny.evaluations(reference, "heldout"), abs=within
    )


def assert_same_run(run: Path, reference: Path) -> None:
    """Check for equal losses and an equal model, up to rounding."""
    assert_same_losses(run, reference)
    assert_same_weights(run, reference)


def assert_same_weights(run: Path, reference: Path) -> None:
    weights, expected = (
        AutoModelForCausalLM.from_pretrained(each / "final").state_dict()
        for each in (run, reference)
    )
    torch.testing.assert_close(weights, expected, rtol=0, atol=2e-3)


@pytest.fixture(scope="module")
def pretrained_alone(pretraining, workspace, tmp_path_factory) -> Path:
    run = tmp_path_factory.mktemp("alone") / "run"
    settings = {"per_device_train_batch_size": 1, **evaluation(workspace, "heldout")}
    pretrain.main(pretraining(run, **settings))
    return run


@pytest.mark.parametrize(("name", "strategy", "recomputation", "compiled"), WAYS)
def test_pretraining_in_two_processes_equals_one(
    name, strategy, recomputation, compiled, pretraining, workspace, pretrained_alone, tmp_path
):
    """Recomputed and compiled layers train like plain layers in one process."""
    run = tmp_path / "run"
    settings = {"activation_checkpointing": recomputation, "compile": compiled}
    settings |= {"per_device_train_batch_size": 1, **evaluation(workspace, "heldout")}
    done = run_two_processes(
        name, "pretrain.py", pretraining(run, **settings), torchrun=name == "cpu"
    )
    shown = succeed(done)
    assert f"activation checkpointing: {recomputation}" in shown
    assert ("compile: as requested, layer by layer, static shapes, kept in" in shown) == compiled
    assert "2 ranks x 2 accumulation" in shown
    assert shown.count("step 6/6") == 1, "one line an event, not one a rank"
    start = tiny.starts(run)[0]
    assert start["compiled"] is compiled
    assert (start["launch"]["strategy"], start["launch"]["world_size"]) == (strategy, 2)
    memory = [line["memory_by_rank"] for line in tiny.train_lines(run)]
    assert {tuple(row["rank"] for row in rows) for rows in memory} == {(0, 1)}
    assert_same_run(run, pretrained_alone)


@pytest.mark.parametrize(
    ("name", "adapters"),
    [
        ("multi_gpu", {}), ("fsdp2", LORA), ("zero3", LORA),
        pytest.param("multi_gpu", QLORA, marks=pytest.mark.exhaustive),
        pytest.param("zero2", QLORA, marks=pytest.mark.exhaustive),
    ],
    ids=["full-multi_gpu", "lora-fsdp2", "lora-zero3", "qlora-multi_gpu", "qlora-zero2"],
)  # fmt: skip
def test_fine_tuning_in_two_processes_equals_one(name, adapters, fine_tuning, workspace, tmp_path):
    settings = {**adapters, **evaluation(workspace, "chats_heldout")}
    alone, run = tmp_path / "alone", tmp_path / "run"
    sft_train.main(fine_tuning(alone, **settings))
    succeed(run_two_processes(name, "sft_train.py", fine_tuning(run, **settings)))
    assert_same_run(run, alone)


def test_weights_in_4_bits_are_sharded_and_resume(fine_tuning, workspace, tmp_path):
    """FSDP2 gathers the 4-bit weights as bfloat16 without changing a bit.

    Checkpoints do not contain these weights.
    """
    settings = QLORA | {"bf16": True, "use_cpu": True, "dtype": "bfloat16", "learning_rate": 1e-3}
    settings |= evaluation(workspace, "chats_heldout")
    alone, run, cut = tmp_path / "alone", tmp_path / "run", tmp_path / "cut"
    sft_train.main(fine_tuning(alone, **settings))
    succeed(run_two_processes("fsdp2", "sft_train.py", fine_tuning(run, **settings)))
    assert_same_losses(run, alone, within=1e-3)
    assert_same_weights(run, alone)
    tiny.cut(shutil.copytree(run, cut), step=3)
    succeed(run_two_processes("fsdp2", "sft_train.py", fine_tuning(cut, **settings)))
    tiny.assert_same_run(cut, run)
    saved = FileSystemReader(run / "checkpoint-6" / "pytorch_model_fsdp_0").read_metadata()
    assert all(".lora_" in name for name in saved.state_dict_metadata)


def test_losses_in_bf16_are_not_rounded_to_it_by_a_strategy(pretraining, workspace, tmp_path):
    """Accelerate's policy for FSDP2 would return the loss in bf16, in steps of 0.03 here."""
    settings = {"bf16": True, "use_cpu": True, "learning_rate": 1e-3}
    settings |= evaluation(workspace, "heldout")
    alone, run = tmp_path / "alone", tmp_path / "run"
    pretrain.main(pretraining(alone, **settings))
    succeed(run_two_processes("fsdp2", "pretrain.py", pretraining(run, **settings)))
    assert_same_losses(run, alone, within=1e-3)


def test_a_cut_run_of_four_processes_resumes_exactly(pretraining, tmp_path):
    """The order of a sum matters for four ranks, not for two (tests/exactness tests two)."""
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    settings = {"per_device_train_batch_size": 1, "max_steps": 12, "save_steps": 6}
    argv = pretraining(whole, **settings)
    succeed(run_processes("multi_gpu", "pretrain.py", argv, processes=4))
    tiny.cut(shutil.copytree(whole, cut), step=6)
    argv = pretraining(cut, **settings)
    shown = succeed(run_processes("multi_gpu", "pretrain.py", argv, processes=4))
    assert f"resuming from {cut / 'checkpoint-6'}" in shown
    tiny.assert_same_run(cut, whole)


def test_a_run_of_two_processes_resumes_on_one(pretraining, pretrained_alone, workspace, tmp_path):
    """tests/exactness tests other strategies and other numbers of processes."""
    run = tmp_path / "run"
    settings = evaluation(workspace, "heldout")
    argv = pretraining(run, per_device_train_batch_size=1, **settings)
    succeed(run_two_processes("fsdp2", "pretrain.py", argv))
    tiny.cut(run, step=3)
    succeed(run_processes("fsdp2", "pretrain.py", argv, processes=1))
    assert_same_run(run, pretrained_alone)


def test_a_launch_that_differs_from_its_config_is_refused(pretraining, tmp_path):
    """FSDP and DeepSpeed on a CPU would silently become DDP, or ranks would train separately."""
    run = tmp_path / "run"
    argv = pretraining(run)
    for name, environment, words in (
        ("fsdp2", {"ACCELERATE_USE_CPU": "true"}, "asked for fsdp2, but accelerate runs ddp"),
        ("multi_gpu", {}, "started 2 processes, but accelerate connected 1"),
    ):
        done = run_two_processes(name, "pretrain.py", argv, env=environment, cpu_environment=False)
        assert done.returncode != 0
        assert words in done.stdout
        assert 'Traceback (most recent call last):\n  File "pretrain' not in done.stdout
        assert not list(run.glob("checkpoint-*"))


def test_a_refusal_in_two_processes_is_shown_once_and_ends_both(pretraining, tmp_path):
    argv = pretraining(tmp_path / "run", train_data="/no/such/data")
    done = run_two_processes("multi_gpu", "pretrain.py", argv)
    assert done.returncode != 0
    assert done.stdout.count("/no/such/data: no such directory") == 1
    assert not (tmp_path / "run").exists()
