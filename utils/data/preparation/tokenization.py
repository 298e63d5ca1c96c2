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

    def __init__(self, tokenizer: "PreTrainedTokenizerBase"):
        self.tokenizer = tokenizer
        self.id_type = id_type(tokenizer)
        self._end: int = tokenizer.eos_token_id

    def __call__(self, documents: Sequence[Document]) -> list[TokenizedDocument | BadRow]:
        """Tokenize documents of one format, in order; one that cannot be rendered is a BadRow."""
        if documents and isinstance(documents[0], TextDocument):
            return self._texts([d.text for d in documents if isinstance(d, TextDocument)])
        rendered = self._batch([d for d in documents if isinstance(d, ChatDocument)])
        return rendered or [self._one(document) for document in documents]

    def _encode(self, texts: list[str], special_tokens: bool) -> list[list[int]]:
        encoded = self.tokenizer(
            texts,
            add_special_tokens=special_tokens,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,  # silences "longer than the model's maximum": packing splits texts
        )
        return encoded["input_ids"]

    def _closed(self, ids: list[int]) -> list[int]:
        return ids if ids and ids[-1] == self._end else [*ids, self._end]

    def _texts(self, texts: list[str]) -> list[TokenizedDocument | BadRow]:
        return [
            TokenizedDocument(np.array(self._closed(ids), dtype=self.id_type), None)
            for ids in self._encode(texts, special_tokens=True)
        ]

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
            if isinstance(document, CompletionDocument):
                ids, mask = self._completion(document)
            else:
                assert isinstance(document, ChatDocument)
                ids, mask = chats.render(self.tokenizer, document.messages, document.tools)
        except chats.RENDERING_ERRORS as error:
            message = f"the chat template refuses this conversation ({error})"
            return BadRow("template_refused", message, document.place)
        return self._checked(document, ids, mask)

    def _completion(self, document: CompletionDocument) -> tuple[list[int], list[int]]:
        if not (isinstance(document.prompt, str) and isinstance(document.completion, str)):
            assert isinstance(document.prompt, list)
            assert isinstance(document.completion, list)
            return chats.render_completion(self.tokenizer, document.prompt, document.completion)
        (prompt,) = self._encode([document.prompt], special_tokens=True)
        if prompt and prompt[-1] == self._end:  # added by the tokenizer, but the text goes on
            prompt = prompt[:-1]
        (completion,) = self._encode([document.completion], special_tokens=False)
        completion = self._closed(completion)
        return prompt + completion, [0] * len(prompt) + [1] * len(completion)

    def _checked(
        self, document: Document, ids: list[int], mask: list[int]
    ) -> TokenizedDocument | BadRow:
        tokenized = TokenizedDocument(
            np.array(ids, dtype=self.id_type), np.array(mask, dtype=np.int8)
        )
        if not tokenized.has_target:
            message = "no assistant token: nothing in this conversation bears loss"
            return BadRow("no_assistant_tokens", message, document.place)
        return tokenized
