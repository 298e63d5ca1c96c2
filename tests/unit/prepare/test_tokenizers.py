"""Tokenizers: loading, hashes, differences, and templates without their training markers."""

import contextlib
import json
from pathlib import Path

import numpy as np
import preparation_samples as samples
import pytest
import trl
from tokenizers import normalizers
from transformers.utils.chat_template_utils import render_jinja_template

from examples.train_tokenizer import train_tokenizer
from utils.config.errors import ConfigurationError
from utils.data.tokenizers import (
    differences,
    foreign_token,
    id_type,
    load_tokenizer,
    tokenizer_sha256,
    vocabulary_size,
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
CHATS = [samples.chat(*turns)["messages"] for turns in (["a"], [" a\n", "\nb ", "c", "d"])]


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
    inside = "{%- generation -%} \n{% set a = 2 %}{{ a }}{%+endgeneration %}"
    scoped = "{% set a = 1 %}x\n " + inside + "{{ a }}"
    for template in (scoped, without_training_marks(scoped)):
        assert render_jinja_template([[]], chat_template=template)[0] == ["x21"]


def test_siblings_differ_in_their_special_tokens_or_rules(tokenizer):
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


def test_a_loaded_tokenizer_has_the_vocabulary_that_was_saved(tmp_path):
    samples.tiny_tokenizer().save_pretrained(tmp_path)
    tokenizer = load_tokenizer(str(tmp_path))
    assert len(tokenizer) == vocabulary_size(tokenizer) == 320
    # A line end before an answer is never in one token with the answer.
    opening = tokenizer("assistant\n")["input_ids"]
    for content in ("def f", "    indented", "\tx", "1", "<|im_end|>"):
        assert tokenizer("assistant\n" + content)["input_ids"][: len(opening)] == opening


def test_the_hash_tells_tokenizers_apart_and_ignores_template_and_last_call(tmp_path):
    tokenizer = samples.tiny_tokenizer()
    before = tokenizer_sha256(tokenizer)
    tokenizer("a b c", truncation=True, max_length=2)
    tokenizer.chat_template = "{{ messages }}"
    assert tokenizer_sha256(tokenizer) == before
    tokenizer.save_pretrained(tmp_path)
    assert tokenizer_sha256(load_tokenizer(str(tmp_path))) == before
    tokenizer.add_tokens(["<new>"])
    assert tokenizer_sha256(tokenizer) != before


def test_the_smallest_type_that_holds_the_vocabulary_is_taken():
    tokenizer = samples.tiny_tokenizer()
    for last, kind in (((1 << 16) - 1, np.uint16), (1 << 16, np.uint32)):
        tokenizer.get_vocab = lambda last=last: {"last": last}
        assert id_type(tokenizer) == kind


def test_a_folder_without_a_usable_tokenizer_is_named(tmp_path):
    for name in ("./nowhere", "/nowhere", "data/demo/tokenizer"):
        with pytest.raises(ConfigurationError, match=f"{name}: no such folder"):
            load_tokenizer(name)
    tokenizer = samples.tiny_tokenizer()
    tokenizer.eos_token = None
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ConfigurationError, match="has no eos_token"):
        load_tokenizer(str(tmp_path))


def test_code_that_comes_with_a_tokenizer_is_not_run(tmp_path):
    folder = tmp_path / "custom"
    samples.tiny_tokenizer().save_pretrained(folder)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config |= {"auto_map": {"AutoTokenizer": ["evil.Evil", None]}, "tokenizer_class": "Evil"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Evil: pass\n")
    with contextlib.suppress(ConfigurationError):
        load_tokenizer(str(folder))
    assert not (tmp_path / "ran").exists()
