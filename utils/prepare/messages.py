"""Messages of published chats, converted to the messages that chat templates read.

A message gets a role, its content as one text, its tool calls as objects, and `weight: 0` if one of
its keys excludes it from training. Unknown keys stay, because a template may read them.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from utils.prepare.loss_flags import trained_parts, with_weight
from utils.prepare.values import (
    ASSISTANT,
    MEDIA_KINDS,
    UnusableRowError,
    check_text,
    decoded,
    refuse_media,
    wrong_type,
)

ROLES = {
    **dict.fromkeys(("human", "user", "prompter"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "bing", "bard", "bot", "chatbot", "model"), ASSISTANT),
    **dict.fromkeys(("ai", "assistant", "moss"), ASSISTANT),
    "system": "system",
    **dict.fromkeys(("tool", "observation", "observations", "ipython", "function"), "tool"),
    **dict.fromkeys(("function_response", "tool_response", "tool_result"), "tool"),
}
CALL_ROLES = ("function_call", "tool_call")  # LLaMA-Factory, ms-swift: the content is a call
OWN_ROLES = {*ROLES.values(), "developer"}  # the roles that templates know
# Keys of an object with a question and its answer, as in ShareAI, Capybara and MOSS.
_ASKED = ("human", "user", "input", "prompt", "question", "query", "instruction")
_ANSWERED = ("gpt", "assistant", "bot", "output", "response", "answer", "completion", "moss")

CALL_KEYS = ("tool_calls", "tool_call", "function_call", "function_calls")
_ARGUMENTS = ("arguments", "parameters", "input", "args", "kwargs")
_ABOUT_A_CALL = {"name", "id", "type", "index", "description", "strict"}
REASONING = ("reasoning_content", "reasoning", "thinking")
_CONTENT = ("content", "value", "text", "parts")
READ = {"role", "content", "tool_calls", "weight", *REASONING}
_TEXT_PARTS = ("text", "input_text", "output_text")
_CALL_PARTS = ("tool_call", "tool_use")  # LLaMA-Factory's and Anthropic's

ABOUT_A_ROW = re.compile(
    r"(.*_)?(id|name|index|type|time|timestamp|date|created|created_at|updated_at|model|lang|"
    r"language|source|url|score|rank|hash|status)s?",
    re.IGNORECASE,
)


def are_messages(value: Any) -> bool:
    """Tell whether a value is a list whose items are messages with a role."""
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(item, Mapping) and ("role" in item or "from" in item) for item in value)
    )


def messages_of(column: str, value: Any) -> list[dict[str, Any]]:
    """Return the messages of a column as templates read them; raises UnusableRowError.

    column: the column's name in error messages.
    """
    value = decoded(value)
    if isinstance(value, Mapping):
        value = _messages_of_object(value)
    if not isinstance(value, list):
        raise wrong_type(column, "a list of messages", value)
    if not value:
        raise UnusableRowError("empty", f"empty document: {column} has no messages")
    found: list[dict[str, Any]] = []
    for turn, given in enumerate(value):
        where = f"message {turn} of {column}"
        for message in _single_messages(where, given, turn):
            _append(found, _message(where, message), role_word(message) in CALL_ROLES)
    return found


def role_word(message: Mapping[str, Any]) -> str:
    """Return the role of a published message, spelled as in ROLES."""
    word = str(message.get("role", message.get("from"))).strip().rstrip(":")
    return word.lower().replace("-", "_")


def check_answers(
    messages: Sequence[Mapping[str, Any]], first_trained: int = 0, column: str = "the chat"
) -> None:
    """Raise UnusableRowError if there is no answer, or an answer without text.

    An answer without text would train only the end token. column: a name of the messages for the
    error.
    """
    roles = dict.fromkeys(message["role"] for message in messages[first_trained:])
    if ASSISTANT not in roles:
        problem = (
            f"nothing is trained on: no message of {column} is the assistant's (roles: "
            f"{', '.join(roles)})"
        )
        raise UnusableRowError("no_assistant_tokens", problem)
    answers = [m for m in messages[first_trained:] if m["role"] == ASSISTANT]
    # Count answers, not messages: the system message may come from a column.
    for number, answer in enumerate(answers, 1):
        if answer.get("weight") != 0 and _says_nothing(answer):
            raise UnusableRowError(
                "empty",
                f"answer {number} of {column} has no text, which would train the "
                "end of a turn alone; give it weight: 0, or leave the chat out",
            )


# --- one message


def _messages_of_object(value: Mapping[str, Any]) -> Any:
    """Return the messages of an object: one message, or several as an object of lists.

    Older versions of `datasets` write a sequence of objects as an object with a list for each key.
    """
    lists = [decoded(item) for item in value.values()]
    if lists and all(isinstance(item, list) for item in lists) and len(set(map(len, lists))) == 1:
        return [dict(zip(value, items, strict=True)) for items in zip(*lists, strict=True)]
    return [value] if {"role", "from"} & value.keys() else value


def _single_messages(where: str, given: Any, turn: int) -> Iterator[dict[str, Any]]:
    """Yield the messages of one item of a list, without keys that are null.

    JSON writers and Arrow write null for a key without a value.
    """
    message = decoded(given)
    if isinstance(given, str) and not are_messages([message]):
        yield {"role": ("user", ASSISTANT)[turn % 2], "content": given}  # as in UltraChat
        return
    if isinstance(message, list) and len(message) == 2:
        yield from _two_texts(where, message)
        return
    if not isinstance(message, Mapping):
        raise wrong_type(where, "an object", message)
    message = {key: value for key, value in message.items() if value is not None}
    if "role" not in message and "from" not in message:
        yield from _question_and_answer(where, message)
        return
    content = message.get("content")
    if isinstance(content, list) and any(_kind(part) == "tool_result" for part in content):
        yield from _split_tool_results(message, content)
    else:
        yield message


def _two_texts(where: str, texts: list[Any]) -> Iterator[dict[str, Any]]:
    """Yield the messages of a list of two texts: role and content, or question and answer."""
    for text in texts:
        check_text(where, text)
    if texts[0].lower() in ROLES:
        yield {"role": texts[0], "content": texts[1]}
    else:
        yield {"role": "user", "content": texts[0]}
        yield {"role": ASSISTANT, "content": texts[1]}


def _question_and_answer(where: str, message: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the two messages of an object that holds a question and its answer."""
    spelled = {key.lower(): key for key in message}
    asked = next((spelled[key] for key in _ASKED if key in spelled), None)
    answered = next((spelled[key] for key in _ANSWERED if key in spelled), None)
    if asked is None or answered is None:
        keys, role = ", ".join(message) or "none", "from" if "value" in message else "role"
        raise UnusableRowError("missing_field", f"{where} has no {role!r} (keys: {keys})")
    for key in (asked, answered):
        if not isinstance(message[key], list | Mapping):  # _message checks lists and objects
            check_text(f"{key!r} of {where}", message[key])
    others = {k: v for k, v in message.items() if k not in (asked, answered, "system")}
    if message.get("system"):  # as in XTuner's
        yield {"role": "system", "content": message["system"]}
    yield {"role": "user", "content": message[asked]}
    yield {"role": ASSISTANT, "content": message[answered], **others}


