"""Marks: private-use characters around the texts of a chat, which say in a rendering whose it is.

However a template moves, trims or drops a text, its marks go with it. A rendering with marks, less
its marks, must be the plain rendering: then nothing but whose text it is was added.
"""

import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from utils.data.preparation.chat_template import REASONING_NAMES, Message, arguments_of

# What a mark stands for; a name of a call is marked only where none of its arguments is.
CONTENT, REASONING, CALL, NAME = range(4)
KINDS = 4
# Supplementary private use, the rarer plane first (icon fonts are in the other one).
BLOCKS = (0x100000, 0xF0000)
BLOCK_SIZE = 0xFFFE
OF_BLOCK = {block: re.compile(f"[{chr(block)}-{chr(block + BLOCK_SIZE - 1)}]") for block in BLOCKS}
MARKS = re.compile("[\U000f0000-\U000ffffd\U00100000-\U0010fffd]")
# Templates look for tags in a text and split it there: marks stand around the text between them.
TAGS = re.compile(r"(<\|?/?[^<>\s]{1,40}>|\[/?[A-Z_]{3,30}\])")
THINKING = re.compile(r"<(/?)(?:think|thinking|reasoning)>")


class ChatRefused(ValueError):
    """A conversation that cannot be trained on; `reason` is the name it is counted under."""

    def __init__(self, message: str, reason: str = "template_refused"):
        super().__init__(message)
        self.reason = reason


NOBODY = -1


class Mark(NamedTuple):
    """One mark found in a rendering: its place, the index of its message and its kind.

    message is NOBODY for the name of a call that is printed once more, as where its result is.
    """

    place: int
    message: int
    kind: int


@dataclass
class MarkedChat:
    """Copies of messages with marks, and how many of each (message, kind) a rendering must show.

    outer: marks also stand around tags at the edges of a text; empty: in place of an empty text.
    A template that looks at such edges, or for empty texts, renders another text then.
    """

    messages: Sequence[Message]
    block: int
    outer: bool
    empty: bool
    marked: list[dict[str, Any]] = field(default_factory=list)
    expected: Counter[tuple[int, int]] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        if len(self.messages) * KINDS > BLOCK_SIZE:
            raise ChatRefused(f"{len(self.messages):,} messages in one conversation")
        self.marked = [self._message(i, message) for i, message in enumerate(self.messages)]

    def find(self, rendering: str) -> list[Mark]:
        """Return every mark of a rendering of these messages, in order."""
        found = []
        names: Counter[int] = Counter()
        for match in OF_BLOCK[self.block].finditer(rendering):
            message, kind = divmod(ord(match.group()) - self.block, KINDS)
            names[message] += kind == NAME
            if kind == NAME and names[message] > self.expected[message, NAME]:
                message = NOBODY
            found.append(Mark(match.start(), message, kind))
        return found

    def _mark(self, index: int, kind: int) -> str:
        return chr(self.block + index * KINDS + kind)

    def _message(self, index: int, message: Message) -> dict[str, Any]:
        marked = dict(message)
        is_call = bool(message.get("tool_calls"))
        for name in ("content", *REASONING_NAMES):
            value = message.get(name)
            kind = CONTENT if name == "content" else REASONING
            if isinstance(value, list):
                marked[name] = [
                    {**part, "text": self._text(part["text"], index, kind, False)}
                    if isinstance(part, dict) and isinstance(part.get("text"), str)
                    else part
                    for part in value
                ]
            elif isinstance(value, str):
                # An empty text beside calls is left alone, or calls that are dropped pass unseen.
                marked[name] = self._text(value, index, kind, self.empty and not is_call)
        names = sum(message.get(name) is not None for name in REASONING_NAMES)
        if names > 1 and self.expected[index, REASONING]:
            self.expected[index, REASONING] //= names  # one text under several names
        if is_call:
            marked["tool_calls"] = [self._call(index, call) for call in message["tool_calls"]]
        return marked

    def _text(self, text: str, index: int, kind: int, empty: bool) -> str:
        """Bracket the words of a text; those between thinking tags count as reasoning."""
        if not text:
            return self._mark(index, kind) if empty else text
        pieces = TAGS.split(text)
        thinks = kind == CONTENT and _closes_thinking(pieces)
        for place, piece in enumerate(pieces):
            if place % 2:
                tag = THINKING.fullmatch(piece)
                thinks = thinks if tag is None or kind != CONTENT else not tag[1]
            elif core := piece.strip():
                of = REASONING if thinks else kind
                mark = self._mark(index, of)
                self.expected[index, of] += 2
                pieces[place] = piece.replace(core, mark + core + mark, 1)
        if self.outer and len(pieces) > 1:
            mark = self._mark(index, kind)
            if not pieces[0].strip():
                pieces[0] += mark
            if not pieces[-1].strip():
                pieces[-1] = mark + pieces[-1]
        return "".join(pieces)

    def _call(self, index: int, call: Mapping[str, Any]) -> dict[str, Any]:
        function = dict(call["function"])
        before = self.expected[index, CALL]
        function["arguments"] = self._value(function.get("arguments"), index)
        if self.expected[index, CALL] == before:
            mark = self._mark(index, NAME)
            function["name"] = f"{mark}{function.get('name', '')}{mark}"
            self.expected[index, NAME] += 2
        return {**call, "function": function}

    def _value(self, value: Any, index: int) -> Any:
        """Bracket every string of a JSON value; keys are left alone."""
        mark = self._mark(index, CALL)
        if isinstance(value, str):
            # JSON in a string: marks inside its braces, so that its edges stay as they are.
            document = re.fullmatch(r"(\s*[\[{]\s*)(\S.*\S|\S)(\s*[\]}]\s*)", value, re.DOTALL)
            if document:
                self.expected[index, CALL] += 2
                return mark.join(document.groups())
            return self._text(value, index, CALL, False)
        if isinstance(value, Mapping):
            return {key: self._value(item, index) for key, item in value.items()}
        return [self._value(item, index) for item in value] if isinstance(value, list) else value


def _closes_thinking(pieces: Sequence[str]) -> bool:
    """Tell whether a text begins within a thought: the generation prompt opened it."""
    tags = [tag for piece in pieces[1::2] if (tag := THINKING.fullmatch(piece))]
    return bool(tags) and bool(tags[0][1])


def free_block(text: str) -> int:
    """Return the code of the first mark, in a block that the text has no character of."""
    used = {ord(c) & 0x1F0000 for c in MARKS.findall(text)}
    for block in BLOCKS:
        if block not in used:
            return block
    raise ChatRefused("it holds characters of both supplementary private-use planes")


def unmarked_place(marks: Sequence[Mark], place: int) -> int:
    """Return where a place of the marked rendering is in the plain one."""
    return place - bisect_left(marks, (place,))


def argument_keys(call: Mapping[str, Any]) -> list[str]:
    """Return the names of a call's arguments, at the top."""
    arguments = arguments_of(call["function"].get("arguments"))
    return [str(key) for key in arguments] if isinstance(arguments, Mapping) else []
