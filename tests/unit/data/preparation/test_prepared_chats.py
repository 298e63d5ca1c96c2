"""Chats and completions: what bears loss, and those that are too long."""

import json

import numpy as np
import preparation_samples as samples
import pytest

from utils.config.errors import ConfigurationError
from utils.data.token_dataset import open_token_dataset

pytestmark = pytest.mark.usefixtures("small_units")


def test_loss_bearing_text_is_the_assistant_turns_and_their_ends(tmp_path):
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
    trained = [
        tokenizer.decode(dataset.tokens(i)[dataset.loss_mask_of(i)]) for i in range(len(dataset))
    ]
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
    first_trained = int(np.argmax(dataset.loss_mask_of(0)))
    assert dataset.tokens(0)[:first_trained].tolist() == prompt


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


def test_completions_made_of_messages_bear_loss_in_the_completion_alone(tmp_path):
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
    trained = dataset.tokens(0)[dataset.loss_mask_of(0)]
    assert samples.tiny_tokenizer().decode(trained) == "new<|im_end|>"
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
