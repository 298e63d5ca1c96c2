"""Compiled layers train as the others do, are compiled once, and resume bit for bit."""

import shutil
from pathlib import Path

import pytest
import tiny
import torch

import pretrain
import sft_train
from utils.callbacks.journal import read_journal
from utils.callbacks.metrics import CompilationWatch
from utils.model import compilation

pytestmark = pytest.mark.slow

AGAIN = "graphs more"


@pytest.fixture(autouse=True)
def nothing_compiled_yet(tmp_path_factory, monkeypatch):
    """One cache for this module: what one test compiled the next one loads."""
    cache = tmp_path_factory.getbasetemp() / "compiled"
    monkeypatch.setenv(compilation.CACHE_VARIABLE, str(cache))
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def figures(run: Path) -> torch.Tensor:
    """Return loss and gradient norm of every step, and the evaluations' losses."""
    lines = read_journal(run / "metrics.jsonl")
    keys = ("loss", "grad_norm", "eval_held_loss")
    return torch.tensor([line[key] for line in lines for key in keys if key in line])


def test_compiled_is_eager(pretraining, workspace, tmp_path, capfd):
    model = tiny.make_model_config(tmp_path / "model.json", num_hidden_layers=4)
    changes = {
        "model_config": model,
        "eval_data": f"held={workspace / 'heldout'}",
        "eval_strategy": "steps",
        "eval_steps": 3,
        "per_device_eval_batch_size": 4,
        "activation_checkpointing": True,
    }
    eager, compiled = tmp_path / "eager", tmp_path / "compiled"
    assert pretrain.main(pretraining(eager, **changes)) == 0
    assert "compile:" not in capfd.readouterr().out
    assert pretrain.main(pretraining(compiled, **changes, compile=True)) == 0
    said = capfd.readouterr().out
    assert "compile: layer by layer, static shapes, kept in" in said
    assert AGAIN not in said
    assert tiny.starts(compiled)[0]["compiled"] is True
    torch.testing.assert_close(figures(compiled), figures(eager), rtol=2e-5, atol=2e-5)


def test_a_resumed_run_with_dropout_is_the_uninterrupted_one(fine_tuning, tmp_path, capfd):
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    settings = {"use_peft": True, "lora_dropout": 0.1, "compile": True}
    assert sft_train.main(fine_tuning(whole, **settings)) == 0
    tiny.cut(shutil.copytree(whole, resumed), step=3)
    torch._dynamo.reset()
    assert AGAIN not in capfd.readouterr().out
    assert sft_train.main(fine_tuning(resumed, **settings)) == 0
    assert "resuming from" in capfd.readouterr().out
    assert torch.equal(figures(resumed), figures(whole))
    weights = sorted(path.relative_to(whole) for path in whole.glob("final/**/*.safetensors"))
    assert weights
    for path in weights:
        assert (whole / path).read_bytes() == (resumed / path).read_bytes()


def test_another_shape_in_training_is_told(pretraining, tmp_path, capfd, monkeypatch):
    """What the watch warns of: here a graph more at every step, as a reset cache makes it."""
    on_step_end = CompilationWatch.on_step_end

    def forgetful(self, *args, **kwargs):
        on_step_end(self, *args, **kwargs)
        torch._dynamo.reset_code_caches()

    monkeypatch.setattr(CompilationWatch, "on_step_end", forgetful)
    assert pretrain.main(pretraining(tmp_path / "run", compile=True, max_steps=2)) == 0
    assert "step 2 compiled" in capfd.readouterr().out
