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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
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
_THEIR_NAMES = {
    "prompt": ("question", "query", "problem", "instruction", "prompt", "input", "user"),
    "completion": (
        *("answer", "response", "output", "solution", "completion", "target", "assistant"),
    ),
    "messages": ("conversation", "dialogue", "dialog", "chat", "turns"),
    "text": ("content", "body", "document", "article", "raw_content", "code"),
}
_TEXT_PARTS = ("text", "input_text", "output_text")
_THOUGHT_PARTS = ("reasoning", "thinking")


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
        theirs = {ours: name for name, ours in self.columns}
        own = [theirs.get(n, n) for n in (*NEEDED[self.row_format], *OPTIONAL[self.row_format])]
        return list(dict.fromkeys([*own, *(name for name, _ in self.filters)]))

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


def _wrong_type(what: str, wanted: str, value: Any) -> UnusableRowError:
    message = f"{what} must be {wanted}, found {type(value).__name__}"
    return UnusableRowError("wrong_type", message)


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


def naming_hint(columns: Sequence[str]) -> str:
    """Say what to type for a row whose columns are none of ours."""
    if "input_ids" in columns:
        return "it is tokenized already: give it to training as --train_data"
    if "chosen" in columns:
        return (
            "of preference data the chosen answers can be trained on: --columns chosen=messages, "
            "chosen=completion where they are texts beside a prompt, or chosen=text alone"
        )
    spelled = {name.lower(): name for name in columns}
    found = {
        ours: next((spelled[name] for name in names if name in spelled), None)
        for ours, names in _THEIR_NAMES.items()
    }
    question, answer = found["prompt"], found["completion"]
    if question and answer:
        context = f" {spelled['context']}=input" if "context" in spelled else ""
        return (
            f"for a prompt and its completion give --columns {question}=prompt {answer}=completion,"
            f" for chats --columns {question}=instruction {answer}=output{context}"
        )
    for ours in ("messages", "text"):
        if found[ours]:
            return f"give --columns {found[ours]}={ours}"
    return "name yours, as in --columns question=prompt answer=completion or body=text"


def document_fields(fields: Mapping[str, Any], row_format: str) -> Mapping[str, Any]:
    """Return the checked fields of a row's document; raises UnusableRowError with the reason."""
    missing = [repr(name) for name in NEEDED[row_format] if fields.get(name) is None]
    if missing:
        found = _found(name for name, value in fields.items() if value is not None)
        message = f"no {' and no '.join(missing)}, which the format {row_format} needs ({found})"
        raise UnusableRowError("missing_field", message)
    if row_format == "text":
        check_text("text", fields["text"])
        return fields
    extras = {"tools": _tools(fields), "chat_template_kwargs": _template_kwargs(fields)}
    if row_format == "prompt_completion":
        return _pair(fields["prompt"], fields["completion"], extras) | extras
    if row_format == "alpaca":
        messages = list(_alpaca(fields))
    else:
        (name,) = NEEDED[row_format]
        messages = _messages(name, fields[name])
    return {"messages": _with_system(messages, fields.get("system")), **extras}


def _pair(prompt: Any, completion: Any, extras: Mapping[str, Any]) -> dict[str, Any]:
    """Return prompt and completion, checked: both texts, or both lists of messages."""
    pair = {"prompt": prompt, "completion": completion}
    if isinstance(prompt, list) or isinstance(completion, list):
        return {name: _messages(name, value) for name, value in pair.items()}
    for name, value in pair.items():
        check_text(name, value)
    if not completion.strip():
        raise UnusableRowError("empty", "empty document: 'completion' has no text")
    if any(extras.values()):
        message = "'tools' and 'chat_template_kwargs' go with messages, but 'prompt' is a text"
        raise UnusableRowError("wrong_type", message)
    return pair


