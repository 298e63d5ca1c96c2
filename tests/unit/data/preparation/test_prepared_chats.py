"""Chats and completions: what is trained on, and those that are too long."""

import json
import os
from pathlib import Path

import numpy as np
import preparation_samples as samples
import pytest
from transformers import AutoTokenizer

from utils.config.errors import ConfigurationError
from utils.data.token_dataset import open_token_dataset

CHATML = Path(samples.CHATML)
pytestmark = pytest.mark.usefixtures("small_units")


def prepared(tmp_path, rows, template=CHATML, **settings):
    """Prepare rows with a template (text or file) into out/; return what describes them."""
    as_file = {"chat_template": str(template)} if isinstance(template, Path) else {}
    text = None if as_file else template
    samples.prepare(
        sources=[samples.write_jsonl(tmp_path / "chats.jsonl", rows)],
        output_dir=tmp_path / "out",
        tokenizer_name_or_path=samples.saved_tokenizer(tmp_path / "tokenizer", text),
        **as_file,
        **settings,
    )
    return json.loads((tmp_path / "out" / "train" / "stoker.json").read_text())


def first_text(tmp_path):
    return samples.tiny_tokenizer().decode(samples.rows(tmp_path / "out" / "train")[0])


def test_loss_text_is_the_assistant_turns_and_their_ends(tmp_path):
    records = [
        samples.chat("hi", "def f():\n    return 1", "more?", "  no ß", system="be brief"),
        samples.chat("x", "y"),
    ]
    content = prepared(tmp_path, records)["preparation"]
    dataset = open_token_dataset(tmp_path / "out" / "train")
    tokenizer = samples.tiny_tokenizer()
    documents = [samples.document(dataset, i) for i in range(len(dataset))]
    trained = [tokenizer.decode(tokens[mask]) for tokens, mask in documents]
    assert trained == ["def f():\n    return 1<|im_end|>  no ß<|im_end|>", "y<|im_end|>"]
    assert dataset.loss_mask == "assistant_masks"
    assert "[[y<|im_end|>]]" not in content["example"]
    assert "[[def f():\n    return 1<|im_end|>]]" in content["example"]
    assert tokenizer.decode([content["end_of_turn_token_id"]]) == "<|im_end|>"
    saved = AutoTokenizer.from_pretrained(tmp_path / "out" / "tokenizer")
    prompt = saved.apply_chat_template(
        [{"role": "user", "content": "x"}], add_generation_prompt=True, return_dict=True
    )["input_ids"]
    tokens, mask = documents[1]
    assert tokens[: int(np.argmax(mask))].tolist() == prompt


@pytest.mark.parametrize("kind", ["messages", "prompt_completion"])
def test_chats_without_a_template_are_refused_before_any_work(tmp_path, kind):
    turns = samples.chat("q", "a")["messages"]
    row = {"messages": turns} if kind == "messages" else {"prompt": turns[:1]}
    row |= {} if kind == "messages" else {"completion": turns[1:]}
    source = samples.write_jsonl(tmp_path / "a.jsonl", [row])
    given = {"tokenizer_name_or_path": samples.saved_tokenizer(tmp_path / "tokenizer")}
    for tokenizer in (given, {"train_tokenizer": 300}):
        with pytest.raises(ConfigurationError, match="the tokenizer has no chat template"):
            samples.prepare(sources=[source], output_dir=tmp_path / "out", **tokenizer)
    assert not (tmp_path / "out").exists()


def test_of_messages_with_a_completion_that_alone_is_trained_on(tmp_path):
    """Tools and template options reach the template beside a prompt, too."""
    template = tmp_path / "a.jinja"
    template.write_text("{% if mood %}{{ mood }}{% endif %}" + CHATML.read_text())
    turns = samples.chat("q", "old", "q2", "new")["messages"]
    look = {"type": "function", "function": {"name": "look", "parameters": {}}}
    extras = {"tools": [look], "chat_template_kwargs": {"mood": "glad"}}
    prepared(tmp_path, [{"prompt": turns[:3], "completion": turns[3:], **extras}], template)
    dataset = open_token_dataset(tmp_path / "out" / "train")
    tokens, mask = samples.document(dataset, 0)
    assert samples.tiny_tokenizer().decode(tokens[mask]) == "new<|im_end|>"
    assert dataset.loss_mask == "completion_mask"
    text = first_text(tmp_path)
    assert text.startswith("glad<|im_start|>system\n# Tools")
    assert '"name": "look"' in text


