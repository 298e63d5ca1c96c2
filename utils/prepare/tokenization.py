"""Tokenization: the token ids of documents, and their loss masks (which tokens are trained on).

The loss mask of a chat or completion is found with the tokens' character offsets in the text.
"""

import json
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from utils.data.tokenizers import id_type
from utils.prepare.chat_masks import ChatMasks, MaskedChat
from utils.prepare.chat_templates import EMPTY_THOUGHT, has_thought
from utils.prepare.encoding import (
    LARGEST_PIECE_CHARACTERS,
    GigatokenEncoder,
    SpecialTokens,
    encode,
    encode_with_offsets,
    text_pieces,
)
from utils.prepare.rows import (
    ChatDocument,
    CompletionDocument,
    Document,
    PiecesDocument,
    TextDocument,
)
from utils.prepare.values import (
    ASSISTANT,
    LOCATIONS,
    ODD_CHARACTERS,
    BadRow,
    Location,
    UnusableRowError,
    pack_locations,
)
from utils.prepare.workspace import partial_name

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MASK_COLUMNS = {"text": None, "messages": "assistant_masks", "prompt_completion": "completion_mask"}

# Tokens per record batch. Few large batches keep the reader's table of chunks short. A writer keeps
# one batch in memory: 2 to 4 bytes per token, and 1 byte for its mask.
TOKENS_PER_BATCH = 1 << 20

WORDS_NOTE, BLANK_NOTE = "prompt_words_in_completions", "prompt_blanks_in_completions"


@dataclass(frozen=True)
class TokenizedDocument:
    """A document's token ids, (tokens,) in the dataset's integer type, and its loss mask.

    loss_mask: (tokens,) int8. None means all tokens are trained on.
    notes: {name in NOTE_TEXTS: count}.
    """

    ids: np.ndarray
    loss_mask: np.ndarray | None
    notes: Mapping[str, int] = field(default_factory=dict)

    @property
    def loss_tokens(self) -> int:
        """The number of tokens that are trained on."""
        return len(self.ids) if self.loss_mask is None else int(self.loss_mask.sum())

    @property
    def has_target(self) -> bool:
        """Whether any token except the first is trained on. Nothing predicts the first token."""
        return len(self.ids) > 1 if self.loss_mask is None else bool(self.loss_mask[1:].any())

    def truncated(self, length: int) -> "TokenizedDocument":
        """Return the document cut to its first `length` tokens."""
        mask = None if self.loss_mask is None else self.loss_mask[:length]
        return replace(self, ids=self.ids[:length], loss_mask=mask)


