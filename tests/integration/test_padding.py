"""A model whose numbers padding would change trains on documents without padding."""

import json

import pytest
import tiny
import torch
from transformers import AutoModelForCausalLM

import pretrain
from utils.config.errors import ConfigurationError
from utils.model.isolation import NO_PADDING

# One head scores the blocks that a token may see. Between equal scores, the length of the padded
# sequence decides.
SPARSE = {
    "model_type": "deepseek_v4", "hidden_size": 64, "num_attention_heads": 4, "head_dim": 32,
    "q_lora_rank": 24, "o_groups": 2, "o_lora_rank": 16, "index_head_dim": 16, "index_n_heads": 1,
    "index_topk": 2, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
    "num_hidden_layers": 4, "sliding_window": 8, "initializer_range": 0.2,
    "vocab_size": tiny.VOCABULARY, "compress_rates":
    {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
}  # fmt: skip


@pytest.mark.slow
def test_where_padding_changes_numbers_each_sequence_ends_with_its_document(tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    heldout = {"input_ids": tiny.documents(6, seed=1)}
    run, config = tmp_path / "run", tmp_path / "config.json"
    config.write_text(json.dumps(SPARSE))
    argv = tiny.flags(
        model_config=config, output_dir=run, packing="none", max_steps=2, save_strategy="no",
        tokenizer_name_or_path=tiny.make_tokenizer(tmp_path / "tokenizer"), logging_steps=1,
        train_data=tiny.save(tmp_path / "data", {"input_ids": tiny.documents(20, seed=0)}),
        eval_data=f"heldout={tiny.save(tmp_path / 'heldout', heldout)}",
        eval_steps=2, sequence_length=64, global_batch_size=4, bf16=False, dtype="float32",
        report_to="none",
    )  # fmt: skip
    with pytest.raises(ConfigurationError, match=r"where sequences are padded.*batch_size 1 --per"):
        pretrain.main([*argv, *tiny.flags(per_device_train_batch_size=4)])
    assert pretrain.main([*argv, *NO_PADDING.split()]) == 0
    assert all(0 < loss < 10 for loss in tiny.losses(run))
    model = AutoModelForCausalLM.from_pretrained(
        run / "final", attn_implementation="eager", dtype=torch.float32
    )
    expected = tiny.plain_loss(model, heldout)
    assert abs(tiny.evaluations(run, "heldout")[2] - expected) < 1e-5
