"""Rows as people publish them, made into the fields of a text, a chat, or a prompt and completion.

A row format is a set of columns and where it comes from:

- text: `text`
- messages: `messages` of role and content (OpenAI, Hugging Face)
- sharegpt: `conversations` of from and value (ShareGPT, LLaMA-Factory, axolotl); becomes messages
- alpaca: `instruction`, `input`, `output` (Stanford Alpaca); becomes messages
- prompt_completion: `prompt` and `completion`, both texts or both messages (TRL)
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

NEEDED: dict[str, tuple[str, ...]] = {
    "text": ("text",),
    "messages": ("messages",),
    "sharegpt": ("conversations",),
    "alpaca": ("instruction", "output"),
    "prompt_completion": ("prompt", "completion"),
}
_OF_CHATS = ("tools", "functions", "system", "chat_template_kwargs")
OPTIONAL: dict[str, tuple[str, ...]] = {
    "text": (),
    "messages": _OF_CHATS,
    "sharegpt": _OF_CHATS,
    "alpaca": ("input", "history", *_OF_CHATS),
    "prompt_completion": ("tools", "functions", "chat_template_kwargs"),
}
# What a row becomes, where that is not the format itself.
DOCUMENT_FORMATS = {"sharegpt": "messages", "alpaca": "messages"}

ROLES = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "bing", "bard", "bot", "model", "assistant"), "assistant"),
    "system": "system",
    **dict.fromkeys(("tool", "observation", "function_response", "function"), "tool"),
}
FUNCTION_CALL = "function_call"  # LLaMA-Factory's turn whose value is a call, or several, as JSON

# Names met in published datasets, for the hint of what to type.
_TEXT_PARTS = ("text", "input_text", "output_text")
_THOUGHT_PARTS = ("reasoning", "thinking")
_QUESTIONS = ("question", "query", "problem", "instruction", "prompt", "input", "user")
_ANSWERS = ("answer", "response", "output", "solution", "completion", "target", "assistant")
_INPUTS = ("input", "context")
_CHATS = ("conversation", "dialogue", "dialog", "chat", "turns")
_TEXTS = ("content", "body", "document", "article", "raw_content", "code")


class UnusableRowError(ValueError):
    """A row that cannot become a document; `reason` is the name it is counted under."""

    def __init__(self, reason: str, message: str):
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True)
class RowSettings:
    """How the rows of one source are read, and how much of them is taken.

    columns: pairs (name in the file, our name). filters: pairs (name in the file, what is kept: a
    value, a list of values, or {"min": ..., "max": ...}). weight: how often each document is
    written, a fraction being the share of documents. max_tokens: of the whole source.
    """

    row_format: str
    columns: tuple[tuple[str, str], ...] = ()
    filters: tuple[tuple[str, Any], ...] = ()
    weight: float = 1.0
    max_tokens: int | None = None

    @property
    def read_columns(self) -> list[str]:
        """The columns to read, by their names in the file; the format's own first."""
        own = columns_to_read([self.row_format], self.columns)
        return list(dict.fromkeys([*own, *(name for name, _ in self.filters)]))

    def renamed(self, fields: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the fields under our names."""
        return renamed(fields, self.columns)

    def selects(self, fields: Mapping[str, Any]) -> bool:
        """Tell whether the filters select a row; raises UnusableRowError without their column."""
        return all(_selects(name, wanted, fields) for name, wanted in self.filters)


def _selects(name: str, wanted: Any, fields: Mapping[str, Any]) -> bool:
    if name not in fields:
        raise UnusableRowError(
            "missing_field",
            f"no {name!r}, which the filter asks for (columns found: {', '.join(sorted(fields))})",
        )
    value = fields[name]
    if isinstance(wanted, Mapping):
        try:
            number = float(value)
        except (TypeError, ValueError):
            return False
        return wanted.get("min", -math.inf) <= number <= wanted.get("max", math.inf)
    values = wanted if isinstance(wanted, list) else [wanted]
    # CSV holds texts alone.
    return value in values or (isinstance(value, str) and value in map(str, values))


def columns_to_read(row_formats: Sequence[str], columns: Sequence[tuple[str, str]]) -> list[str]:
    """Return the columns that these formats read, by their names in the file."""
    theirs = {ours: name for name, ours in columns}
    needed = [name for row_format in row_formats for name in NEEDED[row_format]]
    optional = [name for row_format in row_formats for name in OPTIONAL[row_format]]
    return [theirs.get(name, name) for name in dict.fromkeys([*needed, *optional])]


def renamed(fields: Mapping[str, Any], columns: Sequence[tuple[str, str]]) -> Mapping[str, Any]:
    """Return the fields under our names; a field whose name is taken by another is left out."""
    if not columns:
        return fields
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


def naming_hint(columns: Sequence[str]) -> str:
    """Say what to type for a row whose columns are none of ours."""
    if "input_ids" in columns:
        return "it is tokenized already: give it to training as --train_data"

    spelled = {name.lower(): name for name in columns}

    def first(names: Sequence[str]) -> str | None:
        return next((spelled[name] for name in names if name in spelled), None)

    question, answer, chat, text = map(first, (_QUESTIONS, _ANSWERS, _CHATS, _TEXTS))
    if "chosen" in columns:
        return (
            "of preference data the chosen answers can be trained on: --columns chosen=messages, "
            "or chosen=completion where they are texts"
        )
    if question and answer:
        context = first([name for name in _INPUTS if spelled.get(name) != question])
        pair = _named({question: "prompt", answer: "completion"})
        chat = _named({question: "instruction", answer: "output", context: "input"})
        return f"for a prompt and its completion give --columns {pair}, for chats --columns {chat}"
    if chat:
        return f"for chats give --columns {chat}=messages"
    if text:
        return f"for texts give --columns {text}=text"
    return "name yours, as in --columns question=prompt answer=completion or body=text"


def _named(columns: Mapping[str | None, str]) -> str:
    return " ".join(f"{name}={ours}" for name, ours in columns.items() if name and name != ours)


def document_fields(fields: Mapping[str, Any], row_format: str) -> Mapping[str, Any]:
    """Return the fields of the document that a row makes: text, messages or prompt_completion.

    What is no message or call stays as it is, for the document's own checks. Raises
    UnusableRowError.
    """
    missing = [name for name in NEEDED[row_format] if fields.get(name) is None]
    if missing:
        found = ", ".join(sorted(name for name, value in fields.items() if value is not None))
        raise UnusableRowError(
            "missing_field",
            f"no {' and no '.join(repr(name) for name in missing)}, which the format "
            f"{row_format} needs (columns found: {found or 'none'})",
        )
    if row_format == "text":
        return fields
    extras = {"tools": _tools(fields), "chat_template_kwargs": _template_kwargs(fields)}
    if row_format == "prompt_completion":
        pair = (fields["prompt"], fields["completion"])
        if isinstance(pair[0], list) or isinstance(pair[1], list):
            pair = (_messages("prompt", pair[0]), _messages("completion", pair[1]))
        return {"prompt": pair[0], "completion": pair[1], **extras}
    if row_format == "alpaca":
        messages = list(_alpaca(fields))
    else:
        (name,) = NEEDED[row_format]
        messages = _messages(name, fields[name])
    return {"messages": _with_system(messages, fields.get("system")), **extras}


def _alpaca(fields: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the turns of a row of Alpaca; instruction and input are joined as LLaMA-Factory does.

    `history` is a list of pairs (instruction, output) that came before.
    """
    history = _decoded(fields.get("history")) or []
    for pair in history:
        if not isinstance(pair, list) or len(pair) != 2:
            raise UnusableRowError("wrong_type", "'history' must hold pairs of texts")
        yield {"role": "user", "content": pair[0]}
        yield {"role": "assistant", "content": pair[1]}
    question = [fields["instruction"], fields.get("input") or ""]
    if not all(isinstance(text, str) for text in question):
        raise UnusableRowError("wrong_type", "'instruction' and 'input' must be strings")
    if isinstance(fields["output"], str) and not fields["output"].strip():
        raise UnusableRowError("empty", "empty document: 'output' has no text")
    yield {"role": "user", "content": "\n".join(text for text in question if text)}
    yield {"role": "assistant", "content": fields["output"]}


def _with_system(messages: Any, system: Any) -> Any:
    """Put a row's own system text first; raises UnusableRowError beside another system message."""
    if not isinstance(system, str) or not system.strip() or not isinstance(messages, list):
        return messages
    first = messages[0] if messages else None
    if isinstance(first, dict) and first.get("role") == "system":
        if first.get("content") == system:
            return messages
        raise UnusableRowError(
            "two_systems", "the column 'system' and the first message give different system texts"
        )
    return [{"role": "system", "content": system}, *messages]


def _messages(name: str, value: Any) -> Any:
    value = _decoded(value)
    if not isinstance(value, list):
        return value
    return [_message(name, turn, message) for turn, message in enumerate(value)]


def _message(name: str, turn: int, message: Any) -> Any:
    """Return one message with role, content as one text, and its calls as objects.

    Keys that are null are left out: JSON writers and Arrow put them where nothing was said. A
    message that says nothing but calls or thinks has the content "".
    """
    message = _decoded(message)
    if not isinstance(message, Mapping):
        return message
    found = {key: value for key, value in message.items() if value is not None}
    where = f"message {turn} of {name!r}"
    if "from" in found and "role" not in found:
        found = {
            "role": found["from"],
            "content": found.get("value", found.get("content")),
            **{key: value for key, value in found.items() if key not in ("from", "value")},
        }
        if found["role"] == FUNCTION_CALL:
            calls = _decoded(found["content"])
            found |= {"role": "assistant", "content": "", "tool_calls": calls}
        elif found["role"] not in ROLES:
            known = ", ".join([*ROLES, FUNCTION_CALL])
            raise UnusableRowError(
                "unknown_role", f"{where} is from {found['role']!r}; known are {known}"
            )
    found = _without_special_parts(found)
    role = found.get("role")
    if isinstance(role, str):
        found["role"] = ROLES.get(role, role)
    calls = _decoded(found.pop("tool_calls", None)) or found.pop(FUNCTION_CALL, None)
    if calls:
        several = calls if isinstance(calls, list) else [calls]
        found["tool_calls"] = [_tool_call(where, call) for call in several]
    if "loss_weight" in found and "weight" not in found:  # LLaMA-Factory's name for it
        found["weight"] = found.pop("loss_weight")
    silent = ("tool_calls", "reasoning_content", "reasoning", "thinking")
    if found.get("content") is None and any(key in found for key in silent):
        found["content"] = ""
    if "content" in found:
        found["content"] = _content(where, found["content"], found.get("role"))
    return found


def _without_special_parts(message: dict[str, Any]) -> dict[str, Any]:
    """Move thoughts and calls among the parts of a content to the keys that templates read."""
    content = message.get("content")
    if not isinstance(content, list):
        return message
    kinds = [part.get("type") if isinstance(part, Mapping) else None for part in content]
    parts = list(zip(kinds, content, strict=True))
    thoughts = [_said_by(part, kind) for kind, part in parts if kind in _THOUGHT_PARTS]
    calls = [_said_by(part, kind) for kind, part in parts if kind == "tool_call"]
    if not thoughts and not calls:
        return message
    rest = [part for kind, part in parts if kind not in (*_THOUGHT_PARTS, "tool_call")]
    found = {**message, "content": rest}
    if thoughts:
        found["reasoning_content"] = "".join(map(str, thoughts))
    if calls:
        found["tool_calls"] = calls
    return found


def _said_by(part: Mapping[str, Any], kind: str) -> Any:
    """Return what a part says: under the name of its type, as text or as value."""
    return next((part[key] for key in (kind, "text", "value") if part.get(key) is not None), None)


def _content(where: str, content: Any, role: Any) -> Any:
    """Return a list of text parts as one text, and what a tool gave as JSON."""
    if isinstance(content, list):
        texts = [
            part.get("text", part.get("value")) if isinstance(part, Mapping) else part
            for part in content
            if not isinstance(part, Mapping) or part.get("type", "text") in _TEXT_PARTS
        ]
        strings = [text for text in texts if isinstance(text, str)]
        if len(strings) == len(content):
            return "".join(strings)
        kinds = {str(part.get("type")) for part in content if isinstance(part, Mapping)}
        if role != "tool" and kinds:
            found = ", ".join(sorted(kinds))
            raise UnusableRowError(
                "not_text", f"{where} has parts of type {found}; text alone can be trained on"
            )
    if role == "tool" and isinstance(content, Mapping | list):
        return json.dumps(content, ensure_ascii=False)
    return content


def _tool_call(where: str, call: Any) -> dict[str, Any]:
    """Return a call as {"type", "function": {"name", "arguments"}}, the arguments an object."""
    call = _decoded(call)
    function = _decoded(call.get("function", call)) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise UnusableRowError(
            "wrong_type", f"{where} has a call without the name of a function: {call!r:.80}"
        )
    # Twice, for some datasets have encoded the JSON text once more.
    arguments = _decoded(_decoded(function.get("arguments")))
    found = {"name": function["name"], "arguments": arguments or {}}
    identity = {"id": call["id"]} if call.get("id") is not None else {}
    return {**identity, "type": "function", "function": found}


def _tools(fields: Mapping[str, Any]) -> list[Any] | None:
    """Return the tools of a row as OpenAI writes them, None where there are none."""
    given = fields.get("tools") or fields.get("functions")
    tools = _decoded(given)
    if isinstance(tools, Mapping):
        tools = [tools]
    if isinstance(tools, str) and not tools.strip():
        return None
    tools = [_decoded(tool) for tool in tools] if isinstance(tools, list) else tools
    if tools is None or tools == []:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in tools):
        raise UnusableRowError(
            "wrong_type", f"'tools' must be a list of JSON schemas, found {given!r:.80}"
        )
    return [_tool(tool) for tool in tools]


def _tool(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """Wrap a bare function; undo the JSON text that some datasets keep the parameters in."""
    if "function" not in tool and "name" in tool:
        tool = {"type": "function", "function": tool}
    function = tool.get("function")
    if isinstance(function, Mapping) and isinstance(function.get("parameters"), str):
        tool = {**tool, "function": {**function, "parameters": _decoded(function["parameters"])}}
    return tool


def _template_kwargs(fields: Mapping[str, Any]) -> Mapping[str, Any] | None:
    given = fields.get("chat_template_kwargs")
    found = _decoded(given)
    if not found:
        return None
    if not isinstance(found, Mapping):
        raise UnusableRowError(
            "wrong_type", f"'chat_template_kwargs' must be an object, found {given!r:.80}"
        )
    return {key: value for key, value in found.items() if value is not None} or None


def _decoded(value: Any) -> Any:
    """Return what a JSON text of an object or a list stands for; anything else as it is."""
    if isinstance(value, str) and value.lstrip()[:2].startswith(("{", "[", '"{', '"[')):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return value
    return value