class DocumentTokenizer:
    """Tokenizer that returns token ids and loss masks of documents.

    Texts, and prompts with completions, get EOS, and BOS if the tokenizer adds BOS, unless present.
    Chats get only the template's special tokens. template_date: printed as today (YYYY-MM-DD).
    """

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        backend: str = "tokenizers",
        template_date: str | None = None,
    ):
        self.tokenizer = tokenizer
        self.id_type = id_type(tokenizer)
        self._encode = (
            GigatokenEncoder(tokenizer) if backend == "gigatoken" else partial(encode, tokenizer)
        )
        named = (tokenizer.eos_token_id, tokenizer.bos_token_id, tokenizer.pad_token_id)
        unknown = tokenizer.unk_token_id
        self._unknown_id = None if unknown in named else unknown
        self._template_date = template_date

    def __call__(self, documents: Sequence[Document]) -> list[TokenizedDocument | BadRow]:
        """Return the tokenized documents in order, with a BadRow for each unusable document."""
        kinds: dict[type, Any] = {
            TextDocument: self._encode_texts,
            CompletionDocument: self._encode_completions,
            PiecesDocument: self._join_pieces,
            ChatDocument: self._encode_chats,
        }
        return [one for kind, run in groupby(documents, type) for one in kinds[kind](list(run))]

    @cached_property
    def _special_tokens(self) -> SpecialTokens:
        return SpecialTokens.of(self.tokenizer)

    @cached_property
    def _masks(self) -> ChatMasks:
        return ChatMasks(self.tokenizer, self._template_date)

    def _encode_texts(self, documents: list[TextDocument]) -> Iterator[TokenizedDocument | BadRow]:
        limit = LARGEST_PIECE_CHARACTERS
        short = iter(self._encode([d.text for d in documents if len(d.text) <= limit]))
        for document in documents:
            is_short = len(document.text) <= limit
            ids = next(short) if is_short else self._encode_long_text(document.text)
            before, behind = self._special_tokens.ids_to_add(ids)
            whole = np.concatenate([before, ids, behind])
            if len(whole) <= 4 and self._special_tokens.are_all(whole):
                yield _empty_row(document)
            else:
                yield self._tokenized_document(whole, None, Counter())

    def _encode_long_text(self, text: str) -> np.ndarray:
        """Return the ids of a long text, tokenized piece by piece.

        SentencePiece tokenizers put a blank before a text. To avoid blanks between pieces, tokenize
        later pieces with a character before them, and remove the ids of this character.
        """
        encoded = []
        for number, piece in enumerate(text_pieces(text, LARGEST_PIECE_CHARACTERS)):
            for before in ("\n", "a", ".") if number else ():
                before_ids, whole = self._encode([before, before + piece])
                if np.array_equal(whole[: len(before_ids)], before_ids):
                    ids = whole[len(before_ids) :]
                    break
            else:
                (ids,) = self._encode([piece])
            encoded.append(ids.astype(self.id_type))
        return np.concatenate(encoded)

    def _encode_completions(
        self, documents: list[CompletionDocument]
    ) -> Iterator[TokenizedDocument | BadRow]:
        pairs = [(document.prompt, document.completion) for document in documents]
        joined = zip(documents, self._joined_ids(pairs), strict=True)
        for document, (ids, start, overlap) in joined:
            if self._special_tokens.are_all(ids[start:]):
                yield _empty_row(document)
                continue
            before, behind = self._special_tokens.ids_to_add(ids)
            whole = np.concatenate([before, ids, behind])
            mask = np.arange(len(whole)) >= len(before) + start
            notes = Counter([BLANK_NOTE if overlap.isspace() else WORDS_NOTE] if overlap else [])
            yield self._require_target(document, whole, mask, notes)

    def _join_pieces(self, documents: list[PiecesDocument]) -> Iterator[TokenizedDocument | BadRow]:
        pieces = [piece for document in documents for piece, _ in document.pieces]
        found = iter(self._encode([piece for piece in pieces if isinstance(piece, str)]))
        for document in documents:
            parts = [next(found) if isinstance(p, str) else np.array(p) for p, _ in document.pieces]
            ids = np.concatenate(parts)
            mask = np.repeat([mark for _, mark in document.pieces], list(map(len, parts)))
            if document.special_tokens:
                before, behind = self._special_tokens.ids_to_add(ids)
                ids = np.concatenate([before, ids, behind])
                mask = np.pad(mask, (len(before), len(behind)), "edge")
            if not 0 <= ids.min() <= ids.max() < len(self.tokenizer):
                wrong = min(ids.min(), 0) or ids.max()
                fault = f"token id {wrong}: the tokenizer has {len(self.tokenizer)} tokens"
                yield BadRow("other_tokenizer", fault, document.location)
                continue
            yield self._require_target(document, ids, mask, Counter())

    def _joined_ids(
        self, pairs: Sequence[tuple[str, str]]
    ) -> Iterator[tuple[np.ndarray, int, str]]:
        """Yield (ids, start, overlap) for each prompt and its completion, tokenized as one text.

        start: index of the completion's first token. overlap: prompt text in this token, or "".
        """
        texts = [before + behind for before, behind in pairs]
        if self.tokenizer.is_fast:
            encoded = encode_with_offsets(self.tokenizer, texts)
            for (before, _), text, (ids, offsets) in zip(pairs, texts, encoded, strict=True):
                yield ids, *first_token(text, len(before), len(text), offsets)
            return
        # Without offsets, take the first token that differs from the prompt's tokens.
        prompts = self._encode([before for before, _ in pairs])
        for (before, _), whole, prompt in zip(pairs, self._encode(texts), prompts, strict=True):
            equal = [*(whole[: len(prompt)] == prompt[: len(whole)]), False]
            start = equal.index(False)
            yield whole, start, "" if start == len(prompt) else before[-1]

    def _encode_chats(self, documents: list[ChatDocument]) -> Iterator[TokenizedDocument | BadRow]:
        """Yield each chat's tokens and loss mask, or a BadRow. Tokenizes all chats together."""
        masked: list[MaskedChat | BadRow] = []
        for document in documents:
            try:
                masked.append(self._masks(document))
            except UnusableRowError as error:
                masked.append(error.at(document.location))
        texts = [chat.text for chat in masked if isinstance(chat, MaskedChat)]
        encoded = encode_with_offsets(self.tokenizer, texts)
        for document, chat in zip(documents, masked, strict=True):
            if isinstance(chat, BadRow):
                yield chat
                continue
            ids, offsets = next(encoded)
            try:
                mask = token_mask(chat, offsets)
                yield self._require_target(document, ids, mask, self._chat_notes(document, chat))
            except UnusableRowError as error:
                yield error.at(document.location)

    def _chat_notes(self, document: ChatDocument, chat: MaskedChat) -> Counter[str]:
        """Return {name in NOTE_TEXTS: count}, such as the number of empty thoughts in a chat."""
        empty = [thought.span() for thought in EMPTY_THOUGHT.finditer(chat.text)]
        answers = [
            message["content"]
            for message in document.messages[document.first_trained :]
            if message["role"] == ASSISTANT and message.get("weight") != 0
        ]
        trained = sum(any(a < end and begin < b for a, b in chat.spans) for begin, end in empty)
        thinks = has_thought(document.messages[-1])
        # SmolLM3's template also trains on the empty thought that ends the prompt: harmless.
        closed = (trained or thinks) and self._prompt_has_empty_thought(document)
        return Counter(
            without_earlier_thinking=int(chat.drops_thinking),
            empty_thoughts=0 if closed else trained,
            answers_without_empty_thought=sum(
                all((chat.text[end:start] + chat.text[start:begin]).strip() for begin, end in empty)
                for start in (chat.starts if empty else ())
            ),
            thoughts_after_closed_prompts=int(thinks and closed),
            special_tokens_in_answers=sum(map(bool, map(self._special_pattern.search, answers))),
            odd_characters_in_answers=sum(map(bool, map(ODD_CHARACTERS.search, answers))),
        )

    @cached_property
    def _special_pattern(self) -> re.Pattern[str]:
        words = filter(None, self.tokenizer.all_special_tokens)
        return re.compile("|".join(map(re.escape, words)) or "(?!)")

    def _prompt_has_empty_thought(self, document: ChatDocument) -> bool:
        """Return whether the prompt of the last answer ends with an empty thought."""
        template = self._masks.template
        before = replace(document, messages=template.adapted(document.messages[:-1]))
        with suppress(Exception):  # a template may refuse a chat without its answer
            prompt = template.render(before, generation_prompt=True).rstrip()
            return any(thought.end() == len(prompt) for thought in EMPTY_THOUGHT.finditer(prompt))
        return False

    def _require_target(
        self, document: Document, ids: np.ndarray, mask: np.ndarray, notes: Counter[str]
    ) -> TokenizedDocument | BadRow:
        found = self._tokenized_document(ids, mask.astype(np.int8), notes)
        if found.has_target:
            return found
        message = "no assistant token: nothing after the first token is trained on"
        if isinstance(document, ChatDocument) and all(
            message.get("weight") == 0
            for message in document.messages[document.first_trained :]
            if message["role"] == ASSISTANT
        ):
            message = "every answer is marked as not trained on (weight 0, train false, ...)"
        return BadRow("no_assistant_tokens", message, document.location)

    def _tokenized_document(
        self, ids: np.ndarray, mask: np.ndarray | None, notes: Counter[str]
    ) -> TokenizedDocument:
        if self._unknown_id is not None:
            notes["unknown_tokens"] = int((ids == self._unknown_id).sum())
        return TokenizedDocument(ids.astype(self.id_type), mask, notes)


