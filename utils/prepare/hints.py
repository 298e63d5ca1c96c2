"""Advice for rows of unknown format: flags `--columns theirs=ours` that rename columns."""

import shlex
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from utils.config.preparation import MESSAGE_ROLES, Source
from utils.prepare.messages import ABOUT_A_ROW, ROLES, are_messages, role_word
from utils.prepare.values import ASSISTANT, decoded, renamed

# Names of columns in published datasets.
_QUESTIONS = (
    *("instruction", "question", "query", "problem", "prompt", "input", "inputs", "user", "human"),
    *("article", "document", "passage", "source", "src", "message_1", "messages"),
    *("conversations", "context"),
)
_ANSWERS = (
    *("output", "response", "answer", "solution", "completion", "target", "targets", "outputs"),
    *("generation", "assistant", "gpt", "bot", "generated_solution", "answers", "summary"),
    *("highlights", "tgt", "message_2"),
)
CHATS = (
    *("messages", "conversation", "conversations", "dialogue", "dialog", "chat", "turns"),
    "contents",
)
_TEXTS = ("content", "body", "document", "article", "raw_content", "code", "chat", "dialogue")
_CONTEXT = {"context": "input", "systeminstruction": "system"}


def naming_hint(fields: Mapping[str, Any]) -> str:
    """Return advice for a row of unknown format: the --columns flag that makes it readable."""
    if are_messages([fields]) and {"content", "text", "value"} & fields.keys():
        return "each row is one message: put the messages of a chat into one row, as 'messages'"
    if "input_ids" in fields:
        return "its rows are tokenized: name a folder of save_to_disk with them as train_data"
    names = _renaming({key: decoded(value) for key, value in fields.items()})
    if not names:
        return "no column has a text, messages, or a question with an answer under a known name"
    given = shlex.join(f"{theirs}={ours}" for theirs, ours in names.items() if theirs != ours)
    of = "of preference data the chosen answers can be trained on: " if "chosen" in fields else ""
    return f"{of}give --columns {given}"


def _renaming(fields: Mapping[str, Any]) -> dict[str, str]:
    """Return {column: our name} for a row whose JSON texts are decoded; {} without a suggestion."""
    spelled = {name.lower(): name for name in fields}
    is_preference = "chosen" in fields

    def first(names: Iterable[str], kinds: type | tuple[type, ...]) -> str | None:
        known = (spelled[name] for name in names if name in spelled)
        return next((name for name in known if isinstance(fields[name], kinds)), None)

    context = {spelled[name]: ours for name, ours in _CONTEXT.items() if name in spelled}
    is_chat = {name for name, value in fields.items() if _has_both_roles(value)}
    chats = [name for name in fields if name in is_chat and (not is_preference or name == "chosen")]
    question = first(_QUESTIONS, (str, list))
    answer = first(("chosen",) if is_preference else _ANSWERS, (str, list, Mapping))
    if not chats and not answer and (chat := first((*CHATS, "data"), list)):
        chats = [chat]
    if chats:
        system = {theirs: ours for theirs, ours in context.items() if ours == "system"}
        return {**system, chats[0]: "messages"}
    if question and answer and isinstance(fields[question], list):
        return {question: "prompt", answer: "completion"}
    if question and answer:
        return {**context, question: "instruction", answer: "output"}
    if text := first(("chosen",) if is_preference else _TEXTS, str):
        return {text: "text"}
    texts = [name for name, value in fields.items() if isinstance(value, str) and value.strip()]
    texts = [name for name in texts if not ABOUT_A_ROW.fullmatch(name)]
    return {texts[0]: "text"} if len(texts) == 1 and not question else {}


def _has_both_roles(value: Any) -> bool:
    roles = {ROLES.get(role_word(one)) for one in value} if are_messages(value) else set()
    return {"user", ASSISTANT} <= roles


def absent_columns(fields: Mapping[str, Any], columns: Sequence[tuple[str, str]]) -> list[str]:
    """Return the names in `columns` that neither the row nor its messages have, except roles."""
    text = str(fields).replace('"', "'")  # messages may be JSON
    absent = [each for each in columns if each[0] not in fields and f"'{each[0]}'" not in text]
    return [name for name, ours in absent if ours not in MESSAGE_ROLES or ours == "system"]


def misreading(given: Mapping[str, Any], source: Source) -> str:
    """Return why a row with known columns would be trained on wrongly; "" if the row is fine."""
    fields = renamed(given, source.columns)
    filtered = [name for name, _ in source.filters]
    one_message = "role" in fields and "text" in fields and "parent_id" in fields
    if one_message and "role" not in filtered:
        return (
            "each row is one message of a tree (OpenAssistant): put the messages of a chat into "
            "one row, or filter on role to train on each as a text"
        )
    label = str(fields.get("label")).lower()
    if label in ("true", "false") and "label" not in filtered and "text" not in fields:
        return (
            "its label says which answers are good (KTO): in a recipe give the source the filter "
            "{label: true}, or {label: [true, false]} to train on all"
        )
    if "chosen" in fields and "completion" not in fields:
        chats = [decoded(fields[name]) for name in ("messages", "conversations") if name in fields]
        last = [chat[-1] for chat in chats if are_messages(chat)]
        if any(ROLES.get(role_word(one)) == "user" for one in last):
            return f"its answers are apart: {naming_hint(given)}"
    return ""
