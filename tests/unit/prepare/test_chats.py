"""Chats and completions: loss tokens, thoughts, refusals, and documents that are too long."""

import os
import re
from pathlib import Path

import numpy as np
import preparation_samples as samples
import pytest
from transformers import AutoTokenizer

from utils.config.errors import ConfigurationError
from utils.data.token_dataset import open_token_dataset
from utils.prepare.chat_masks import MaskedChat
from utils.prepare.chat_templates import EMPTY_THOUGHT
from utils.prepare.encoding import load_prompts
from utils.prepare.tokenization import token_mask
from utils.prepare.tokenizer import attach_template, template_with_defaults
from utils.prepare.values import UnusableRowError

CHATML = Path(samples.CHATML).read_text()


def prepared(folder, rows, template=CHATML, **settings):
    """Prepare rows with a template into folder/out; return the description of the data."""
    folder.mkdir(exist_ok=True)
    samples.prepare(
        sources=[samples.write_jsonl(folder / "chats.jsonl", rows)],
        output_dir=folder / "out",
        tokenizer_name_or_path=samples.saved_tokenizer(folder / "tokenizer", template),
        **settings,
    )
    return samples.description(folder / "out" / "train")


def documents(folder):
    """Return the text and the trained text of each document of folder/out."""
    dataset, tokenizer = open_token_dataset(folder / "out" / "train"), samples.tiny_tokenizer()
    found = [samples.document(dataset, index) for index in range(len(dataset))]
    return [(tokenizer.decode(ids), tokenizer.decode(ids[mask])) for ids, mask in found]


def test_loss_text_is_the_assistant_turns_and_their_ends(tmp_path):
    turns = ("hi", "def f():\n    return 1", "more?", "  no ß")
    records = [samples.chat(*turns, system="be brief"), samples.chat("x", "y")]
    described = prepared(tmp_path, records, None, chat_template=samples.CHATML)
    trained = [answers for _, answers in documents(tmp_path)]
    assert trained == ["def f():\n    return 1<|im_end|>  no ß<|im_end|>", "y<|im_end|>"]
    assert described["loss_mask"] == "assistant_masks"
    content = described["preparation"]
    assert "[[y<|im_end|>]]" not in content["example"]
    assert "[[def f():\n    return 1<|im_end|>]]" in content["example"]
    saved = AutoTokenizer.from_pretrained(tmp_path / "out" / "tokenizer")
    assert saved.decode([content["end_of_turn_token_id"]]) == "<|im_end|>"
    question = [{"role": "user", "content": "x"}]
    prompt = saved.apply_chat_template(question, add_generation_prompt=True, return_dict=True)
    ids, mask = samples.document(open_token_dataset(tmp_path / "out" / "train"), 1)
    assert ids[: mask.argmax()].tolist() == prompt["input_ids"]


def test_chats_without_a_template_are_refused_before_any_work(tmp_path, prepare):
    turns = samples.chat("q", "a")["messages"]
    advice = "the tokenizer has no chat template: give --chat_template FILE"
    for row in ({"messages": turns}, {"prompt": turns[:1], "completion": turns[1:]}):
        source = samples.write_jsonl(tmp_path / "a.jsonl", [row])
        with pytest.raises(ConfigurationError, match=advice):
            prepare("out", sources=[source])
    assert not (tmp_path / "out").exists()


def test_of_messages_with_a_completion_that_alone_is_trained_on(tmp_path):
    """The template gets the tools and template options of a row with prompt and completion."""
    turns = samples.chat("q", "old", "q2", "new")["messages"]
    look = {"type": "function", "function": {"name": "look", "parameters": {}}}
    extras = {"tools": [look], "chat_template_kwargs": {"mood": "glad"}}
    template = "{% if mood %}{{ mood }}{% endif %}" + CHATML
    row = {"prompt": turns[:3], "completion": turns[3:], **extras}
    assert prepared(tmp_path, [row], template)["loss_mask"] == "completion_mask"
    ((text, trained),) = documents(tmp_path)
    assert trained == "new<|im_end|>"
    assert text.startswith("glad<|im_start|>system\n# Tools")
    assert '"name": "look"' in text


