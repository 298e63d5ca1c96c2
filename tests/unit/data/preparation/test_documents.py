import pytest

from utils.data.prepare.documents import (
    ChatDocument,
    TextDocument,
    content_digest,
    parse_documents,
)
from utils.data.prepare.records import BadRow, Location, Record
from utils.data.prepare.rows import RowSettings

PLACE = Location("a.jsonl", "line", 3)
MESSAGES = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]


def parse(fields, document_format):
    (found,) = parse_documents(Record(fields, PLACE), RowSettings(document_format))
    return found


def row(*messages, **more):
    return {"messages": [*messages], **more}


@pytest.mark.parametrize(
    ("document_format", "fields", "reason", "message"),
    [
        ("text", {"text": None}, "missing_field", "no 'text', which the format text needs"),
        ("text", {"text": ""}, "empty", "'text' has no text"),
        ("text", {"text": "a\ud800"}, "invalid_utf8", "half a surrogate pair at character 1"),
        ("messages", {"text": "a"}, "missing_field", r"needs (columns found: text)"),
        ("messages", {"messages": "a"}, "wrong_type", "must be a list of messages, found str"),
        ("messages", row(), "empty", "'messages' has no messages"),
        ("messages", row({"role": "user"}), "missing_field", "has no 'content'"),
        ("messages", row({"content": "a"}), "missing_field", "has no 'role'"),
        ("messages", row({"role": "user", "content": 3}), "wrong_type", "string, found int"),
        ("messages", row({**MESSAGES[1], "tool_calls": [1]}), "wrong_type", "without the name"),
        ("messages", row(MESSAGES[0], tools="none"), "wrong_type", "'tools' must be a list"),
        ("messages", row(*MESSAGES, chat_template_kwargs=1), "wrong_type", "must be an object"),
        (
            "messages",
            row({"role": "user", "content": [{"type": "image_url"}, {"type": "text"}]}),
            "not_text",
            "has a part that is no text ({'type': 'image_url'}): text alone",
        ),
        (
            "sharegpt",
            {"conversations": [{"from": "narrator", "value": "x"}]},
            "unknown_role",
            "message 0 of 'conversations' is from 'narrator'; known are human",
        ),
        ("alpaca", {"instruction": "i", "output": " "}, "empty", "'output' has no text"),
        (
            "alpaca",
            {"instruction": "i", "output": "o", "history": [1]},
            "wrong_type",
            "'history' must hold",
        ),
        ("prompt_completion", {}, "missing_field", "no 'prompt' and no 'completion'"),
        ("prompt_completion", {"prompt": "a", "completion": " "}, "empty", "'completion' has no"),
        (
            "prompt_completion",
            {"prompt": "a", "completion": MESSAGES},
            "wrong_type",
            "'prompt' must be a list of messages, found str",
        ),
        (
            "prompt_completion",
            {"prompt": "a", "completion": "b", "tools": [{"name": "f"}]},
            "wrong_type",
            "go with messages",
        ),
    ],
)
def test_a_record_that_cannot_be_used_says_why(document_format, fields, reason, message):
    found = parse(fields, document_format)
    assert isinstance(found, BadRow)
    assert found.reason == reason
    assert message in str(found)
    assert str(found).startswith("a.jsonl:3: ")


def test_the_digest_follows_content_and_seed_and_not_the_place():
    one = TextDocument("a", PLACE)
    assert content_digest(one, 0) == content_digest(TextDocument("a", Location("b")), 0)
    assert content_digest(one, 0) != content_digest(one, 1)
    assert content_digest(one, 0) != content_digest(TextDocument("b", PLACE), 0)
    reordered = [{"content": "q", "role": "user"}, MESSAGES[1]]
    chats = [ChatDocument(messages, PLACE) for messages in (MESSAGES, reordered, MESSAGES[:1])]
    digests = [content_digest(chat, 0) for chat in chats]
    assert digests[0] == digests[1] != digests[2]
