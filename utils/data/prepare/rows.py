"""Rows as people publish them, made into the fields of a text, a chat, or a prompt and completion.

A row format is a set of columns and where it comes from:

- text: `text`
- messages: `messages` of role and content (OpenAI, Hugging Face)
- sharegpt: `conversations` of from and value (ShareGPT, LLaMA-Factory, axolotl); becomes messages
- alpaca: `instruction`, `input`, `output` (Stanford Alpaca); becomes messages
- prompt_completion: `prompt` and `completion`, both texts or both messages (TRL)
"""

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from utils.config.preparation import check_template_variables
from utils.data.prepare.messages import are_messages, messages_of, tool_calls_of
from utils.data.prepare.values import (
    ASSISTANT,
    MEDIA,
    UnusableRowError,
    check_text,
    decoded,
    refuse_media,
    wrong_type,
)

NEEDED: dict[str, tuple[str, ...]] = {
    "text": ("text",),
    "messages": ("messages",),
    "sharegpt": ("conversations",),
    "alpaca": ("instruction", "output"),
    "prompt_completion": ("prompt", "completion"),
}
_OF_CHATS = ("tools", "functions", "system", "system_prompt", "chat_template_kwargs", *MEDIA)
OPTIONAL: dict[str, tuple[str, ...]] = {
    "text": MEDIA,
    "messages": _OF_CHATS,
    "sharegpt": _OF_CHATS,
    "alpaca": ("input", "history", *_OF_CHATS),
    "prompt_completion": ("history", *_OF_CHATS),
}
# What a row becomes, where that is not the format itself.
DOCUMENT_FORMATS = {"sharegpt": "messages", "alpaca": "messages"}
_MEDIA_TAGS = re.compile("<(image|video|audio)>")  # where LLaMA-Factory and others put them


@dataclass(frozen=True)
class RowSettings:
    """How the rows of one source are read, and how much of them is taken.

    columns: pairs (name in the file, our name). filters: pairs (name in the file, what is kept: a
    value, a list of values, or {"min": ..., "max": ...}). weight: how often each document is
    written, a fraction being the share of documents. max_tokens: of the whole source.
    chat_template_kwargs: variables of the chat template, for rows that do not give them.
    """

    row_format: str
    columns: tuple[tuple[str, str], ...] = ()
    filters: tuple[tuple[str, Any], ...] = ()
    weight: float = 1.0
    max_tokens: int | None = None
    chat_template_kwargs: Mapping[str, Any] | None = None

    @property
    def read_columns(self) -> list[str]:
        """The columns to read, by their names in the file; the format's own first."""
        theirs = {ours: name for name, ours in self.columns}
        own = [theirs.get(n, n) for n in (*NEEDED[self.row_format], *OPTIONAL[self.row_format])]
        return list(dict.fromkeys([*own, *(name for name, _ in self.filters)]))

    def in_their_words(self, text: str) -> str:
        """Return a message with the names that the file has for our columns."""
        theirs = {repr(ours): repr(name) for name, ours in self.columns}
        return re.sub(r"'\w+'", lambda found: theirs.get(found[0], found[0]), text)

    def selects(self, fields: Mapping[str, Any]) -> bool:
        """Tell whether the filters select a row; raises UnusableRowError without their column."""
        for name, _ in self.filters:
            if name not in fields:
                message = f"no {name!r}, which the filter asks for ({_found(fields)})"
                raise UnusableRowError("missing_field", message)
        return all(_selects(wanted, fields[name]) for name, wanted in self.filters)


def _selects(wanted: Any, value: Any) -> bool:
    if isinstance(wanted, Mapping):
        try:
            return wanted.get("min", -math.inf) <= float(value) <= wanted.get("max", math.inf)
        except (TypeError, ValueError):
            return False
    values = wanted if isinstance(wanted, list) else [wanted]
    # CSV holds texts alone.
    return value in values or (isinstance(value, str) and value in map(str, values))