def _kind(part: Any) -> Any:
    return part.get("type") if isinstance(part, Mapping) else None


def _split_tool_results(
    message: Mapping[str, Any], parts: Sequence[Any]
) -> Iterator[dict[str, Any]]:
    """Yield a tool message for each `tool_result` part (Anthropic), and messages of other parts."""
    rest: list[Any] = []
    for part in parts:
        if _kind(part) != "tool_result":
            rest.append(part)
            continue
        if rest:
            yield {**message, "content": rest}
            rest = []
        other = {key: value for key, value in part.items() if key not in ("type", "tool_use_id")}
        result = {"role": "tool", "content": "", **other}
        yield {**result, "tool_call_id": part["tool_use_id"]} if "tool_use_id" in part else result
    if rest:
        yield {**message, "content": rest}


def _append(found: list[dict[str, Any]], message: dict[str, Any], is_call: bool) -> None:
    """Append a message. If it is only a call, add the call to the assistant's previous message."""
    before: dict[str, Any] = found[-1] if found else {"role": ""}
    if is_call and before["role"] == ASSISTANT and before.get("weight") == message.get("weight"):
        before["tool_calls"] = [*before.get("tool_calls", ()), *message["tool_calls"]]
    else:
        found.append(message)


def _message(where: str, message: dict[str, Any]) -> dict[str, Any]:
    """Return one message with role, content as one text, and its calls as objects.

    The content is "" if the message only calls tools or thinks.
    """
    found = _with_role(where, message)
    is_trained: dict[str, bool] = {}
    if isinstance(content := found.get("content"), Mapping) and found["role"] == "tool":
        found["content"] = json.dumps(content, ensure_ascii=False)
    elif isinstance(content, list | Mapping):
        parts = content if isinstance(content, list) else [content]
        is_trained = trained_parts(where, parts) if found["role"] == ASSISTANT else {}
        said = _read_parts(where, parts, found["role"])
        if both := [key for key in said if key != "content" and found.get(key)]:
            message_text = f"{where} has {both[0]!r} and the same among its parts: keep one of them"
            raise UnusableRowError("wrong_type", message_text)
        found |= said
    text_key = _text_key(message)
    given = {key: calls for key in CALL_KEYS if (calls := decoded(found.pop(key, None)))}
    if len(given) > 1:
        message_text = f"{where} has calls under {' and '.join(map(repr, given))}: keep one of them"
        raise UnusableRowError("wrong_type", message_text)
    for calls in given.values():
        found["tool_calls"] = tool_calls_of(where, calls)
    found |= _thought(where, found)
    if found["role"] == "tool" or any(key in found for key in ("tool_calls", *REASONING)):
        found.setdefault("content", "")
    if "content" not in found:
        raise UnusableRowError(
            "missing_field", f"{where} has no {text_key!r}{_unread(found, text_key)}"
        )
    check_text(f"{text_key!r} of {where}", found["content"])
    refuse_media(where, found)
    if _says_nothing(found) and (lost := _unread(found, text_key)):
        raise UnusableRowError("unread_key", f"{where} has no text{lost}")
    return with_weight(where, found, is_trained)


