"""Rows that cannot be used are named or skipped, never silently."""

import logging
from collections import Counter

import preparation_samples as samples
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from utils.config.errors import ConfigurationError
from utils.prepare.rows import RowSettings, parse_document
from utils.prepare.values import BadRow, Location, Record

BAD_LINES = {
    "malformed_json": (b'{"text": ', r"malformed JSON"),
    "not_an_object": (b"[1]", r"a record must be a JSON object, found list"),
    "missing_field": (b'{"messages": []}', r"no 'text', .*needs \(columns found: messages\)"),
    "wrong_type": (b'{"text": 7}', r"'text' must be a string, found int"),
    "empty": (b'{"text": " \\n"}', r"empty document: 'text' has no text"),
    "invalid_utf8": (b'{"text": "\xff"}', r"not UTF-8"),
}


def test_bad_rows_are_named_or_skipped_counted_and_shown(tmp_path, prepare, caplog):
    caplog.set_level(logging.INFO)
    source = samples.text_source(tmp_path / "a.jsonl", 100)
    good = source.read_bytes().splitlines(keepends=True)
    for line, message in BAD_LINES.values():
        source.write_bytes(b"".join([*good[:77], line + b"\n", *good[77:]]))
        with pytest.raises(ConfigurationError, match=rf"a\.jsonl:78: {message}.*--on_bad_row skip"):
            prepare("out", sources=[source], format="text")
    bad = [line + b"\n" for line, _ in BAD_LINES.values()]
    source.write_bytes(b"".join([*bad, *good, *bad[:2]]))
    train = prepare("out", sources=[source], format="text", on_bad_row="skip") / "train"
    assert len(samples.rows(train)) == 100
    dropped = Counter([*BAD_LINES, "malformed_json", "not_an_object"])
    assert samples.description(train)["preparation"]["sources"]["dropped"] == dropped
    assert "2 malformed_json" in caplog.text
    assert "a.jsonl:1: malformed JSON" in caplog.text


def test_a_split_that_is_left_without_documents_is_named(tmp_path, prepare):
    source = samples.text_source(tmp_path / "a.jsonl", 5)
    for fraction, empty in ((1e-9, "validation"), (1 - 1e-9, "train")):
        with pytest.raises(ConfigurationError, match=f"^- {empty}: no document is left .*fraction"):
            prepare("out", sources=[source], validation_fraction=fraction)


CHAT = samples.chat("q", "a")["messages"]
TYPO = {"role": "assitant", "content": "a"}
PICTURE = {"role": "user", "content": [{"type": "image_url"}, {"type": "text"}]}
UNUSABLE = [
    ("text", {"text": "a\ud800"}, "invalid_utf8: half a surrogate pair at character 1"),
    ("messages", {"messages": [{"role": "user"}]}, "missing_field: has no 'content'"),
    ("messages", {"messages": [TYPO]}, "unknown_role: known are assistant"),
    ("messages", {"messages": [CHAT[1] | {"tool_calls": [1]}]}, "wrong_type: without 'name'"),
    ("messages", {"messages": [PICTURE]}, "not_text: text alone"),
    ("sharegpt", {"conversations": [{"from": "x", "value": "y"}]}, "unknown_role: known are human"),
    ("prompt_completion", {}, "missing_field: no 'prompt' and no 'completion'"),
    ("prompt_completion", {"prompt": "a", "completion": " "}, "empty: 'completion' has no text"),
]


@pytest.mark.parametrize(("document_format", "fields", "problem"), UNUSABLE)
def test_a_record_that_cannot_be_used_says_why(document_format, fields, problem):
    record = Record(fields, Location("a.jsonl", "line", 3))
    found = parse_document(record, RowSettings(document_format))
    assert isinstance(found, BadRow)
    reason, words = problem.split(": ")
    assert found.reason == reason
    assert str(found).startswith("a.jsonl:3: ")
    assert words in str(found)


def test_only_the_completion_has_to_answer():
    """The assistant's messages in a prompt are context: they may be empty, and are no answer."""
    asked = samples.chat("q", "")["messages"]
    (answer,) = samples.chat("q", "a")["messages"][1:]
    rows = RowSettings("prompt_completion")

    def parsed(completion):
        record = Record({"prompt": asked, "completion": completion}, Location("a.jsonl", "line", 3))
        return parse_document(record, rows)

    assert parsed([answer]).first_trained == 2
    refused = parsed([{"role": "user", "content": "q2"}])
    assert refused.reason == "no_assistant_tokens"


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
@pytest.mark.usefixtures("workers_for_little")
def test_what_is_not_read_and_chats_that_end_unanswered_are_counted(
    tmp_path, prepare, caplog, suffix
):
    caplog.set_level(logging.INFO)
    chat = samples.chat("q", "a")["messages"]
    noted = [chat[0], chat[1] | {"name": "n", "info": {"x": 1}}]
    rows = [
        *({"messages": [*noted, *chat], "score": 0.5, "language": "en"} for _ in range(60)),
        *({"messages": [*chat, chat[0]], "score": 0.5, "language": None} for _ in range(3)),
    ]
    if suffix == "parquet":
        path = tmp_path / "a.parquet"
        pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=5)
    else:
        path = samples.write_jsonl(tmp_path / "a.jsonl", rows)
    tokenizer = samples.saved_tokenizer(
        tmp_path / "chatml", samples.chatml_tokenizer().chat_template
    )
    folder = prepare("out", sources=[path], tokenizer_name_or_path=tokenizer, num_proc=2)
    unanswered = 63 if suffix == "parquet" else 60  # Parquet: nulls count, the column is not read
    assert (
        f"a.{suffix}: not read: column language ({unanswered}), column score (63), "
        "message key info (60), message key name (60)"
    ) in caplog.text
    assert "3 chats end with a message that is not the assistant's" in caplog.text
    notes = samples.description(folder / "train")["preparation"]["sources"]
    assert notes["without_last_answer"] == 3