OVERLONG = [samples.chat("q", "a"), samples.chat("q", "a " * 200), samples.chat("q " * 200, "a")]


def test_overlong_chats_are_dropped_truncated_or_an_error_and_long_texts_kept(tmp_path):
    expected = {"drop": (1, {"overlong": 2}, 0), "truncate": (2, {"truncated_without_loss": 1}, 1)}
    for choice, (documents, dropped, truncated) in expected.items():
        (folder := tmp_path / choice).mkdir()
        content = prepared(folder, OVERLONG, sequence_length=64, on_overlong=choice)
        assert content["statistics"]["documents"] == documents
        assert content["statistics"]["longest_document"] <= 64
        assert content["preparation"]["sources"]["dropped"] == dropped
        assert content["preparation"]["sources"]["truncated"] == truncated
    with pytest.raises(ConfigurationError, match=r"chats\.jsonl:2: \d+ tokens, more than the sequ"):
        prepared(tmp_path, OVERLONG, sequence_length=64)
    (tmp_path / "texts").mkdir()
    content = prepared(tmp_path / "texts", [{"text": "a b " * 500}], None, sequence_length=64)
    assert content["statistics"]["longest_document"] > 500


DATED = (
    "{{ strftime_now('%d %b %Y') }}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_a_date_that_the_template_prints_is_that_of_the_sources_or_the_given_one(tmp_path, caplog):
    source = samples.write_jsonl(tmp_path / "a.jsonl", [samples.chat("q", "a")])
    os.utime(source, (1_700_000_000, 1_700_000_000))
    tokenizer = samples.saved_tokenizer(tmp_path / "tokenizer", DATED)
    given = {"sources": [source], "tokenizer_name_or_path": tokenizer}
    with caplog.at_level("INFO"):
        samples.prepare(**given, output_dir=tmp_path / "out")
    assert "prints today's date: it is 2023-11-14 in this data (--template_date)" in caplog.text
    assert first_text(tmp_path).startswith("14 Nov 2023<|im_start|>user")
    content = json.loads((tmp_path / "out" / "train" / "stoker.json").read_text())["preparation"]
    assert content["settings"]["template_date"] == "2023-11-14"
    assert content["loss_masks"] == "derived"
    samples.prepare(**given, output_dir=tmp_path / "b" / "out", template_date="2026-05-04")
    assert first_text(tmp_path / "b").startswith("04 May 2026")
    with pytest.raises(ConfigurationError, match="template_date is '4 May': give a day as YYYY-MM"):
        samples.prepare(**given, output_dir=tmp_path / "other", template_date="4 May")


def test_a_chat_whose_calls_are_left_out_is_named_or_counted(tmp_path):
    called = samples.chat("q", "a")
    called["messages"][1]["tool_calls"] = [{"name": "look", "arguments": {"at": "it"}}]
    rows = [samples.chat("q", "a"), called]
    where = r"chats\.jsonl:2: message 1 \(assistant\): the chat template leaves out its tool calls"
    with pytest.raises(ConfigurationError, match=where):
        prepared(tmp_path, rows, DATED)
    (tmp_path / "b").mkdir()
    content = prepared(tmp_path / "b", rows, DATED, on_bad_row="skip")["preparation"]
    assert content["sources"]["dropped"] == {"tool_calls_left_out": 1}


def test_thinking_that_the_template_drops_is_counted_and_logged(tmp_path, caplog):
    drops = DATED.replace("m.content", "m.content.split('</think>')[-1]")
    chat = samples.chat("q", "<think>hm</think>a", "r", "b")
    with caplog.at_level("INFO"):
        content = prepared(tmp_path, [chat, samples.chat("q", "a")], drops)["preparation"]
    assert "1 chats lost the thinking of their earlier turns" in caplog.text
    assert content["sources"]["without_earlier_thinking"] == 1
