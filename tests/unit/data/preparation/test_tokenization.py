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


def test_texts_begin_and_end_once_whatever_the_tokenizer_adds():
    plain = samples.tiny_tokenizer()("a b")["input_ids"]
    text = TextDocument("a b", PLACE)
    found = tokenize(samples.tiny_tokenizer(), text)
    assert found.ids.tolist() == [*plain, 0]
    assert found.ids.dtype == np.uint16
    assert found.loss_mask is None
    for template in ("<|im_start|> $A", "<|im_start|> $A <|endoftext|>"):
        tokenizer = with_bos(samples.tiny_tokenizer(), template)
        assert tokenize(tokenizer, text).ids.tolist() == [2, *plain, 0]
        pair = tokenize(tokenizer, CompletionDocument("a", "b", PLACE)).ids.tolist()
        assert (pair.count(2), pair.count(0), pair[-1]) == (1, 1, 0)
    chat = ChatDocument(samples.chat("q", "a")["messages"], PLACE)
    assert tokenize(with_bos(samples.chatml_tokenizer()), chat).ids.tolist().count(2) == 2


@pytest.mark.parametrize("closing", ["", "<|endoftext|>"])
def test_the_completion_and_its_end_are_trained_on_and_the_prompt_is_not(closing):
    tokenizer = samples.tiny_tokenizer()
    found = tokenize(tokenizer, CompletionDocument("x y: ", "return 1" + closing, PLACE))
    prompt = tokenizer("x y: ")["input_ids"]
    split = len(prompt)
    assert found.loss_mask.tolist() == [0] * split + [1] * (len(found.ids) - split)
    assert tokenizer.decode(found.ids[split:]) == "return 1<|endoftext|>"
    assert found.ids[:split].tolist() == prompt
    assert not found.truncated(split).has_target
    assert found.truncated(split + 1).has_target
    assert len(found.truncated(split + 1).ids) == split + 1


def test_a_chat_that_the_template_refuses_is_a_bad_row_and_the_others_are_kept():
    template = samples.chatml_tokenizer().chat_template
    check = "{% if messages|length == 3 %}{{ raise_exception('roles must alternate') }}{% endif %}"
    tokenizer = DocumentTokenizer(samples.tiny_tokenizer(check + template))
    chats = [
        ChatDocument(samples.chat(*contents)["messages"], PLACE)
        for contents in (("q", "a"), ("q", "a", "q"))
    ]
    good, bad = tokenizer(chats)
    assert good.loss_tokens == 2
    assert isinstance(bad, BadRow)
    assert bad.reason == "template_refused"
    assert "roles must alternate" in str(bad)
    assert tokenizer(chats[1:]) == [bad]