def test_overlong_chats_are_dropped_truncated_or_an_error_and_long_texts_kept(tmp_path):
    long = "a " * 200
    rows = [samples.chat("q", "a"), samples.chat("q", long), samples.chat(long, "a")]
    expected = {"drop": (1, {"overlong": 2}, 0), "truncate": (2, {"truncated_without_loss": 1}, 1)}
    for choice, (kept, dropped, truncated) in expected.items():
        content = prepared(tmp_path / choice, rows, sequence_length=64, on_overlong=choice)
        assert content["statistics"]["documents"] == kept
        assert content["statistics"]["longest_document"] <= 64
        assert content["preparation"]["sources"]["dropped"] == dropped
        assert content["preparation"]["sources"]["truncated"] == truncated
    with pytest.raises(ConfigurationError) as refused:
        prepared(tmp_path, rows, sequence_length=64)
    rows, advice = refused.value.problems
    assert re.search(r"chats\.jsonl:2, 3: \d+ tokens, more than the sequence_length of 64", rows)
    assert advice.startswith("2 rows cannot be used: raise --sequence_length, or choose --on_over")
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
    assert documents(tmp_path)[0][0].startswith("14 Nov 2023<|im_start|>user")
    content = samples.description(tmp_path / "out" / "train")["preparation"]
    assert content["settings"]["template_date"] == "2023-11-14"
    assert content["loss_masks"] == "derived"
    samples.prepare(**given, output_dir=tmp_path / "b" / "out", template_date="2026-05-04")
    assert documents(tmp_path / "b")[0][0].startswith("04 May 2026")


def test_a_chat_that_the_template_leaves_out_or_refuses_is_named_or_counted(tmp_path):
    check = "{% if messages|length == 3 %}{{ raise_exception('roles must alternate') }}{% endif %}"
    good, called, refused = (samples.chat(*turns) for turns in ("qa", "qa", "qaq"))
    called["messages"][1]["tool_calls"] = [{"name": "look", "arguments": {"at": "it"}}]
    left_out = r"message 1 \(assistant\): the chat template leaves out its tool calls"
    for row, problem in ((called, left_out), (refused, ".*roles must alternate")):
        with pytest.raises(ConfigurationError, match=rf"chats\.jsonl:2: {problem}"):
            prepared(tmp_path, [good, row], check + DATED)
    rows = [good, called, refused]
    described = prepared(tmp_path / "b", rows, check + DATED, on_bad_row="skip")
    assert described["statistics"]["documents"] == 1
    dropped = {"tool_calls_left_out": 1, "template_refused": 1}
    assert described["preparation"]["sources"]["dropped"] == dropped


def test_thinking_that_the_template_drops_is_counted_and_logged(tmp_path, caplog):
    drops = DATED.replace("m.content", "m.content.split('</think>')[-1]")
    rows = [samples.chat("q", "<think>hm</think>a", "r", "b"), samples.chat("q", "a")]
    with caplog.at_level("INFO"):
        content = prepared(tmp_path, rows, drops)["preparation"]
    assert "1 chats train earlier answers without their thoughts" in caplog.text
    assert content["sources"]["without_earlier_thinking"] == 1


WITHOUT_MARKERS = (
    "{% for m in messages %}<|im_start|>{{ m['role'] + '\n' + m['content'] }}<|im_end|>{% endfor %}"
)
END_NOT_TRAINED = (
    "{% for m in messages %}{{ m['role'] }}"
    "{% generation %}{{ m['content'] }}{% endgeneration %}<|im_end|>{% endfor %}"
)


def test_a_template_without_markers_gets_derived_masks_and_stays_as_it_is(tmp_path, caplog):
    """An answer of weight zero is not trained on."""
    row = samples.chat("q", "a", "r", "b")
    row["messages"][1]["weight"] = 0
    row["messages"][3]["weight"] = 1
    with caplog.at_level("INFO"):
        prepared(tmp_path, [row], WITHOUT_MARKERS)
    assert "derived from its renderings" in caplog.text
    saved = AutoTokenizer.from_pretrained(tmp_path / "out" / "tokenizer")
    assert saved.chat_template == WITHOUT_MARKERS
    assert documents(tmp_path)[0][1] == "b<|im_end|>"


