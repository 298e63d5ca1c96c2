"""Token ids of texts: from the tokenizer, or from gigatoken (optional, many times faster)."""

import logging
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np

from utils.config.errors import ConfigurationError
from utils.host.foreign import foreign

if TYPE_CHECKING:
    from transformers import BatchEncoding, PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

TOKENIZER_FAILS = "it does not turn text into tokens"
# Longer texts are tokenized in pieces, because a tokenizer needs about 100 bytes per token.
LARGEST_PIECE_CHARACTERS = 4 << 20
CUTS_SEARCHED_CHARACTERS = 1 << 16  # a cut is searched this far before the end of a piece
# Positions between two words where no tokenizer joins the characters on both sides.
CUTS = re.compile(r"(?<=\w)(?= \w)|(?<=\S\n)(?=\w)")


@dataclass(frozen=True)
class SpecialTokens:
    """The ids that a tokenizer adds at the start and the end of a text, and its end token.

    A token with which a text already begins or ends is not added again.
    """

    before: np.ndarray
    behind: np.ndarray
    end: int

    @classmethod
    def of(cls, tokenizer: "PreTrainedTokenizerBase") -> "SpecialTokens":
        """Derive the special tokens from the ids of a word with and without special tokens.

        Raises ConfigurationError if special tokens change the word's own ids.
        """
        end = tokenizer.eos_token_id
        for text in _words(tokenizer):
            (bare,), (full,) = encode(tokenizer, [text]), encode(tokenizer, [text], True)
            for before in range(len(full) - len(bare) + 1 if len(bare) else 0):
                behind = before + len(bare)
                if np.array_equal(full[before:behind], bare):
                    return cls(full[:before], full[behind:], end)
        raise ConfigurationError(
            f"the tokenizer {tokenizer.name_or_path} gives a text other tokens when it adds its "
            "special ones, so a text's own tokens cannot be told from them"
        )

    def around(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the ids to add at the start and at the end of a document with these ids."""
        nothing = self.before[:0].astype(ids.dtype)
        begins = np.array_equal(ids[: self.before.size], self.before)
        before = nothing if begins else self.before.astype(ids.dtype)
        if ids.size and ids[-1] == self.end:
            return before, nothing
        has_end = self.behind.size and self.behind[-1] == self.end
        behind = self.behind if has_end else np.append(self.behind, self.end)
        return before, behind.astype(ids.dtype)

    def are_all(self, ids: np.ndarray) -> bool:
        """Tell whether all ids are special tokens."""
        return bool(np.isin(ids, [*self.before, *self.behind, self.end]).all())


def _words(tokenizer: "PreTrainedTokenizerBase") -> Iterator[str]:
    """Yield words to try: "a", then words of the vocabulary, which the tokenizer knows."""
    yield "a"
    special = set(tokenizer.all_special_tokens)
    yield from islice((word for word in tokenizer.get_vocab() if word not in special), 100)


def _encoded(
    tokenizer: "PreTrainedTokenizerBase", texts: Sequence[str], **options: bool
) -> "BatchEncoding":
    with foreign(f"the tokenizer {tokenizer.name_or_path}", TOKENIZER_FAILS):
        return tokenizer(
            list(texts),
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,  # silences "longer than the model's maximum": packing splits texts
            **options,
        )


def encode(
    tokenizer: "PreTrainedTokenizerBase", texts: Sequence[str], special_tokens: bool = False
) -> list[np.ndarray]:
    """Return the ids of each text."""
    if not texts:
        return []  # a tokenizer takes no empty list
    encoded = _encoded(tokenizer, texts, add_special_tokens=special_tokens)
    return [np.array(ids, dtype=np.int64) for ids in encoded["input_ids"]]


def encode_with_offsets(
    tokenizer: "PreTrainedTokenizerBase", texts: Sequence[str]
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield the ids of each text, and each token's start and stop in characters, (tokens, 2)."""
    if not texts:
        return
    options = {"add_special_tokens": False, "return_offsets_mapping": True}
    encoded = _encoded(tokenizer, texts, **options)
    for ids, offsets in zip(encoded["input_ids"], encoded["offset_mapping"], strict=True):
        yield np.array(ids, dtype=np.int64), np.array(offsets, dtype=np.int64).reshape(-1, 2)


def prompt_ids(tokenizer: "PreTrainedTokenizerBase", text: str) -> list[int]:
    """Return the ids of a text that a model continues: with BOS as in training, without EOS."""
    (ids,) = encode(tokenizer, [text])
    before, _ = SpecialTokens.of(tokenizer).around(ids)
    return [*before.tolist(), *ids.tolist()]


def text_pieces(text: str, most: int) -> Iterator[str]:
    """Cut a text into pieces of at most `most` characters, between words if possible."""
    start = 0
    while len(text) - start > most:
        stop = start + most
        searched = max(start + 1, stop - CUTS_SEARCHED_CHARACTERS)
        cuts = [cut.start() for cut in CUTS.finditer(text, searched, stop + 1)]
        stop = cuts[-1] if cuts else stop
        yield text[start:stop]
        start = stop
    yield text[start:]


# --- gigatoken

# Difficult texts. They show differences in splitting rules, normalizers and byte fallback.
PROBES = (
    *("", " ", "\n", "a", "  two  spaces ", "\t\ttabs\r\nand \r\n\r\n ends\n\n\n", " " * 70),
    *("It's we'll THEY'RE I'd 'tis 's", "1 12 123 1234 12345.678,90 ٣٤ ⅷ½²", "a" * 300, "aB" * 150),
    *("naïve Ünïcödé ß ﬁ ﬂ", "e\u0301 a\u0323\u0307 \u0301", "漢字かなカナ한국어", "مرحبا שלום"),
    *("👩‍👩‍👧🏽 ❤\ufe0f 🇩🇪", "\u00a0\u2003\u3000\u200b\ufeff", "\x00\x01\x1f\x7f\ufffd\ue000"),
    *("(a)[b]{c}<d>!?.,;:-_#$%&*+=/\\|~^`", "def f(x):\n    return x  # ok\n"),
    "\uff21\uff22\u3000\uff11\uff12",
)


def choose_backend(wanted: str, tokenizer: "PreTrainedTokenizerBase", document_format: str) -> str:
    """Return "gigatoken" or "tokenizers". For `auto` this is gigatoken if it can be used.

    Gigatoken cannot tokenize chats, and must give the tokenizer's ids on difficult texts. Logs the
    choice. Raises ConfigurationError if gigatoken is required and cannot be used.
    """
    if wanted == "tokenizers":
        return wanted
    try:
        if document_format == "messages":
            raise ValueError("the mask of a chat needs the offsets of characters")
        _compare_on_probes(tokenizer)
    except ImportError:
        problem = "gigatoken, which is many times faster, is not installed (pip install gigatoken)"
    except (ValueError, RuntimeError, KeyError, TypeError, AttributeError) as error:
        problem = f"gigatoken cannot be used: {str(error).splitlines()[0]}"
    else:
        logger.info("tokenizing with gigatoken, which gives the tokenizer's ids on difficult texts")
        return "gigatoken"
    if wanted == "gigatoken":
        raise ConfigurationError(
            f"tokenizer_backend: {problem}; use --tokenizer_backend tokenizers"
        )
    logger.info("tokenizing with the tokenizer itself: %s", problem)
    return "tokenizers"


def _compare_on_probes(tokenizer: "PreTrainedTokenizerBase") -> None:
    """Raise ValueError with the first difficult text for which gigatoken gives other ids."""
    added = [str(token) for token in tokenizer.get_added_vocab()]
    texts = [*PROBES, *added, *(f"a{token}b {token} c{token}" for token in added)]
    found = GigatokenEncoder(tokenizer)(texts)
    for text, ids, exact in zip(texts, found, encode(tokenizer, texts), strict=True):
        if not np.array_equal(ids, exact):
            shown = repr(text if len(text) <= 80 else text[:80] + "...")
            raise ValueError(f"gigatoken gives other ids for the text {shown}")


class GigatokenEncoder:
    """An encoder with gigatoken (optional: pip install gigatoken).

    Creating one raises ImportError if gigatoken is not installed, and one of several errors for a
    tokenizer that gigatoken does not know.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase"):
        import gigatoken

        self._tokenizer = gigatoken.Tokenizer(tokenizer.backend_tokenizer)

    def __call__(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the ids of each text."""
        import awkward

        if not texts:
            return []
        encoded: Any = self._tokenizer.encode_batch(list(texts))
        ends = np.cumsum(awkward.to_numpy(awkward.num(encoded)))
        return np.split(awkward.to_numpy(awkward.flatten(encoded)), ends[:-1])
