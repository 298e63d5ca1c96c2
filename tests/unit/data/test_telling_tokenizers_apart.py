"""Differences between two tokenizers, and templates without their training markers."""

from pathlib import Path

import pytest
import trl
from tokenizers import normalizers
from transformers.utils.chat_template_utils import render_jinja_template

from examples.train_tokenizer import train_tokenizer
from utils.data.tokenizers import (
    differences,
    foreign_token,
    without_training_marks,
)

SHIPPED = Path(__file__).parents[3] / "recipes" / "chat_templates"
TEMPLATES = [
    *sorted(SHIPPED.glob("*.jinja")),
    *sorted(
        path
        for path in (Path(trl.__file__).parent / "chat_templates").glob("*_training.jinja")
        if "llava" not in path.name  # this template only accepts lists of parts
    ),
]
CHATS = [
    [{"role": "user", "content": "a"}],
    [
        {"role": "user", "content": " a\n"},
        {"role": "assistant", "content": "\nb "},
        {"role": "user", "content": "c"},
        {"role": "assistant", "content": "d"},
    ],
]


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(iter(["one two three"] * 5), 262)


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.stem)
def test_a_template_renders_the_same_without_marks(path):
    template = path.read_text()
    assert "generation %}" in template or "generation -%}" in template
    bare = without_training_marks(template)
    assert "endgeneration" not in bare
    for prompt in (False, True):
        marked, unmarked = (
            render_jinja_template(CHATS, chat_template=each, add_generation_prompt=prompt)[0]
            for each in (template, bare)
        )
        assert marked == unmarked
    # Without its markers a template has the same scopes of variables and the same blanks.
    scoped = (
        "{% set a = 1 %}x\n {%- generation -%} \n{% set a = 2 %}{{ a }}{%+endgeneration %}{{ a }}"
    )
    for template in (scoped, without_training_marks(scoped)):
        assert render_jinja_template([[]], chat_template=template)[0] == ["x21"]


def test_siblings_differ_in_their_special_tokens_or_rules(tokenizer):
    assert differences(tokenizer, tokenizer) == []

    def sibling(end):
        text = tokenizer.backend_tokenizer.to_str()
        backend = tokenizer.backend_tokenizer.from_str(text)
        return type(tokenizer)(tokenizer_object=backend, eos_token=end, pad_token="<|pad|>")

    chat = sibling("<|im_end|>")
    chat.add_tokens(["<tool>"])
    assert differences(chat, tokenizer) == [
        "eos_token <|im_end|> instead of <|endoftext|>",
        "1 added tokens in one of them alone (<tool>)",
    ]
    assert foreign_token(chat, tokenizer) is None
    composed = sibling("<|endoftext|>")
    composed.backend_tokenizer.normalizer = normalizers.NFC()
    (difference,) = differences(composed, tokenizer)
    assert "other rules for cutting text" in difference


def test_other_words_are_named(tokenizer):
    other = train_tokenizer(iter(["four five six seven"] * 5), 262)
    assert "token 26" in foreign_token(tokenizer, other)
    assert any("token 26" in line for line in differences(tokenizer, other))