@pytest.mark.parametrize("mark", [{"weight": 0}, {"train": False}])
def test_a_chat_whose_answers_are_all_marked_says_so(tmp_path, mark):
    turns = samples.chat("q", "a", "r", "b")["messages"]
    rows = [{"messages": [turn | mark for turn in turns]}, samples.chat("q", "a")]
    with pytest.raises(ConfigurationError, match="every answer is marked as not trained on"):
        prepared(tmp_path, rows, WITHOUT_MARKERS)


WHOLE = "{% for m in messages %}{{ m.role + '\n' + m.content }}<|im_end|>{% endfor %}"


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        ("{% for m in messages %}", "not valid Jinja"),
        (END_NOT_TRAINED, "the token that ends it"),
        ("{% generation %}" + WHOLE + "{% endgeneration %}", "words of another message"),
        (WHOLE + "{% generation %}<|im_end|>{% endgeneration %}", "some of its words"),
        (WITHOUT_MARKERS.replace("<|im_end|>", "<|other|>"), "ends it.*--add_tokens '<.other.>'"),
        (CHATML.replace("<|im_end|>", "<|other|>"), "no such tokens"),
    ],
)
def test_a_template_whose_masks_would_be_wrong_is_refused(tmp_path, template, problem):
    file = tmp_path / "a.jinja"
    file.write_text(template)
    with pytest.raises(
        ConfigurationError, match=rf"a\.jinja(:| cannot be trained with:) .*{problem}"
    ):
        attach_template(samples.tiny_tokenizer(), str(file))


def test_a_token_across_the_edge_of_a_turn_is_refused_but_for_blanks():
    """In the text "A\n bc" the header is "A\n" and the turn " bc", or the turn is "bc" or "b"."""
    chat = MaskedChat("A\n bc", [(2, 5)])
    for offsets, mask in ([(0, 1), (1, 3), (3, 5)], [0, 0, 1]), ([(0, 2), (2, 5)], [0, 1]):
        assert token_mask(chat, np.array(offsets)).tolist() == mask
    for spans, offsets in ([(3, 5)], [(0, 5)]), ([(3, 4)], [(0, 3), (3, 5)]):
        with pytest.raises(UnusableRowError, match="one token holds the") as refused:
            token_mask(MaskedChat(chat.text, spans), np.array(offsets))
        assert refused.value.reason == "straddled"


# --- thoughts: empty ones are in the prompt or counted; template defaults are saved

# As in Qwen3: the last answer has a thought. With thinking off, the prompt has an empty thought.
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.last %}<think>\n{{ m.reasoning_content or '' }}\n"
    "</think>\n\n{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n"
    "{% endif %}{% endif %}"
)
EMPTY = "<think>\n\n</think>\n\n"
OFF, ON = {"enable_thinking": False}, {"enable_thinking": True}


@pytest.fixture
def trained(tmp_path, prepare):
    """Prepare one chat; return its trained text and the counts."""

    def prepared(name, row, source=None, **settings):
        path = samples.write_jsonl(tmp_path / f"{name}.jsonl", [row])
        tokenizer = samples.saved_tokenizer(tmp_path / "thinking", TEMPLATE)
        source = {"path": str(path), **(source or {})}
        out = prepare(name, sources=[source], tokenizer_name_or_path=tokenizer, **settings)
        ids, mask = samples.document(open_token_dataset(out / "train"), 0)
        counted = samples.description(out / "train")["preparation"]["sources"]
        return samples.tiny_tokenizer().decode(ids[mask]), counted

    return prepared


def test_an_empty_thought_that_is_trained_on_is_counted(trained, caplog):
    caplog.set_level("INFO")
    said, counted = trained("out", samples.chat("q", "Rome", "q", "Paris"))
    assert said == f"Rome<|im_end|>{EMPTY}Paris<|im_end|>"
    assert counted["empty_thoughts"] == 1
    assert "1 answers train an empty thought" in caplog.text


