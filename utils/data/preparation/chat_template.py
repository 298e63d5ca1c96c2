"""A chat template as the preparation renders it: on a fixed date, with messages in its own form."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import TYPE_CHECKING, Any

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
