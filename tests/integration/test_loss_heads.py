"""The fused loss head trains as the one that makes all logits does, to rounding."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import tiny
import torch
from safetensors.torch import load_file

import pretrain
import sft_train
from utils.callbacks.journal import read_journal
from utils.kernels.linear_cross_entropy import SIZES

pytestmark = pytest.mark.slow

SOFTCAPS = {"model_type": "gemma2", "head_dim": 8, "final_logit_softcapping": 2.0}
# Adam divides by the gradient's size: where that is rounding, so is the sign of the step.
EXACT = {"adam_epsilon": 1e-4}


@pytest.fixture(autouse=True)
def several_chunks(monkeypatch):
    sizes = replace(SIZES["cpu"], rows=37, tile=1, block=9 * tiny.VOCABULARY)
    monkeypatch.setitem(SIZES, "cpu", sizes)


def figures(run: Path) -> torch.Tensor:
    """Return loss and gradient norm of every step, and the evaluations' losses."""
    lines = read_journal(run / "metrics.jsonl")
    keys = ("loss", "grad_norm", "eval_held_loss")
    return torch.tensor([line[key] for line in lines for key in keys if key in line])


def compare(main, argv, tmp_path: Path, *, tolerance: float, **changes):
    runs = {}
    for head in ("fused", "logits"):
        runs[head] = tmp_path / head
        assert main(argv(runs[head], loss_head=head, **changes)) == 0
        start = json.loads((runs[head] / "provenance.json").read_text())["starts"][0]
        assert start["loss_head"]["name"] == head
    fused, logits = figures(runs["fused"]), figures(runs["logits"])
    assert len(fused) == len(logits) > 12
    assert not torch.equal(fused, torch.zeros_like(fused))
    torch.testing.assert_close(fused, logits, rtol=tolerance, atol=tolerance)
    actual, expected = (load_file(runs[head] / "final" / "model.safetensors") for head in runs)
    for key, tensor in actual.items():
        torch.testing.assert_close(tensor, expected[key], rtol=tolerance, atol=tolerance)


def held(workspace: Path, data: str = "heldout") -> dict[str, object]:
    return {"eval_data": f"held={workspace / data}", "eval_strategy": "steps", "eval_steps": 3}


@pytest.mark.parametrize("model", ["tied", "untied", "softcaps"])
def test_pretraining(model, pretraining, workspace, tmp_path, capsys):
    other = {"tied": {"tie_word_embeddings": True}, "untied": {}, "softcaps": SOFTCAPS}[model]
    path = tiny.make_model_config(tmp_path / "model.json", **other)
    changes = {"model_config": path, **held(workspace), **EXACT}
    compare(pretrain.main, pretraining, tmp_path, tolerance=3e-5, **changes)


def test_fine_tuning_with_masks(fine_tuning, workspace, tmp_path, capsys):
    changes = {**held(workspace, "chats_heldout"), **EXACT}
    compare(sft_train.main, fine_tuning, tmp_path, tolerance=3e-5, **changes)


def test_lora(fine_tuning, workspace, tmp_path, capsys):
    changes = {**held(workspace, "chats_heldout"), **EXACT, "use_peft": True}
    compare(sft_train.main, fine_tuning, tmp_path, tolerance=3e-5, **changes)


def test_mixed_precision(pretraining, workspace, tmp_path, capsys):
    changes = {**held(workspace), **EXACT, "bf16": True, "use_cpu": True}
    compare(pretrain.main, pretraining, tmp_path, tolerance=2e-2, **changes)


def test_auto_fuses_experts_too_and_says_whether_their_load_is_balanced(
    pretraining, fine_tuning, workspace, tmp_path, capfd
):
    experts = {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
    path = tiny.make_model_config(tmp_path / "experts.json", **experts)
    assert pretrain.main(pretraining(tmp_path / "run", model_config=path, dry_run=True)) == 0
    said = capfd.readouterr().out
    assert "loss: auto: fused" in said
    assert "experts: no load-balancing loss" in said
    # TRL adds the term whenever the architecture has a coefficient for it.
    changes = {"model_config": path, "dry_run": True}
    changes |= {"tokenizer_name_or_path": workspace / "tokenizer", "model_name_or_path": None}
    argv = fine_tuning(tmp_path / "sft", **changes)
    assert sft_train.main(argv) == 0
    said = capfd.readouterr().out
    assert "loss: auto: fused" in said
    assert "experts: load-balancing loss of each global batch, times 0.001" in said
    assert sft_train.main([*argv, "--router_aux_loss_coef", "0"]) == 0
    assert "experts: no load-balancing loss" in capfd.readouterr().out
