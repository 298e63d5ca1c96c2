"""Loss masks of chats: the parts of a rendered chat that are trained on, checked for every chat.

A template may have {% generation %} markers around the assistant's text. Without markers the text
is derived: chat_templates.py renders the chat plainly and with marks around its texts, and
chat_turns.py finds the start and the end of each assistant turn near the marks. Start and end
depend only on the kinds of messages and the text around the turn. They are cached for the next turn
with the same kinds and text, so that most chats cost only these two renderings.

Every chat is checked. Each message's text must be in the rendering. The trained text of a turn must
have the turn's own text, the names, keys and numbers of its tool calls and the token that ends the
turn. It must have no text of another message.
"""

import json
import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from utils.config.errors import ConfigurationError
from utils.host.foreign import RENDERING_BYTES, limits, reason
from utils.prepare.chat_templates import (
    NO_MESSAGE,
    TAGS,
    ChatTemplate,
    MarkedChat,
)
from utils.prepare.chat_turns import LEADING_TAGS, TurnDelimiter
from utils.prepare.rows import ChatDocument, Message
from utils.prepare.values import ASSISTANT, UnusableRowError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CACHED = 20_000  # kinds of turns in the cache; chats of one template have a few dozen kinds

Span = tuple[int, int]  # [start, stop), in characters


@dataclass(frozen=True)
class MaskedChat:
    """A rendered chat and the spans [start, stop) of its trained text, in characters.

    drops_thinking: the template leaves out the reasoning of at least one trained turn.
    """

    text: str
    spans: Sequence[Span]
    drops_thinking: bool = False


