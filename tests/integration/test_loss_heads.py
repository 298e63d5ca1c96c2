"""Training with the fused loss head equals training with all logits, up to rounding."""

from dataclasses import replace

import pytest
import tiny
import torch
from safetensors.torch import load_file

import pretrain
import sft_train
from utils.kernels.linear_cross_entropy import SIZES

pytestmark = pytest.mark.slow

SOFTCAPS = {"model_type": "gemma2", "head_dim": 8, "final_logit_softcapping": 2.0}
# Script, changes of the model, settings, tolerance.
CASES = {
    "tied": (pretrain, {"tie_word_embeddings": True}, {}, 3e-5),
    "softcaps": (pretrain, SOFTCAPS, {}, 3e-5),
    "masks": (sft_train, {}, {}, 3e-5),
    "lora": (sft_train, {}, {"use_peft": True}, 3e-5),
    "bf16": (pretrain, {}, {"bf16": True, "use_cpu": True}, 2e-2),
}


@pytest.mark.parametrize("name", CASES)
def test_both_heads_train_alike(
    name, pretraining, fine_tuning, workspace, tmp_path, monkeypatch, capsys
):
    """The heads agree although the fused one computes several chunks of tokens."""
    sizes = replace(SIZES["cpu"], rows=37, tile=1, block=9 * tiny.VOCABULARY)
    monkeypatch.setitem(SIZES, "cpu", sizes)
    script, model, changes, tolerance = CASES[name]
    if script is pretrain:
        path = tiny.make_model_config(tmp_path / "model.json", **model)
        argv, held, changes = pretraining, "heldout", changes | {"model_config": path}
    else:
        argv, held = fine_tuning, "chats_heldout"
    changes |= {"eval_data": f"held={workspace / held}", "eval_strategy": "steps", "eval_steps": 3}
    # Adam divides by the gradient's size. With a small epsilon, a gradient of mere rounding errors
    # would give a full step of a random sign.
    changes |= {"adam_epsilon": 1e-4}
    figures, weights = [], []
    for head in ("fused", "logits"):
        run = tmp_path / head
        assert script.main(argv(run, loss_head=head, **changes)) == 0
        assert tiny.starts(run)[0]["loss_head"]["name"] == head
        figures.append(tiny.figures(run, "loss", "grad_norm", "eval_held_loss"))
        weights.append(load_file(run / "final" / "model.safetensors"))
    assert len(figures[0]) > 12
    assert figures[0].any()
    torch.testing.assert_close(*figures, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(*weights, rtol=tolerance, atol=tolerance)