def _thought(where: str, message: Mapping[str, Any]) -> dict[str, str]:
    """Return the thought of a message, checked, under its given key and as `reasoning_content`."""
    given = {key: _thought_text(message[key]) for key in REASONING if message.get(key)}
    for key, thought in given.items():
        check_text(f"{key!r} of {where}", thought)
    if len(set(given.values())) > 1:
        names = " and ".join(map(repr, given))
        raise UnusableRowError("wrong_type", f"{where} has other thoughts under {names}: keep one")
    thought = next(iter(given.values()), None)
    return given if thought is None else given | {"reasoning_content": thought}


def _thought_text(said: Any) -> Any:
    """Return the text of a thought that is a list of texts or text parts (Mistral, OpenAI)."""
    if not isinstance(said, list):
        return said
    texts: list[Any] = [part.get("text") if isinstance(part, Mapping) else part for part in said]
    return "".join(texts) if all(isinstance(text, str) for text in texts) else said


def _says_nothing(message: Mapping[str, Any]) -> bool:
    said = [message.get(key) for key in ("content", *REASONING)]
    return not message.get("tool_calls") and not any(str(text or "").strip() for text in said)


def _text_key(message: Mapping[str, Any]) -> str:
    """Return the key that holds a message's text, or the usual key if no key holds it."""
    order, usual = (_CONTENT, "content") if "role" in message else (("value", *_CONTENT), "value")
    return next((key for key in order if key in message), usual)


def _unread(message: Mapping[str, Any], text_key: str) -> str:
    """Return advice for a message without text: its unread keys, one of which may hold the text."""
    names = [
        key
        for key, value in message.items()
        if key not in READ
        and isinstance(value, str | list | Mapping)
        and len(value)
        and not ABOUT_A_ROW.fullmatch(key)
    ]
    if not names:
        return ""
    return f", and {', '.join(map(repr, names))} is not read: write {text_key!r} or 'tool_calls'"