def _found(names: Iterable[str]) -> str:
    return f"columns found: {', '.join(sorted(names)) or 'none'}"


def renamed(fields: Mapping[str, Any], columns: Sequence[tuple[str, str]]) -> Mapping[str, Any]:
    """Return the fields under our names; a field whose name is taken by another is left out."""
    ours = dict(columns)
    taken = set(ours.values())
    return {
        ours.get(name, name): value
        for name, value in fields.items()
        if name in ours or name not in taken
    }


def detect_formats(fields: Mapping[str, Any]) -> list[str]:
    """Return every format whose columns the row has (one, when the row is clear)."""
    return [name for name, needed in NEEDED.items() if all(column in fields for column in needed)]


def holds_chats(fields: Mapping[str, Any], row_format: str) -> bool:
    """Tell whether a row becomes a chat, which a template renders."""
    if DOCUMENT_FORMATS.get(row_format, row_format) == "messages":
        return True
    prompt = fields.get("prompt")
    return row_format == "prompt_completion" and _is_chat(prompt)


def document_fields(fields: Mapping[str, Any], row_format: str) -> Mapping[str, Any]:
    """Return the checked fields of a row's document; raises UnusableRowError with the reason."""
    missing = [repr(name) for name in NEEDED[row_format] if fields.get(name) is None]
    if missing:
        given = {name: value for name, value in fields.items() if value is not None}
        message = f"no {' and no '.join(missing)}, which the format {row_format} needs"
        message += f" ({_found(given)})"
        if others := detect_formats(given):
            message += (
                f". It is a row of the format {others[0]}: files of different formats go into a "
                "recipe, each as an entry of `sources`"
            )
        raise UnusableRowError("missing_field", message)
    if row_format == "text":
        check_text("text", fields["text"])
        if _MEDIA_TAGS.search(fields["text"]):
            refuse_media("the row", fields)
        return fields
    refuse_media("the row", fields)
    extras = {"tools": _tools(fields), "chat_template_kwargs": _template_kwargs(fields)}
    if row_format == "prompt_completion":
        return _pair(fields, extras) | extras
    if row_format == "alpaca":
        messages = list(_alpaca(fields))
    else:
        (name,) = NEEDED[row_format]
        messages = messages_of(name, fields[name])
    return {"messages": _with_system(messages, _system(fields)), **extras}


def _is_chat(prompt: Any) -> bool:
    return isinstance(prompt, list) or are_messages(decoded(prompt))


def _pair(fields: Mapping[str, Any], extras: Mapping[str, Any]) -> dict[str, Any]:
    """Return prompt and completion, checked: both texts, or both lists of messages.

    The completion of a prompt of messages may be the text of the answer.
    """
    prompt, completion = fields["prompt"], fields["completion"]
    others = {"system": _system(fields), "history": fields.get("history")}
    if _is_chat(prompt):
        if others["history"]:
            raise UnusableRowError("wrong_type", "'history' goes into the messages of 'prompt'")
        if isinstance(completion, str) and not _is_chat(completion):
            completion = [{"role": ASSISTANT, "content": completion}]
        if isinstance(completion, list) and any(isinstance(one, str) for one in completion):
            raise wrong_type("'completion'", "a text, or messages of role and content", completion)
        return {
            "prompt": _with_system(messages_of("prompt", prompt), others["system"]),
            "completion": messages_of("completion", completion),
        }
    if _is_chat(completion):
        raise wrong_type("'prompt'", "a list of messages, as 'completion' is", prompt)
    for name, value in (("prompt", prompt), ("completion", completion)):
        check_text(name, value)
    if not completion.strip():
        raise UnusableRowError("empty", "empty document: 'completion' has no text")
    if given := [name for name, value in {**extras, **others}.items() if value]:
        raise UnusableRowError(
            "wrong_type",
            f"{' and '.join(map(repr, given))} go with messages, but 'prompt' is a text; chats are "
            "made where --columns names 'prompt' instruction and 'completion' output",
        )
    return {"prompt": prompt, "completion": completion}


