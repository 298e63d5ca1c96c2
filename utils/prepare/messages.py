"""Messages of published chats, converted to the messages that chat templates read.

A converted message has a role, its content as one text, its tool calls as objects, and `weight: 0`
if it is excluded from training. Unknown keys stay, because a template may read them.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from itertools import groupby
from typing import Any

from utils.prepare.values import (
    ASSISTANT,
    MEDIA_KINDS,
    UnusableRowError,
    as_json,
    check_text,
    decode_json,
    duplicate_keys_error,
    join_text_parts,
    refuse_media,
    renamed_message,
    split_thought,
    wrong_type_error,
)

ROLES = {
    **dict.fromkeys(("human", "user", "prompter"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "bing", "bard", "bot", "chatbot", "model"), ASSISTANT),
    **dict.fromkeys(("ai", "assistant", "moss"), ASSISTANT),
    "system": "system",
    **dict.fromkeys(("tool", "observation", "observations", "ipython", "function"), "tool"),
    **dict.fromkeys(("function_response", "tool_response", "tool_result"), "tool"),
}
CALL_ROLES = ("function_call", "tool_call")  # the content is a tool call (LLaMA-Factory, ms-swift)
OWN_ROLES = {*ROLES.values(), "developer"}  # the roles that chat templates know
# Keys of an object that has both a question and its answer, as in ShareAI, Capybara and MOSS.
_QUESTION_KEYS = ("human", "user", "input", "prompt", "question", "query", "instruction")
_ANSWER_KEYS = ("gpt", "assistant", "bot", "output", "response", "answer", "completion", "moss")

_CALL_KEYS = ("tool_calls", "tool_call", "function_call", "function_calls")
_ARGUMENT_KEYS = ("arguments", "parameters", "input", "args", "kwargs")
_OTHER_CALL_KEYS = {"name", "id", "type", "index", "description", "strict"}
_THOUGHT_KEYS = ("reasoning_content", "reasoning", "thinking")
_CONTENT_KEYS = ("content", "value", "text", "parts")
READ_KEYS = {"role", "content", "tool_calls", "weight", *_THOUGHT_KEYS}
_TEXT_PARTS = ("text", "input_text", "output_text")
_CALL_PARTS = ("tool_call", "tool_use")  # LLaMA-Factory's and Anthropic's
METADATA_KEY = re.compile(
    r"(.*_)?(id|name|index|type|time|timestamp|date|created|created_at|updated_at|model|lang|"
    r"language|source|url|score|rank|hash|status)s?",
    re.IGNORECASE,
)
# Keys that say whether a message is trained on. True means "train on it" for _TRAIN_FLAGS (axolotl,
# ms-swift, LLaMA-Factory, OpenAI, Mistral), and "do not train on it" for _MASK_FLAGS (torchtune).
_TRAIN_FLAGS = (
    *("weight", "loss_weight", "loss_scale", "loss", "loss_mask"),
    *("train", "training", "trainable", "train_on_turn"),
)
_MASK_FLAGS = ("mask", "masked")
_TRAINING_FLAG = re.compile("train|loss|mask|weight", re.IGNORECASE)


def are_messages(value: Any) -> bool:
    """Return whether a value is a non-empty list of messages: objects with `role` or `from`."""
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(item, Mapping) and ("role" in item or "from" in item) for item in value)
    )


def messages_of(
    column: str, value: Any, names: Sequence[tuple[str, str]] = ()
) -> list[dict[str, Any]]:
    """Return the messages in `value`, in the form that chat templates read.

    column: the column's name in errors. names: pairs (name in the file, Stoker's name) of message
    keys and roles. Raises UnusableRowError if `value` has no message or a faulty one.
    """
    value = decode_json(value)
    if isinstance(value, Mapping):
        # Older versions of `datasets` write a sequence of objects as an object of lists.
        lists = [decode_json(each) for each in value.values()]
        if all(isinstance(each, list) for each in lists) and len(set(map(len, lists))) == 1:
            value = [dict(zip(value, items, strict=True)) for items in zip(*lists, strict=True)]
        elif {"role", "from"} & value.keys():
            value = [value]
    if not isinstance(value, list):
        raise wrong_type_error(column, "a list of messages", value)
    if not value:
        raise UnusableRowError("empty", f"empty document: {column} has no messages")
    messages: list[dict[str, Any]] = []
    for turn, item in enumerate(value):
        where = f"message {turn} of {column}"
        for published in _messages_of_item(where, renamed_message(item, names), turn):
            message = _convert_message(where, published)
            previous = messages[-1] if messages else {}
            same_role = all(previous.get(key) == message.get(key) for key in ("role", "weight"))
            if same_role and role_word(published) in CALL_ROLES and not message["content"]:
                previous["tool_calls"] = [*previous.get("tool_calls", ()), *message["tool_calls"]]
            else:
                messages.append(message)
    return messages


def unread_keys(messages: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield labels, such as "message key id", of keys and roles that only chat templates read."""
    for message in messages:
        if message["role"] not in OWN_ROLES:
            yield f"role {message['role']}, which is context only"
        yield from (f"message key {key}" for key in message if key not in READ_KEYS)


