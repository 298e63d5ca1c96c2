"""Runs with weights and Adam states in fewer bits resume as exactly as any other run."""

import pytest
import tiny
import torch
from launching import run_processes

import pretrain
from utils.config.errors import ConfigurationError

pytestmark = pytest.mark.slow

STATES = {"optim_states": "bfloat16"}
SMALLEST = {"dtype": "bfloat16", "stochastic_rounding": True, "optim_states": "int8"}


@pytest.fixture
def wide(pretraining, tmp_path):
    """Return the command line for a model with matrices wide enough for 8-bit states."""
    config = tiny.make_model_config(tmp_path / "wide.json", hidden_size=64, intermediate_size=128)
    return lambda output_dir, **changes: pretraining(output_dir, model_config=config, **changes)


@pytest.mark.parametrize("settings", [STATES, SMALLEST], ids=["states", "smallest"])
def test_a_resumed_run_is_the_uninterrupted_one(settings, wide, tmp_path, capfd):
    whole, kept = tmp_path / "whole", settings["optim_states"]
    pretrain.main(wide(whole, **settings))
    assert f"no mixed precision, Adam's states in {kept}" in capfd.readouterr().out
    state = torch.load(whole / "checkpoint-3/optimizer.pt", weights_only=True)["state"][0]
    assert state["exp_avg"].dtype == getattr(torch, kept)
    run = tiny.copied(whole, tmp_path / "cut", step=3)
    with pytest.raises(ConfigurationError, match=f"its optim_states is {kept}, now it is float32"):
        pretrain.main(wide(run, **settings | {"optim_states": "float32"}))
    pretrain.main(wide(run, **settings))
    tiny.assert_same_run(run, whole)


@pytest.mark.parametrize("config", ["multi_gpu", "fsdp2"])
def test_two_ranks_round_alike_and_resume_exactly(config, wide, tmp_path):
    """The ranks resume from rank 0's file (DDP), or from shards of codes and scales (FSDP2)."""
    whole, settings = tmp_path / "whole", {**SMALLEST, "per_device_train_batch_size": 1}
    run_processes(config, "pretrain.py", wide(whole, **settings)).succeeded()
    run = tiny.copied(whole, tmp_path / "cut", step=3)
    shown = run_processes(config, "pretrain.py", wide(run, **settings)).succeeded()
    assert f"resuming from {run / 'checkpoint-3'}" in shown
    tiny.assert_same_run(run, whole)