def _with_role(where: str, message: dict[str, Any]) -> dict[str, Any]:
    """Return a message with OpenAI's name for its role, and its text as `content`."""
    is_sharegpt = "role" not in message
    given = message.get("from") if is_sharegpt else message["role"]
    check_text(f"{'from' if is_sharegpt else 'role'!r} of {where}", given)
    content_key = _text_key(message)
    if content_key != "content" and message.get("content"):
        both = f"{where} has {content_key!r} and 'content': keep one of them"
        raise UnusableRowError("wrong_type", both)
    taken = ("role", "from") if is_sharegpt else ("role",)
    found = {k: v for k, v in message.items() if k not in taken and k != content_key}
    if content_key in message:
        found["content"] = message[content_key]
    role = role_word(message)
    if role in CALL_ROLES:
        calls = tool_calls_of(where, decoded(found.get("content")))
        return {"role": ASSISTANT, **found, "content": "", "tool_calls": calls}
    if is_sharegpt and role not in {*ROLES, *OWN_ROLES}:
        known = ", ".join([*ROLES, *CALL_ROLES])
        raise UnusableRowError("unknown_role", f"{where} is from {given!r}; known are {known}")
    meant = get_close_matches(role, (ASSISTANT, "system", "user"), n=1, cutoff=0.8)
    if role not in ROLES and meant:  # a spelling error: templates know no roles like these
        raise UnusableRowError("unknown_role", f"{where} has the role {given!r}: {meant[0]!r}?")
    return {"role": ROLES.get(role, role if role in OWN_ROLES else given), **found}


def _read_parts(where: str, parts: Sequence[Any], role: str) -> dict[str, Any]:
    """Return the text, thoughts and calls of a list of parts, by the keys that templates read."""
    texts, thoughts, calls = [], [], []
    for part in parts:
        kind, said = "text", part
        if isinstance(part, Mapping):
            kind = "thinking" if part.get("thought") is True else part.get("type", "text")  # Gemini
            names = (kind, "text", "value", "content")
            said = next((part[name] for name in names if part.get(name) is not None), None)
        if kind in ("reasoning", "thinking") and isinstance(thought := _thought_text(said), str):
            thoughts.append(thought)
        elif kind in _CALL_PARTS:
            calls.append(part if said is None else said)
        elif kind in _TEXT_PARTS and isinstance(said, str):
            texts.append(said)
        elif role == "tool" and not any(medium in str(kind) for medium in MEDIA_KINDS):
            return {"content": json.dumps(parts, ensure_ascii=False)}
        else:
            message = f"{where} has a part that is no text ({part!r:.60}): text alone is trained on"
            raise UnusableRowError("not_text", message)
    found: dict[str, Any] = {"content": "".join(texts)}
    if thoughts:
        found["reasoning_content"] = "".join(thoughts)
    return found | ({"tool_calls": calls} if calls else {})


def tool_calls_of(where: str, calls: Any) -> list[dict[str, Any]]:
    """Return calls as {"type", "function": {"name", "arguments"}}; arguments become an object."""
    found = []
    for call in map(decoded, calls if isinstance(calls, list) else [calls]):
        function = decoded(call.get("function", call)) if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            message = f"{where} has a call without the name of a function: {call!r:.80}"
            raise UnusableRowError("wrong_type", message)
        key = next((key for key in _ARGUMENTS if function.get(key) is not None), None)
        if key is None and (others := function.keys() - {*_ARGUMENTS, *_ABOUT_A_CALL}):
            message = f"{where} has a call with {', '.join(sorted(others))} but no 'arguments'"
            raise UnusableRowError("wrong_type", message)
        # Decode twice, because some datasets encode the JSON text twice.
        arguments = decoded(decoded(function.get(key))) or {}
        if isinstance(arguments, str):
            message = f"{where} has a call whose arguments are no JSON: {arguments!r:.80}"
            raise UnusableRowError("malformed_json", message)
        identity = {"id": call["id"]} if call.get("id") is not None else {}
        function = {"name": function["name"], "arguments": arguments}
        found.append({**identity, "type": "function", "function": function})
    return found
