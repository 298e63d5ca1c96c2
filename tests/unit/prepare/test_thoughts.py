"""Thoughts in chats: empty thoughts are in the prompt or counted; template defaults are saved."""

import preparation_samples as samples
import pytest
from transformers import AutoTokenizer

from utils.config.errors import ConfigurationError
from utils.data.token_dataset import open_token_dataset
from utils.prepare.encoding import load_prompts
from utils.prepare.tokenization import EMPTY_THOUGHT
from utils.prepare.tokenizer import template_with_defaults

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
        ({"enable thinking": True}, "'enable thinking' is no name of a variable"),
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