def role_word(message: Mapping[str, Any]) -> str:
    """Return the role of a published message in normal spelling: "tool_call" for "Tool-Call:"."""
    word = str(message.get("role", message.get("from"))).strip().rstrip(":")
    return word.lower().replace("-", "_")


def check_answers(
    messages: Sequence[Mapping[str, Any]], first_trained: int = 0, column: str = "the chat"
) -> None:
    """Raise UnusableRowError if messages[first_trained:] has no answer, or an empty answer.

    An answer that has only a thought counts as empty, because it was cut off. Exception: an answer
    with `weight: 0` may be empty. column: the name of the messages in the error.
    """
    answers = [m for m in messages[first_trained:] if m["role"] == ASSISTANT]
    if not answers:
        roles = list(dict.fromkeys(message["role"] for message in messages[first_trained:]))
        problem = f"no message of {column} is the assistant's (roles: {', '.join(roles)})"
        if unknown := [role for role in roles if role not in OWN_ROLES]:
            problem += f"; if {unknown[-1]} is: --columns {unknown[-1]}=assistant"
        raise UnusableRowError("no_assistant_tokens", f"nothing is trained on: {problem}")
    # Count answers, not messages: the system message may come from a column.
    for number, answer in enumerate(answers, 1):
        if answer.get("weight") != 0 and _is_empty(answer):
            thinks = any(str(answer.get(key) or "").strip() for key in ("content", *_THOUGHT_KEYS))
            what = "no text after its thought" if thinks else "no text"
            raise UnusableRowError(
                "empty",
                f"answer {number} of {column} has {what}, so the model would learn to end its turn "
                "there; give it weight: 0, or leave the chat out",
            )


def _messages_of_item(where: str, item: Any, index: int) -> Iterator[dict[str, Any]]:
    """Yield the messages of an item of a chat. item: a text, a pair or an object."""
    message = decode_json(item)
    if isinstance(item, str) and not are_messages([message]):
        yield {"role": ("user", ASSISTANT)[index % 2], "content": item}  # as in UltraChat
        return
    if isinstance(message, list) and len(message) == 2:  # role and content, or two turns
        for text in message:
            check_text(where, text)
        keys = ("role", "content") if message[0].lower() in ROLES else ("user", ASSISTANT)
        message = dict(zip(keys, message, strict=True))
    if not isinstance(message, Mapping):
        raise wrong_type_error(where, "an object", message)
    # JSON writers and Arrow write null for a key without a value.
    message = {key: value for key, value in message.items() if value is not None}
    if "role" in message or "from" in message:
        yield from _split_tool_results(message)
    else:
        yield from _question_and_answer(where, message)