def _empty_row(document: TextDocument | CompletionDocument) -> BadRow:
    message = f"empty document: {document.column!r} has special tokens alone"
    return BadRow("empty", message, document.location)


def token_mask(chat: MaskedChat, offsets: np.ndarray) -> np.ndarray:
    """Return the loss mask of a rendered chat: bool, (tokens,). True means trained on.

    offsets: each token's start and stop in characters, (tokens, 2). Tokens inside the trained spans
    of `chat` are trained on. Tokens that cross an edge of a span are also trained on, if their text
    outside the span is blank. Otherwise UnusableRowError is raised. Exception: a token that crosses
    the start of a span, but has only blanks inside the span, is not trained on.
    """
    mask = np.zeros(len(offsets), dtype=bool)
    starts, stops = offsets.T
    text = chat.text
    for start, stop in chat.spans:
        first, text_before = first_token(text, start, stop, offsets)
        last = int(np.searchsorted(starts, stop)) - 1
        if first > last:
            continue
        if text_before.strip() or text[stop : stops[last]].strip():
            edge = "the header of a turn and its first words"
            if not text_before.strip():
                edge = "the end of a turn and what follows it"
            raise UnusableRowError("straddled", f"one token holds {edge}")
        mask[first : last + 1] = True
    return mask


def first_token(text: str, start: int, stop: int, offsets: np.ndarray) -> tuple[int, str]:
    """Return the index of the first token of text[start:stop], and the token's text before `start`.

    offsets: (tokens, 2), see `token_mask`. A token that crosses `start` and has only blanks after
    `start` is skipped.
    """
    starts, stops = offsets.T
    first = int(np.searchsorted(stops, start, side="right"))
    if first == len(offsets) or starts[first] >= start:
        return first, ""
    if text[start : stops[first]].isspace() and stops[first] < stop:
        return first + 1, ""
    return first, text[starts[first] : start]


