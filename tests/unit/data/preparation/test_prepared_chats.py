"""Chats and completions: what bears loss, and those that are too long."""

import json
import os
from pathlib import Path

import numpy as np
import preparation_samples as samples
import pytest

from utils.config.errors import ConfigurationError
from utils.data.token_dataset import open_token_dataset

pytestmark = pytest.mark.usefixtures("small_units")


def test_loss_text_is_the_assistant_turns_and_their_ends(tmp_path):
    records = [
        samples.chat("hi", "def f():\n    return 1", "more?", "  no ß", system="be brief"),
        samples.chat("x", "y"),
    ]
    samples.prepare(
        sources=[samples.write_jsonl(tmp_path / "chats.jsonl", records)],
        output_dir=tmp_path / "out",
        tokenizer_name_or_path=samples.saved_tokenizer(tmp_path / "tokenizer"),
        chat_template=samples.CHATML,
    )
    dataset = open_token_dataset(tmp_path / "out" / "train")
    tokenizer = samples.tiny_tokenizer()
    documents = [samples.document(dataset, i) for i in range(len(dataset))]
    trained = [tokenizer.decode(tokens[mask]) for tokens, mask in documents]
    assert trained == ["def f():\n    return 1<|im_end|>  no ß<|im_end|>", "y<|im_end|>"]
    assert dataset.loss_mask == "assistant_masks"
    content = json.loads((tmp_path / "out" / "train" / "stoker.json").read_text())["preparation"]
    assert "[[y<|im_end|>]]" not in content["example"]
    assert "[[def f():\n    return 1<|im_end|>]]" in content["example"]
    assert tokenizer.decode([content["end_of_turn_token_id"]]) == "<|im_end|>"


def test_the_saved_tokenizer_generates_with_the_template_of_the_data(tmp_path):
    from transformers import AutoTokenizer

    samples.prepare(
        sources=[samples.write_jsonl(tmp_path / "a.jsonl", [samples.chat("q", "answer")])],
        output_dir=tmp_path / "out",
        tokenizer_name_or_path=samples.saved_tokenizer(tmp_path / "tokenizer"),
        chat_template=samples.CHATML,
    )
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out" / "tokenizer")
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "q"}], add_generation_prompt=True, return_dict=True
    )["input_ids"]
    dataset = open_token_dataset(tmp_path / "out" / "train")
    tokens, mask = samples.document(dataset, 0)
    assert tokens[: int(np.argmax(mask))].tolist() == prompt


@pytest.mark.parametrize("tokenizer", ["given", "trained"])
@pytest.mark.parametrize("kind", ["messages", "prompt_completion"])
def test_chats_without_a_template_are_refused_before_any_work(tmp_path, tokenizer, kind):
    turns = samples.chat("q", "a")["messages"]
    row = {"messages": turns} if kind == "messages" else {"prompt": turns[:1]}
    row |= {} if kind == "messages" else {"completion": turns[1:]}
    settings = {"train_tokenizer": 300}
    if tokenizer == "given":
        settings = {"tokenizer_name_or_path": samples.saved_tokenizer(tmp_path / "tokenizer")}
    with pytest.raises(ConfigurationError, match="the tokenizer has no chat template"):
        samples.prepare(
            sources=[samples.write_jsonl(tmp_path / "a.jsonl", [row])],
            output_dir=tmp_path / "out",
            **settings,
        )
    assert not (tmp_path / "out").exists()


def test_completions_made_of_messages_are_trained_on_in_the_completion_alone(tmp_path):
    turns = samples.chat("q", "old", "q2", "new")["messages"]
    samples.prepare(
        sources=[
            samples.write_jsonl(
                tmp_path / "a.jsonl", [{"prompt": turns[:3], "completion": turns[3:]}]
            )
        ],
        output_dir=tmp_path / "out",
        tokenizer_name_or_path=samples.saved_tokenizer(tmp_path / "tokenizer"),
        chat_template=samples.CHATML,
    )
    dataset = open_token_dataset(tmp_path / "out" / "train")
    tokens, mask = samples.document(dataset, 0)
    assert samples.tiny_tokenizer().decode(tokens[mask]) == "new<|im_end|>"
    assert dataset.loss_mask == "completion_mask"


def overlong_chats(tmp_path):
    long_answer, long_question = samples.chat("q", "a " * 200), samples.chat("q " * 200, "a")
    return samples.write_jsonl(
        tmp_path / "chats.jsonl", [samples.chat("q", "a"), long_answer, long_question]
    )


@pytest.mark.parametrize(
    ("on_overlong", "documents", "dropped", "truncated"),
    [
        ("drop", 1, {"overlong": 2}, 0),
        ("truncate", 2, {"truncated_without_loss": 1}, 1),
    ],
)
def test_overlong_chats_are_dropped_or_truncated_and_counted(
    tmp_path, on_overlong, documents, dropped, truncated
):
    samples.prepare(
        sources=[overlong_chats(tmp_path)],
        output_dir=tmp_path / "out",
        tokenizer_name_or_path=samples.saved_tokenizer(tmp_path / "tokenizer"),
        chat_template=samples.CHATML,
        sequence_length=64,
        on_overlong=on_overlong,
    )
    content = json.loads((tmp_path / "out" / "train" / "stoker.json").read_text())
    assert content["statistics"]["documents"] == documents
    assert content["statistics"]["longest_document"] <= 64
    assert content["preparation"]["sources"]["dropped"] == dropped
    assert content["preparation"]["sources"]["truncated"] == truncated