def test_an_empty_thought_of_the_prompt_is_not_counted(tmp_path, prepare):
    """SmolLM3's {% generation %} encloses the thought that its prompt has, too."""
    template = (
        "{% set empty = '' if enable_thinking else '<think>\n\n</think>\n' %}"
        "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}"
        "<|im_start|>assistant\n{{ empty + m.content }}<|im_end|>\n{% endgeneration %}"
        "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n"
    )
    path = samples.write_jsonl(tmp_path / "rows.jsonl", [samples.chat("q", "Rome", "q", "Paris")])
    for name, printed, expected in (("same", "{{ empty }}", 0), ("other", "", 2)):
        tokenizer = samples.saved_tokenizer(
            tmp_path / f"of_{name}", f"{template}{printed}{{% endif %}}"
        )
        source = {"path": str(path), "chat_template_kwargs": OFF}
        out = prepare(name, sources=[source], tokenizer_name_or_path=tokenizer)
        counted = samples.description(out / "train")["preparation"]["sources"]
        assert counted["empty_thoughts"] == expected


@pytest.mark.parametrize(("setting", "thought"), [(OFF, ""), (ON, EMPTY)])
def test_answers_before_the_only_empty_thought_are_counted(trained, caplog, setting, thought):
    """They begin where a model that thinks begins its thought, so they teach it not to think."""
    caplog.set_level("INFO")
    row = samples.chat("q", "Rome", "q", "Oslo", "q", "Paris")
    said, counted = trained("out", row, chat_template_kwargs=setting)
    assert said == f"Rome<|im_end|>Oslo<|im_end|>{thought}Paris<|im_end|>"
    assert counted["answers_without_empty_thought"] == 2
    assert "2 answers have no empty thought" in caplog.text
    row["messages"][1]["weight"] = 0
    assert trained("weighted", row)[1]["answers_without_empty_thought"] == 1
    assert trained("last", samples.chat("q", "Paris"))[1]["answers_without_empty_thought"] == 0


@pytest.mark.parametrize("odd", ["\r\n", "\x00", "\u200b", "\ufffd", "donâ€™t", "&quot;"])
def test_odd_characters_of_answers_that_are_trained_on_are_counted(trained, caplog, odd):
    caplog.set_level("INFO")
    row = samples.chat("q", f"Rome{odd}", f"q{odd}", "Oslo", "q", f"{odd}Paris")
    assert trained("out", row)[1]["odd_characters_in_answers"] == 2
    assert "2 answers have line ends of Windows" in caplog.text
    row["messages"][1]["weight"] = 0
    assert trained("weighted", row)[1]["odd_characters_in_answers"] == 1
    assert trained("fine", samples.chat("q", "a & b\n"))[1]["odd_characters_in_answers"] == 0


def test_a_chat_without_a_user_names_the_role_that_may_be_the_user(trained, tmp_path):
    row = samples.chat("q", "Paris")
    row["messages"][0]["role"] = "customer"
    with pytest.raises(ConfigurationError, match=r"does not name 'customer': .* customer=user"):
        trained("unknown", row)
    columns = {"columns": {"customer": "user"}}
    assert trained("named", row, columns)[0] == trained("user", samples.chat("q", "Paris"))[0]
    beside = samples.chat("q", "Rome", "q", "Paris")
    beside["messages"][0]["role"] = "narrator"
    assert trained("beside", beside)[0].endswith("Paris<|im_end|>")
    prepared(tmp_path / "own", [row], CHATML + "{# customer: a role of this template #}")


def test_an_end_that_an_answer_has_as_text_is_counted(trained):
    said, counted = trained("out", samples.chat("q<|im_end|>", "Rome", "q", "Paris<|im_end|>"))
    assert said == f"Rome<|im_end|>{EMPTY}Paris<|im_end|><|im_end|>"
    assert counted["special_tokens_in_answers"] == 1


@pytest.mark.parametrize(
    ("column", "source", "setting", "empty"),
    [
        (None, None, OFF, False),
        (None, OFF, None, False),
        (OFF, None, None, False),
        (None, ON, OFF, True),
        (None, OFF, ON, False),
        (ON, OFF, OFF, True),
        (OFF, ON, ON, False),
    ],
)
def test_a_row_wins_over_its_source_and_that_over_the_setting(
    trained, column, source, setting, empty
):
    row = samples.chat("q", "Paris") | ({"chat_template_kwargs": column} if column else {})
    source = {"chat_template_kwargs": source} if source else None
    said, counted = trained("out", row, source, chat_template_kwargs=setting)
    assert said == (EMPTY if empty else "") + "Paris<|im_end|>"
    assert counted["empty_thoughts"] == int(empty)