def _alpaca(fields: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the turns of a row of Alpaca; instruction and input are joined as LLaMA-Factory does.

    `history` holds the turns before, such as pairs (instruction, output). Beside tools, an output
    that is a JSON list of calls becomes these calls, as in xLAM's data.
    """
    given = fields.get("input") or ""
    output = fields["output"]
    for name, text in (("instruction", fields["instruction"]), ("input", given)):
        check_text(name, text)
    check_text("output", output)
    history = decoded(fields.get("history")) or []
    if history:
        yield from messages_of("history", history)
    question = "\n".join(text for text in (fields["instruction"], given) if text)
    yield {"role": "user", "content": question}
    if not output.strip():
        raise UnusableRowError("empty", "empty document: 'output' has no text")
    calls = decoded(output)
    if fields.get("tools") and isinstance(calls, list) and calls and _are_calls(calls):
        yield {"role": ASSISTANT, "content": "", "tool_calls": tool_calls_of("'output'", calls)}
    else:
        yield {"role": ASSISTANT, "content": output}


def _are_calls(calls: list[Any]) -> bool:
    return all(isinstance(call, Mapping) and {"name", "arguments"} <= call.keys() for call in calls)


def _system(fields: Mapping[str, Any]) -> Any:
    given = [fields.get(name) or None for name in ("system", "system_prompt")]
    if None not in given and given[0] != given[1]:
        raise UnusableRowError("two_systems", "'system' and 'system_prompt' give different texts")
    return given[0] or given[1]


def _with_system(messages: list[dict[str, Any]], system: Any) -> list[dict[str, Any]]:
    """Put a row's own system text first; raises UnusableRowError beside another system message."""
    if not system or (isinstance(system, str) and not system.strip()):
        return messages
    is_message = isinstance(system, Mapping)
    given = {"content": system} if not is_message else dict(system)
    (message,) = messages_of("system", [given | {"role": "system"}])
    if messages[0]["role"] != "system":
        return [message, *messages]
    if messages[0]["content"] != message["content"]:
        raise UnusableRowError(
            "two_systems", "the column 'system' and the first message give different system texts"
        )
    return messages


# --- tools and template variables


def _tools(fields: Mapping[str, Any]) -> list[Any] | None:
    """Return the tools of a row as OpenAI writes them, None where there are none."""
    given = [tools for name in ("tools", "functions") if (tools := decoded(fields.get(name)))]
    if len(given) == 2 and given[0] != given[1]:
        raise UnusableRowError("wrong_type", "'tools' and 'functions' differ: keep one of them")
    tools = given[0] if given else None
    if not tools or (isinstance(tools, str) and not tools.strip()):
        return None
    tools = [decoded(tool) for tool in (tools if isinstance(tools, list) else [tools])]
    if not all(isinstance(tool, Mapping) for tool in tools):
        raise wrong_type("'tools'", "a list of JSON schemas", fields.get("tools"))
    return [_tool(tool) for tool in tools]


def _tool(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """Wrap a bare function, also Anthropic's; decode parameters that are kept as JSON text."""
    if "input_schema" in tool and "parameters" not in tool:
        tool = {"parameters" if key == "input_schema" else key: tool[key] for key in tool}
    if "function" not in tool and "name" in tool:
        tool = {"type": "function", "function": tool}
    function = tool.get("function")
    if not isinstance(function, Mapping) or "parameters" not in function:
        return tool
    return {**tool, "function": {**function, "parameters": decoded(function["parameters"])}}


def _template_kwargs(fields: Mapping[str, Any]) -> Mapping[str, Any] | None:
    found = decoded(fields.get("chat_template_kwargs")) or {}
    try:
        check_template_variables(found)
    except ValueError as error:
        raise UnusableRowError("wrong_type", str(error)) from None
    return {key: value for key, value in found.items() if value is not None} or None
