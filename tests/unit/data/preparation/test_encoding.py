import numpy as np
import preparation_samples as samples
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from utils.config.errors import ConfigurationError
from utils.data.prepare import tokenization as encoding
from utils.data.prepare.tokenization import GigatokenEncoder, choose_backend, encode


def words_only():
    tokenizer = Tokenizer(models.WordLevel({"<unk>": 0, "</s>": 1, "a": 2}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>")


def surrounded():
    tokenizer = samples.tiny_tokenizer()
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|im_start|> $A <|im_end|>",
        special_tokens=[("<|im_start|>", 2), ("<|im_end|>", 3)],
    )
    return tokenizer


@pytest.mark.parametrize("make", [samples.tiny_tokenizer, surrounded])
def test_gigatoken_gives_the_ids_of_the_tokenizer(make):
    tokenizer = make()
    fast = GigatokenEncoder(tokenizer)
    pieces = [*"aB1 \n\t.,'é漢", "'s", "  ", "e\u0301", "🇩🇪", "\u3000", "\x00", "<|endoftext|>"]

    @settings(max_examples=60, deadline=None)
    @given(st.lists(st.lists(st.sampled_from(pieces) | st.text()).map("".join), min_size=1))
    def check(texts):
        for special_tokens in (False, True):
            found = fast._fast_ids(texts, special_tokens)
            for one, other in zip(found, encode(tokenizer, texts, special_tokens), strict=True):
                np.testing.assert_array_equal(one, other)

    check()


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


def test_other_ids_are_found_before_any_work_and_while_working(monkeypatch):
    fast, right = GigatokenEncoder(samples.tiny_tokenizer()), GigatokenEncoder._fast_ids
    for _ in range(300):
        fast(["x " * 1000], True)
    monkeypatch.setattr(
        GigatokenEncoder,
        "_fast_ids",
        lambda self, texts, special: [
            ids[:-1] if "漢" in text or "x x" in text else ids
            for text, ids in zip(texts, right(self, texts, special), strict=True)
        ],
    )
    assert choose_backend("auto", samples.tiny_tokenizer(), "text") == "tokenizers"
    with pytest.raises(ConfigurationError, match="other ids for the text '漢字"):
        choose_backend("gigatoken", samples.tiny_tokenizer(), "text")
    texts = ["x " * 1000] * 2 * round(1 / encoding.VERIFIED_SHARE)
    with pytest.raises(ConfigurationError, match=r"'x x .*\.\.\.', so what it made cannot be"):
        fast(texts, True)