def _split_tool_results(message: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield a message, or its pieces: `tool_result` parts (Anthropic) become tool messages."""
    content = message.get("content")
    if not isinstance(content, list) or not any(map(_is_tool_result, content)):
        yield message
        return
    for are_results, parts in groupby(content, _is_tool_result):
        if not are_results:
            yield {**message, "content": list(parts)}
            continue
        for part in parts:
            result = {"role": "tool", "content": "", **part}
            del result["type"]
            if "tool_use_id" in result:
                result["tool_call_id"] = result.pop("tool_use_id")
            yield result


def _is_tool_result(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") == "tool_result"


def _question_and_answer(where: str, message: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the messages of an object that has a question and its answer.

    Raises UnusableRowError for any other object.
    """
    originals = {key.lower(): key for key in message}
    question_key = next((originals[key] for key in _QUESTION_KEYS if key in originals), None)
    answer_key = next((originals[key] for key in _ANSWER_KEYS if key in originals), None)
    if question_key is None or answer_key is None:
        keys, role = ", ".join(message) or "none", "from" if "value" in message else "role"
        problem = f"{where} has no {role!r} (keys: {keys})"
        if len(message) > 1:
            problem += ": name them, as in --columns {}=role {}=content".format(*message)
        raise UnusableRowError("missing_field", problem)
    for key in (question_key, answer_key):
        if not isinstance(message[key], list | Mapping):  # _convert_message checks lists
            check_text(f"{key!r} of {where}", message[key])
    others = {k: v for k, v in message.items() if k not in (question_key, answer_key, "system")}
    if message.get("system"):  # as in XTuner
        yield {"role": "system", "content": message["system"]}
    yield {"role": "user", "content": message[question_key]}
    yield {"role": ASSISTANT, "content": message[answer_key], **others}


def _convert_message(where: str, published: dict[str, Any]) -> dict[str, Any]:
    """Return a message with its role, its content as one text, and its tool calls as objects."""
    message, text_key = _with_role_and_content(where, published)
    content = message.get("content")
    parts: list[Any] = []
    if isinstance(content, Mapping) and message["role"] == "tool":
        message["content"] = as_json(where, content)
    elif isinstance(content, list | Mapping):
        parts = content if isinstance(content, list) else [content]
        from_parts = _content_of_parts(where, parts, message["role"])
        if twice := [key for key in from_parts if key != "content" and message.get(key)]:
            raise duplicate_keys_error(where, twice[0], "the same among its parts")
        message |= from_parts
    calls = {key: found for key in _CALL_KEYS if (found := decode_json(message.pop(key, None)))}
    if len(calls) > 1:
        raise duplicate_keys_error(where, *calls)
    for found in calls.values():
        message["tool_calls"] = tool_calls_of(where, found)
    message |= _reasoning_of(where, message)
    if message["role"] == "tool" or any(key in message for key in ("tool_calls", *_THOUGHT_KEYS)):
        message.setdefault("content", "")
    if "content" in message:
        check_text(f"{text_key!r} of {where}", message["content"])
    refuse_media(where, message)
    _check_content(where, message, text_key)
    return _with_weight(where, message, parts)


def _with_role_and_content(where: str, message: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """Return the message with keys `role` and `content`, and the key that had the content."""
    role_key = "role" if "role" in message else "from"
    given_role, word = message[role_key], role_word(message)
    check_text(f"{role_key!r} of {where}", given_role)
    if word not in {*ROLES, *OWN_ROLES, *CALL_ROLES}:
        # The template handles an unknown role under the key `role`, unless it looks misspelled.
        suggestions = get_close_matches(word, (ASSISTANT, "system", "user"), n=1, cutoff=0.8)
        if role_key == "from" or suggestions:
            advice = (
                f"; known are {', '.join([*ROLES, *CALL_ROLES])}; another is named by --columns"
            )
            if suggestions:
                advice = f" (did you mean {suggestions[0]}?): correct it, or give --columns"
            role = suggestions[0] if suggestions else ASSISTANT
            problem = f"{where} has the role {given_role!r}{advice}, as in {given_role}={role}"
            raise UnusableRowError("unknown_role", problem)
    text_keys = _CONTENT_KEYS if role_key == "role" else ("value", *_CONTENT_KEYS)
    text_key = next((key for key in text_keys if key in message), text_keys[0])
    if text_key != "content" and message.get("content"):
        raise duplicate_keys_error(where, text_key, "content")
    others = {k: v for k, v in message.items() if k not in (role_key, text_key)}
    role = ROLES.get(word, word if word in OWN_ROLES else given_role)
    content = {"content": message[text_key]} if text_key in message else {}
    if word in CALL_ROLES:
        thought, call = split_thought(message.get(text_key))  # as in LLaMA-Factory
        calls = tool_calls_of(where, decode_json(call))
        return {"role": ASSISTANT, **others, "content": thought, "tool_calls": calls}, text_key
    return {"role": role, **others, **content}, text_key


def _content_of_parts(where: str, parts: Sequence[Any], role: str) -> dict[str, Any]:
    """Return {"content": text} of parts, with `reasoning_content` and `tool_calls` if any."""
    texts, thoughts, calls = [], [], []
    for part in parts:
        kind, value = "text", part
        if isinstance(part, Mapping):
            kind = "thinking" if part.get("thought") is True else str(part.get("type", "text"))
            names = (kind, "text", "value", "content")
            value = next((part[name] for name in names if part.get(name) is not None), None)
        if kind in ("reasoning", "thinking") and isinstance(thought := join_text_parts(value), str):
            thoughts.append(thought)
        elif kind in _CALL_PARTS:
            calls.append(part if value is None else value)
        elif kind in _TEXT_PARTS and isinstance(value, str):
            texts.append(value)
        elif role == "tool" and not any(medium in kind for medium in MEDIA_KINDS):
            return {"content": as_json(where, parts)}
        else:
            message = f"{where} has a part that is no text ({part!r:.60}): text alone is trained on"
            raise UnusableRowError("not_text", message)
    result: dict[str, Any] = {"content": "".join(texts)}
    if thoughts:
        result["reasoning_content"] = "".join(thoughts)
    return result | ({"tool_calls": calls} if calls else {})


def _reasoning_of(where: str, message: Mapping[str, Any]) -> dict[str, Any]:
    """Return {key: thought} for a message's thought keys and for `reasoning_content`.

    Returns {} if the message has no thought key. Raises UnusableRowError if the keys have
    different thoughts, or if the content has a thought as well.
    """
    thoughts = {key: join_text_parts(message[key]) for key in _THOUGHT_KEYS if message.get(key)}
    for key, thought in thoughts.items():
        check_text(f"{key!r} of {where}", thought)
    in_content = ["<think>"] if split_thought(message.get("content"))[0] else []
    if len(set(thoughts.values())) + len(in_content) > 1:
        raise duplicate_keys_error(where, *thoughts, *in_content)
    texts = [*thoughts.values()]
    return thoughts | ({"reasoning_content": texts[0]} if texts else {})


def _is_empty(message: Mapping[str, Any]) -> bool:
    """Return whether a message has neither tool calls nor text after its thought."""
    _, text = split_thought(message.get("content"))
    return not message.get("tool_calls") and not str(text or "").strip()


def _check_content(where: str, message: Mapping[str, Any], text_key: str) -> None:
    """Raise UnusableRowError if a message has no content, or its text is under an unknown key."""
    unread = [
        repr(key)
        for key, value in message.items()
        if key not in READ_KEYS
        and isinstance(value, str | list | Mapping)
        and len(value)
        and not METADATA_KEY.fullmatch(key)
    ]
    if "content" not in message or (unread and _is_empty(message)):
        problem = f"{where} has no {text_key!r}"
        if unread:
            problem += f", and {', '.join(unread)} is not read: write {text_key!r} or 'tool_calls'"
        raise UnusableRowError("missing_field", problem)


def tool_calls_of(where: str, calls: Any) -> list[dict[str, Any]]:
    """Return tool calls in OpenAI's form: [{"type", "function": {"name", "arguments": object}}]."""
    converted = []
    for call in map(decode_json, calls if isinstance(calls, list) else [calls]):
        function = decode_json(call.get("function", call)) if isinstance(call, Mapping) else {}
        function = function if isinstance(function, Mapping) else {}
        key = next((key for key in _ARGUMENT_KEYS if function.get(key) is not None), None)
        has_unknown_keys = key is None and function.keys() - {*_ARGUMENT_KEYS, *_OTHER_CALL_KEYS}
        if has_unknown_keys or not isinstance(function.get("name"), str):
            message = f"{where} has a call without 'name' and 'arguments': {call!r:.80}"
            raise UnusableRowError("wrong_type", message)
        # Decode twice, because some datasets encode the JSON text twice.
        arguments = decode_json(decode_json(function.get(key))) or {}
        if isinstance(arguments, str):
            message = f"{where} has a call whose arguments are no JSON: {arguments!r:.80}"
            raise UnusableRowError("malformed_json", message)
        identity = {"id": call["id"]} if call.get("id") is not None else {}
        function = {"name": function["name"], "arguments": arguments}
        converted.append({**identity, "type": "function", "function": function})
    return converted


def _with_weight(where: str, message: dict[str, Any], parts: Sequence[Any]) -> dict[str, Any]:
    """Return the message with `weight: 0` in place of flags (`mask`, ...) that exclude an answer.

    All other training flags are removed. Exception: messages of other roles keep the flags that ask
    for training. Raises UnusableRowError for contradicting or unclear flags.
    """
    flags = _training_flags(message)
    if message["role"] != ASSISTANT:  # keep the flags that ask for training
        dropped = [k for k in flags if k.lower() in _MASK_FLAGS or not message[k]]
        return {key: value for key, value in message.items() if key not in dropped}
    trained = [_asks_for_training(where, key, message.pop(key)) for key in flags]
    part_objects = [part for part in parts if isinstance(part, Mapping)]
    if len(set(trained)) > 1 or any(_training_flags(part) for part in part_objects):
        problem = f"{where}: its parts have flags, or its keys contradict each other: give it one "
        raise UnusableRowError("unclear_weight", problem + "'weight', 0 or 1")
    return message | ({"weight": 0} if False in trained else {})


def _training_flags(message: Mapping[str, Any]) -> list[str]:
    return [key for key in message if message[key] is not None and _TRAINING_FLAG.search(key)]


def _asks_for_training(where: str, key: str, value: Any) -> bool:
    """Return whether a flag, such as `train: true`, asks for training.

    Raises UnusableRowError if the value is unclear.
    """
    word = key.lower()
    if word in _TRAIN_FLAGS and isinstance(value, bool | int | float) and value in (0, 1):
        return bool(value)
    if word in _MASK_FLAGS and isinstance(value, bool):
        return not value
    raise UnusableRowError(
        "unclear_weight",
        f"{where} has {key!r}: {value!r:.60}, which is not read: write 'weight': 0 (the message is "
        "not trained on) or 1",
    )
