"""The checks that every chat must pass, whatever its loss mask comes from.

Each message's text is in the rendering, and what is trained on of an assistant turn is its own
text and the token that ends it.
"""

import json
import re
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

from utils.data.preparation.chat_marks import (
    CONTENT,
    NOBODY,
    REASONING,
    ChatRefused,
    Mark,
    MarkedChat,
    argument_keys,
    unmarked_place,
)

TAKE_ANOTHER = "--chat_template takes one that prints it"
Spans = Sequence[tuple[int, int]]  # [start, stop), in characters


@dataclass
class MarkedRendering:
    """A chat rendered with marks (`whole`), and what was given to the template with it."""

    marked: MarkedChat
    tools: Sequence[Any] | None
    options: Mapping[str, Any] | None
    whole: str

    @cached_property
    def marks(self) -> list[Mark]:
        """Every mark of the rendering, in order."""
        return self.marked.find(self.whole)

    @cached_property
    def plain(self) -> str:
        """The rendering without its marks."""
        places = [-1, *(mark.place for mark in self.marks), len(self.whole)]
        return "".join(self.whole[a + 1 : b] for a, b in pairwise(places))

    @cached_property
    def _own(self) -> dict[int, list[int]]:
        found: dict[int, list[int]] = {}
        for mark in self.marks:
            found.setdefault(mark.message, []).append(mark.place)
        return found

    @cached_property
    def _others(self) -> list[Mark]:
        return [mark for mark in self.marks if mark.message != NOBODY]

    def own(self, message: int) -> list[int]:
        """Return the places of a message's marks, in order."""
        return self._own.get(message, [])

    def between(self, message: int) -> tuple[int, int]:
        """Return [low, high) of the text between the marks before a message's and behind them."""
        own, marks = self.own(message), self._others
        if own:
            before, behind = bisect_left(marks, (own[0],)), bisect_right(marks, (own[-1] + 1,))
        else:
            before = max((k + 1 for k, m in enumerate(marks) if m.message < message), default=0)
            later = (k for k, m in enumerate(marks) if m.message > message)
            behind = min(later, default=len(marks))
        low = marks[before - 1].place + 1 if before else 0
        return low, marks[behind].place if behind < len(marks) else len(self.whole)


def check_texts(chat: MarkedRendering, text: str) -> bool:
    """Raise ChatRefused unless the text of every message and every tool is in the rendering.

    Returns whether reasoning was left out of a turn that others follow, as many published
    templates do by design.
    """
    found = Counter((mark.message, mark.kind) for mark in chat.marks)
    dropped = False
    for (index, kind), expected in chat.marked.expected.items():
        if found[index, kind] >= expected:
            continue
        if kind != REASONING or not _is_past(chat, index):
            what = {CONTENT: "content", REASONING: "reasoning"}.get(kind, "tool calls")
            reason = f"{what.replace(' ', '_')}_left_out"
            raise ChatRefused(
                f"{named(chat, index)}: the chat template leaves out its {what} ({TAKE_ANOTHER})",
                reason,
            )
        dropped = True
    for index, message in enumerate(chat.marked.messages):
        for call in message.get("tool_calls") or []:
            for word in (str(call["function"].get("name", "")), *argument_keys(call)):
                if word not in text:
                    where = named(chat, index)
                    problem = f"{where}: the chat template leaves out {word!r} of its calls"
                    raise ChatRefused(f"{problem} ({TAKE_ANOTHER})", "tool_calls_left_out")
    for name in _tool_names(chat.tools):
        if name not in text:
            raise ChatRefused(
                f"the chat template leaves out the tool {name!r} ({TAKE_ANOTHER})", "tools_left_out"
            )
    return dropped


def _is_past(chat: MarkedRendering, index: int) -> bool:
    """Tell whether the user or the assistant speaks after a message."""
    return any(message["role"] != "tool" for message in chat.marked.messages[index + 1 :])


def _tool_names(tools: Sequence[Any] | None) -> list[str]:
    functions = [tool.get("function") or tool for tool in tools or [] if isinstance(tool, dict)]
    return [name for function in functions if isinstance(name := function.get("name"), str)]


def ends_with_token(said: str, tokens: re.Pattern[str]) -> bool:
    """Tell whether a text ends with one of the tokens, but for white space."""
    said = said.rstrip()
    return any(match.end() == len(said) for match in tokens.finditer(said))


def check_spans(
    chat: MarkedRendering,
    trained: Mapping[int, Spans],
    text: str,
    tokens: re.Pattern[str],
    stop: str,
) -> None:
    """Raise ChatRefused unless the spans of each turn hold its words, no other's, and its end.

    trained: message index -> spans of `text`. tokens: what may end a turn; stop: the EOS token,
    which the model says once.
    """
    places = [unmarked_place(chat.marks, mark.place) for mark in chat.marks]
    for turn, spans in trained.items():
        for place in chat.own(turn):
            plain = unmarked_place(chat.marks, place)
            if not any(low <= plain <= high for low, high in spans):
                message = f"{named(chat, turn)}: some of its words would not be trained on"
                raise ChatRefused(message, "mask_incomplete")
        for low, high in spans:
            inside = chat.marks[bisect_right(places, low) : bisect_left(places, high)]
            if any(mark.message not in (turn, NOBODY) for mark in inside):
                message = f"{named(chat, turn)}: words of another message would be trained on"
                raise ChatRefused(message, "mask_too_wide")
        said = "".join(text[slice(*span)] for span in spans)
        written = json.dumps(chat.marked.messages[turn], ensure_ascii=False).count(stop)
        if said.count(stop) > written + 1:
            message = f"{named(chat, turn)}: the template prints it as two turns"
            raise ChatRefused(message, "mask_too_wide")
        if not spans or not ends_with_token(text[slice(*spans[-1])], tokens):
            message = f"{named(chat, turn)}: the token that ends it would not be trained on"
            raise ChatRefused(message, "mask_incomplete")


def spans_of_markers(
    chat: MarkedRendering, turns: Sequence[int], blocks: Spans
) -> dict[int, list[tuple[int, int]]]:
    """Return the {% generation %} blocks of each turn: with its marks, or next after others'."""
    places = [(unmarked_place(chat.marks, mark.place), mark.message) for mark in chat.marks]
    own: dict[int, list[tuple[int, int]]] = {turn: [] for turn in turns}
    for start, stop in blocks:
        if start == stop:
            continue
        inside = [message for place, message in places if start <= place <= stop and message in own]
        earlier = max((message for place, message in places if place <= start), default=-1)
        turn = min(inside, default=next((turn for turn in turns if turn > earlier), None))
        if turn is not None:
            own[turn].append((start, stop))
    return own


def named(chat: MarkedRendering, index: int) -> str:
    """Return the name of a message for an error."""
    return f"message {index} ({chat.marked.messages[index]['role']})"
