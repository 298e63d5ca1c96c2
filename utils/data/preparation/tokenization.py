"""Tokenization: documents to token ids and the mask of those that bear loss."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from utils.data.preparation import chats
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
    """ids (tokens,) of the dataset's id type; loss_mask (tokens,) int8, None: all bear loss."""

    ids: np.ndarray
    loss_mask: np.ndarray | None

    @property
    def loss_tokens(self) -> int:
        """The number of tokens that bear loss."""
        return len(self.ids) if self.loss_mask is None else int(self.loss_mask.sum())

    def truncated(self, length: int) -> "TokenizedDocument":
        """Return the first `length` tokens."""
        mask = None if self.loss_mask is None else self.loss_mask[:length]
        return TokenizedDocument(self.ids[:length], mask)

    @property
    def has_target(self) -> bool:
        """Whether a token behind the first one bears loss: nothing predicts the first."""
        return len(self.ids) > 1 if self.loss_mask is None else bool(self.loss_mask[1:].any())


class DocumentTokenizer:
    """Turns documents of one format into ids and masks.

    Text: the tokenizer's own BOS if it adds one, the text, then EOS. Prompt and completion as
    strings are tokenized apart, as generation will do, and the completion ends with EOS. Messages
    are rendered by the chat template, which says itself what ends them.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", backend: str = "tokenizers"):
        self.tokenizer = tokenizer
        self.id_type = id_type(tokenizer)
        self._encode = encoder(backend, tokenizer)
        self._end = np.array([tokenizer.eos_token_id], dtype=self.id_type)

    def __call__(self, documents: Sequence[Document]) -> list[TokenizedDocument | BadRow]:
        """Tokenize documents of one format, in order; one that cannot be rendered is a BadRow."""
        if documents and isinstance(documents[0], TextDocument):
            return self._texts([d.text for d in documents if isinstance(d, TextDocument)])
        pairs = [d for d in documents if isinstance(d, CompletionDocument) and d.is_text]
        if len(pairs) == len(documents):
            return self._pairs(pairs)
        rendered = self._batch([d for d in documents if isinstance(d, ChatDocument)])
        return rendered or [self._one(document) for document in documents]

    def _closed(self, ids: np.ndarray) -> np.ndarray:
        return ids if ids.size and ids[-1] == self._end[0] else np.concatenate([ids, self._end])

    def _texts(self, texts: list[str]) -> list[TokenizedDocument | BadRow]:
        return [TokenizedDocument(self._closed(ids), None) for ids in self._encode(texts, True)]

    def _pairs(self, documents: list[CompletionDocument]) -> list[TokenizedDocument | BadRow]:
        prompts = self._encode([str(document.prompt) for document in documents], True)
        completions = self._encode([str(document.completion) for document in documents], False)
        found = []
        for document, prompt, completion in zip(documents, prompts, completions, strict=True):
            # An end that the tokenizer adds is taken off, for the text goes on.
            opening = prompt[:-1] if prompt.size and prompt[-1] == self._end[0] else prompt
            ids = np.concatenate([opening, self._closed(completion)])
            found.append(self._checked(document, ids, np.arange(len(ids)) >= len(opening)))
        return found

    def _batch(self, documents: list[ChatDocument]) -> list[TokenizedDocument | BadRow]:
        """Render chats at once, which is faster; [] when one of them needs a look of its own."""
        if not documents or any(document.tools for document in documents):
            return []
        try:
            ids, masks = chats.render_batch(self.tokenizer, documents)
        except chats.RENDERING_ERRORS:
            return []
        return [self._checked(*pair) for pair in zip(documents, ids, masks, strict=True)]

    def _one(self, document: Document) -> TokenizedDocument | BadRow:
        try:
            if isinstance(document, ChatDocument):
                ids, mask = chats.render(self.tokenizer, document.messages, document.tools)
            else:
                assert isinstance(document, CompletionDocument)
                if document.is_text:
                    return self._pairs([document])[0]
                assert isinstance(document.prompt, list)
                assert isinstance(document.completion, list)
                ids, mask = chats.render_completion(
                    self.tokenizer, document.prompt, document.completion
                )
        except chats.RENDERING_ERRORS as error:
            message = f"the chat template refuses this conversation ({error})"
            return BadRow("template_refused", message, document.place)
        return self._checked(document, ids, mask)

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