def _alpaca(fields: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the turns of a row of Alpaca; instruction and input are joined as LLaMA-Factory does.

    `history` is a list of pairs (instruction, output) that came before.
    """
    given = fields.get("input") or ""
    check_text("instruction", fields["instruction"])
    check_text("input", given)
    question = "\n".join(text for text in (fields["instruction"], given) if text)
    history = _decoded(fields.get("history")) or []
    for pair in [*history, [question, fields["output"]]]:
        if not isinstance(pair, list) or len(pair) != 2:
            raise UnusableRowError("wrong_type", "'history' must hold pairs of texts")
        check_text("instruction", pair[0])
        check_text("output", pair[1])
        yield {"role": "user", "content": pair[0]}
        yield {"role": "assistant", "content": pair[1]}
    if not fields["output"].strip():
        raise UnusableRowError("empty", "empty document: 'output' has no text")


def _with_system(messages: list[dict[str, Any]], system: Any) -> list[dict[str, Any]]:
    """Put a row's own system text first; raises UnusableRowError beside another system message."""
    if not isinstance(system, str) or not system.strip():
        return messages
    if messages[0]["role"] != "system":
        check_text("system", system)
        return [{"role": "system", "content": system}, *messages]
    if messages[0]["content"] != system:
        raise UnusableRowError(
            "two_systems", "the column 'system' and the first message give different system texts"
        )
    return messages


def check_text(name: str, text: Any) -> None:
    """Raise UnusableRowError unless a value is a string that UTF-8 can write."""
    if not isinstance(text, str):
        raise _wrong_type(repr(name), "a string", text)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        message = f"{name!r} holds half a surrogate pair at character {error.start}"
        raise UnusableRowError("invalid_utf8", message) from None


# --- messages


def _messages(name: str, value: Any) -> list[dict[str, Any]]:
    """Return the messages of a row as templates read them; raises UnusableRowError."""
    value = _decoded(value)
    if not isinstance(value, list):
        raise _wrong_type(repr(name), "a list of messages", value)
    if not value:
        raise UnusableRowError("empty", f"empty document: {name!r} has no messages")
    return [_message(f"message {turn} of {name!r}", message) for turn, message in enumerate(value)]


def _message(where: str, message: Any) -> dict[str, Any]:
    """Return one message with role, content as one text, and its calls as objects.

    Keys that are null are left out: JSON writers and Arrow put them where nothing was said. A
    message that says nothing but calls or thinks has the content "".
    """
    message = _decoded(message)
    if not isinstance(message, Mapping):
        raise _wrong_type(where, "an object", message)
    found = _with_role(where, {key: value for key, value in message.items() if value is not None})
    if isinstance(content := found.get("content"), list):
        found |= _content_of_parts(where, content, found["role"])
    elif isinstance(content, Mapping) and found["role"] == "tool":
        found["content"] = json.dumps(content, ensure_ascii=False)
    if calls := _decoded(found.pop("tool_calls", None)) or found.pop(FUNCTION_CALL, None):
        found["tool_calls"] = _tool_calls(where, calls)
    if "loss_weight" in found and "weight" not in found:  # LLaMA-Factory's name for it
        found["weight"] = found.pop("loss_weight")
    if any(key in found for key in ("tool_calls", "reasoning_content", "reasoning", "thinking")):
        found.setdefault("content", "")
    if "content" not in found:
        raise UnusableRowError("missing_field", f"{where} has no 'content'")
    for key in ("content", "reasoning_content"):
        check_text(f"{key} of {where}", found.get(key, ""))
    return found


def _with_role(where: str, message: dict[str, Any]) -> dict[str, Any]:
    """Return a message with its role by OpenAI's name, and ShareGPT's `value` as content."""
    is_sharegpt = "from" in message and "role" not in message
    if is_sharegpt:
        message["role"] = message.pop("from")
        if "value" in message:
            message["content"] = message.pop("value")
    if "role" not in message:
        raise UnusableRowError("missing_field", f"{where} has no 'role'")
    role = message["role"]
    check_text(f"role of {where}", role)
    if is_sharegpt and role == FUNCTION_CALL:
        calls = _decoded(message.get("content"))
        return message | {"role": "assistant", "content": "", "tool_calls": calls}
    if is_sharegpt and role not in ROLES:
        known = ", ".join([*ROLES, FUNCTION_CALL])
        raise UnusableRowError("unknown_role", f"{where} is from {role!r}; known are {known}")
    meant = get_close_matches(role, ("assistant", "system", "user"), n=1, cutoff=0.8)
    if role not in ROLES and meant:  # templates know other roles, but none like these
        raise UnusableRowError("unknown_role", f"{where} has the role {role!r}: {meant[0]!r}?")
    return message | {"role": ROLES.get(role, role)}


def _content_of_parts(where: str, parts: Sequence[Any], role: Any) -> dict[str, Any]:
    """Return the text of a list of parts; thoughts and calls go to the keys that templates read."""
    texts, thoughts, calls = [], [], []
    for part in parts:
        kind, said = "text", part
        if isinstance(part, Mapping):
            kind = part.get("type", "text")
            names = (kind, "text", "value")
            said = next((part[name] for name in names if part.get(name) is not None), None)
        if kind in _THOUGHT_PARTS:
            thoughts.append(str(said))
        elif kind == "tool_call":
            calls.append(said)
        elif kind in _TEXT_PARTS and isinstance(said, str):
            texts.append(said)
        elif role == "tool":
            return {"content": json.dumps(parts, ensure_ascii=False)}
        else:
            message = f"{where} has a part that is no text ({part!r:.60}): text alone is trained on"
            raise UnusableRowError("not_text", message)
    found: dict[str, Any] = {"content": "".join(texts)}
    if thoughts:
        found["reasoning_content"] = "".join(thoughts)
    return found | ({"tool_calls": calls} if calls else {})


def _tool_calls(where: str, calls: Any) -> list[dict[str, Any]]:
    """Return calls as {"type", "function": {"name", "arguments"}}, the arguments an object."""
    found = []
    for call in map(_decoded, calls if isinstance(calls, list) else [calls]):
        function = _decoded(call.get("function", call)) if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            message = f"{where} has a call without the name of a function: {call!r:.80}"
            raise UnusableRowError("wrong_type", message)
        # Twice, for some datasets have encoded the JSON text once more.
        arguments = _decoded(_decoded(function.get("arguments"))) or {}
        identity = {"id": call["id"]} if call.get("id") is not None else {}
        function = {"name": function["name"], "arguments": arguments}
        found.append({**identity, "type": "function", "function": function})
    return found


# --- tools and template variables


def _tools(fields: Mapping[str, Any]) -> list[Any] | None:
    """Return the tools of a row as OpenAI writes them, None where there are none."""
    tools = _decoded(fields.get("tools") or fields.get("functions"))
    if not tools or (isinstance(tools, str) and not tools.strip()):
        return None
    tools = [_decoded(tool) for tool in (tools if isinstance(tools, list) else [tools])]
    if not all(isinstance(tool, Mapping) for tool in tools):
        raise _wrong_type("'tools'", "a list of JSON schemas", fields.get("tools"))
    return [_tool(tool) for tool in tools]


def _tool(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """Wrap a bare function; undo the JSON text that some datasets keep the parameters in."""
    if "function" not in tool and "name" in tool:
        tool = {"type": "function", "function": tool}
    function = tool.get("function")
    if not isinstance(function, Mapping) or "parameters" not in function:
        return tool
    return {**tool, "function": {**function, "parameters": _decoded(function["parameters"])}}


def _template_kwargs(fields: Mapping[str, Any]) -> Mapping[str, Any] | None:
    found = _decoded(fields.get("chat_template_kwargs")) or {}
    if not isinstance(found, Mapping):
        raise _wrong_type("'chat_template_kwargs'", "an object", found)
    return {key: value for key, value in found.items() if value is not None} or None


def _decoded(value: Any) -> Any:
    """Return what a JSON text of an object or a list stands for; anything else as it is."""
    if isinstance(value, str) and value.lstrip()[:2].startswith(("{", "[", '"{', '"[')):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return value
    return value
