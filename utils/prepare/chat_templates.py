"""Rendering of chats by a tokenizer's chat template, with a fixed date as today's date."""

import json
import re
from collections.abc import Iterable, Mapping
from datetime import datetime
from functools import cached_property
from itertools import product
from typing import TYPE_CHECKING, Any

from utils.config.errors import ConfigurationError
from utils.host.foreign import RENDERING_BYTES, library_errors, resource_limits
from utils.prepare.rows import ChatDocument, Message
from utils.prepare.values import ASSISTANT, Location

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Keys of a message's reasoning in published data. A template reads one of the first two.
REASONING_NAMES = ("reasoning_content", "thinking", "reasoning")
PROBE_LOCATION = Location("a probe")  # the location of the short chats that test a template
PROBE_ID = "abcdefghi"  # the id of a tool call. Mistral's templates require nine letters
# A tool for the short chats that test a template. Some templates refuse chats without tools.
PROPERTIES = {"probe": {"type": "string", "description": "a probe"}}
PARAMETERS = {"type": "object", "properties": PROPERTIES, "required": ["probe"]}
FUNCTION = {"name": "f", "description": "Try a template out", "parameters": PARAMETERS}
TOOL = {"type": "function", "function": FUNCTION}
# An empty thought as templates print it: <think>\n\n</think>, [THINK][/THINK], ...
EMPTY_THOUGHT = re.compile(
    r"[<\[◁]\|?(\w*:?(?:think|thinking|thought|reasoning))\|?[>\]▷]\s*[<\[◁]\|?/\1\|?[>\]▷]"
    r"|<\|open\|>think<\|sep\|>\s*<\|close\|>think<\|sep\|>|<\|channel>thought\s*<channel\|>|<\|START_THINKING\|>\s*<\|END_THINKING\|>",
    re.IGNORECASE,
)
GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


