"""Embeddings with more rows than tokens: from scratch, loaded, sharded and resumed."""

import pytest
import tiny
import torch
from launching import run_processes
from transformers import AutoConfig, AutoModelForCausalLM

import pretrain

pytestmark = pytest.mark.slow

PADDED = {"pad_embeddings_to_multiple_of": 100}  # 128 words become 200 rows


@pytest.mark.parametrize("source", ["scratch", "loaded"])
def test_padding_trains_saves_and_resumes(
    source, pretraining, pretrained, base_model, tmp_path, capsys
):
    """Added rows begin as the mean of a loaded model's rows, and the model never predicts them."""
    weights = {"model_config": None, "model_name_or_path": base_model} if source == "loaded" else {}
    settings = PADDED | weights | {"max_steps": 20, "save_steps": 10}
    assert pretrain.main(pretraining(tmp_path / "whole", **settings, dry_run=True)) == 0
    assert "embedding: 200 rows, 128 before" in capsys.readouterr().out
    whole = pretrained(tmp_path / "whole", **settings)
    cut = pretrained(tiny.copied(whole, tmp_path / "cut", step=10), **settings)
    tiny.assert_same_run(cut, whole)
    model = AutoModelForCausalLM.from_pretrained(whole / "final")
    assert model.config.vocab_size == len(model.get_input_embeddings().weight) == 200
    prompt = torch.tensor(tiny.documents(1, seed=5))
    with torch.no_grad():
        logits = model(input_ids=prompt).logits
    assert logits[..., 128:].mean() < logits[..., :128].mean(), "no token that was to be predicted"
    generated = model.generate(prompt, do_sample=True, max_new_tokens=60, eos_token_id=None)
    assert generated.max() < 128
    # The next stage keeps these rows, even if it sets the same multiple again.
    stage = {"model_config": None, "init_from": whole, "max_steps": 1}
    pretrained(tmp_path / "next", **stage)
    assert AutoConfig.from_pretrained(tmp_path / "next" / "final").vocab_size == 200
    pretrained(tmp_path / "again", **stage, **PADDED)


@pytest.mark.parametrize("strategy", ["fsdp2", "zero3"])
def test_sharded_strategies_add_the_same_rows(
    strategy, pretraining, pretrained, base_model, tmp_path
):
    settings = PADDED | {"model_config": None, "model_name_or_path": base_model, "max_steps": 2}
    alone = pretrained(tmp_path / "alone", **settings)
    argv = pretraining(tmp_path / "run", **settings)
    run_processes(strategy, "pretrain.py", argv).succeeded()
    assert tiny.losses(tmp_path / "run") == pytest.approx(tiny.losses(alone), abs=1e-4)