# --- the files of documents


class TokenFileWriter:
    """Writer of tokenized documents to an Arrow file. Equal input gives equal bytes.

    The metadata of each record batch lists the locations of its documents in the sources.
    """

    def __init__(self, path: Path, features: Mapping[str, Any]):
        self._path, self._draft = path, partial_name(path)
        types = {name: feature["feature"]["dtype"] for name, feature in features.items()}
        self._schema = pa.schema(
            {name: pa.list_(pa.type_for_alias(dtype)) for name, dtype in types.items()},
            metadata={"huggingface": json.dumps({"info": {"features": features}})},
        )
        self._documents: list[TokenizedDocument] = []
        self._locations: list[Location] = []
        self._tokens = 0
        self._file = self._draft.open("wb")
        self._stream = pa.ipc.new_stream(self._file, self._schema)

    def append(self, document: TokenizedDocument, location: Location) -> None:
        """Append a document. location: the location of its record in the sources."""
        self._documents.append(document)
        self._locations.append(location)
        self._tokens += len(document.ids)
        if self._tokens >= TOKENS_PER_BATCH:
            self._write_batch()

    def _write_batch(self) -> None:
        values = [[d.ids for d in self._documents], [d.loss_mask for d in self._documents]]
        columns = [pa.array(values[i], field.type) for i, field in enumerate(self._schema)]
        self._stream.write_batch(
            pa.record_batch(columns, schema=self._schema),
            custom_metadata={LOCATIONS: pack_locations(self._locations)},
        )
        self._documents, self._locations, self._tokens = [], [], 0

    def finish(self) -> None:
        """Write the last batch, flush the file to disk and rename it to its final name."""
        if self._documents:
            self._write_batch()
        self._stream.close()
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self._draft.replace(self._path)


def token_features(id_type: np.dtype, document_format: str) -> dict[str, Any]:
    """Return the columns of a split and their types, in the JSON form of `datasets` features."""
    types, mask_column = {"input_ids": id_type.name}, MASK_COLUMNS[document_format]
    if mask_column:
        types[mask_column] = "int8"
    return {
        name: {"feature": {"dtype": dtype, "_type": "Value"}, "_type": "List"}
        for name, dtype in types.items()
    }
