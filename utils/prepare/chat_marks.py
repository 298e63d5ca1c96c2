"""A chat with marks around the texts of its messages, and checks that its rendering is complete.

Marks are rare letters around a text. In the rendering, marks show which message a text is from,
even if the template moved or trimmed the text. A missing mark shows a text that the template
dropped. Without the marks, the rendering of the marked chat must equal the rendering of the
original chat. This proves that marks change nothing else.
"""

import html
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

from utils.prepare.chat_templates import REASONING_NAMES, ChatTemplate
from utils.prepare.rows import ChatDocument, Message
from utils.prepare.values import UnusableRowError

# Template variables. Some templates print reasoning only if one of these variables is set.
THINKING_ON = ({"thinking": True}, {"enable_thinking": True}, {"preserve_thinking": True})
# Kinds of marked texts. A tool call without marked arguments has marks around its name or id.
CONTENT, REASONING, CALL, NAME = range(4)
MARK_KINDS = 4
NO_MESSAGE = -1
RARE = range(0x20000, 0x2A6D7)  # letters that are rare in chats and that Python prints unescaped
# Some templates split a text at its tags. So each piece of text between tags has its own marks.
TAGS = re.compile(r"(<\|?/?[^<>\s]{1,40}>|\[/?[A-Z_]{3,30}\])")
THINKING = re.compile(r"<(/?)(?:think|thinking|reasoning)>")
TEMPLATE_LEAVES_OUT = "the chat template leaves out {} (--chat_template takes one that prints it)"


class Mark(NamedTuple):
    """A mark (rare letter) in a rendered chat.

    at: the mark's index in the rendering without marks. message: the index of the marked message.
    kind: CONTENT, REASONING, CALL (an argument of a tool call) or NAME (a call's tool name or id).
    """

    at: int
    message: int  # NO_MESSAGE if a tool's name is repeated, for example before the tool's result
    kind: int


