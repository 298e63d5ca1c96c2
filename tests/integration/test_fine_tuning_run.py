"""Whole fine-tuning runs in this process, full and LoRA: only loss-bearing tokens are learned."""

import json

import pytest
import tiny
import torch
from transformers import AutoModelForCausalLM

import sft_train

pytestmark = pytest.mark.slow


def test_a_run_learns_the_completions(fine_tuning, workspace, tmp_path):
    run = tmp_path / "run"
    sft_train.main(
        fine_tuning(
            run,
            eval_data=f"heldout={workspace / 'chats_heldout'}",
            eval_strategy="steps",
            eval_steps=10,
            eval_on_start="true",
            max_steps=20,
            save_steps=10,
        )
    )
    evaluated = tiny.evaluations(run, "heldout")
    assert evaluated[20] < evaluated[0] - 0.5
    model = AutoModelForCausalLM.from_pretrained(run / "final")
    assert _completion_loss(model) == pytest.approx(evaluated[20], abs=1e-5)


def _completion_loss(model: torch.nn.Module) -> float:
    """The oracle: each held-out document alone, the loss over its completion tokens."""
    columns = tiny.masked(tiny.documents(23, seed=3))
    total, targets = 0.0, 0
    with torch.no_grad():
        for row, mask in zip(columns["input_ids"], columns["completion_mask"], strict=True):
            ids = torch.tensor([row])
            labels = ids.masked_fill(torch.tensor([mask]) == 0, -100)
            total += model(input_ids=ids, labels=labels).loss.item() * sum(mask)
            targets += sum(mask)
    return total / targets


def test_prompts_are_not_trained_on(fine_tuning, workspace, tmp_path):
    """Other prompts with the same positions change inputs but never count as targets."""
    from utils.callbacks.journal import read_journal

    run = tmp_path / "run"
    heldout = f"heldout={workspace / 'chats_heldout'}"
    sft_train.main(fine_tuning(run, eval_data=heldout, eval_strategy="steps", eval_steps=6))
    columns = tiny.masked(tiny.documents(23, seed=3))
    lines = read_journal(run / "metrics.jsonl")
    tokens = [line["eval_heldout_tokens"] for line in lines if line["event"] == "eval"]
    assert tokens == [sum(map(sum, columns["completion_mask"]))]


def test_accumulation_does_not_change_the_losses_when_masks_differ(fine_tuning, tmp_path):
    for micro_batch in (1, 4):
        sft_train.main(
            fine_tuning(tmp_path / str(micro_batch), per_device_train_batch_size=micro_batch)
        )
    assert tiny.losses(tmp_path / "1") == pytest.approx(tiny.losses(tmp_path / "4"), abs=1e-5)


def test_lora_trains_adapters_and_merges_them_into_the_final_model(
    fine_tuning, base_model, workspace, tmp_path
):
    run = tmp_path / "run"
    sft_train.main(
        fine_tuning(
            run,
            use_peft="true",
            lora_r=4,
            lora_dropout=0,
            lora_target_modules="all-linear",
            max_steps=10,
            eval_data=f"heldout={workspace / 'chats_heldout'}",
            eval_strategy="steps",
            eval_steps=10,
            eval_on_start="true",
        )
    )
    evaluated = tiny.evaluations(run, "heldout")
    assert evaluated[10] < evaluated[0]
    final = AutoModelForCausalLM.from_pretrained(run / "final")
    assert not (run / "final" / "adapter_config.json").exists()
    assert _completion_loss(final) == pytest.approx(evaluated[10], abs=1e-4)
    base = AutoModelForCausalLM.from_pretrained(base_model).state_dict()
    changed = {name for name, value in final.state_dict().items() if not value.equal(base[name])}
    assert changed
    assert all("proj" in name for name in changed)
    adapter = json.loads((run / "adapter" / "adapter_config.json").read_text())
    assert adapter["r"] == 4


def test_a_resumed_lora_run_equals_the_uninterrupted_one(fine_tuning, tmp_path):
    import shutil

    settings = {"use_peft": "true", "lora_r": 4, "lora_dropout": 0.1}
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    sft_train.main(fine_tuning(whole, **settings))
    sft_train.main(fine_tuning(cut, **settings))
    for name in ("final", "adapter", "checkpoint-6"):
        shutil.rmtree(cut / name)
    sft_train.main(fine_tuning(cut, **settings))
    assert tiny.losses(cut) == tiny.losses(whole)
    weights = "final/model.safetensors"
    assert (cut / weights).read_bytes() == (whole / weights).read_bytes()


def test_long_documents_are_dropped_or_truncated_and_counted(fine_tuning, tmp_path, capsys):
    for choice, words in (("drop", "dropped as too long"), ("truncate", "truncated")):
        run = tmp_path / choice
        sft_train.main(fine_tuning(run, sequence_length=32, on_overlong=choice, max_steps=1))
        shown = capsys.readouterr().out
        assert words in shown
        assert "tokens left out" in shown


def test_weights_choose_the_share_of_each_dataset(fine_tuning, workspace, tmp_path):
    run = tmp_path / "run"
    chats, other = workspace / "chats", workspace / "chats_heldout"
    sft_train.main(fine_tuning(run, train_data=[f"{chats}=3", f"{other}=1"], max_steps=2))
    fingerprints = json.loads((run / "provenance.json").read_text())["starts"][0]["data"]["train"]
    assert len(set(fingerprints)) == 2
