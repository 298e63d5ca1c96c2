"""Texts to token ids: by the tokenizer itself, or by gigatoken where that gives the same ids."""

import importlib.util
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from utils.config.errors import ConfigurationError
from utils.data.tokenizers import id_type

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

# (texts, special tokens?) -> the ids of each text, in the dataset's id type.
Encode = Callable[[Sequence[str], bool], list[np.ndarray]]

VERIFIED_SHARE = 1 / 64  # of the characters; the tokenizer itself is a hundred times slower
FIRST_VERIFIED = 1 << 14  # characters
# What splitting rules, normalizers and byte fallbacks get wrong first.
PROBES = (
    *("", " ", "\n", "a", "  two  spaces ", "\t\ttabs\r\nand \r\n\r\n ends\n\n\n", " " * 70),
    *("It's we'll THEY'RE I'd 'tis 's", "1 12 123 1234 12345.678,90 ٣٤ ⅷ½²", "a" * 300, "aB" * 150),
    *("naïve Ünïcödé ß ﬁ ﬂ", "e\u0301 a\u0323\u0307 \u0301", "漢字かなカナ한국어", "مرحبا שלום"),
    *("👩‍👩‍👧🏽 ❤\ufe0f 🇩🇪", "\u00a0\u2003\u3000\u200b\ufeff", "\x00\x01\x1f\x7f\ufffd\ue000"),
    *("(a)[b]{c}<d>!?.,;:-_#$%&*+=/\\|~^`", "def f(x):\n    return x  # ok\n"),
    "\uff21\uff22\u3000\uff11\uff12",
)


def choose_backend(wanted: str, tokenizer: "PreTrainedTokenizerBase", document_format: str) -> str:
    """Return "gigatoken" or "tokenizers"; `auto` takes gigatoken where it gives the same ids.

    Says which. Raises ConfigurationError when gigatoken is asked for and cannot be used.
    """
    if wanted == "tokenizers":
        return wanted
    problem = _problem_of_gigatoken(tokenizer, document_format)
    if problem is None:
        logger.info("tokenized with gigatoken, held against the tokenizer as it goes")
        return "gigatoken"
    if wanted == "gigatoken":
        raise ConfigurationError(
            f"tokenizer_backend is gigatoken, but {problem}: use --tokenizer_backend tokenizers"
        )
    logger.info("tokenized with the tokenizer itself: %s", problem)
    return "tokenizers"


def encoder(backend: str, tokenizer: "PreTrainedTokenizerBase") -> Encode:
    """Return what encodes texts with the chosen backend."""
    return GigatokenEncoder(tokenizer) if backend == "gigatoken" else TokenizerEncoder(tokenizer)


class TokenizerEncoder:
    """Encodes with the tokenizer itself."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase"):
        self._tokenizer = tokenizer
        self._id_type = id_type(tokenizer)

    def __call__(self, texts: Sequence[str], special_tokens: bool) -> list[np.ndarray]:
        """Return the ids of each text."""
        encoded = self._tokenizer(
            list(texts),
            add_special_tokens=special_tokens,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,  # silences "longer than the model's maximum": packing splits texts
        )
        return [np.array(ids, dtype=self._id_type) for ids in encoded["input_ids"]]


class GigatokenEncoder:
    """Encodes with gigatoken, and every 64th character with the tokenizer too.

    Raises ConfigurationError for ids that differ, ValueError or RuntimeError (when it is made) for
    a tokenizer that gigatoken does not know.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase"):
        import gigatoken  # optional: pip install gigatoken

        self._exact = TokenizerEncoder(tokenizer)
        self._id_type = id_type(tokenizer)
        # First, for it leaves the tokenizer without truncation.
        self._before, self._behind = _surroundings(self._exact)
        self._fast = gigatoken.Tokenizer(tokenizer.backend_tokenizer)
        self._unverified = float(FIRST_VERIFIED)

    def __call__(self, texts: Sequence[str], special_tokens: bool) -> list[np.ndarray]:
        """Return the ids of each text."""
        found = self._encode(texts, special_tokens)
        self._unverified += VERIFIED_SHARE * sum(map(len, texts))
        for text, ids in zip(texts, found, strict=True):
            if len(text) <= self._unverified:
                self._unverified -= len(text)
                self._verify(text, ids, special_tokens)
                break
        return found

    def first_difference(self, texts: Sequence[str]) -> str | None:
        """Return the first of these texts that the tokenizer gives other ids for."""
        for special_tokens in (False, True):
            fast = self._encode(texts, special_tokens)
            exact = self._exact(texts, special_tokens)
            for text, one, other in zip(texts, fast, exact, strict=True):
                if not np.array_equal(one, other):
                    return text
        return None

    def _encode(self, texts: Sequence[str], special_tokens: bool) -> list[np.ndarray]:
        import awkward

        encoded: Any = self._fast.encode_batch(list(texts))
        flat = awkward.to_numpy(awkward.flatten(encoded)).astype(self._id_type)
        ends = np.cumsum(awkward.to_numpy(awkward.num(encoded)))
        found = np.split(flat, ends[:-1])
        if special_tokens and (self._before.size or self._behind.size):
            return [np.concatenate([self._before, ids, self._behind]) for ids in found]
        return found

    def _verify(self, text: str, ids: np.ndarray, special_tokens: bool) -> None:
        (exact,) = self._exact([text], special_tokens)
        if not np.array_equal(ids, exact):
            raise ConfigurationError(
                f"gigatoken gives other ids than the tokenizer for the text {_shown(text)}, so "
                "what it made cannot be trusted: remove the output folder and run again with "
                "--tokenizer_backend tokenizers"
            )


def _problem_of_gigatoken(tokenizer: "PreTrainedTokenizerBase", document_format: str) -> str | None:
    """Return why gigatoken cannot stand in for this tokenizer."""
    if document_format == "messages":
        return "the mask of a chat comes from the places of characters, which only it gives"
    if importlib.util.find_spec("gigatoken") is None:
        return "gigatoken, which is many times faster, is not installed (pip install gigatoken)"
    if getattr(tokenizer, "backend_tokenizer", None) is None:
        return "this tokenizer is none of the tokenizers library, which gigatoken reads"
    try:
        fast = GigatokenEncoder(tokenizer)
    except (ValueError, RuntimeError, KeyError, TypeError) as error:
        return f"gigatoken does not know this kind of tokenizer ({str(error).splitlines()[0]})"
    added = [str(token) for token in tokenizer.get_added_vocab()]
    between = [f"a{token}b {token} c{token}" for token in added]
    different = fast.first_difference([*PROBES, *added, *between])
    if different is None:
        return None
    return f"gigatoken gives other ids for the text {_shown(different)}"


def _surroundings(encode: Encode) -> tuple[np.ndarray, np.ndarray]:
    """Return the special tokens that the tokenizer puts before and behind a text."""
    (bare,), (full,) = encode(["a"], False), encode(["a"], True)
    added = len(full) - len(bare)
    for before in range(added + 1):
        if np.array_equal(full[before : before + len(bare)], bare):
            return full[:before], full[before + len(bare) :]
    raise ValueError("its special tokens change what stands between them")


def _shown(text: str) -> str:
    return repr(text if len(text) <= 80 else text[:80] + "...")
