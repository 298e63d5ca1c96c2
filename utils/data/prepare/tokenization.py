"""Tokenization: documents to token ids and the mask of those that are trained on.

Texts are encoded by the tokenizer itself, or by gigatoken (optional, many times faster) where that
gives the same ids.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np

from utils.config.errors import ConfigurationError
from utils.data.prepare.chat_masks import ChatMasks, MaskedChat
from utils.data.prepare.documents import ChatDocument, CompletionDocument, Document, TextDocument
from utils.data.prepare.records import BadRow
from utils.data.prepare.rows import UnusableRowError
from utils.data.tokenizers import id_type

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

MASK_COLUMNS = {"text": None, "messages": "assistant_masks", "prompt_completion": "completion_mask"}


@dataclass(frozen=True)
class TokenizedDocument:
    """ids (tokens,) of the dataset's id type; loss_mask (tokens,) int8, None: all trained on.

    drops_thinking: the chat template leaves out reasoning of earlier turns.
    """

    ids: np.ndarray
    loss_mask: np.ndarray | None
    drops_thinking: bool = False

    @property
    def loss_tokens(self) -> int:
        """The number of tokens that are trained on."""
        return len(self.ids) if self.loss_mask is None else int(self.loss_mask.sum())

    @property
    def has_target(self) -> bool:
        """Whether a token behind the first one is trained on: nothing predicts the first."""
        return len(self.ids) > 1 if self.loss_mask is None else bool(self.loss_mask[1:].any())

    def truncated(self, length: int) -> "TokenizedDocument":
        """Return the first `length` tokens."""
        mask = None if self.loss_mask is None else self.loss_mask[:length]
        return replace(self, ids=self.ids[:length], loss_mask=mask)


class DocumentTokenizer:
    """Turns documents into ids and masks.

    Text: the tokenizer's own BOS if it adds one, the text, then EOS. Prompt and completion as
    strings are tokenized apart, as generation will do, and the completion ends with EOS. Messages
    are rendered by the chat template, which itself prints what ends them; template_date: the date
    (YYYY-MM-DD) that it prints for today's.
    """

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        backend: str = "tokenizers",
        template_date: str | None = None,
    ):
        self.tokenizer = tokenizer
        self.id_type = id_type(tokenizer)
        is_fast = backend == "gigatoken"
        self._encode = GigatokenEncoder(tokenizer) if is_fast else partial(encode, tokenizer)
        self._end = tokenizer.eos_token_id
        self._template_date = template_date

    def __call__(self, documents: Sequence[Document]) -> list[TokenizedDocument | BadRow]:
        """Tokenize documents in order; one that cannot be rendered is a BadRow."""
        kinds: dict[type, Any] = {
            TextDocument: self._texts,
            CompletionDocument: self._completions,
            ChatDocument: self._chats,
        }
        return [one for kind, run in groupby(documents, type) for one in kinds[kind](list(run))]

    @cached_property
    def _masks(self) -> ChatMasks:
        return ChatMasks(self.tokenizer, self._template_date)

    def _closed(self, ids: np.ndarray) -> np.ndarray:
        return ids if ids.size and ids[-1] == self._end else np.append(ids, self._end)

    def _texts(self, documents: list[TextDocument]) -> list[TokenizedDocument | BadRow]:
        encoded = self._encode([document.text for document in documents], True)
        return [TokenizedDocument(self._closed(ids).astype(self.id_type), None) for ids in encoded]

    def _completions(self, documents: list[CompletionDocument]) -> list[TokenizedDocument | BadRow]:
        prompts = self._encode([document.prompt for document in documents], True)
        completions = self._encode([document.completion for document in documents], False)
        found = []
        for document, prompt, completion in zip(documents, prompts, completions, strict=True):
            # An end that the tokenizer adds is taken off, for the text continues.
            opening = prompt[:-1] if prompt.size and prompt[-1] == self._end else prompt
            ids = np.concatenate([opening, self._closed(completion)])
            found.append(self._checked(document, ids, np.arange(len(ids)) >= len(opening)))
        return found

    def _chats(self, documents: list[ChatDocument]) -> list[TokenizedDocument | BadRow]:
        """Render chats one by one and tokenize them at once."""
        masked: list[MaskedChat | BadRow] = []
        for document in documents:
            try:
                masked.append(self._masks(document))
            except UnusableRowError as error:
                masked.append(BadRow(error.reason, str(error), document.location))
        texts = [chat.text for chat in masked if isinstance(chat, MaskedChat)]
        texts = texts or [""]  # a tokenizer takes no empty list
        encoded = self.tokenizer(texts, add_special_tokens=False, return_offsets_mapping=True)
        tokens = zip(encoded["input_ids"], encoded["offset_mapping"], strict=True)
        found: list[TokenizedDocument | BadRow] = []
        for document, chat in zip(documents, masked, strict=True):
            if isinstance(chat, BadRow):
                found.append(chat)
                continue
            ids, offsets = (np.array(values, dtype=np.int64) for values in next(tokens))
            try:
                mask = token_mask(chat, offsets.reshape(-1, 2))
                found.append(self._checked(document, ids, mask, chat.drops_thinking))
            except UnusableRowError as error:
                found.append(BadRow(error.reason, str(error), document.location))
        return found

    def _checked(
        self, document: Document, ids: np.ndarray, mask: np.ndarray, drops_thinking: bool = False
    ) -> TokenizedDocument | BadRow:
        found = TokenizedDocument(ids.astype(self.id_type), mask.astype(np.int8), drops_thinking)
        if not found.has_target:
            message = "no assistant token: nothing in this conversation is trained on"
            return BadRow("no_assistant_tokens", message, document.location)
        return found


def token_mask(chat: MaskedChat, offsets: np.ndarray) -> np.ndarray:
    """Return which tokens are trained on (bool); offsets (tokens, 2): their start and stop.

    A token that joins blanks of a turn to what precedes it (header and line break) is given to the
    model; one that joins blanks before or behind the turn to its words is the model's. Raises
    UnusableRowError if a token holds words of a turn and of something else.
    """
    mask = np.zeros(len(offsets), dtype=bool)
    starts, stops = offsets.T
    text = chat.text
    for start, stop in chat.spans:
        first = int(np.searchsorted(stops, start, side="right"))
        last = int(np.searchsorted(starts, stop)) - 1
        if first > last:
            continue
        problem = ""
        if starts[first] < start and text[start : stops[first]].isspace() and stops[first] < stop:
            first += 1
        elif text[starts[first] : start].strip():
            problem = "one token holds the header of a turn and its first words"
        if text[stop : stops[last]].strip():
            problem = problem or "one token holds the end of a turn and what follows it"
        if problem:
            raise UnusableRowError("straddled", problem)
        mask[first : last + 1] = True
    return mask


# --- texts

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

    Logs which. Raises ConfigurationError when gigatoken is required and cannot be used.
    """
    if wanted == "tokenizers":
        return wanted
    try:
        if document_format == "messages":
            raise ValueError("the mask of a chat needs the offsets of characters")
        added = [str(token) for token in tokenizer.get_added_vocab()]
        between = [f"a{token}b {token} c{token}" for token in added]
        GigatokenEncoder(tokenizer).compare([*PROBES, *added, *between])
    except ImportError:
        problem = "gigatoken, which is many times faster, is not installed (pip install gigatoken)"
    except (ValueError, RuntimeError, KeyError, TypeError, AttributeError) as error:
        problem = f"gigatoken cannot be used: {str(error).splitlines()[0]}"
    else:
        logger.info("tokenizing with gigatoken; 1 in 64 characters is compared with the tokenizer")
        return "gigatoken"
    if wanted == "gigatoken":
        raise ConfigurationError(
            f"tokenizer_backend: {problem}; use --tokenizer_backend tokenizers"
        )
    logger.info("tokenizing with the tokenizer itself: %s", problem)
    return "tokenizers"


