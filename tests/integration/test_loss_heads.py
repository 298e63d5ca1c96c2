"""Training with the fused loss head equals training with all logits, up to rounding."""

import pytest
import tiny
import torch
from safetensors.torch import load_file

from utils.kernels.linear_cross_entropy import TILE_SIZES

pytestmark = pytest.mark.slow

SOFTCAPS = {"model_type": "gemma2", "head_dim": 8, "final_logit_softcapping": 2.0}
# Fixture that trains, its held-out split, changes of the model, settings, tolerance.
CASES = {
    "tied": ("pretrained", "heldout", {"tie_word_embeddings": True}, {}, 3e-5),
    "softcaps": ("pretrained", "heldout", SOFTCAPS, {}, 3e-5),
    "masks": ("fine_tuned", "chats_heldout", {}, {}, 3e-5),
    "lora": ("fine_tuned", "chats_heldout", {}, {"use_peft": True}, 3e-5),
    "bf16": ("pretrained", "heldout", {}, {"bf16": True, "use_cpu": True}, 2e-2),
}


@pytest.mark.parametrize("name", CASES)
def test_both_heads_train_alike(name, request, tmp_path, monkeypatch):
    """The heads agree although the fused one computes several chunks of tokens."""
    sizes = TILE_SIZES["cpu"]._replace(rows=37, tile=1, block=9 * tiny.VOCABULARY)
    monkeypatch.setitem(TILE_SIZES, "cpu", sizes)
    trained, held, model, changes, tolerance = CASES[name]
    # Adam divides by the gradient's size. With a small epsilon, a gradient of mere rounding errors
    # would give a full step of a random sign.
    changes = changes | request.getfixturevalue(held) | {"adam_epsilon": 1e-4}
    if trained == "pretrained":
        changes["model_config"] = tiny.make_model_config(tmp_path / "model.json", **model)
    figures, weights = [], []
    for head in ("fused", "logits"):
        run = request.getfixturevalue(trained)(tmp_path / head, loss_head=head, **changes)
        assert tiny.starts(run)[0]["loss_head"]["name"] == head
        figures.append(tiny.figures(run, "loss", "grad_norm", "eval_heldout_loss"))
        weights.append(load_file(run / "final" / "model.safetensors"))
    assert len(figures[0]) > 12
    assert figures[0].any()
    torch.testing.assert_close(*figures, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(*weights, rtol=tolerance, atol=tolerance)
