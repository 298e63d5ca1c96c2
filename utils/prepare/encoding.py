"""Token ids of texts and prompts: from the tokenizer, or from gigatoken (optional, much faster)."""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from utils.config.errors import ConfigurationError
from utils.host.foreign import library_errors, reason
from utils.prepare.chat_templates import PROBE_LOCATION, ChatTemplate
from utils.prepare.rows import ChatDocument, document_fields

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TOKENIZER_FAILS = "it does not turn text into tokens"
# verbose=False: no warning about texts above the model's maximum length; packing splits them.
IDS_ALONE = dict.fromkeys(("return_attention_mask", "return_token_type_ids", "verbose"), False)
# Longer texts are tokenized in pieces, because a tokenizer needs about 100 bytes per token.
LARGEST_PIECE_CHARACTERS = 4 << 20
CUTS_SEARCHED_CHARACTERS = 1 << 16  # a cut is at most this far before a full piece's end
# Positions between two words where no tokenizer joins the characters on both sides.
CUTS = re.compile(r"(?<=\w)(?= \w)|(?<=\S\n)(?=\w)")


@dataclass(frozen=True)
class SpecialTokens:
    """The ids of the special tokens that a tokenizer adds before and behind a text.

    end: the id of EOS.
    """

    before: np.ndarray
    behind: np.ndarray
    end: int

    @classmethod
    def of(cls, tokenizer: "PreTrainedTokenizerBase") -> "SpecialTokens":
        """Return a tokenizer's special tokens, found by tokenizing a word with and without them.

        Raises ConfigurationError if special tokens change the word's own ids.
        """
        end = tokenizer.eos_token_id
        special = set(tokenizer.all_special_tokens)
        words = (word for word in tokenizer.get_vocab() if word not in special)
        for text in ("a", *islice(words, 100)):
            (bare,), (full,) = encode(tokenizer, [text]), encode(tokenizer, [text], True)
            for before in range(len(full) - len(bare) + 1 if len(bare) else 0):
                behind = before + len(bare)
                if np.array_equal(full[before:behind], bare):
                    return cls(full[:before], full[behind:], end)
        raise ConfigurationError(
            f"the tokenizer {tokenizer.name_or_path} gives a text other tokens when it adds its "
            "special ones, so a text's own tokens cannot be told from them"
        )

    def ids_to_add(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return two arrays: the special ids to add before `ids` and behind `ids`.

        Special tokens that `ids` already has are left out. EOS always ends a document, even if the
        tokenizer itself does not add EOS.
        """
        empty = self.before[:0].astype(ids.dtype)
        begins = np.array_equal(ids[: self.before.size], self.before)
        before = empty if begins else self.before.astype(ids.dtype)
        if ids.size and ids[-1] == self.end:
            return before, empty
        has_end = self.behind.size and self.behind[-1] == self.end
        behind = self.behind if has_end else np.append(self.behind, self.end)
        return before, behind.astype(ids.dtype)

    def are_all(self, ids: np.ndarray) -> bool:
        """Return whether all ids are special tokens. True for an empty array."""
        return bool(np.isin(ids, [*self.before, *self.behind, self.end]).all())


def encode(
    tokenizer: "PreTrainedTokenizerBase", texts: Sequence[str], special_tokens: bool = False
) -> list[np.ndarray]:
    """Return the token ids of each text, (tokens,) int64. special_tokens: add BOS and EOS."""
    if not texts:
        return []  # a tokenizer takes no empty list
    with library_errors(f"the tokenizer {tokenizer.name_or_path}", TOKENIZER_FAILS):
        encoded = tokenizer(list(texts), add_special_tokens=special_tokens, **IDS_ALONE)
    return [np.array(ids, dtype=np.int64) for ids in encoded["input_ids"]]


def encode_with_offsets(
    tokenizer: "PreTrainedTokenizerBase", texts: Sequence[str]
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield two arrays for each text: token ids, and the tokens' start and stop in characters.

    Shapes: (tokens,) and (tokens, 2).
    """
    if not texts:
        return
    options = IDS_ALONE | {"add_special_tokens": False, "return_offsets_mapping": True}
    with library_errors(f"the tokenizer {tokenizer.name_or_path}", TOKENIZER_FAILS):
        encoded = tokenizer(list(texts), **options)
    for ids, offsets in zip(encoded["input_ids"], encoded["offset_mapping"], strict=True):
        yield np.array(ids, dtype=np.int64), np.array(offsets, dtype=np.int64).reshape(-1, 2)


def text_pieces(text: str, most: int) -> Iterator[str]:
    """Yield pieces of a text, each at most `most` characters. Cuts between words if possible."""
    start = 0
    while len(text) - start > most:
        stop = start + most
        searched = max(start + 1, stop - CUTS_SEARCHED_CHARACTERS)
        cuts = [cut.start() for cut in CUTS.finditer(text, searched, stop + 1)]
        stop = cuts[-1] if cuts else stop
        yield text[start:stop]
        start = stop
    yield text[start:]


# --- prompts that a model continues


class Prompt(NamedTuple):
    """A prompt for the model: its text for display, and the token ids that the model continues."""

    text: str
    token_ids: list[int]


def prompt_ids(tokenizer: "PreTrainedTokenizerBase", text: str) -> list[int]:
    """Return the token ids of a prompt: with BOS if training adds BOS, and without EOS."""
    (ids,) = encode(tokenizer, [text])
    before, _ = SpecialTokens.of(tokenizer).ids_to_add(ids)
    return [*before.tolist(), *ids.tolist()]


def load_prompts(
    entries: Sequence[str], tokenizer: "PreTrainedTokenizerBase", *, chats: bool, most_tokens: int
) -> list[Prompt]:
    """Return the prompts in the setting `sample_prompts` (`entries`).

    An entry is a prompt, or a .txt or .jsonl file with a prompt on each line. A line of a .jsonl
    file is an object with the key `prompt`. chats: render every prompt with the chat template, if
    the tokenizer has one. Then an object may have the key `messages` instead. Raises a
    ConfigurationError that lists all faults, such as prompts of more than `most_tokens` tokens.
    """
    template = ChatTemplate(tokenizer) if chats and tokenizer.chat_template is not None else None
    prompts, problems = [], []
    for origin, line in _prompt_lines(entries):
        try:
            fields = json.loads(line) if origin.partition(":")[0].endswith(".jsonl") else line
            prompt = _parse_prompt(fields, tokenizer, template)
            if not 0 < len(prompt.token_ids) <= most_tokens:
                raise ValueError(
                    f"it has {len(prompt.token_ids):,} tokens, and the model takes 1 to "
                    f"{most_tokens:,} before what it adds (sample_max_new_tokens)"
                )
            prompts.append(prompt)
        except ConfigurationError:
            raise  # the template took too much time or memory, as it would for every prompt
        except Exception as error:  # also an error of the template
            problems.append(f"sample_prompts {origin}: {reason(error)}")
    if problems:
        raise ConfigurationError(problems)
    return prompts


def _prompt_lines(entries: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield (origin, text) of each prompt. origin: FILE:LINE, or the prompt's start in quotes.

    Raises ConfigurationError for an unreadable or empty file.
    """
    for entry in entries:
        path = Path(entry)
        is_named_like_a_file = path.suffix in (".jsonl", ".txt")
        if not is_named_like_a_file or (re.search(r"\s", entry) and not path.is_file()):
            yield repr(entry[:40]), entry
            continue
        try:
            lines = path.read_text(encoding="utf-8").split("\n")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigurationError(f"sample_prompts {entry} cannot be read: {error}") from error
        numbered = [(f"{path}:{at}", line) for at, line in enumerate(lines, 1) if line.strip()]
        if not numbered:
            raise ConfigurationError(f"sample_prompts {entry} is empty: put a prompt on each line.")
        yield from numbered


def _parse_prompt(
    fields: Any, tokenizer: "PreTrainedTokenizerBase", template: ChatTemplate | None
) -> Prompt:
    """Return the prompt of a text or a .jsonl object. Faulty input may raise any Exception."""
    record = fields if isinstance(fields, dict) else {"prompt": fields}
    key = "messages" if "messages" in record else "prompt"
    value = record.get(key)
    if isinstance(value, str) and template is None:
        return Prompt(value, prompt_ids(tokenizer, value))
    if template is None or not value:
        what = "`prompt` or `messages`" if template else "`prompt`; there are no chats here"
        raise ValueError(f"give a text, or an object with {what}")
    messages = [{"role": "user", "content": value}] if isinstance(value, str) else value
    chat = document_fields(record | {key: messages}, "messages", [(key, "messages")])
    adapted = template.adapted(chat["messages"])
    document = ChatDocument(adapted, PROBE_LOCATION, chat["tools"], chat["chat_template_kwargs"])
    text = template.render(document, generation_prompt=True)
    last_message = str(chat["messages"][-1]["content"])
    return Prompt(last_message, tokenizer(text, add_special_tokens=False)["input_ids"])


# --- gigatoken

# Test texts. They reveal differences in splitting rules, normalizers and byte fallback.
PROBE_TEXTS = (
    *("", " ", "\n", "a", "  two  spaces ", "\t\ttabs\r\nand \r\n\r\n ends\n\n\n", " " * 70),
    *("It's we'll THEY'RE I'd 'tis 's", "1 12 123 1234 12345.678,90 ٣٤ ⅷ½²", "a" * 300, "aB" * 150),
    *("naïve Ünïcödé ß ﬁ ﬂ", "e\u0301 a\u0323\u0307 \u0301", "漢字かなカナ한국어", "مرحبا שלום"),
    *("👩‍👩‍👧🏽 ❤\ufe0f 🇩🇪", "\u00a0\u2003\u3000\u200b\ufeff", "\x00\x01\x1f\x7f\ufffd\ue000"),
    *("(a)[b]{c}<d>!?.,;:-_#$%&*+=/\\|~^`", "def f(x):\n    return x  # ok\n"),
    "\uff21\uff22\u3000\uff11\uff12",
)


def choose_backend(wanted: str, tokenizer: "PreTrainedTokenizerBase", document_format: str) -> str:
    """Return the tokenizer library to use: "gigatoken" or "tokenizers".

    wanted: the setting `tokenizer_backend`. "auto" chooses gigatoken if documents are plain texts
    and gigatoken gives the tokenizer's ids for all test texts (PROBE_TEXTS). Raises
    ConfigurationError if `wanted` is "gigatoken" and gigatoken cannot be used.
    """
    if wanted == "tokenizers":
        return wanted
    try:
        if document_format != "text":
            raise ValueError("loss masks need the offsets of characters")
        added = [str(token) for token in tokenizer.get_added_vocab()]
        texts = [*PROBE_TEXTS, *added, *(f"a{token}b {token} c{token}" for token in added)]
        found = GigatokenEncoder(tokenizer)(texts)
        for text, ids, exact in zip(texts, found, encode(tokenizer, texts), strict=True):
            if not np.array_equal(ids, exact):
                raise ValueError(f"gigatoken gives other ids for the text {text[:80]!r}")
    except (ImportError, ValueError, RuntimeError, KeyError, TypeError, AttributeError) as error:
        if wanted == "auto":
            return "tokenizers"
        raise ConfigurationError(
            f"tokenizer_backend: gigatoken cannot be used: {str(error).splitlines()[0]}; use "
            "--tokenizer_backend tokenizers"
        ) from error
    return "gigatoken"


class GigatokenEncoder:
    """An encoder of texts with gigatoken. Raises any Exception for an unsupported tokenizer."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase"):
        import gigatoken

        self._tokenizer = gigatoken.Tokenizer(tokenizer.backend_tokenizer)

    def __call__(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return a list with an array of token ids for each text, without special tokens."""
        import awkward

        if not texts:
            return []
        encoded: Any = self._tokenizer.encode_batch(list(texts))
        ends = np.cumsum(awkward.to_numpy(awkward.num(encoded)))
        return np.split(awkward.to_numpy(awkward.flatten(encoded)), ends[:-1])
