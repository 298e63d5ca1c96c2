"""Loss masks of chats: the spans (ranges of characters) of a rendered chat that are trained on.

A template may have {% generation %} markers around the assistant's text. If it has none,
chat_turns.py finds the start and the end of each turn.

Every chat is checked. The rendering must contain each message's text. The trained text of a turn
must contain the message's text, the names, keys and numbers of its tool calls, and the token that
ends the turn. The trained text must not contain text of another message.
"""

import json
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from utils.config.errors import ConfigurationError
from utils.host.foreign import RENDERING_BYTES, reason, resource_limits
from utils.prepare.chat_marks import NO_MESSAGE, TAGS, MarkedChat, words_of_calls
from utils.prepare.chat_templates import ChatTemplate
from utils.prepare.chat_turns import Span, TurnDelimiter
from utils.prepare.messages import OWN_ROLES
from utils.prepare.rows import ChatDocument
from utils.prepare.values import ASSISTANT, UnusableRowError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class MaskedChat:
    """A rendered chat, and its spans to train on: [start, stop) in characters.

    starts: the start of each trained turn's first span. drops_thinking: the template leaves out the
    reasoning of at least one trained turn.
    """

    text: str
    spans: Sequence[Span]
    starts: Sequence[int] = ()
    drops_thinking: bool = False


class ChatMasks:
    """Callable that renders chats with a tokenizer's template and finds the text to train on.

    date: printed as today's date (see ChatTemplate).
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", date: str | None = None):
        self.template = ChatTemplate(tokenizer, date)
        self._turns = TurnDelimiter(self.template, tokenizer)

    def __call__(self, document: ChatDocument) -> MaskedChat:
        """Return the rendering of a chat and the spans to train on.

        Turns before index `document.first_trained` and turns with `weight: 0` are not trained on.
        Raises UnusableRowError if the template refuses the chat, or if the spans fail a check.
        """
        try:
            with resource_limits(f"{document.location}: the chat template", RENDERING_BYTES):
                adapted = self.template.adapted(document.messages)
                return self._masked(replace(document, messages=adapted))
        except (UnusableRowError, ConfigurationError):
            raise
        except Exception as error:
            message = f"the chat template refuses this conversation ({reason(error)})"
            if self._accepts_without_system(document):
                message += ": put the text of the system message into the first user message"
            raise UnusableRowError("template_refused", message) from error

    def _accepts_without_system(self, document: ChatDocument) -> bool:
        if document.messages[0]["role"] != "system":
            return False
        with suppress(Exception):
            adapted = self.template.adapted(document.messages[1:])
            return bool(self.template.render(replace(document, messages=adapted)))
        return False

    def _check_roles(self, chat: ChatDocument) -> None:
        """Raise UnusableRowError if a role is unknown and no message has the role `user`.

        A known role is in OWN_ROLES or occurs in the template's source.
        """
        roles = dict.fromkeys(message["role"] for message in chat.messages)
        unknown = [
            role for role in roles if role not in OWN_ROLES and role not in self.template.source
        ]
        if unknown and "user" not in roles:
            raise UnusableRowError(
                "unknown_role",
                f"no message has the role user, and the chat template does not name {unknown[0]!r}"
                f": if that is the user, give --columns {unknown[0]}=user",
            )

    def _masked(self, chat: ChatDocument) -> MaskedChat:
        self._check_roles(chat)
        turns = [i for i, message in enumerate(chat.messages) if message["role"] == ASSISTANT]
        text, blocks = self.template.render_with_markers(chat)
        marked = MarkedChat(self.template, chat, text)
        without_thinking = marked.check_texts_printed()
        if self.template.has_markers:
            spans = _spans_of_blocks(marked, turns, blocks)
        else:
            spans, closing = self._turns.spans(marked, turns)
            text += closing
        trained = [
            turn
            for turn in turns
            if turn >= chat.first_trained and chat.messages[turn].get("weight") != 0
        ]
        for turn in trained:
            self._check_spans(marked, turn, spans[turn], text)
        trained_spans = [span for turn in trained for span in spans[turn]]
        starts = [spans[turn][0][0] for turn in trained if spans[turn]]
        return MaskedChat(text, trained_spans, starts, not without_thinking.isdisjoint(trained))

    def _check_spans(self, chat: MarkedChat, turn: int, spans: Sequence[Span], text: str) -> None:
        """Raise UnusableRowError if the spans to train on do not match the turn.

        The spans must contain the turn's texts, its tool calls and the token that ends the turn,
        but no text of another message. turn: the message index. text: the rendering.
        """
        text_indices = [chat.indices[number] for number in chat.marks_of.get(turn, ())]
        # The generation prompt may already have the tags that begin a text, such as <think>.
        start = spans[0][0] if spans else 0
        text_indices = [
            max(index, start) if not TAGS.sub("", text[index:start]).strip() else index
            for index in text_indices
        ]
        mark_ranges = [
            (bisect_right(chat.indices, low), bisect_left(chat.indices, high))
            for low, high in spans
        ]
        messages_inside = {
            mark.message for first, last in mark_ranges for mark in chat.marks[first:last]
        }
        trained = "".join(text[slice(*span)] for span in spans)
        stop = self._turns.stop
        stops_in_message = json.dumps(chat.messages[turn], ensure_ascii=False).count(stop)
        ending = text[slice(*spans[-1])].rstrip() if spans else ""
        missing = [word for word in words_of_calls(chat.chat.messages[turn]) if word not in trained]
        problem, reason = "", "mask_incomplete"
        if not all(any(low <= index <= high for low, high in spans) for index in text_indices):
            problem = "some of its words would not be trained on"
        elif missing:
            problem = f"{missing[0]!r} of its calls would not be trained on"
            if self.template.prints_ids:
                problem += " (the template prints ids in place of names: functions.NAME:0)"
        elif messages_inside - {turn, NO_MESSAGE}:
            problem, reason = "words of another message would be trained on", "mask_too_wide"
        elif trained.count(stop) > stops_in_message + 1:
            problem, reason = "the template prints it as two turns", "mask_too_wide"
        elif not any(match.end() == len(ending) for match in self._turns.added.finditer(ending)):
            problem = "the token that ends it would not be trained on"
        if problem:
            raise chat.refused(turn, problem, reason)


def _spans_of_blocks(
    chat: MarkedChat, turns: Sequence[int], blocks: Sequence[Span]
) -> dict[int, list[Span]]:
    """Return {turn: spans of its {% generation %} blocks}. turns: indices of assistant messages.

    Marks surround the texts of each message (see chat_marks.py). A block belongs to the first turn
    with a mark inside the block. A block without marks of a turn belongs to the turn that follows
    the last message with a mark before the block.
    """
    spans: dict[int, list[Span]] = {turn: [] for turn in turns}
    for start, stop in blocks:
        if start == stop:
            continue
        inside = [m.message for m in chat.marks if start <= m.at <= stop and m.message in spans]
        earlier = max((mark.message for mark in chat.marks if mark.at <= start), default=-1)
        turn = min(inside, default=next((turn for turn in turns if turn > earlier), None))
        if turn is not None:
            spans[turn].append((start, stop))
    return spans
