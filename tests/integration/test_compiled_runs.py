"""Compiled layers resume bit for bit; that they train as others do: see test_strategies.py."""

import shutil
from pathlib import Path

import pytest
import tiny
import torch

import sft_train
from utils.callbacks.journal import read_journal
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
