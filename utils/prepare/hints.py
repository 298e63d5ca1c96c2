"""Advice for rows in an unknown format: `--columns NAME_IN_FILE=OUR_NAME` flags rename columns."""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from utils.config.preparation import MESSAGE_ROLES, Source
from utils.prepare.messages import METADATA_KEY, ROLES, are_messages, check_answers, role_word
from utils.prepare.rows import becomes_chat, detect_formats, document_fields
from utils.prepare.values import ASSISTANT, UnusableRowError, decode_json, renamed

# Names of columns in published datasets.
_QUESTIONS = (
    *("instruction", "question", "query", "problem", "prompt", "input", "inputs", "user", "human"),
    *("article", "document", "dialogue", "passage", "source", "src", "message_1", "messages"),
    *("conversations", "inputs_pretokenized", "input_text", "context"),
)
_ANSWERS = (
    *("output", "response", "answer", "solution", "completion", "target", "targets", "outputs"),
    *("generation", "assistant", "gpt", "bot", "generated_solution", "canonical_solution"),
    *("answers", "summary", "highlights", "tgt", "message_2", "chatgpt_answers", "output_text"),
    *("targets_pretokenized", "preferred_output", "reply", "replies", "response_j"),
)
CHAT_COLUMNS = (
    *("messages", "conversation", "conversations", "dialogue", "dialog", "chat", "turns"),
    *("contents", "chosen_messages"),
)
_TEXTS = (
    *("text", "content", "body", "document", "article", "raw_content", "code", "chat", "dialogue"),
)
_CONTEXT = {
    **dict.fromkeys(("document", "article", "passage", "paragraph", "context", "input"), "input"),
    **dict.fromkeys(("systeminstruction", "system_prompt", "system"), "system"),
    **dict.fromkeys(("complex_cot", "thought", "thinking", "reasoning"), "reasoning_content"),
    **{name: name for name in ("reasoning_content", "history", "tools", "functions")},
}

Renaming = dict[str, str]  # {column of the file: column of a row format in rows.py}


def naming_hint(fields: Mapping[str, Any]) -> str:
    """Return advice for a row in an unknown format: --columns flags that make the row readable."""
    if are_messages([fields]) and {"content", "text", "value"} & fields.keys():
        return "each row is one message: put the messages of a chat into one row, as 'messages'"
    renamings: dict[str, Renaming] = {}
    problems: list[str] = []
    for kind, names in _likely_renamings(fields):
        problem = _renaming_problem(fields, names)
        if not problem:
            renamings.setdefault(kind, names)
        elif kind != "texts":
            problems.append(problem)
    if len(renamings) > 1:
        renamings.pop("texts", None)
    if not renamings and not problems:
        renamings = _guess_unknown_columns(fields)
    if not renamings:
        reason = (problems or ["it has no texts, messages, or question with an answer"])[0]
        return f"no column can be read under another name ({reason})"
    flags = {
        kind: shlex.join(f"{theirs}={ours}" for theirs, ours in names.items() if theirs != ours)
        for kind, names in renamings.items()
    }
    note = "of preference data the chosen answers can be trained on: " if "chosen" in fields else ""
    return note + ", ".join(f"for {kind} give --columns {names}" for kind, names in flags.items())


def absent_columns(fields: Mapping[str, Any], columns: Sequence[tuple[str, str]]) -> list[str]:
    """Return the names in --columns that do not occur in the row.

    A name may occur as a column, a key of a message or a role. columns: pairs (name in the file,
    Stoker's name). Names that become `user`, `assistant` or `tool` are never returned: a row
    may lack these roles.
    """
    text = str(fields).replace('"', "'")  # messages may be JSON text with double quotes
    absent = [each for each in columns if each[0] not in fields and f"'{each[0]}'" not in text]
    return [name for name, ours in absent if ours not in MESSAGE_ROLES or ours == "system"]