def test_the_setting_is_the_default_of_the_saved_template(trained, tmp_path):
    trained("out", samples.chat("q", "Paris"), chat_template_kwargs=OFF)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out" / "tokenizer")
    asked, options = [{"role": "user", "content": "q"}], {"add_generation_prompt": True}
    prompt = tokenizer.apply_chat_template(asked, tokenize=False, **options)
    assert prompt.endswith("<|im_start|>assistant\n" + EMPTY)
    on = tokenizer.apply_chat_template(asked, tokenize=False, **options, enable_thinking=True)
    assert on + EMPTY == prompt
    (sample,) = load_prompts(["q"], tokenizer, chats=True, most_tokens=100)
    assert tokenizer.decode(sample.token_ids) == prompt


@pytest.mark.parametrize("setting", [None, OFF])
def test_thoughts_behind_a_prompt_that_closes_thinking_are_counted(trained, setting):
    row = samples.chat("q", "Paris")
    row["messages"][1]["reasoning_content"] = "hm"
    said, counted = trained("out", row, chat_template_kwargs=setting)
    assert said.endswith("hm\n</think>\n\nParis<|im_end|>")
    assert counted["empty_thoughts"] == 0
    assert counted["thoughts_after_closed_prompts"] == int(setting is not None)


EMPTY_THOUGHTS = [
    *("<think>\n\n</think>", "<think></think>", "<seed:think> </seed:think>"),
    *("[THINK][/THINK]", "◁think▷◁/think▷", "<|channel>thought\n<channel|>"),
    *("<thinking>\n</thinking>", "<|START_THINKING|><|END_THINKING|>"),
]
NOT_EMPTY = ["<think>\nhm\n</think>", "<think>", "</think>", "<think></thinking>", "<b></b>", "[]"]


def test_empty_thoughts_are_known_as_templates_print_them():
    assert all(map(EMPTY_THOUGHT.fullmatch, EMPTY_THOUGHTS))
    assert not any(map(EMPTY_THOUGHT.search, NOT_EMPTY))


@pytest.mark.parametrize("beginning", ["", "\n", "  ", "\n  {% if x %}{% endif %}\n "])
def test_defaults_change_nothing_else_of_a_template(beginning):
    template = beginning + "{{ x }}|{{ y }}|{{ z }}"
    values = {"x": "a\"b\n%} 'ß", "y": {"k": [1, None, True]}, "z": None, "unread": 1}
    tokenizer = samples.tiny_tokenizer(template)
    asked = [{"role": "user", "content": "q"}]
    expected = tokenizer.apply_chat_template(asked, tokenize=False, **values)
    plain = tokenizer.apply_chat_template(asked, tokenize=False, x="1", y="2")
    tokenizer.chat_template = template_with_defaults(template, values)
    assert "unread" not in tokenizer.chat_template
    given = tokenizer.apply_chat_template(asked, tokenize=False, z=None)
    assert given == expected
    assert tokenizer.apply_chat_template(asked, tokenize=False, x="1", y="2") == plain


def test_a_variable_that_the_template_does_not_read_is_named(trained, caplog):
    said, _ = trained(
        "out",
        samples.chat("q", "Paris"),
        {"chat_template_kwargs": {"thinking": True}},
        chat_template_kwargs={"enable_thinkin": False},
    )
    assert said.startswith(EMPTY)
    for name in ("enable_thinkin", "thinking"):
        assert f"the chat template reads no {name}, so it has no effect" in caplog.text


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([1], "give a mapping, such as"),
        ({"messages": []}, "messages is given with each chat"),
    ],
)
def test_variables_that_cannot_be_are_refused(tmp_path, prepare, source, given, message):
    with pytest.raises(ConfigurationError, match=message):
        prepare("out", sources=[{"path": str(source), "chat_template_kwargs": given}])
    if isinstance(given, dict):
        with pytest.raises(ConfigurationError, match=message):
            prepare("out", sources=[source], chat_template_kwargs=given)


def test_variables_of_a_source_of_texts_are_refused(prepare, source):
    entry = {"path": str(source), "chat_template_kwargs": OFF}
    with pytest.raises(ConfigurationError, match="are for chats, and this is text: leave them out"):
        prepare("out", sources=[entry])
