"""Whole fine-tuning runs, full and LoRA: only the completions are trained on."""

import json
import shutil

import datasets
import pytest
import tiny
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import pretrain
import sft_train
from utils.host.journal_file import read_journal

pytestmark = pytest.mark.slow

LORA = {
    "use_peft": "true", "lora_r": 4, "lora_dropout": 0.1, "lora_target_modules": "all-linear",
    "async_save": "true", "compile": "true",
}  # fmt: skip


@pytest.mark.parametrize("adapters", [{}, LORA], ids=["full", "compiled lora"])
def test_a_run_learns_the_completions(
    adapters, fine_tuning, base_model, workspace, tmp_path, capfd
):
    """A resumed run gives the same bits; adapters are merged into the finished model."""
    run, cut, steps = tmp_path / "run", tmp_path / "cut", 6 if adapters else 20
    torch._dynamo.reset()
    settings = adapters | {
        "eval_data": f"heldout={workspace / 'chats_heldout'}",
        "eval_strategy": "steps",
        "eval_steps": steps // 2,
        "eval_on_start": "true",
        "max_steps": steps,
        "save_steps": steps // 2,
    }
    graphs = [tiny.compiled_graphs()]
    sft_train.main(fine_tuning(run, **settings))
    graphs.append(tiny.compiled_graphs())
    columns = tiny.masked(tiny.documents(23, seed=3))
    targets = sum(map(sum, columns["completion_mask"]))
    lines = [line for line in read_journal(run / "metrics.jsonl") if line["event"] == "eval"]
    assert {line["eval_heldout_tokens"] for line in lines} == {targets}, "no prompt counts"
    evaluated = tiny.evaluations(run, "heldout")
    assert evaluated[steps] < evaluated[0] - (0 if adapters else 0.5)
    final = AutoModelForCausalLM.from_pretrained(run / "final")
    assert tiny.plain_loss(final, columns) == pytest.approx(evaluated[steps], abs=1e-4)
    if adapters:
        assert not (run / "final" / "adapter_config.json").exists()
        assert json.loads((run / "adapter" / "adapter_config.json").read_text())["r"] == 4
        base = AutoModelForCausalLM.from_pretrained(base_model).state_dict()
        moved = {name for name, value in final.state_dict().items() if not value.equal(base[name])}
        assert moved
        assert all("proj" in name for name in moved)
    tiny.cut(shutil.copytree(run, cut, ignore=shutil.ignore_patterns(".lock")), step=steps // 2)
    torch._dynamo.reset()
    sft_train.main(fine_tuning(cut, **settings))
    shown = capfd.readouterr().out
    assert ("compile: as requested, layer by layer" in shown) == bool(adapters)
    assert tiny.compiled_graphs() - graphs[1] == graphs[1] - graphs[0], "as many for half the steps"
    tiny.assert_same_run(cut, run)
    names = ("grad_norm", "eval_heldout_loss")
    assert torch.equal(tiny.figures(cut, *names), tiny.figures(run, *names))


def test_long_documents_are_dropped_or_truncated_and_counted(fine_tuning, tmp_path, capsys):
    for choice, words in (("drop", "dropped as too long"), ("truncate", "truncated")):
        run = tmp_path / choice
        sft_train.main(fine_tuning(run, sequence_length=32, on_overlong=choice, max_steps=1))
        shown = capsys.readouterr().out
        assert words in shown
        assert "tokens left out" in shown


def test_users_own_datasets_train_as_they_are(
    pretraining, fine_tuning, workspace, tmp_path, capsys
):
    """Data are int64 ids from plain `datasets` code, with or without labels, or a DatasetDict."""
    rows = tiny.documents(60, seed=5)
    mine, extra, mask = tmp_path / "mine", tmp_path / "extra", [[1] * len(row) for row in rows]
    labels = [[-100, *row[1:]] for row in rows]
    both = datasets.Dataset.from_dict({"input_ids": rows, "labels": labels})
    datasets.DatasetDict({"train": both, "test": both.select(range(9))}).save_to_disk(mine)
    tiny.save(extra, {"input_ids": rows, "attention_mask": mask, "id": mask})
    evaluation = {"eval_data": f"test={mine}", "eval_strategy": "steps", "eval_steps": 1}
    sft_train.main(fine_tuning(tmp_path / "a", max_steps=1, train_data=mine, **evaluation))
    assert "test: a small held-out split (9 documents" in capsys.readouterr().out
    weighted = [f"{extra}=3", f"{workspace / 'chats'}=1"]
    pretrain.main(pretraining(tmp_path / "b", max_steps=1, train_data=weighted))
    assert all(len(tiny.losses(tmp_path / run)) == 1 for run in "ab")
    assert len(set(tiny.starts(tmp_path / "b")[0]["data"]["train"])) == 2
    assert {path.name for path in mine.iterdir()} == {"dataset_dict.json", "test", "train"}


def test_plain_text_for_a_model_with_a_chat_template_is_warned_of(
    fine_tuning, workspace, tmp_path, capfd
):
    tokenizer = AutoTokenizer.from_pretrained(workspace / "tokenizer")
    for template, warned in ((None, False), ("{{ messages }}", True)):
        tokenizer.chat_template = template
        tokenizer.save_pretrained(tmp_path / f"tokenizer-{warned}")
        data = {"train_data": workspace / "documents"}
        data["tokenizer_name_or_path"] = tmp_path / f"tokenizer-{warned}"
        sft_train.main([*fine_tuning(tmp_path / "run", **data), "--dry_run"])
        shown = capfd.readouterr().out
        assert ("documents has plain text: all of it is trained on, without" in shown) == warned
