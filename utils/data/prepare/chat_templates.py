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
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

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
        adapted = {"content": ""} | {k: value for k, value in message.items() if value is not None}
        if self.reads_parts:
            adapted["content"] = [{"type": "text", "text": adapted["content"]}]
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
            text = self._try({"content": "", "tool_calls": [_adapted_call(call, as_object)]})
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
    function = dict(call["function"])
    if not as_object and not isinstance(function["arguments"], str):
        function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
    return {**call, "function": function}


# --- marks

# What a mark stands for; the name of a call is marked only where none of its arguments is.
CONTENT, REASONING, CALL, NAME = range(4)
KINDS = 4
NOBODY = -1
FIRST_MARK = 0x100000  # plane 16, the rarer one of private use: icon fonts are in plane 15
MARKS = re.compile("[\U00100000-\U0010ffff]")
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

    Marks stand around texts, around tags at the edges of a text, and before an empty text; a
    template that looks at such edges, or for empty texts, renders another text then. `expected`:
    how many marks of each (message, kind) the rendering must show. `indices`: where each mark is in
    the plain rendering.
    """

    def __init__(self, template: ChatTemplate, chat: Chat):
        self.chat = chat
        self._has_markers = template.has_markers
        self.expected: Counter[tuple[int, int]] = Counter()
        self.messages = [self._message(i, message) for i, message in enumerate(chat.messages)]
        self.whole = template.render(Chat(self.messages, chat.tools, chat.options))
        self.marks = self._find(self.whole)
        self.indices = [mark.at - earlier for earlier, mark in enumerate(self.marks)]
        self._others = [mark for mark in self.marks if mark.message != NOBODY]
        self._own: dict[int, list[int]] = {}
        for mark in self.marks:
            self._own.setdefault(mark.message, []).append(mark.at)

    def named(self, index: int) -> str:
        """Return the name of a message for an error."""
        return f"message {index} ({self.chat.messages[index]['role']})"

    def own(self, message: int) -> list[int]:
        """Return the indices of a message's marks in `whole`, in order."""
        return self._own.get(message, [])

    def around(self, message: int) -> tuple[int, int, int, int]:
        """Return where in `whole`: end of the text before a message, its own start, end, the next.

        Raises ChatRefused for a message of which nothing is printed.
        """
        own, marks = self.own(message), self._others
        if not own:
            raise ChatRefused(
                f"{self.named(message)}: nothing of it is printed", "content_left_out"
            )
        before, behind = bisect_left(marks, (own[0],)), bisect_right(marks, (own[-1] + 1,))
        low = marks[before - 1].at + 1 if before else 0
        high = marks[behind].at if behind < len(marks) else len(self.whole)
        return low, own[0], own[-1] + 1, high

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
        for match in MARKS.finditer(rendering):
            message, kind = divmod(ord(match.group()) - FIRST_MARK, KINDS)
            names[message] += kind == NAME
            if kind == NAME and names[message] > self.expected[message, NAME]:
                message = NOBODY
            found.append(Mark(match.start(), message, kind))
        return found

    # --- marking

    def _message(self, index: int, message: Message) -> dict[str, Any]:
        marked = dict(message)
        calls = message.get("tool_calls") or []
        # An empty text beside calls is left alone, or calls that are dropped pass unseen; and one
        # in a template with markers, which tell where it is.
        can_be_empty = not calls and not self._has_markers
        content = message["content"]
        if isinstance(content, list):
            texts = [self._text(part["text"], index, CONTENT, can_be_empty) for part in content]
            marked["content"] = [
                {**part, "text": text} for part, text in zip(content, texts, strict=True)
            ]
        else:
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
        if not text.strip():
            return _mark(index, kind) + text if can_be_empty else text
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
                pieces[number] = piece.replace(core, self._bracketed(core, index, of), 1)
        if len(pieces) > 1:
            mark = _mark(index, kind)
            pieces[0] += "" if pieces[0].strip() else mark
            pieces[-1] = ("" if pieces[-1].strip() else mark) + pieces[-1]
        return "".join(pieces)

    def _bracketed(self, text: str, index: int, kind: int) -> str:
        self.expected[index, kind] += 2
        return _mark(index, kind) + text + _mark(index, kind)

    def _call(self, index: int, call: Mapping[str, Any]) -> dict[str, Any]:
        function = dict(call["function"])
        before = self.expected[index, CALL]
        function["arguments"] = self._value(function["arguments"], index)
        if self.expected[index, CALL] == before:
            function["name"] = self._bracketed(function["name"], index, NAME)
        return {**call, "function": function}

    def _value(self, value: Any, index: int) -> Any:
        """Bracket every string of a JSON value; keys are left alone."""
        if isinstance(value, str):
            # JSON in a string: marks inside its braces, so that its edges stay as they are.
            document = re.fullmatch(r"(\s*[\[{]\s*)(\S.*\S|\S)(\s*[\]}]\s*)", value, re.DOTALL)
            if document:
                return document[1] + self._bracketed(document[2], index, CALL) + document[3]
            return self._text(value, index, CALL)
        if isinstance(value, Mapping):
            return {key: self._value(item, index) for key, item in value.items()}
        return [self._value(item, index) for item in value] if isinstance(value, list) else value


def _mark(index: int, kind: int) -> str:
    return chr(FIRST_MARK + index * KINDS + kind)


def check_texts(chat: MarkedChat, text: str) -> bool:
    """Raise ChatRefused unless the text of every message and every tool is in the rendering.

    Returns whether reasoning was left out of a turn that others follow, as many published
    templates do by design.
    """
    found = Counter((mark.message, mark.kind) for mark in chat.marks)
    dropped = False
    for (index, kind), expected in chat.expected.items():
        if found[index, kind] >= expected:
            continue
        is_past = any(message["role"] != "tool" for message in chat.messages[index + 1 :])
        if kind != REASONING or not is_past:
            what = {CONTENT: "content", REASONING: "reasoning"}.get(kind, "tool calls")
            _refuse_left_out(f"{chat.named(index)}: ", f"its {what}", what)
        dropped = True
    for index, message in enumerate(chat.chat.messages):
        for call in message.get("tool_calls") or []:
            arguments = call["function"]["arguments"]  # as a string they are marked as a whole
            keys = arguments if isinstance(arguments, Mapping) else ()
            for word in map(str, (call["function"]["name"], *keys)):
                if word not in text:
                    _refuse_left_out(
                        f"{chat.named(index)}: ", f"{word!r} of its calls", "tool calls"
                    )
    for tool in chat.chat.tools or []:
        name = (tool.get("function") or tool).get("name") if isinstance(tool, dict) else None
        if isinstance(name, str) and name not in text:
            _refuse_left_out("", f"the tool {name!r}", "tools")
    return dropped


def _refuse_left_out(where: str, what: str, kind: str) -> NoReturn:
    raise ChatRefused(
        f"{where}the chat template leaves out {what} (--chat_template takes one that prints it)",
        f"{kind.replace(' ', '_')}_left_out",
    )