class ChatTemplate:
    """A tokenizer's chat template, which renders chats as strings.

    Some templates read message contents as strings, others as lists of parts. Some read the
    arguments of tool calls as objects, others as JSON strings. This class renders short chats to
    find the form that the template reads, and `adapted` converts messages to this form. date: the
    date (YYYY-MM-DD) that the template prints as today's date. None means the real date.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", date: str | None = None):
        from transformers.utils.chat_template_utils import _cached_compile_jinja_template

        self._origin = f"the chat template of {tokenizer.name_or_path}"
        with (
            library_errors(self._origin, "not valid Jinja"),
            resource_limits(self._origin, RENDERING_BYTES),
        ):
            self.source = source = tokenizer.get_chat_template()
            self.has_markers = GENERATION.search(source) is not None
            self._variables = dict(tokenizer.special_tokens_map)
            # Despite its name, this function has no cache: the date below changes this object only.
            self._compiled: Any = _cached_compile_jinja_template(source)
        if date is not None:
            self._compiled.globals["strftime_now"] = datetime.fromisoformat(date).strftime

    def render(self, chat: ChatDocument, generation_prompt: bool = False) -> str:
        """Return the rendering of a chat as text.

        Raises ConfigurationError if the template takes too much time or memory, and any other
        Exception if the template refuses the chat.
        """
        with resource_limits(self._origin, RENDERING_BYTES):
            return str(self._compiled.render(**self._variables_of(chat, generation_prompt)))

    def render_with_markers(self, chat: ChatDocument) -> tuple[str, list[tuple[int, int]]]:
        """Return the rendering, and (start, stop) of each {% generation %} block in characters."""
        from transformers.utils.chat_template_utils import _render_with_assistant_indices

        return _render_with_assistant_indices(self._compiled, **self._variables_of(chat, False))

    def _variables_of(self, chat: ChatDocument, generation_prompt: bool) -> dict[str, Any]:
        options = (chat.template_options or {}).items()
        return {
            **self._variables,
            "documents": None,
            **{name: value for name, value in options if value is not None},
            "messages": list(chat.messages),
            "tools": chat.tools or None,
            "add_generation_prompt": generation_prompt,
        }

    def adapted(self, messages: Iterable[Message]) -> list[dict[str, Any]]:
        """Return messages with content, reasoning and calls in the form that the template reads."""
        adapted_messages = []
        for message in messages:
            adapted = {"content": ""} | {k: v for k, v in message.items() if v is not None}
            if self._reads_content_parts:
                adapted["content"] = [{"type": "text", "text": adapted["content"]}]
            reasoning = [adapted[name] for name in REASONING_NAMES if name in adapted]
            if reasoning and self._reads_thoughts_as_parts:
                text = {"type": "text", "text": message.get("content") or ""}
                adapted["content"] = [{"type": "thinking", "thinking": reasoning[0]}, text]
                adapted = {k: v for k, v in adapted.items() if k not in REASONING_NAMES}
            elif reasoning:
                adapted |= dict.fromkeys(REASONING_NAMES[:2], reasoning[0])
            if calls := adapted.pop("tool_calls", None):
                adapted["tool_calls"] = [
                    _adapted_call(call, self._reads_arguments_as_objects) for call in calls
                ]
            adapted_messages.append(adapted)
        return adapted_messages

    @cached_property
    def _reads_content_parts(self) -> bool:
        """Whether the template prints a message's content only as a list of parts, not as text."""
        text = "stoker probes"
        parts = [{"type": "text", "text": text}]
        as_text = self._render_reply({"content": text})
        return text not in as_text and text in self._render_reply({"content": parts})

    @cached_property
    def _reads_thoughts_as_parts(self) -> bool:
        """Whether the template prints reasoning only as a part of the content list (Ministral)."""
        thought = "stoker thinks"
        part = {"type": "thinking", "thinking": thought}
        in_parts = self._render_reply({"content": [part, {"type": "text", "text": "x"}]})
        # A template that prints the list as Python text also prints the key 'type'.
        if thought not in in_parts or re.search("""['"]type['"]""", in_parts):
            return False
        reply = {"content": "x", **dict.fromkeys(REASONING_NAMES[:2], thought)}
        return thought not in self._render_reply(reply)

    @cached_property
    def _reads_arguments_as_objects(self) -> bool:
        """Whether the template reads the arguments of tool calls as objects, not as JSON text."""
        for as_object in (True, False):
            text = self._render_call({"stoker": "probe"}, as_object)
            # The wrong form is visible: an object in Python's notation, or a string encoded twice.
            if "stoker" in text and "{'stoker" not in text and '\\"stoker' not in text:
                return as_object
        return True

    @cached_property
    def prints_ids(self) -> bool:
        """Whether the template prints a call's id, not the tool's name (Kimi: functions.NAME:0)."""
        text = self._render_call({}, self._reads_arguments_as_objects)
        return "look_up" not in text and PROBE_ID in text

    def _render_call(self, arguments: Mapping[str, Any], as_object: bool) -> str:
        function = {"name": "look_up", "arguments": arguments}
        call = _adapted_call({"type": "function", "id": PROBE_ID, "function": function}, as_object)
        return self._render_reply({"content": "", "tool_calls": [call]})

    def _render_reply(self, reply: Message) -> str:
        contents = "x", [{"type": "text", "text": "x"}]
        for content, tools in product(contents, (None, [TOOL])):
            question = {"role": "user", "content": content}
            chat = ChatDocument([question, {"role": "assistant", **reply}], PROBE_LOCATION, tools)
            try:
                return self.render(chat)
            except ConfigurationError:
                raise
            except Exception:  # noqa: S112 - the template refuses this form
                continue
        return ""


def _adapted_call(call: Mapping[str, Any], as_object: bool) -> dict[str, Any]:
    function = dict(call["function"])
    if not as_object and not isinstance(function["arguments"], str):
        function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
    return {**call, "function": function}


def has_thought(message: Message) -> bool:
    """Return whether a message is an answer with reasoning. An empty thought does not count."""
    content = str(message.get("content"))
    if message["role"] != ASSISTANT or EMPTY_THOUGHT.search(content):
        return False
    return bool(message.get("reasoning_content") or re.search(r"</\w*think\w*>", content))
