"""Samples at evaluations are the model's continuations, and they do not change the run."""

import json

import pytest
import tiny
import torch
from families import tiny_config, tiny_model
from launching import run_processes
from transformers import AutoModelForCausalLM, AutoTokenizer

from utils.config.errors import ConfigurationError
from utils.host.journal_file import read_journal
from utils.prepare.encoding import load_prompts

pytestmark = pytest.mark.slow

TEMPLATE = "{% for m in messages %}{{ m.content }} <pad> {% endfor %}"


@pytest.fixture
def settings(workspace, heldout) -> dict[str, object]:
    """Return settings with evaluations at steps 0 and 3 of 6, and with dropout."""
    model = tiny.make_model_config(workspace / "dropping.json", attention_dropout=0.1)
    return {**heldout, "model_config": model, "eval_on_start": True}


@pytest.fixture
def asking(tmp_path) -> dict[str, object]:
    """Return the settings of three prompts: a text, and a file with two."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "t9 t12"}\n"t1"\n')
    return {"sample_prompts": ["t5 t8 t11", prompts], "sample_max_new_tokens": 5}


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


@pytest.mark.parametrize(("attention", "compiled"), [("auto", True), ("sdpa", False)])
def test_samples_are_greedy_and_change_nothing(
    attention, compiled, pretrained, settings, asking, tmp_path, capsys
):
    """Compiled layers run eagerly while samples are generated."""
    torch._dynamo.reset()
    settings |= {"attn_implementation": attention, "compile": compiled}
    settings["activation_checkpointing"] = "full"
    silent = pretrained(tmp_path / "silent", **settings)
    settings |= asking | {"max_steps": None, "max_tokens": "1.4k"}
    asked = pretrained(tmp_path / "asked", **settings)
    shown = capsys.readouterr().out
    assert "max_tokens: 1,400 / 256 a step = 6 steps" in shown
    tiny.assert_same_run(asked, silent)
    assert tiny.evaluations(asked, "heldout") == tiny.evaluations(silent, "heldout")
    told = samples(asked)
    assert sorted(told) == [0, 3, 6]
    assert [row["prompt"] for row in told[6]] == ["t5 t8 t11", "t9 t12", "t1"]
    assert told[0] != told[6], "it has learned something"
    assert_greedy(asked, step=6)
    completion = json.dumps(told[6][2]["completion"])
    assert f'sample (step 6): "t1" -> {completion}' in shown


@pytest.mark.parametrize("name", ["gemma2", "gpt_oss"])
def test_caps_and_sinks_of_attention_count_in_samples(name, pretrained, heldout, asking, tmp_path):
    base = tmp_path / "base"
    tiny_model(tiny_config(name)).save_pretrained(base)
    tiny.make_tokenizer(base)
    loaded = {"model_config": None, "model_name_or_path": base, "max_steps": 3}
    assert_greedy(pretrained(tmp_path / "run", **heldout, **asking, **loaded), step=3)


@pytest.mark.parametrize("strategy", ["multi_gpu", "fsdp2", "zero3"])
def test_every_strategy_says_the_same(strategy, pretraining, asking, settings, tmp_path):
    settings |= {"per_device_train_batch_size": 1, "max_steps": 3}
    silent, asked = tmp_path / "silent", tmp_path / "asked"
    argv = pretraining(asked, **settings, **asking)
    shown = run_processes(strategy, "pretrain.py", argv).succeeded()
    assert shown.count('sample (step 3): "t1" -> ') == 1, "by one rank"
    assert_greedy(asked, step=3)
    if strategy != "multi_gpu":  # its model is that of one process
        run_processes(strategy, "pretrain.py", pretraining(silent, **settings)).succeeded()
        tiny.assert_same_run(asked, silent)


def test_chats_go_through_the_template_and_adapters_answer(
    fine_tuned, chats_heldout, workspace, tmp_path
):
    tokenizer = AutoTokenizer.from_pretrained(workspace / "tokenizer")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    prompts, roles = tmp_path / "prompts.jsonl", ("user", "assistant", "user")
    words = zip(roles, ("t5", "t6", "t8"), strict=True)
    chat = [{"role": role, "content": word} for role, word in words]
    prompts.write_text(json.dumps({"messages": chat}) + "\n")
    settings = {
        "use_peft": True, "lora_dropout": 0.1, "tokenizer_name_or_path": tmp_path / "tokenizer",
        "sample_prompts": ["t9", prompts], "sample_max_new_tokens": 4, "max_steps": 3,
    }  # fmt: skip
    run = fine_tuned(tmp_path / "run", **chats_heldout, **settings)
    model = AutoModelForCausalLM.from_pretrained(run / "final")
    rows = samples(run)[3]
    assert [row["prompt"] for row in rows] == ["t9", "t8"]
    for row, asked in zip(rows, ("t9 <pad>", "t5 <pad> t6 <pad> t8 <pad>"), strict=True):
        expected = continued(model, tokenizer(asked)["input_ids"], 4)
        assert row["completion"] == tokenizer.decode(expected)


def test_prompts_that_cannot_be_asked_are_refused_all_at_once(workspace, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(workspace / "tokenizer")
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": 5}\n\n{"messages": []}\n{"prompt": "t1 t2 t3 t4"}\nx\n')
    (tmp_path / "none.txt").write_text("\n")
    for given, problems in (
        ([prompts, ""], [
            f"sample_prompts {prompts}:1: give a text, or an object with `prompt`",
            f"{prompts}:3: give a text",
            f"{prompts}:4: it has 4 tokens, and the model takes 1 to 3",
            f"{prompts}:5: Expecting value", "sample_prompts '': it has 0 tokens",
        ]),
        ([tmp_path / "missing.txt"], ["cannot be read: "]),
        ([tmp_path / "none.txt"], ["is empty"]),
    ):  # fmt: skip
        with pytest.raises(ConfigurationError) as refused:
            load_prompts([str(each) for each in given], tokenizer, chats=False, most_tokens=3)
        for problem in problems:
            assert problem in str(refused.value)
