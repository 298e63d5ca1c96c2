"""A chat template as the preparation renders it: on a fixed date, with messages in its own form."""

import json
import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from jinja2 import TemplateError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


Message = Mapping[str, Any]

# What a template may raise on a conversation it was not written for (roles out of order, ...).
RENDERING_ERRORS = (TemplateError, TypeError, ValueError, KeyError, AttributeError, IndexError)
# The names that a message's reasoning goes by; transformers fills the first and the second.
REASONING_NAMES = ("reasoning_content", "thinking", "reasoning")
MARKERS = re.compile(r"\{%-?\s*generation\s*-?%\}")


class ChatTemplate:
    """Renders conversations as strings, in the same way whatever the day.

    date: what a template that prints today's date prints, as YYYY-MM-DD. A template reads message
    contents as strings or as lists of parts, and the arguments of tool calls as objects or as JSON
    strings: which, is found by trying, and conversations are given in that form.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", date: str | None = None):
        from transformers.utils.chat_template_utils import _cached_compile_jinja_template

        self.source = tokenizer.get_chat_template()
        self._variables = dict(tokenizer.special_tokens_map)
        # Compiled anew, not taken from transformers' cache: its date is for this object alone.
        self._compiled: Any = _cached_compile_jinja_template(self.source)
        if date is not None:
            day = datetime.fromisoformat(date)
            self._compiled.globals["strftime_now"] = day.strftime

    @cached_property
    def has_markers(self) -> bool:
        """Whether {% generation %} says which text is the assistant's."""
        return MARKERS.search(self.source) is not None

    @cached_property
    def prints_the_date(self) -> bool:
        """Whether the rendering may depend on the day."""
        return "strftime_now" in self.source

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Any] | None = None,
        options: Mapping[str, Any] | None = None,
        generation_prompt: bool = False,
    ) -> str:
        """Return the rendering of messages that `adapted` returned.

        Raises one of RENDERING_ERRORS when the template refuses the conversation.
        """
        variables = self._of(messages, tools, options, generation_prompt)
        return str(self._compiled.render(**variables))

    def render_with_markers(
        self,
        messages: Sequence[Message],
        tools: Sequence[Any] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> tuple[str, list[tuple[int, int]]]:
        """Return (rendering, [(start, stop) of each {% generation %} block]), in characters."""
        blocks: list[str] = []
        spans: list[tuple[int, int]] = []
        with self._compiled.environment.activate_tracker(blocks, spans):
            for block in self._compiled.generate(**self._of(messages, tools, options, False)):
                blocks.append(block)  # one by one: the tracker counts what is there so far
        return "".join(blocks), spans

    def adapted(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        """Return the messages in the form that the template reads."""
        return [self._adapted(message) for message in messages]

    def _of(
        self,
        messages: Sequence[Message],
        tools: Sequence[Any] | None,
        options: Mapping[str, Any] | None,
        generation_prompt: bool,
    ) -> dict[str, Any]:
        return {
            **self._variables,
            "documents": None,
            **{name: value for name, value in (options or {}).items() if value is not None},
            "messages": list(messages),
            "tools": tools or None,
            "add_generation_prompt": generation_prompt,
        }

    def _adapted(self, message: Message) -> dict[str, Any]:
        adapted = {key: value for key, value in message.items() if value is not None}
        content = adapted.get("content")
        if isinstance(content, list) and all("text" in part for part in content):
            content = "".join(part["text"] for part in content)
            adapted["content"] = content
        if isinstance(content, str) and self.reads_parts:
            adapted["content"] = [{"type": "text", "text": content}]
        reasoning = next((adapted[name] for name in REASONING_NAMES if name in adapted), None)
        if reasoning is not None:
            adapted = {"thinking": reasoning, **adapted, "reasoning_content": reasoning}
        if calls := adapted.pop("tool_calls", None):
            adapted["tool_calls"] = [self._adapted_call(call, self.reads_objects) for call in calls]
        return adapted

    @staticmethod
    def _adapted_call(call: Mapping[str, Any], as_object: bool) -> dict[str, Any]:
        # Data sets also hold calls without the wrapper {"type": "function", "function": ...}.
        function = dict(call.get("function", call))
        arguments = function.get("arguments")
        if as_object:
            function["arguments"] = arguments_of(arguments)
        elif not isinstance(arguments, str):
            function["arguments"] = json.dumps(arguments or {}, ensure_ascii=False)
        outer = call if "function" in call else {"type": "function"}
        return {**outer, "function": function}

    @cached_property
    def reads_parts(self) -> bool:
        """Whether contents are printed only when they are lists of parts."""
        text = "stoker probes"
        parts = [{"type": "text", "text": text}]
        return not self._prints(text, {"content": text}) and self._prints(text, {"content": parts})

    @cached_property
    def reads_objects(self) -> bool:
        """Whether the arguments of a call go in as objects; False: as JSON in a string."""
        arguments = {"stoker": "probe"}
        for as_object in (True, False):
            call = self._adapted_call(
                {"id": "abcdefghi", "function": {"name": "f", "arguments": arguments}}, as_object
            )
            for content in ({}, {"content": ""}):
                text = self._try({"tool_calls": [{"type": "function", **call}], **content})
                # Not an object printed by Python, nor a string that is encoded a second time.
                if "stoker" in text and "{'stoker" not in text and '\\"stoker' not in text:
                    return as_object
        return True

    def _prints(self, text: str, reply: Message) -> bool:
        return text in self._try(reply)

    def _try(self, reply: Message) -> str:
        for question in self._questions():
            try:
                return self.render([question, {"role": "assistant", **reply}])
            except RENDERING_ERRORS:
                continue
        return ""

    @staticmethod
    def _questions() -> Iterator[Message]:
        yield {"role": "user", "content": "x"}
        yield {"role": "user", "content": [{"type": "text", "text": "x"}]}


def arguments_of(arguments: Any) -> Any:
    """Return the arguments of a call as an object where they are one, given as JSON or not."""
    if arguments is None:
        return {}
    if not isinstance(arguments, str):
        return arguments
    try:
        found = json.loads(arguments or "{}")
    except ValueError:
        return arguments
    return found if isinstance(found, dict) else arguments


# Marks: private-use characters around the texts of a chat, which say in a rendering whose it is.

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
