"""Chat templates: rendered on a fixed date, plainly or with marks around the messages' texts.

Marks are private-use characters that say in a rendering whose text it is. However a template moves,
trims or drops a text, its marks go with it. A rendering with marks, less its marks, must be the
plain rendering: then nothing but that information was added.
"""

import json
import re
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from jinja2 import TemplateError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = Mapping[str, Any]

# What a template may raise on a conversation it was not written for (roles out of order, ...).
RENDERING_ERRORS = (TemplateError, TypeError, ValueError, KeyError, AttributeError, IndexError)
# The names that a message's reasoning goes by; templates read the first and the second.
REASONING_NAMES = ("reasoning_content", "thinking", "reasoning")
GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


class ChatRefused(ValueError):
    """A conversation that cannot be trained on; `reason` is the name it is counted under."""

    def __init__(self, message: str, reason: str = "template_refused"):
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True)
class Chat:
    """What a template is given: messages in its own form, tools, and more variables."""

    messages: Sequence[Message]
    tools: Sequence[Any] | None = None
    options: Mapping[str, Any] | None = None


class ChatTemplate:
    """Renders conversations as strings, in the same way whatever the day.

    date: what a template that prints today's date prints, as YYYY-MM-DD. A template reads message
    contents as strings or as lists of parts, and the arguments of tool calls as objects or as JSON
    strings: trying finds out which, and `adapted` gives messages in that form.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", date: str | None = None):
        from transformers.utils.chat_template_utils import _cached_compile_jinja_template

        self.source = tokenizer.get_chat_template()
        self.has_markers = GENERATION.search(self.source) is not None
        self.prints_the_date = "strftime_now" in self.source
        self._variables = dict(tokenizer.special_tokens_map)
        # Compiled anew, not taken from transformers' cache: its date is for this object alone.
        self._compiled: Any = _cached_compile_jinja_template(self.source)
        if date is not None:
            self._compiled.globals["strftime_now"] = datetime.fromisoformat(date).strftime

    def render(self, chat: Chat, generation_prompt: bool = False) -> str:
        """Return the rendering; raises one of RENDERING_ERRORS when the template refuses it."""
        return str(self._compiled.render(**self._given(chat, generation_prompt)))

    def render_with_markers(self, chat: Chat) -> tuple[str, list[tuple[int, int]]]:
        """Return (rendering, [(start, stop) of each {% generation %} block]), in characters."""
        blocks: list[str] = []
        spans: list[tuple[int, int]] = []
        with self._compiled.environment.activate_tracker(blocks, spans):
            for block in self._compiled.generate(**self._given(chat, False)):
                blocks.append(block)  # one by one: the tracker counts what is there so far
        return "".join(blocks), spans

    def _given(self, chat: Chat, generation_prompt: bool) -> dict[str, Any]:
        options = {name: value for name, value in (chat.options or {}).items() if value is not None}
        return {
            **self._variables,
            "documents": None,
            **options,
            "messages": list(chat.messages),
            "tools": chat.tools or None,
            "add_generation_prompt": generation_prompt,
        }

    def adapted(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        """Return the messages in the form that the template reads."""
        return [self._adapted(message) for message in messages]

    def _adapted(self, message: Message) -> dict[str, Any]:
        adapted = {key: value for key, value in message.items() if value is not None}
        content = adapted.get("content")
        if isinstance(content, list) and all("text" in part for part in content):
            adapted["content"] = content = "".join(part["text"] for part in content)
        if isinstance(content, str) and self.reads_parts:
            adapted["content"] = [{"type": "text", "text": content}]
        reasoning = next((adapted[name] for name in REASONING_NAMES if name in adapted), None)
        if reasoning is not None:
            adapted |= dict.fromkeys(REASONING_NAMES[:2], reasoning)
        if calls := adapted.pop("tool_calls", None):
            adapted["tool_calls"] = [_adapted_call(call, self.reads_objects) for call in calls]
        return adapted

    @cached_property
    def reads_parts(self) -> bool:
        """Whether contents are printed only when they are lists of parts."""
        text = "stoker probes"
        parts = [{"type": "text", "text": text}]
        return text not in self._try({"content": text}) and text in self._try({"content": parts})

    @cached_property
    def reads_objects(self) -> bool:
        """Whether the arguments of a call go in as objects; False: as JSON in a string."""
        function = {"name": "f", "arguments": {"stoker": "probe"}}
        call = {"type": "function", "id": "abcdefghi", "function": function}
        for as_object in (True, False):
            for content in ({}, {"content": ""}):
                text = self._try({"tool_calls": [_adapted_call(call, as_object)], **content})
                # Not an object printed by Python, nor a string that is encoded a second time.
                if "stoker" in text and "{'stoker" not in text and '\\"stoker' not in text:
                    return as_object
        return True

    def _try(self, reply: Message) -> str:
        for content in ("x", [{"type": "text", "text": "x"}]):
            question = {"role": "user", "content": content}
            try:
                return self.render(Chat([question, {"role": "assistant", **reply}]))
            except RENDERING_ERRORS:
                continue
        return ""


def _adapted_call(call: Mapping[str, Any], as_object: bool) -> dict[str, Any]:
    # Data sets also hold calls without the wrapper {"type": "function", "function": ...}.
    function = dict(call.get("function", call))
    arguments = function.get("arguments")
    if as_object:
        function["arguments"] = arguments_of(arguments)
    elif not isinstance(arguments, str):
        function["arguments"] = json.dumps(arguments or {}, ensure_ascii=False)
    return {**(call if "function" in call else {"type": "function"}), "function": function}


def arguments_of(arguments: Any) -> Any:
    """Return the arguments of a call as an object where they are one, given as JSON or not."""
    if not isinstance(arguments, str):
        return {} if arguments is None else arguments
    try:
        found = json.loads(arguments or "{}")
    except ValueError:
        return arguments
    return found if isinstance(found, dict) else arguments


# --- marks

# What a mark stands for; the name of a call is marked only where none of its arguments is.
CONTENT, REASONING, CALL, NAME = range(4)
KINDS = 4
NOBODY = -1
# Supplementary private use, the rarer plane first (icon fonts are in the other one).
BLOCKS = (0x100000, 0xF0000)
BLOCK_SIZE = 0xFFFE
MARKS = re.compile("[\U000f0000-\U000ffffd\U00100000-\U0010fffd]")
# Templates look for tags in a text and split it there: marks stand around the text between them.
TAGS = re.compile(r"(<\|?/?[^<>\s]{1,40}>|\[/?[A-Z_]{3,30}\])")
THINKING = re.compile(r"<(/?)(?:think|thinking|reasoning)>")


class Mark(NamedTuple):
    """One mark of a rendering: where it is (`at`), the index of its message and its kind.

    message is NOBODY for the name of a call that is printed once more, as where its result is.
    """

    at: int
    message: int
    kind: int


class MarkedChat:
    """A chat, its copy with marks, and the rendering of that copy (`whole`).

    `expected`: how many marks of each (message, kind) the rendering must show. edges: marks also
    stand around tags at the edges of a text, and in place of an empty text; a template that looks
    at such edges, or for empty texts, renders another text then.
    """

    def __init__(self, template: ChatTemplate, chat: Chat, text: str, *, edges: bool):
        self.chat = chat
        self.expected: Counter[tuple[int, int]] = Counter()
        self.edges = edges
        self._block = _free_block(text)
        self._mark_pattern = re.compile(f"[{chr(self._block)}-{chr(self._block + BLOCK_SIZE - 1)}]")
        if len(chat.messages) * KINDS > BLOCK_SIZE:
            raise ChatRefused(f"{len(chat.messages):,} messages in one conversation")
        self.messages = [self._message(i, message) for i, message in enumerate(chat.messages)]
        self.whole = template.render(Chat(self.messages, chat.tools, chat.options))
        self.marks = self._find(self.whole)
        self._indices: dict[int, list[int]] = {}
        for mark in self.marks:
            self._indices.setdefault(mark.message, []).append(mark.at)
        self._others = [mark for mark in self.marks if mark.message != NOBODY]

    @cached_property
    def plain(self) -> str:
        """The rendering without its marks."""
        indices = [-1, *(mark.at for mark in self.marks), len(self.whole)]
        return "".join(self.whole[a + 1 : b] for a, b in pairwise(indices))

    def named(self, index: int) -> str:
        """Return the name of a message for an error."""
        return f"message {index} ({self.chat.messages[index]['role']})"

    def own(self, message: int) -> list[int]:
        """Return the indices of a message's marks in `whole`, in order."""
        return self._indices.get(message, [])

    def between(self, message: int) -> tuple[int, int]:
        """Return [low, high) of the text between the marks before a message's and behind them."""
        own, marks = self.own(message), self._others
        if own:
            before, behind = bisect_left(marks, (own[0],)), bisect_right(marks, (own[-1] + 1,))
        else:
            before = max((k + 1 for k, m in enumerate(marks) if m.message < message), default=0)
            later = (k for k, m in enumerate(marks) if m.message > message)
            behind = min(later, default=len(marks))
        low = marks[before - 1].at + 1 if before else 0
        return low, marks[behind].at if behind < len(marks) else len(self.whole)

    def unmarked(self, index: int) -> int:
        """Return where an index of the marked rendering is in the plain one."""
        return index - bisect_left(self.marks, (index,))

    def tail(self, rendering: str) -> str:
        """Return what follows the last mark of a rendering of some of these messages."""
        marks = [mark for mark in self._find(rendering) if mark.message != NOBODY]
        return rendering[marks[-1].at + 1 :] if marks else rendering

    def _find(self, rendering: str) -> list[Mark]:
        found = []
        names: Counter[int] = Counter()
        for match in self._mark_pattern.finditer(rendering):
            message, kind = divmod(ord(match.group()) - self._block, KINDS)
            names[message] += kind == NAME
            if kind == NAME and names[message] > self.expected[message, NAME]:
                message = NOBODY
            found.append(Mark(match.start(), message, kind))
        return found

    # --- marking

    def _mark(self, index: int, kind: int) -> str:
        return chr(self._block + index * KINDS + kind)

    def _message(self, index: int, message: Message) -> dict[str, Any]:
        marked = dict(message)
        calls = message.get("tool_calls") or []
        content = message.get("content")
        # An empty text beside calls is left alone, or calls that are dropped pass unseen.
        can_be_empty = not calls
        if isinstance(content, list):
            marked["content"] = [
                {**part, "text": self._text(part["text"], index, CONTENT)}
                if isinstance(part, dict) and isinstance(part.get("text"), str)
                else part
                for part in content
            ]
        elif isinstance(content, str):
            marked["content"] = self._text(content, index, CONTENT, can_be_empty)
        reasoning = message.get("reasoning_content")
        if isinstance(reasoning, str):
            text = self._text(reasoning, index, REASONING, can_be_empty)
            marked |= {name: text for name in REASONING_NAMES if name in message}
        if calls:
            marked["tool_calls"] = [self._call(index, call) for call in calls]
        return marked

    def _text(self, text: str, index: int, kind: int, can_be_empty: bool = False) -> str:
        """Bracket the words of a text; those between thinking tags count as reasoning."""
        if not text:
            return self._mark(index, kind) if can_be_empty and self.edges else text
        pieces = TAGS.split(text)
        tags = [tag for piece in pieces[1::2] if (tag := THINKING.fullmatch(piece))]
        # A text that closes a thought first begins within it: the generation prompt opened it.
        thinks = kind == CONTENT and bool(tags) and bool(tags[0][1])
        for number, piece in enumerate(pieces):
            if number % 2:
                tag = THINKING.fullmatch(piece)
                thinks = thinks if tag is None or kind != CONTENT else not tag[1]
            elif core := piece.strip():
                of = REASONING if thinks else kind
                mark = self._mark(index, of)
                self.expected[index, of] += 2
                pieces[number] = piece.replace(core, mark + core + mark, 1)
        if self.edges and len(pieces) > 1:
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
            return self._text(value, index, CALL)
        if isinstance(value, Mapping):
            return {key: self._value(item, index) for key, item in value.items()}
        return [self._value(item, index) for item in value] if isinstance(value, list) else value


def _free_block(text: str) -> int:
    """Return the code of the first mark, in a block that the text has no character of."""
    used = {ord(c) & 0x1F0000 for c in MARKS.findall(text)}
    for block in BLOCKS:
        if block not in used:
            return block
    raise ChatRefused("it holds characters of both supplementary private-use planes")
