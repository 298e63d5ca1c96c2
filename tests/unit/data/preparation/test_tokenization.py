import numpy as np
import preparation_samples as samples
import pytest
from tokenizers.processors import TemplateProcessing

from utils.data.prepare.documents import ChatDocument, CompletionDocument, TextDocument
from utils.data.prepare.records import BadRow, Location
from utils.data.prepare.tokenization import DocumentTokenizer

PLACE = Location("a.jsonl", "line", 1)


def tokenize(tokenizer, document):
    (found,) = DocumentTokenizer(tokenizer)([document])
    return found


def with_bos(tokenizer, template="<|im_start|> $A"):
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=template, special_tokens=[("<|im_start|>", 2), ("<|endoftext|>", 0)]
    )
    return tokenizer


def test_a_text_gets_the_end_of_text_once():
    tokenizer = samples.tiny_tokenizer()
    found = tokenize(tokenizer, TextDocument("a b", PLACE))
    assert found.ids.tolist() == [*tokenizer("a b")["input_ids"], 0]
    assert found.ids.dtype == np.uint16
    assert found.loss_mask is None
    twice = with_bos(samples.tiny_tokenizer(), "<|im_start|> $A <|endoftext|>")
    assert tokenize(twice, TextDocument("a b", PLACE)).ids.tolist() == [2, *found.ids.tolist()]


def test_a_tokenizer_that_opens_with_a_token_does_so_once():
    found = tokenize(with_bos(samples.tiny_tokenizer()), TextDocument("a b", PLACE))
    plain = samples.tiny_tokenizer()("a b")["input_ids"]
    assert found.ids.tolist() == [2, *plain, 0]
    pair = tokenize(with_bos(samples.tiny_tokenizer()), CompletionDocument("a", "b", PLACE))
    assert pair.ids.tolist().count(2) == 1
    chat = samples.chat("q", "a")["messages"]
    tokenizer = with_bos(samples.chatml_tokenizer())
    assert tokenize(tokenizer, ChatDocument(chat, PLACE)).ids.tolist().count(2) == 2


@pytest.mark.parametrize("closing", ["", "<|endoftext|>"])
def test_the_completion_and_its_end_are_trained_on_and_the_prompt_is_not(closing):
    tokenizer = samples.tiny_tokenizer()
    pair = CompletionDocument("x y: ", "return 1" + closing, PLACE)
    found = tokenize(tokenizer, pair)
    split = len(tokenizer("x y: ")["input_ids"])
    assert found.loss_mask.tolist() == [0] * split + [1] * (len(found.ids) - split)
    assert tokenizer.decode(found.ids[split:]) == "return 1<|endoftext|>"
    assert found.ids[:split].tolist() == tokenizer("x y: ")["input_ids"]


def test_an_end_that_the_tokenizer_adds_to_the_prompt_is_taken_off():
    tokenizer = with_bos(samples.tiny_tokenizer(), "$A <|endoftext|>")
    found = tokenize(tokenizer, CompletionDocument("a", "b", PLACE))
    assert found.ids.tolist().count(0) == 1
    assert found.ids[-1] == 0


def test_a_chat_that_the_template_refuses_is_a_bad_row_and_the_others_are_kept():
    template = samples.chatml_tokenizer().chat_template
    check = "{% if messages|length == 3 %}{{ raise_exception('roles must alternate') }}{% endif %}"
    tokenizer = samples.tiny_tokenizer(check + template)
    chats = [samples.chat(*contents)["messages"] for contents in (("q", "a"), ("q", "a", "q"))]
    good, bad = DocumentTokenizer(tokenizer)([ChatDocument(chat, PLACE) for chat in chats])
    assert good.loss_tokens == 2
    assert isinstance(bad, BadRow)
    assert bad.reason == "template_refused"
    assert "roles must alternate" in str(bad)


def test_truncation_tells_whether_anything_is_left_to_learn():
    pair = tokenize(samples.tiny_tokenizer(), CompletionDocument("x", "y z", PLACE))
    prompt = int((pair.loss_mask == 0).sum())
    assert not pair.truncated(prompt).has_target
    assert pair.truncated(prompt + 1).has_target
    assert len(pair.truncated(prompt + 1).ids) == prompt + 1
