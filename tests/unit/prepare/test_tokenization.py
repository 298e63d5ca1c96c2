import numpy as np
import preparation_samples as samples
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from utils.config.errors import ConfigurationError
from utils.prepare.encoding import GigatokenEncoder, choose_backend, encode
from utils.prepare.rows import ChatDocument, CompletionDocument, TextDocument
from utils.prepare.tokenization import DocumentTokenizer
from utils.prepare.values import BadRow, Location

PLACE = Location("a.jsonl", "line", 1)


def tokenize(tokenizer, document):
    (found,) = DocumentTokenizer(tokenizer)([document])
    return found


def adding(tokenizer, template):
    """Make a tokenizer add special tokens to each text."""
    special_tokens = [("<|im_start|>", 2), ("<|im_end|>", 3), ("<|endoftext|>", 0)]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=template, special_tokens=special_tokens
    )
    return tokenizer


def test_texts_begin_and_end_once_whatever_the_tokenizer_adds():
    plain = samples.tiny_tokenizer()("a b")["input_ids"]
    text = TextDocument("a b", PLACE)
    found = tokenize(samples.tiny_tokenizer(), text)
    assert found.ids.tolist() == [*plain, 0]
    assert found.ids.dtype == np.uint16
    assert found.loss_mask is None
    for template in ("<|im_start|> $A", "<|im_start|> $A <|endoftext|>"):
        tokenizer = adding(samples.tiny_tokenizer(), template)
        assert tokenize(tokenizer, text).ids.tolist() == [2, *plain, 0]
        pair = tokenize(tokenizer, CompletionDocument("a", "b", PLACE)).ids.tolist()
        assert (pair.count(2), pair.count(0), pair[-1]) == (1, 1, 0)
    chat = ChatDocument(samples.chat("q", "a")["messages"], PLACE)
    tokenizer = adding(samples.chatml_tokenizer(), "<|im_start|> $A")
    assert tokenize(tokenizer, chat).ids.tolist().count(2) == 2


@pytest.mark.parametrize("closing", ["", "<|endoftext|>"])
def test_the_completion_and_its_end_are_trained_on_and_the_prompt_is_not(closing):
    tokenizer = samples.tiny_tokenizer()
    found = tokenize(tokenizer, CompletionDocument("x y:\n", "return 1" + closing, PLACE))
    prompt = tokenizer("x y:\n")["input_ids"]
    split = len(prompt)
    assert found.loss_mask.tolist() == [0] * split + [1] * (len(found.ids) - split)
    assert tokenizer.decode(found.ids[split:]) == "return 1<|endoftext|>"
    assert found.ids[:split].tolist() == prompt
    assert not found.truncated(split).has_target
    assert found.truncated(split + 1).has_target
    assert len(found.truncated(split + 1).ids) == split + 1


@pytest.mark.parametrize("template", ["$A", "<|im_start|> $A <|im_end|>"])
def test_gigatoken_gives_the_ids_of_the_tokenizer(template):
    tokenizer = adding(samples.tiny_tokenizer(), template)
    fast = DocumentTokenizer(tokenizer, "gigatoken")
    exact = DocumentTokenizer(tokenizer)
    pieces = [*"aB1 \n\t.,'é漢", "'s", "  ", "e\u0301", "🇩🇪", "\u3000", "\x00", "<|endoftext|>"]

    @settings(max_examples=60, deadline=None)
    @given(st.lists(st.lists(st.sampled_from(pieces) | st.text()).map("".join), min_size=1))
    def check(texts):
        found = fast._encode(texts)
        for one, other in zip(found, encode(tokenizer, texts), strict=True):
            np.testing.assert_array_equal(one, other)
        pairs = zip(texts, reversed(texts), strict=True)
        documents = [
            *(TextDocument(text, PLACE) for text in texts),
            *(CompletionDocument(*pair, PLACE) for pair in pairs),
        ]
        for one, other in zip(fast(documents), exact(documents), strict=True):
            if isinstance(other, BadRow):
                assert one == other
            else:
                np.testing.assert_array_equal(one.ids, other.ids)
                np.testing.assert_array_equal(one.loss_mask, other.loss_mask)

    check()


def words_only():
    tokenizer = Tokenizer(models.WordLevel({"<unk>": 0, "</s>": 1, "a": 2}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>")


@pytest.mark.parametrize(
    ("make", "document_format", "reason"),
    [
        (words_only, "text", "gigatoken cannot be used: Unsupported model type"),
        (samples.chatml_tokenizer, "messages", "the mask of a chat needs the offsets"),
    ],
)
def test_what_gigatoken_cannot_do_the_tokenizer_does(make, document_format, reason, caplog):
    caplog.set_level("INFO")
    assert choose_backend("auto", make(), document_format) == "tokenizers"
    with pytest.raises(ConfigurationError, match=f"{reason}.*--tokenizer_backend tokenizers"):
        choose_backend("gigatoken", make(), document_format)
    assert "tokenizing with the tokenizer itself" in caplog.text


def test_a_gigatoken_with_other_ids_is_not_used(monkeypatch):
    right = GigatokenEncoder.__call__

    def wrong(self, texts):
        found = zip(texts, right(self, texts), strict=True)
        return [ids[:-1] if "漢" in text else ids for text, ids in found]

    monkeypatch.setattr(GigatokenEncoder, "__call__", wrong)
    assert choose_backend("auto", samples.tiny_tokenizer(), "text") == "tokenizers"
    with pytest.raises(ConfigurationError, match="other ids for the text '漢字"):
        choose_backend("gigatoken", samples.tiny_tokenizer(), "text")