class MarkedChat:
    """A chat, its copy with marks (rare letters) around the texts, and the rendering of this copy.

    Tags such as <think> split a text into pieces, and marks surround each piece. A text that begins
    or ends with a tag also has a mark at that edge. An empty text may have one mark. Raises
    UnusableRowError if the marks change what the template prints, for example because the template
    looks for a prefix of a text.

    messages: the copy with marks. text: the rendering without marks. marks: the marks in the order
    of the rendering. indices: the index of each mark in `text`. marks_of: {message index: indices
    of its marks in `marks`}. expected: {(message index, kind): the minimum number of marks in a
    complete rendering}.
    """

    def __init__(self, template: ChatTemplate, chat: ChatDocument, text: str):
        self.chat = chat
        self._template = template
        count = MARK_KINDS * len(chat.messages)
        for self._first_code in range(RARE.start, RARE.stop - count, count):
            self._pattern = re.compile(
                f"[{chr(self._first_code)}-{chr(self._first_code + count - 1)}]"
            )
            if not self._pattern.search(text):
                break
        else:
            problem = "it has too many messages, or too many rare letters"
            raise UnusableRowError("template_refused", problem)
        # Try with marked empty texts first, then without: some templates test for empty texts.
        for self._mark_empty in (False,) if template.has_markers else (True, False):
            self.expected: Counter[tuple[int, int]] = Counter()
            self._marked_texts: list[tuple[int, int, str]] = []
            self.messages = [
                self._mark_message(i, message) for i, message in enumerate(chat.messages)
            ]
            try:
                rendering = self.rendered(self.messages)
            except Exception:  # a template may raise anything when it refuses the marks
                rendering = ""
            self.text, self.marks = self._separate_marks(rendering)
            if self.text == text:
                break
        else:
            raise UnusableRowError(
                "template_refused",
                "the chat template escapes or compares texts, so the assistant's cannot be told "
                "from others' (--chat_template takes a template that prints texts as they are)",
            )
        self._check_texts(rendering)
        self.indices = [mark.at for mark in self.marks]
        self.marks_of: dict[int, list[int]] = {}
        for number, mark in enumerate(self.marks):
            self.marks_of.setdefault(mark.message, []).append(number)

    def refused(
        self, index: int, problem: str, reason: str = "template_refused"
    ) -> UnusableRowError:
        """Return an UnusableRowError about the message with index `index`."""
        role = self.chat.messages[index]["role"]
        return UnusableRowError(reason, f"message {index} ({role}): {problem}")

    def bounds(self, message: int) -> tuple[int, int, int, int]:
        """Return four indices in `text` that bound a message and the gaps before and after it.

        These are the end of the previous message's texts (or 0), the start and the end of this
        message's texts, and the start of the next message's texts (or the length of `text`). Raises
        UnusableRowError if the message is not printed, or if another message is printed between
        this message's texts.
        """
        if message not in self.marks_of:
            raise self.refused(message, "nothing of it is printed", "content_left_out")
        first, last = self.marks_of[message][0], self.marks_of[message][-1]
        if {mark.message for mark in self.marks[first:last]} - {message, NO_MESSAGE}:
            problem = "the template prints another message in the middle of it: give its words and "
            problem += "its calls as two messages"
            raise self.refused(message, problem, "mask_too_wide")
        before = (m.at for m in reversed(self.marks[:first]) if m.message != NO_MESSAGE)
        behind = (m.at for m in self.marks[last + 1 :] if m.message != NO_MESSAGE)
        start, stop = self.marks[first].at, self.marks[last].at
        return next(before, 0), start, stop, next(behind, len(self.text))

    def rendered(self, messages: Sequence[Message], generation_prompt: bool = False) -> str:
        """Render `messages` with this chat's tools and template options, and with the marks."""
        return self._template.render(replace(self.chat, messages=messages), generation_prompt)

    def text_behind_marks(
        self, messages: Sequence[Message], generation_prompt: bool = False
    ) -> str:
        """Render marked messages. Return the text after their last mark, without marks."""
        text, marks = self._separate_marks(self.rendered(messages, generation_prompt))
        return text[max((mark.at for mark in marks if mark.message != NO_MESSAGE), default=0) :]

    def _separate_marks(self, rendering: str) -> tuple[str, list[Mark]]:
        marks = []
        names: Counter[int] = Counter()
        for number, match in enumerate(self._pattern.finditer(rendering)):
            message, kind = divmod(ord(match.group()) - self._first_code, MARK_KINDS)
            names[message] += kind == NAME
            if kind == NAME and names[message] > self.expected[message, NAME]:
                message = NO_MESSAGE
            marks.append(Mark(match.start() - number, message, kind))
        return self._pattern.sub("", rendering), marks

    # --- marking

    def _mark_message(self, index: int, message: Message) -> dict[str, Any]:
        calls = message.get("tool_calls") or []
        # A mark in the empty text of a message with calls would hide that its calls are dropped.
        mark_empty = not calls and self._mark_empty
        content, reasoning = message["content"], message.get("reasoning_content")
        if isinstance(content, str):
            marked = {**message, "content": self._mark_text(content, index, CONTENT, mark_empty)}
        else:
            marked = {**message, "content": [self._mark_part(index, part) for part in content]}
        if isinstance(reasoning, str):
            text = self._mark_text(reasoning, index, REASONING, mark_empty)
            marked |= {name: text for name in REASONING_NAMES if name in message}
        if calls:
            marked["tool_calls"] = [self._mark_call(index, call) for call in calls]
        return marked

    def _mark_part(self, index: int, part: Mapping[str, str]) -> dict[str, str]:
        """Return a content part ({"type": T, T: text}) with marks around its text."""
        name = part["type"]
        kind = REASONING if name == "thinking" else CONTENT
        return {"type": name, name: self._mark_text(part[name], index, kind, self._mark_empty)}

    def _mark_text(self, text: str, index: int, kind: int, mark_empty: bool = False) -> str:
        """Return `text` with a mark (a rare letter) before and after each piece between its tags.

        index: the message's index. kind: the kind of the marks, such as CONTENT. With CONTENT,
        pieces between <think> and </think> get the kind REASONING. mark_empty: put one mark into an
        empty text.
        """
        if not text.strip():
            return self._mark(index, kind) + text if mark_empty else text
        pieces = TAGS.split(text)
        tags = [tag for piece in pieces[1::2] if (tag := THINKING.fullmatch(piece))]
        # If the first tag closes a thought, the text begins inside a thought: the prompt opened it.
        is_reasoning = kind == CONTENT and bool(tags) and bool(tags[0][1])
        for number, piece in enumerate(pieces):
            if number % 2:
                tag = THINKING.fullmatch(piece)
                is_reasoning = is_reasoning if tag is None or kind != CONTENT else not tag[1]
            elif words := piece.strip():
                piece_kind = REASONING if is_reasoning else kind
                marked = self._between_marks(words, index, piece_kind)
                pieces[number] = piece.replace(words, marked, 1)
        if len(pieces) > 1:
            mark = self._mark(index, kind)
            pieces[0] += "" if pieces[0].strip() else mark
            pieces[-1] = ("" if pieces[-1].strip() else mark) + pieces[-1]
        return "".join(pieces)

    def _between_marks(self, text: str, index: int, kind: int) -> str:
        self.expected[index, kind] += 2
        self._marked_texts.append((index, kind, text))
        return self._mark(index, kind) + text + self._mark(index, kind)

    def _mark(self, index: int, kind: int) -> str:
        return chr(self._first_code + index * MARK_KINDS + kind)

    def _mark_call(self, index: int, call: Mapping[str, Any]) -> dict[str, Any]:
        function = dict(call["function"])
        before = self.expected[index, CALL]
        function["arguments"] = self._mark_value(function["arguments"], index)
        if self.expected[index, CALL] == before:
            if call.get("id") and self._template.prints_ids:
                return {**call, "id": self._between_marks(call["id"], index, NAME)}
            function["name"] = self._between_marks(function["name"], index, NAME)
        return {**call, "function": function}

    def _mark_value(self, value: Any, index: int) -> Any:
        """Return a tool call's JSON value with marks around every string. Keys get no marks."""
        if isinstance(value, str):
            return self._mark_text(value, index, CALL)
        if isinstance(value, Mapping):
            return {key: self._mark_value(item, index) for key, item in value.items()}
        if isinstance(value, list):
            return [self._mark_value(item, index) for item in value]
        return value

    # --- checks

    def _check_texts(self, rendering: str) -> None:
        """Raise UnusableRowError if a text is printed in a changed form. Escapes are allowed."""
        for index, kind, text in self._marked_texts:
            mark = self._mark(index, kind)
            if f"{mark}{text}{mark}" in rendering or mark not in rendering:
                continue
            # Templates may print a text unchanged, or as JSON, Python or HTML.
            encoded = (json.dumps(text), json.dumps(text, ensure_ascii=False), repr(text))
            forms = {text, html.escape(text), *(form[1:-1] for form in encoded)}
            forms |= {json.dumps(form, ensure_ascii=False)[1:-1] for form in forms}
            printed = re.findall(f"{mark}([^{mark}]*){mark}", rendering)
            if printed and not forms.intersection(printed):
                problem = (
                    f"the chat template changes the text: it prints {quoted(printed[0])} for "
                    f"{quoted(text)}, and the model would learn that (--chat_template takes a "
                    "template that prints texts as they are)"
                )
                raise self.refused(index, problem, "text_changed")

    def check_texts_printed(self) -> set[int]:
        """Return the indices of messages that are rendered without their reasoning.

        Many templates leave out the reasoning of earlier turns. Raises UnusableRowError if the
        rendering lacks the last turn's reasoning, another text of a message, or a tool.
        """
        printed = Counter((mark.message, mark.kind) for mark in self.marks)
        left_out = [key for key, expected in self.expected.items() if printed[key] < expected]
        for index, kind in left_out:
            is_past = any(message["role"] != "tool" for message in self.messages[index + 1 :])
            if kind != REASONING or not is_past:
                part = {CONTENT: "content", REASONING: "reasoning"}.get(kind, "tool calls")
                problem = TEMPLATE_LEAVES_OUT.format(f"its {part}")
                if kind == REASONING and (setting := self._setting_that_prints(index, kind)):
                    problem += f"; or set chat_template_kwargs: {setting}, which prints it"
                raise self.refused(index, problem, f"{part.replace(' ', '_')}_left_out")
        for index, message in enumerate(self.chat.messages):
            for word in words_of_calls(message):
                if word not in self.text:
                    problem = TEMPLATE_LEAVES_OUT.format(f"{word!r} of its calls")
                    raise self.refused(index, problem, "tool_calls_left_out")
        for tool in self.chat.tools or []:
            name = (tool.get("function") or tool).get("name") if isinstance(tool, dict) else None
            if isinstance(name, str) and name not in self.text:
                problem = TEMPLATE_LEAVES_OUT.format(f"the tool {name!r}")
                raise UnusableRowError("tools_left_out", problem)
        return {index for index, _ in left_out}

    def _setting_that_prints(self, index: int, kind: int) -> str:
        """Return the item of THINKING_ON, as JSON, that makes the template print a left-out text.

        Returns "" if no item does. index: the message's index. kind: the kind of the text.
        """
        for setting in THINKING_ON:
            options = {**(self.chat.template_options or {}), **setting}
            chat = replace(self.chat, messages=self.messages, template_options=options)
            with suppress(Exception):  # the template refuses the setting
                if self._mark(index, kind) in self._template.render(chat):
                    return json.dumps(setting)
        return ""


def words_of_calls(message: Message) -> Iterator[str]:
    """Yield the function names, keys and numbers in a message's tool calls.

    Keys and numbers get no marks. Therefore the checks search for these words in the rendering.
    """
    for call in message.get("tool_calls") or []:
        yield call["function"]["name"]
        yield from _keys_and_numbers(call["function"]["arguments"])


def _keys_and_numbers(value: Any) -> Iterator[str]:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        yield json.dumps(value)
    elif isinstance(value, Mapping):
        yield from value
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            yield from _keys_and_numbers(item)


def quoted(text: str) -> str:
    """Return a text in quotes for an error message, shortened to 80 characters."""
    return repr(text if len(text) <= 80 else text[:80] + "...")