class ChatMasks:
    """Renderer of chats with one tokenizer's template. It also finds the text to train on."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", date: str | None = None):
        self.template = ChatTemplate(tokenizer, date)
        self._turns = TurnDelimiter(self.template, tokenizer)
        self._delimiters: dict[Any, tuple[int, int, str]] = {}

    def __call__(self, document: ChatDocument) -> MaskedChat:
        """Return the rendering of a chat and the spans to train on.

        Turns before message `first_trained` and turns with `weight: 0` are left out. Raises
        UnusableRowError if the template does not fit the chat.
        """
        try:
            with limits(f"{document.location}: the chat template", RENDERING_BYTES):
                adapted = self.template.adapted(document.messages)
                return self._masked(replace(document, messages=adapted))
        except (UnusableRowError, ConfigurationError):
            raise
        except Exception as error:
            message = f"the chat template refuses this conversation ({reason(error)})"
            raise UnusableRowError("template_refused", message) from error

    def _masked(self, chat: ChatDocument) -> MaskedChat:
        turns = [i for i, message in enumerate(chat.messages) if message["role"] == ASSISTANT]
        text, blocks = self.template.render_with_markers(chat)
        marked = MarkedChat(self.template, chat, text)
        without_thinking = marked.turns_without_thinking()
        if self.template.has_markers:
            spans = _spans_of_blocks(marked, turns, blocks)
        else:
            spans, closing = self._derived_spans(marked, turns)
            text += closing
        trained = [
            turn
            for turn in turns
            if turn >= chat.first_trained and chat.messages[turn].get("weight") != 0
        ]
        for turn in trained:
            self._check_spans(marked, turn, spans[turn], text)
        trained_spans = [span for turn in trained for span in spans[turn]]
        return MaskedChat(text, trained_spans, not without_thinking.isdisjoint(trained))

    def _check_spans(self, chat: MarkedChat, turn: int, spans: Sequence[Span], text: str) -> None:
        """Raise UnusableRowError unless spans have a turn's words and end, and no other turn's."""
        words = [chat.indices[number] for number in chat.marks_of.get(turn, ())]
        # The generation prompt may already have the tags that begin a text, such as <think>.
        start = spans[0][0] if spans else 0
        words = [max(n, start) if not TAGS.sub("", text[n:start]).strip() else n for n in words]
        between = [(bisect_right(chat.indices, a), bisect_left(chat.indices, b)) for a, b in spans]
        inside = {mark.message for first, last in between for mark in chat.marks[first:last]}
        trained_text = "".join(text[slice(*span)] for span in spans)
        written = json.dumps(chat.messages[turn], ensure_ascii=False).count(self._turns.stop)
        ending = text[slice(*spans[-1])].rstrip() if spans else ""
        unsaid = [
            word for word in _words_of_calls(chat.chat.messages[turn]) if word not in trained_text
        ]
        problem, reason = "", "mask_incomplete"
        if not all(any(low <= index <= high for low, high in spans) for index in words):
            problem = "some of its words would not be trained on"
        elif unsaid:
            problem = f"{unsaid[0]!r} of its calls would not be trained on"
            if self.template.prints_ids:
                problem += " (the template prints ids in place of names: functions.NAME:0)"
        elif inside - {turn, NO_MESSAGE}:
            problem, reason = "words of another message would be trained on", "mask_too_wide"
        elif trained_text.count(self._turns.stop) > written + 1:
            problem, reason = "the template prints it as two turns", "mask_too_wide"
        elif not any(match.end() == len(ending) for match in self._turns.added.finditer(ending)):
            problem = "the token that ends it would not be trained on"
        if problem:
            raise chat.refused(turn, problem, reason)

    # --- delimiting turns

    def _derived_spans(
        self, chat: MarkedChat, turns: Sequence[int]
    ) -> tuple[dict[int, list[Span]], str]:
        """Return each turn's spans in the plain rendering, and a text to append to the rendering.

        The text to append ends the last turn. It is "" if the template itself ends that turn.
        """
        spans: dict[int, list[Span]] = {}
        closing, last = "", 0
        for turn in turns:
            low, first, behind, high = chat.bounds(turn)
            tags = LEADING_TAGS.match(chat.text, first, behind)
            gap, following = chat.text[low : tags.end() if tags else first], chat.text[behind:high]
            header, length, closing = self._delimiters_of(chat, turn, gap, following)
            start, last = max(low + header, last), behind + length
            if closing and last != len(chat.text):
                raise chat.refused(turn, "nothing ends it")
            spans[turn] = [(start, last + len(closing))]
        return spans, closing

    def _delimiters_of(
        self, chat: MarkedChat, turn: int, gap: str, following: str
    ) -> tuple[int, int, str]:
        """Return what TurnDelimiter finds for a turn, from the cache if possible.

        gap, following: the text before and behind the turn. The result is the length of the header
        in `gap`, the length of the turn's end in `following`, and a text to append to the turn.
        """
        numbers = {call.get("id") for call in chat.chat.messages[turn].get("tool_calls") or []}
        names = "|".join([*map(re.escape, filter(None, numbers)), r"\d"])
        texts = (
            re.sub(names, lambda found: "0" * len(found[0]), text) for text in (gap, following)
        )
        key = (*texts, _kinds_around(chat, turn))
        found = self._delimiters.get(key)
        if found is None:
            start = self._turns.header_length(chat, turn, gap)
            found = (start, *self._turns.end(chat, turn, following))
            if len(self._delimiters) > CACHED:
                self._delimiters.clear()
            if not re.search(r"\d", found[2]):  # a text to append with a number fits only this turn
                self._delimiters[key] = found
        return found


def _words_of_calls(message: Message) -> Iterator[str]:
    """Yield the names, keys and numbers in a message's tool calls, which marks do not cover."""
    for call in message.get("tool_calls") or []:
        yield call["function"]["name"]
        yield from _keys_and_numbers(call["function"]["arguments"])


def _keys_and_numbers(value: Any) -> Iterator[str]:
    if isinstance(value, Mapping):
        yield from value
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        yield json.dumps(value)
    elif isinstance(value, (Mapping, list)):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _keys_and_numbers(item)


def _kinds_around(chat: MarkedChat, turn: int) -> tuple[Any, ...]:
    """Return the part of a turn's cache key that is not text: the kinds of messages around it."""
    given = chat.chat
    keys = ("content", "tool_calls", "reasoning_content")
    kinds = [
        (message["role"], *(bool(message.get(key)) for key in keys))
        for message in given.messages[max(turn - 1, 0) : turn + 2]
    ]
    is_last = turn == len(given.messages) - 1
    return turn == 0, is_last, bool(given.tools), repr((kinds, given.template_options))


def _spans_of_blocks(
    chat: MarkedChat, turns: Sequence[int], blocks: Sequence[Span]
) -> dict[int, list[Span]]:
    """Return the {% generation %} blocks of each turn.

    A block belongs to the turn that has marks inside the block. A block without marks belongs to
    the first turn after the last message with marks before the block.
    """
    own: dict[int, list[Span]] = {turn: [] for turn in turns}
    for start, stop in blocks:
        if start == stop:
            continue
        inside = [
            message for at, message, _ in chat.marks if start <= at <= stop and message in own
        ]
        earlier = max((message for at, message, _ in chat.marks if at <= start), default=-1)
        turn = min(inside, default=next((turn for turn in turns if turn > earlier), None))
        if turn is not None:
            own[turn].append((start, stop))
    return own