def encode(
    tokenizer: "PreTrainedTokenizerBase", texts: Sequence[str], special_tokens: bool
) -> list[np.ndarray]:
    """Return the ids of each text."""
    encoded = tokenizer(
        list(texts),
        add_special_tokens=special_tokens,
        return_attention_mask=False,
        return_token_type_ids=False,
        verbose=False,  # silences "longer than the model's maximum": packing splits texts
    )
    return [np.array(ids, dtype=np.int64) for ids in encoded["input_ids"]]


class GigatokenEncoder:
    """Encodes with gigatoken, and every 64th character with the tokenizer too.

    When it is made it raises ImportError where gigatoken is not installed, and one of several
    errors for a tokenizer that gigatoken does not know.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase"):
        import gigatoken  # optional: pip install gigatoken

        self._exact = partial(encode, tokenizer)
        # First, for gigatoken leaves the tokenizer without truncation.
        self._before, self._behind = _surroundings(tokenizer)
        self._fast = gigatoken.Tokenizer(tokenizer.backend_tokenizer)
        self._unverified = float(FIRST_VERIFIED)

    def __call__(self, texts: Sequence[str], special_tokens: bool) -> list[np.ndarray]:
        """Return the ids of each text; raises ConfigurationError where the tokenizer's differ."""
        found = self._fast_ids(texts, special_tokens)
        self._unverified += VERIFIED_SHARE * sum(map(len, texts))
        short = (i for i, text in enumerate(texts) if len(text) <= self._unverified)
        if (chosen := next(short, None)) is not None:
            self._unverified -= len(texts[chosen])
            try:
                self._check([texts[chosen]], [found[chosen]], special_tokens)
            except ValueError as error:
                raise ConfigurationError(
                    f"{error}, so what it made cannot be trusted: remove the output folder and run "
                    "again with --tokenizer_backend tokenizers"
                ) from error
        return found

    def compare(self, texts: Sequence[str]) -> None:
        """Raise ValueError with the first text that the tokenizer gives other ids for."""
        for special_tokens in (False, True):
            self._check(texts, self._fast_ids(texts, special_tokens), special_tokens)

    def _check(
        self, texts: Sequence[str], found: Sequence[np.ndarray], special_tokens: bool
    ) -> None:
        for text, ids, exact in zip(texts, found, self._exact(texts, special_tokens), strict=True):
            if not np.array_equal(ids, exact):
                shown = repr(text if len(text) <= 80 else text[:80] + "...")
                raise ValueError(f"gigatoken gives other ids for the text {shown}")

    def _fast_ids(self, texts: Sequence[str], special_tokens: bool) -> list[np.ndarray]:
        import awkward

        encoded: Any = self._fast.encode_batch(list(texts))
        ends = np.cumsum(awkward.to_numpy(awkward.num(encoded)))
        found = np.split(awkward.to_numpy(awkward.flatten(encoded)), ends[:-1])
        if special_tokens and (self._before.size or self._behind.size):
            return [np.concatenate([self._before, ids, self._behind]) for ids in found]
        return found


def _surroundings(tokenizer: "PreTrainedTokenizerBase") -> tuple[np.ndarray, np.ndarray]:
    """Return the special tokens that the tokenizer puts before and behind a text."""
    (bare,), (full,) = encode(tokenizer, ["a"], False), encode(tokenizer, ["a"], True)
    for before in range(len(full) - len(bare) + 1):
        behind = before + len(bare)
        if np.array_equal(full[before:behind], bare):
            return full[:before], full[behind:]
    raise ValueError("the tokenizer's special tokens change what stands between them")
