"""Samples at evaluations are the model's continuations, and they do not change the run."""

import json

import pytest
import tiny
import torch
from families import tiny_config, tiny_model
from launching import run_processes
from transformers import AutoModelForCausalLM, AutoTokenizer

import pretrain
import sft_train
from utils.callbacks.journal import read_journal
from utils.config.errors import ConfigurationError
from utils.prepare.encoding import load_prompts

pytestmark = pytest.mark.slow

TEMPLATE = "{% for m in messages %}{{ m.content }} <pad> {% endfor %}"


@pytest.fixture
def settings(workspace) -> dict[str, object]:
    """Return settings with evaluations at steps 0 and 3 of 6, and with dropout."""
    model = tiny.make_model_config(workspace / "dropping.json", attention_dropout=0.1)
    return {
        "model_config": model, "eval_data": f"heldout={workspace / 'heldout'}",
        "eval_strategy": "steps", "eval_steps": 3, "eval_on_start": True,
    }  # fmt: skip


@pytest.fixture
def asking(settings, tmp_path) -> dict[str, object]:
    """Return the same settings with three prompts: a text, and a file with two."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "t9 t12"}\n"t1"\n')
    return settings | {"sample_prompts": ["t5 t8 t11", prompts], "sample_max_new_tokens": 5}


def samples(run) -> dict[int, list[dict[str, str]]]:
    lines = read_journal(run / "metrics.jsonl")
    return {line["step"]: line["samples"] for line in lines if line["event"] == "samples"}


def continued(model: torch.nn.Module, ids: list[int], tokens: int) -> list[int]:
    """Return the expected text: always the most likely token, without a cache."""
    made = list(ids)
    while len(made) < len(ids) + tokens and (len(made) == len(ids) or made[-1] != 0):
        with torch.no_grad():
            made.append(int(model(input_ids=torch.tensor([made])).logits[0, -1].argmax()))
    return made[len(ids) :]


def assert_greedy(run, step: int) -> None:
    """Check that the samples of the last step are the finished model's continuations."""
    model = AutoModelForCausalLM.from_pretrained(run / "final")
    assert model.config.use_cache
    tokenizer = AutoTokenizer.from_pretrained(run / "final")
    for row in samples(run)[step]:
        expected = continued(model, tokenizer(row["prompt"])["input_ids"], 5)
        assert row["completion"] == tokenizer.decode(expected)


@pytest.mark.parametrize("attention", ["auto", "sdpa"])
def test_samples_are_greedy_and_change_nothing(
    attention, pretraining, settings, asking, tmp_path, capsys
):
    runs = {name: tmp_path / name for name in ("silent", "asked")}
    others = {"attn_implementation": attention, "activation_checkpointing": "full"}
    pretrain.main(pretraining(runs["silent"], **settings, **others))
    others |= {"max_steps": None, "max_tokens": "1.4k"}
    assert pretrain.main(pretraining(runs["asked"], **asking, **others)) == 0
    shown = capsys.readouterr().out
    assert "max_tokens: 1,400 / 256 a step = 6 steps" in shown
    tiny.assert_same_run(runs["asked"], runs["silent"])
    evaluated = [tiny.evaluations(run, "heldout") for run in runs.values()]
    assert evaluated[0] == evaluated[1]
    told = samples(runs["asked"])
    assert sorted(told) == [0, 3, 6]
    assert [row["prompt"] for row in told[6]] == ["t5 t8 t11", "t9 t12", "t1"]
    assert told[0] != told[6], "it has learned something"
    assert_greedy(runs["asked"], step=6)
    completion = json.dumps(told[6][2]["completion"])
    assert f'sample (step 6): "t1" -> {completion}' in shown


@pytest.mark.parametrize("name", ["gemma2", "gpt_oss"])
def test_caps_and_sinks_of_attention_count_in_samples(name, pretraining, asking, tmp_path):
    base = tmp_path / "base"
    tiny_model(tiny_config(name)).save_pretrained(base)
    tiny.make_tokenizer(base)
    given = asking | {"model_config": None, "model_name_or_path": base, "max_steps": 3}
    assert pretrain.main(pretraining(tmp_path / "run", **given)) == 0
    assert_greedy(tmp_path / "run", step=3)


@pytest.mark.parametrize("strategy", ["multi_gpu", "fsdp2", "zero3"])
def test_every_strategy_says_the_same(strategy, pretraining, asking, settings, tmp_path):
    """Compiled layers run eagerly while samples are generated."""
    settings = settings | {"per_device_train_batch_size": 1, "compile": strategy == "fsdp2"}
    runs = {name: tmp_path / name for name in ("silent", "asked")}
    for name, run in runs.items():
        given = settings | (asking if name == "asked" else {}) | {"max_steps": 3}
        given |= {"compile": settings["compile"], "per_device_train_batch_size": 1}
        done = run_processes(strategy, "pretrain.py", pretraining(run, **given))
        assert done.returncode == 0, done.stdout[-6000:]
    assert done.stdout.count('sample (step 3): "t1" -> ') == 1, "by one rank"
    tiny.assert_same_run(runs["asked"], runs["silent"])
    assert_greedy(runs["asked"], step=3)


def test_chats_go_through_the_template_and_adapters_answer(fine_tuning, workspace, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(workspace / "tokenizer")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    prompts = tmp_path / "prompts.jsonl"
    chat = [{"role": "user", "content": "t5"}, {"role": "assistant", "content": "t6"}]
    chat.append({"role": "user", "content": "t8"})
    prompts.write_text(json.dumps({"messages": chat}) + "\n")
    argv = fine_tuning(
        tmp_path / "run", use_peft=True, lora_dropout=0.1, max_steps=2,
        tokenizer_name_or_path=tmp_path / "tokenizer",
        eval_data=f"heldout={workspace / 'chats_heldout'}", eval_strategy="steps", eval_steps=2,
        sample_prompts=["t9", prompts], sample_max_new_tokens=4, save_strategy="no",
        save_steps=None,
    )  # fmt: skip
    assert sft_train.main(argv) == 0
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "final")
    rows = samples(tmp_path / "run")[2]
    assert [row["prompt"] for row in rows] == ["t9", "t8"]
    for row, asked in zip(rows, ("t9 <pad>", "t5 <pad> t6 <pad> t8 <pad>"), strict=True):
        expected = continued(model, tokenizer(asked)["input_ids"], 4)
        assert row["completion"] == tokenizer.decode(expected)


def test_prompts_that_cannot_be_asked_are_refused_all_at_once(workspace, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(workspace / "tokenizer")
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": 5}\n\n{"messages": []}\n{"prompt": "t1 t2 t3 t4"}\nx\n')
    with pytest.raises(ConfigurationError) as refused:
        load_prompts([str(prompts), ""], tokenizer, chats=False, most_tokens=3)
    said = "\n".join(refused.value.problems)
    for problem in (
        f"sample_prompts {prompts}:1: give a text, or an object with `prompt`",
        f"{prompts}:3: give a text", f"{prompts}:4: it has 4 tokens, and the model takes 1 to 3",
        f"{prompts}:5: Expecting value", "sample_prompts '': it has 0 tokens",
    ):  # fmt: skip
        assert problem in said
    (tmp_path / "none.txt").write_text("\n")
    for name, problem in (("missing.txt", "cannot be read: "), ("none.txt", "is empty")):
        with pytest.raises(ConfigurationError, match=problem):
            load_prompts([str(tmp_path / name)], tokenizer, chats=False, most_tokens=3)