def test_an_overlong_chat_is_an_error_that_names_its_line(tmp_path):
    with pytest.raises(ConfigurationError, match=r"chats\.jsonl:2: \d+ tokens, more than the sequ"):
        samples.prepare(
            sources=[overlong_chats(tmp_path)],
            output_dir=tmp_path / "out",
            tokenizer_name_or_path=samples.saved_tokenizer(tmp_path / "tokenizer"),
            chat_template=samples.CHATML,
            sequence_length=64,
        )


def test_long_texts_are_kept_whole(tmp_path, tokenizer):
    source = samples.write_jsonl(tmp_path / "a.jsonl", [{"text": "a b " * 500}])
    samples.prepare(
        sources=[source],
        output_dir=tmp_path / "out",
        tokenizer_name_or_path=tokenizer,
        sequence_length=64,
    )
    assert len(samples.rows(tmp_path / "out" / "train")[0]) > 500


DATED = (
    "{{ strftime_now('%d %b %Y') }}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_a_date_that_the_template_prints_is_that_of_the_sources_in_every_shard(tmp_path, caplog):
    source = samples.write_jsonl(tmp_path / "a.jsonl", [samples.chat("q", "a")])
    os.utime(source, (1_700_000_000, 1_700_000_000))
    tokenizer = samples.saved_tokenizer(tmp_path / "tokenizer", DATED)
    with caplog.at_level("INFO"):
        samples.prepare(
            sources=[source], output_dir=tmp_path / "out", tokenizer_name_or_path=tokenizer
        )
    assert "prints today's date: it is 2023-11-14 in this data (--template_date)" in caplog.text
    text = samples.tiny_tokenizer().decode(samples.rows(tmp_path / "out" / "train")[0])
    assert text.startswith("14 Nov 2023<|im_start|>user")
    content = json.loads((tmp_path / "out" / "train" / "stoker.json").read_text())["preparation"]
    assert content["settings"]["template_date"] == "2023-11-14"
    assert content["loss_masks"] == "derived"


def test_a_given_date_is_printed_and_a_wrong_one_refused(tmp_path):
    source = samples.write_jsonl(tmp_path / "a.jsonl", [samples.chat("q", "a")])
    given = {
        "sources": [source],
        "tokenizer_name_or_path": samples.saved_tokenizer(tmp_path / "tokenizer", DATED),
    }
    samples.prepare(**given, output_dir=tmp_path / "out", template_date="2026-05-04")
    text = samples.tiny_tokenizer().decode(samples.rows(tmp_path / "out" / "train")[0])
    assert text.startswith("04 May 2026")
    with pytest.raises(ConfigurationError, match="template_date is '4 May': give a day as YYYY-MM"):
        samples.prepare(**given, output_dir=tmp_path / "other", template_date="4 May")


def test_tools_and_template_options_reach_the_template_beside_a_prompt(tmp_path):
    options = "{% if mood %}{{ mood }}{% endif %}"
    template = tmp_path / "a.jinja"
    template.write_text(options + Path(samples.CHATML).read_text())
    turns = samples.chat("q", "a")["messages"]
    look = {"type": "function", "function": {"name": "look", "parameters": {}}}
    extras = {"tools": [look], "chat_template_kwargs": {"mood": "glad"}}
    row = {"prompt": turns[:1], "completion": turns[1:], **extras}
    samples.prepare(
        sources=[samples.write_jsonl(tmp_path / "a.jsonl", [row])],
        output_dir=tmp_path / "out",
        tokenizer_name_or_path=samples.saved_tokenizer(tmp_path / "tokenizer"),
        chat_template=str(template),
    )
    text = samples.tiny_tokenizer().decode(samples.rows(tmp_path / "out" / "train")[0])
    assert text.startswith("glad<|im_start|>system\n# Tools")
    assert '"name": "look"' in text


@pytest.mark.parametrize("on_bad_row", ["error", "skip"])
def test_a_chat_whose_calls_are_left_out_is_named_or_counted(tmp_path, on_bad_row):
    called = samples.chat("q", "a")
    called["messages"][1]["tool_calls"] = [
        {"type": "function", "function": {"name": "look", "arguments": {"at": "it"}}}
    ]
    settings = {
        "sources": [samples.write_jsonl(tmp_path / "a.jsonl", [samples.chat("q", "a"), called])],
        "output_dir": tmp_path / "out",
        "tokenizer_name_or_path": samples.saved_tokenizer(tmp_path / "tokenizer", DATED),
        "on_bad_row": on_bad_row,
    }
    if on_bad_row == "error":
        where = r"a\.jsonl:2: message 1 \(assistant\): the chat template leaves out its tool calls"
        with pytest.raises(ConfigurationError, match=where):
            samples.prepare(**settings)
        return
    samples.prepare(**settings)
    content = json.loads((tmp_path / "out" / "train" / "stoker.json").read_text())["preparation"]
    assert content["sources"]["dropped"] == {"tool_calls_left_out": 1}


def test_thinking_that_the_template_drops_is_counted_and_logged(tmp_path, caplog):
    drops = DATED.replace("m.content", "m.content.split('</think>')[-1]")
    chat = samples.chat("q", "<think>hm</think>a", "r", "b")
    with caplog.at_level("INFO"):
        samples.prepare(
            sources=[samples.write_jsonl(tmp_path / "a.jsonl", [chat, samples.chat("q", "a")])],
            output_dir=tmp_path / "out",
            tokenizer_name_or_path=samples.saved_tokenizer(tmp_path / "tokenizer", drops),
        )
    assert "left out by the chat template in 1 chats" in caplog.text
    content = json.loads((tmp_path / "out" / "train" / "stoker.json").read_text())["preparation"]
    assert content["sources"]["without_earlier_thinking"] == 1
