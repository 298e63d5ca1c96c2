from pathlib import Path

import preparation_samples as samples
import pytest
import trl

from utils.config.errors import ConfigurationError
from utils.data.preparation.chats import (
    attach_training_template,
    end_of_turn_id,
    read_chat_template,
    render,
    render_batch,
    render_completion,
)
from utils.data.preparation.documents import ChatDocument
from utils.data.preparation.records import Place

TRL_TEMPLATES = Path(trl.__file__).parent / "chat_templates"
WITHOUT_MARKERS = "{% for m in messages %}{{ m['role'] + m['content'] }}<|im_end|>{% endfor %}"
END_NOT_TRAINED = (
    "{% for m in messages %}{{ m['role'] }}"
    "{% generation %}{{ m['content'] }}{% endgeneration %}<|im_end|>{% endfor %}"
)


def trained_text(tokenizer, ids, mask) -> str:
    return tokenizer.decode([token for token, bears in zip(ids, mask, strict=True) if bears])


CONVERSATIONS = [
    ("q", "a"),
    ("q", "first answer", "q2\n", "    second\n\nanswer\n"),
    ("ß 漢字", "\U0001f600"),
    ("q", "", "q", "not empty"),
    ("a" * 300, "b c " * 200, "d", "e", "f", "g"),
]


@pytest.mark.parametrize("contents", CONVERSATIONS)
@pytest.mark.parametrize("system", [None, "you are terse"])
def test_chatml_trains_the_answers_and_their_ends_and_nothing_else(contents, system):
    tokenizer = samples.chatml_tokenizer()
    messages = samples.chat(*contents, system=system)["messages"]
    ids, mask = render(tokenizer, messages, None)
    answers = [m["content"] + "<|im_end|>" for m in messages if m["role"] == "assistant"]
    assert trained_text(tokenizer, ids, mask) == "".join(answers)
    everything = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages)
    assert tokenizer.decode(ids) == everything


@pytest.mark.parametrize("contents", CONVERSATIONS)
def test_what_is_trained_continues_what_generation_starts_from(contents):
    tokenizer = samples.chatml_tokenizer()
    messages = samples.chat(*contents)["messages"]
    ids, mask = render(tokenizer, messages, None)
    prompt = tokenizer.apply_chat_template(
        messages[:1], add_generation_prompt=True, return_dict=True
    )["input_ids"]
    assert ids[: len(prompt)] == prompt
    assert mask[: len(prompt) + 1] == [0] * len(prompt) + [1]


def test_a_batch_is_rendered_like_its_chats_one_by_one():
    tokenizer = samples.chatml_tokenizer()
    chats = [samples.chat(*contents)["messages"] for contents in CONVERSATIONS]
    ids, masks = render_batch(tokenizer, [ChatDocument(c, Place("a")) for c in chats])
    singly = [render(tokenizer, chat, None) for chat in chats]
    assert list(zip(ids, masks, strict=True)) == singly


def test_only_the_completion_of_a_conversation_bears_loss():
    tokenizer = samples.chatml_tokenizer()
    messages = samples.chat("q", "old answer", "q2", "new answer")["messages"]
    ids, mask = render_completion(tokenizer, messages[:3], messages[3:])
    assert trained_text(tokenizer, ids, mask) == "new answer<|im_end|>"
    assert ids == render(tokenizer, messages, None)[0]


def test_a_template_that_renders_the_prompt_differently_is_refused_for_completions():
    template = Path(samples.CHATML).read_text()
    tokenizer = samples.tiny_tokenizer("{{ messages | length }}" + template)
    messages = samples.chat("q", "a")["messages"]
    with pytest.raises(ValueError, match="renders the prompt differently"):
        render_completion(tokenizer, messages[:1], messages[1:])


def test_the_shipped_template_is_accepted_and_ends_turns_with_its_token():
    tokenizer = samples.tiny_tokenizer()
    attach_training_template(tokenizer, samples.CHATML)
    assert tokenizer.chat_template == Path(samples.CHATML).read_text()
    assert end_of_turn_id(tokenizer) == tokenizer.convert_tokens_to_ids("<|im_end|>")


def test_the_end_of_an_answer_is_not_that_of_a_part_of_it():
    """gpt-oss ends its last answer with <|return|>; thinking and earlier answers with <|end|>."""
    template = (
        "{% for m in messages %}{% if m.role == 'user' %}<|im_start|>{{ m.content }}<|im_end|>"
        "{% else %}<|im_start|>{% generation %}{{ m.content }}"
        "{{ '<|endoftext|>' if loop.last else '<|im_end|>' }}{% endgeneration %}{% endif %}"
        "{% endfor %}"
    )
    tokenizer = samples.tiny_tokenizer(template)
    assert end_of_turn_id(tokenizer) == tokenizer.convert_tokens_to_ids("<|endoftext|>")
    bare = template.replace("'<|endoftext|>'", "''")  # its last answer ends with nothing
    tokenizer = samples.tiny_tokenizer(bare)
    assert end_of_turn_id(tokenizer) == tokenizer.convert_tokens_to_ids("<|im_end|>")


def test_a_known_template_without_markers_gets_the_training_version_of_trl():
    tokenizer = samples.tiny_tokenizer((TRL_TEMPLATES / "qwen2_5.jinja").read_text())
    attach_training_template(tokenizer, None)
    assert tokenizer.chat_template == (TRL_TEMPLATES / "qwen2_5_training.jinja").read_text()
    ids, mask = render(tokenizer, samples.chat("q", "a")["messages"], None)
    assert trained_text(tokenizer, ids, mask).strip() == "a<|im_end|>"


def test_no_chat_template_is_refused_with_one_to_take():
    with pytest.raises(ConfigurationError, match=r"no chat template: give --chat_template FILE"):
        attach_training_template(samples.tiny_tokenizer(), None)


def test_a_template_without_markers_is_refused():
    with pytest.raises(ConfigurationError, match=r"has no \{% generation %\} markers"):
        attach_training_template(samples.tiny_tokenizer(WITHOUT_MARKERS), None)


def test_a_template_that_does_not_train_the_end_of_turn_is_refused(tmp_path):
    (tmp_path / "a.jinja").write_text(END_NOT_TRAINED)
    with pytest.raises(ConfigurationError, match=r"a\.jinja: the token that ends the assistant's"):
        attach_training_template(samples.tiny_tokenizer(), str(tmp_path / "a.jinja"))


def test_an_end_of_turn_that_is_no_token_of_the_tokenizer_is_refused(tmp_path):
    text = Path(samples.CHATML).read_text().replace("<|im_end|>", "<|unknown_end|>")
    (tmp_path / "a.jinja").write_text(text)
    with pytest.raises(ConfigurationError, match="one special token of this tokenizer"):
        attach_training_template(samples.tiny_tokenizer(), str(tmp_path / "a.jinja"))


def test_a_broken_or_missing_template_file_is_named(tmp_path):
    (tmp_path / "a.jinja").write_text("{% for m in messages %}")
    with pytest.raises(ConfigurationError, match=r"a\.jinja: not valid Jinja"):
        read_chat_template(str(tmp_path / "a.jinja"))
    with pytest.raises(ConfigurationError, match=r"b\.jinja: cannot be read"):
        read_chat_template(str(tmp_path / "b.jinja"))
    with pytest.raises(ConfigurationError, match="cannot be read"):
        read_chat_template(str(tmp_path))
