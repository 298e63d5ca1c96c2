"""Tokenization: documents to token ids and the mask of those that bear loss."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from utils.data.preparation.chat_marks import ChatRefused
from utils.data.preparation.chat_masks import ChatMasks, MaskedChat
from utils.data.preparation.chats import tokenize
from utils.data.preparation.documents import (
    ChatDocument,
    CompletionDocument,
    Document,
    TextDocument,
)
from utils.data.preparation.encoding import encoder
from utils.data.preparation.records import BadRow
from utils.data.tokenizers import id_type

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MASK_COLUMNS = {"text": None, "messages": "assistant_masks", "prompt_completion": "completion_mask"}


@dataclass(frozen=True)
class TokenizedDocument:
    """ids (tokens,) of the dataset's id type; loss_mask (tokens,) int8, None: all bear loss.

    drops_thinking: the chat template leaves out reasoning of earlier turns.
    """

    ids: np.ndarray
    loss_mask: np.ndarray | None
    drops_thinking: bool = False

    @property
    def loss_tokens(self) -> int:
        """The number of tokens that bear loss."""
        return len(self.ids) if self.loss_mask is None else int(self.loss_mask.sum())

    def truncated(self, length: int) -> "TokenizedDocument":
        """Return the first `length` tokens."""
        mask = None if self.loss_mask is None else self.loss_mask[:length]
        return replace(self, ids=self.ids[:length], loss_mask=mask)

    @property
    def has_target(self) -> bool:
        """Whether a token behind the first one bears loss: nothing predicts the first."""
        return len(self.ids) > 1 if self.loss_mask is None else bool(self.loss_mask[1:].any())


class DocumentTokenizer:
    """Turns documents of one format into ids and masks.

    Text: the tokenizer's own BOS if it adds one, the text, then EOS. Prompt and completion as
    strings are tokenized apart, as generation will do, and the completion ends with EOS. Messages
    are rendered by the chat template, which says itself what ends them; template_date: the date
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
        self._encode = encoder(backend, tokenizer)
        self._end = np.array([tokenizer.eos_token_id], dtype=self.id_type)
        self._template_date = template_date

    def __call__(self, documents: Sequence[Document]) -> list[TokenizedDocument | BadRow]:
        """Tokenize documents of one format, in order; one that cannot be rendered is a BadRow."""
        if documents and isinstance(documents[0], TextDocument):
            return self._texts([d.text for d in documents if isinstance(d, TextDocument)])
        pairs = [d for d in documents if isinstance(d, CompletionDocument)]
        chats = [d for d in documents if isinstance(d, ChatDocument)]
        of_pairs = iter(self._pairs(pairs) if pairs else [])
        of_chats = iter(self._chats(chats) if chats else [])
        return [next(of_chats if isinstance(d, ChatDocument) else of_pairs) for d in documents]

    @cached_property
    def _masks(self) -> ChatMasks:
        return ChatMasks(self.tokenizer, self._template_date)

    def _closed(self, ids: np.ndarray) -> np.ndarray:
        return ids if ids.size and ids[-1] == self._end[0] else np.concatenate([ids, self._end])

    def _texts(self, texts: list[str]) -> list[TokenizedDocument | BadRow]:
        return [TokenizedDocument(self._closed(ids), None) for ids in self._encode(texts, True)]

    def _pairs(self, documents: list[CompletionDocument]) -> list[TokenizedDocument | BadRow]:
        prompts = self._encode([document.prompt for document in documents], True)
        completions = self._encode([document.completion for document in documents], False)
        found = []
        for document, prompt, completion in zip(documents, prompts, completions, strict=True):
            # An end that the tokenizer adds is taken off, for the text goes on.
            opening = prompt[:-1] if prompt.size and prompt[-1] == self._end[0] else prompt
            ids = np.concatenate([opening, self._closed(completion)])
            found.append(self._checked(document, ids, np.arange(len(ids)) >= len(opening)))
        return found

    def _chats(self, documents: list[ChatDocument]) -> list[TokenizedDocument | BadRow]:
        """Render chats one by one and tokenize them at once."""
        found: list[TokenizedDocument | BadRow | None] = [None] * len(documents)
        rendered: dict[int, MaskedChat] = {}
        for place, document in enumerate(documents):
            try:
                rendered[place] = self._masks(
                    document.messages,
                    document.tools,
                    document.template_options,
                    document.first_trained,
                )
            except ChatRefused as refused:
                found[place] = BadRow(refused.reason, str(refused), document.place)
        tokenized = tokenize(self.tokenizer, list(rendered.values())) if rendered else []
        for place, chat, pair in zip(rendered, rendered.values(), tokenized, strict=True):
            if isinstance(pair, ChatRefused):
                found[place] = BadRow(pair.reason, str(pair), documents[place].place)
            else:
                checked = self._checked(documents[place], *pair)
                if isinstance(checked, TokenizedDocument):
                    checked = replace(checked, drops_thinking=chat.drops_thinking)
                found[place] = checked
        return [document for document in found if document is not None]

    def _checked(
        self, document: Document, ids: np.ndarray | list[int], mask: np.ndarray | list[int]
    ) -> TokenizedDocument | BadRow:
        tokenized = TokenizedDocument(
            np.array(ids, dtype=self.id_type), np.array(mask, dtype=np.int8)
        )
        if not tokenized.has_target:
            message = "no assistant token: nothing in this conversation bears loss"
            return BadRow("no_assistant_tokens", message, document.place)
        return tokenized