def unsuitable_reason(given: Mapping[str, Any], source: Source) -> str:
    """Return why a row in a known format is unsuitable for training; "" if the row is fine.

    For example, the answer of a KTO row may be labelled as bad. given: the row's fields.
    """
    fields = renamed(given, source.columns)
    filtered = [name for name, _ in source.filters]
    is_single_message = "role" in fields and "text" in fields and "parent_id" in fields
    if is_single_message and "role" not in filtered:
        return (
            "each row is one message of a tree (OpenAssistant): put the messages of a chat into "
            "one row, or filter on role to train on each as a text"
        )
    label = str(fields.get("label")).lower()
    bad, good = ("0", "1") if "completion" in fields and label in ("0", "1") else ("false", "true")
    if label in (bad, good) and "label" not in filtered and "text" not in fields:
        return (
            "its label says which answers are good (KTO): in a recipe give the source the filter "
            f"{{label: {good}}}, or {{label: [{good}, {bad}]}} to train on all"
        )
    if "chosen" in fields and "completion" not in fields:
        chats = [
            decode_json(fields[name]) for name in ("messages", "conversations") if name in fields
        ]
        last = [chat[-1] for chat in chats if are_messages(chat)]
        if any(ROLES.get(role_word(one)) == "user" for one in last):
            return f"its answers are apart: {naming_hint(given)}"
    return ""


def _likely_renamings(fields: Mapping[str, Any]) -> Iterator[tuple[str, Renaming]]:
    """Yield (kind of document, {column: Stoker's name}) of well-known columns, likeliest first."""
    columns = {name.lower(): name for name in fields}
    is_preference = "chosen" in fields
    answers: Sequence[str] = ("chosen",) if is_preference else _ANSWERS
    texts: Sequence[str] = ("chosen",) if is_preference else _TEXTS
    questions = [columns[name] for name in _QUESTIONS if name in columns]
    answer_columns = [columns[name] for name in answers if name in columns]
    pairs = [(one, other) for one in questions for other in answer_columns if one != other]
    yield from (("chats", names) for names in _chat_renamings(fields, columns, pairs))
    for question, answer in pairs:
        other_names = {name.lower() for name in fields if name not in (question, answer)}
        context_names = other_names & {*_CONTEXT, "instruction", "question", "query"}
        if isinstance(fields[question], str) and not context_names:
            yield "a prompt and its completion", {question: "prompt", answer: "completion"}
    yield from (("texts", {columns[name]: "text"}) for name in texts if name in columns)


def _chat_renamings(
    fields: Mapping[str, Any], columns: Mapping[str, str], pairs: Sequence[tuple[str, str]]
) -> Iterator[Renaming]:
    context = {ours: columns[name] for name, ours in _CONTEXT.items() if name in columns}
    extra = {theirs: ours for ours, theirs in context.items()}
    answer_fields = ("input", "reasoning_content")
    system = {theirs: ours for theirs, ours in extra.items() if ours not in answer_fields}
    for name in ("chosen",) if "chosen" in fields else (*CHAT_COLUMNS, "data"):
        if name in columns:
            yield {**system, columns[name]: "messages"}
    for question, answer in pairs:
        yield {**extra, question: "instruction", answer: "output"}
    for question, answer in pairs:
        if not isinstance(fields[question], str):
            yield {**system, question: "prompt", answer: "completion"}
    for name, value in fields.items():
        if (
            name not in context.values()
            and "chosen" not in fields
            and are_messages(decode_json(value))
        ):
            yield {**system, name: "messages"}


def _guess_unknown_columns(fields: Mapping[str, Any]) -> dict[str, Renaming]:
    """Return {kind of document: {column: Stoker's name}} for a row without well-known column names.

    Returns {} for other rows, and for rows with lists or objects.
    """
    names = [
        name
        for name, value in fields.items()
        if isinstance(value, str) and value.strip() and not METADATA_KEY.fullmatch(name)
    ]
    known = {*_QUESTIONS, *(_ANSWERS if len(names) > 1 else ())} - {"input"}
    others = any(isinstance(value, list | dict) for value in fields.values())
    if not names or others or any(name.lower() in known for name in fields):
        return {}
    texts = {"texts": {max(names, key=lambda name: len(fields[name])): "text"}}
    pair = dict(zip(names[:2], ("prompt", "completion"), strict=False))
    return texts | ({"a prompt and its completion, by your names,": pair} if len(names) > 1 else {})


def _renaming_problem(fields: Mapping[str, Any], names: Renaming) -> str:
    """Return why a row is unreadable after renaming its columns; "" if the row is readable."""
    columns = tuple(names.items())
    ours = renamed(fields, columns)
    formats = detect_formats(ours)
    if len(formats) != 1:
        return f"it could be {' or '.join(formats)} then"
    try:
        found = document_fields(fields, formats[0], columns)
        messages = found.get("messages") or [*found.get("prompt", ()), *found.get("completion", ())]
        if becomes_chat(ours, formats[0]):
            check_answers(messages)
            if not {"user", ASSISTANT} <= {message["role"] for message in messages}:
                return "no question with an answer"
    except UnusableRowError as error:
        return str(error)
    return ""
