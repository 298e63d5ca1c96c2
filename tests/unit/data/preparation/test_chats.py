from pathlib import Path

import numpy as np
import preparation_samples as samples
import pytest

from utils.config.errors import ConfigurationError
from utils.data.prepare.chat_masks import MaskedChat
from utils.data.prepare.documents import ChatDocument
from utils.data.prepare.records import Location
from utils.data.prepare.rows import UnusableRowError
from utils.data.prepare.tokenization import DocumentTokenizer, token_mask
from utils.data.prepare.tokenizer import attach_template, end_of_turn_id, read_chat_template

WITHOUT_MARKERS = (
    "{% for m in messages %}<|im_start|>{{ m['role'] + '\n' + m['content'] }}<|im_end|>{% endfor %}"
)
END_NOT_TRAINED = (
    "{% for m in messages %}{{ m['role'] }}"
    "{% generation %}{{ m['content'] }}{% endgeneration %}<|im_end|>{% endfor %}"
)


def trained_on(tokenizer, messages):
    """Return the decoded text that is trained on."""
    (found,) = DocumentTokenizer(tokenizer)([ChatDocument(messages, Location("a.jsonl"))])
    return tokenizer.decode(found.ids[found.loss_mask == 1])


@pytest.mark.parametrize("markers", [True, False])
def test_the_end_of_an_answer_is_not_that_of_a_part_of_it(markers):
    """gpt-oss ends its last answer with <|return|>; thinking and earlier answers with <|end|>."""
    template = (
        "{% for m in messages %}{% if m.role == 'user' %}<|im_start|>{{ m.content }}<|im_end|>"
        "{% else %}<|im_start|>{% generation %}{{ m.content }}"
        "{{ '<|endoftext|>' if loop.last else '<|im_end|>' }}{% endgeneration %}{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>{% endif %}"
    )
    if not markers:
        template = template.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    tokenizer = samples.tiny_tokenizer(template)
    assert end_of_turn_id(tokenizer) == tokenizer.convert_tokens_to_ids("<|endoftext|>")


def test_a_template_without_markers_gets_derived_masks_and_stays_as_it_is(caplog):
    """An answer of weight zero is not trained on."""
    tokenizer = samples.tiny_tokenizer(WITHOUT_MARKERS)
    with caplog.at_level("INFO"):
        attach_template(tokenizer, None)
    assert "derived from its renderings" in caplog.text
    assert tokenizer.chat_template == WITHOUT_MARKERS
    messages = samples.chat("q", "a", "r", "b", "s", "c")["messages"]
    messages[1]["weight"] = 0
    messages[3]["weight"] = 1
    assert trained_on(tokenizer, messages) == "b<|im_end|>c<|im_end|>"


WHOLE = "{% for m in messages %}{{ m.role + '\n' + m.content }}<|im_end|>{% endfor %}"


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        (END_NOT_TRAINED, "the token that ends it"),
        ("{% generation %}" + WHOLE + "{% endgeneration %}", "words of another message"),
        (WHOLE + "{% generation %}<|im_end|>{% endgeneration %}", "some of its words"),
        (WITHOUT_MARKERS.replace("<|im_end|>", "<|other|>"), "ends it.*--add_tokens '<.other.>'"),
        (Path(samples.CHATML).read_text().replace("<|im_end|>", "<|other|>"), "no such tokens"),
    ],
    ids=["end not trained", "too much", "too little", "no end", "no end, with markers"],
)
def test_a_template_whose_masks_would_be_wrong_is_refused(tmp_path, template, problem):
    file = tmp_path / "a.jinja"
    file.write_text(template)
    with pytest.raises(ConfigurationError, match=rf"a\.jinja cannot be trained with: .*{problem}"):
        attach_template(samples.tiny_tokenizer(), str(file))


def test_a_broken_or_missing_template_file_is_named(tmp_path):
    (tmp_path / "a.jinja").write_text("{% for m in messages %}")
    for name, problem in (("a.jinja", "not valid Jinja"), ("b.jinja", "cannot be read")):
        with pytest.raises(ConfigurationError, match=f"{name}: {problem}"):
            read_chat_template(str(tmp_path / name))


def test_a_token_across_the_edge_of_a_turn_is_refused_but_for_blanks():
    """The text "A\n b" of a header, a line break and a turn " b" or "b"; offsets of tokens."""
    chat = MaskedChat("A\n bc", [(2, 5)])
    for offsets, mask in ([(0, 1), (1, 3), (3, 5)], [0, 0, 1]), ([(0, 2), (2, 5)], [0, 1]):
        assert token_mask(chat, np.array(offsets)).tolist() == mask
    for spans, offsets in ([(3, 5)], [(0, 5)]), ([(3, 4)], [(0, 3), (3, 5)]):
        with pytest.raises(UnusableRowError, match="one token holds the") as refused:
            token_mask(MaskedChat(chat.text, spans), np.array(offsets))
        assert refused.value.reason == "straddled"
