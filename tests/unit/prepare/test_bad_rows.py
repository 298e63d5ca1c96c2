"""Rows that cannot be used are named, in the words of the user's file, or skipped and counted."""

import json
import logging
import re
from collections import Counter

import preparation_samples as samples
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from utils.config.errors import ConfigurationError
from utils.config.preparation import COLUMNS, MESSAGE_ROLES
from utils.prepare.rows import RowSettings, detect_formats, parse_document
from utils.prepare.tokenization import DocumentTokenizer
from utils.prepare.values import BadRow, Location, Record, renamed

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
    source.write_bytes(b"".join([*bad, *good, *bad]))
    with pytest.raises(ConfigurationError) as refused:
        prepare("out", sources=[source], format="text")
    *shown, advice = refused.value.problems
    rows = ["1, 107", "2, 108", "3, 109", "4, 110", "5", "6"]  # those with one fault in a line
    assert [re.search(r"a\.jsonl:([\d, ]+): ", row)[1] for row in shown] == rows
    assert advice == (
        "12 rows cannot be used (the first 10 are above): repair them, or skip such rows with "
        "--on_bad_row skip"
    )
    source.write_bytes(b"".join([*bad, *good, *bad[:2]]))
    train = prepare("out", sources=[source], format="text", on_bad_row="skip") / "train"
    assert len(samples.rows(train)) == 100
    dropped = Counter([*BAD_LINES, "malformed_json", "not_an_object"])
    assert samples.description(train)["preparation"]["sources"]["dropped"] == dropped
    assert "2 malformed_json" in caplog.text
    assert "a.jsonl:1: malformed JSON" in caplog.text


def test_the_work_ends_at_a_part_of_the_data_without_any_usable_row(tmp_path, prepare, caplog):
    rows = [{"input_ids": [0, 10**6]}] * 400
    with pytest.raises(ConfigurationError, match="rows cannot be used") as refused:
        prepare("out", sources=[samples.write_jsonl(tmp_path / "a.jsonl", rows)])
    assert "a.jsonl: no row fits: the rest is not checked" in caplog.text
    assert int(re.search(r"(\d+) rows cannot", str(refused.value))[1]) < 100


def test_a_split_that_is_left_without_documents_is_named(tmp_path, prepare):
    source = samples.text_source(tmp_path / "a.jsonl", 5)
    for fraction, empty in ((1e-9, "validation"), (1 - 1e-9, "train")):
        with pytest.raises(ConfigurationError, match=f"^- {empty}: no document is left .*fraction"):
            prepare("out", sources=[source], validation_fraction=fraction)


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
        f"a.{suffix}: not read, unless by the chat template: column language ({unanswered}), "
        "column score (63), message key info (60), message key name (60)"
    ) in caplog.text
    assert "3 chats end with a message that is not the assistant's" in caplog.text
    notes = samples.description(folder / "train")["preparation"]["sources"]
    assert notes["without_last_answer"] == 3


# --- the names in error messages are those in the user's file

TURNS = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
SHARED = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]
# Stoker's names of columns and keys. An error message may have one only if the row has it.
OURS = {*COLUMNS, "from", "value"} - {*MESSAGE_ROLES, "tool_calls", "weight"}


def turn(**keys):
    """Return the chat TURNS, with other keys for its answer."""
    return [TURNS[0], keys]


def shared(**keys):
    return [SHARED[0], keys]


def calls(*, of):
    return [*TURNS, {"role": "assistant", "content": "b", of: [1]}]


# (columns, a good row, the bad row's other values (None: no such column), the expected message).
# fmt: off
TEXT = ("body=text", {"body": "some words"})
CHAT = ("dialog=messages persona=system kw=chat_template_kwargs fns=tools", {"dialog": TURNS})
SHAREGPT = ("", {"conversations": SHARED})
SHAREGPT_COLUMNS = ("talk=conversations", {"talk": SHARED})
ALPACA = ("", {"instruction": "i", "output": "o"})
QUESTIONS = ("question=instruction answer=output note=input past=history",
             {"question": "i", "answer": "o"})
PAIR = ("", {"prompt": "p", "completion": "c"})
PAIR_COLUMNS = ("question=prompt answer=completion persona=system",
                {"question": "p", "answer": "c"})
CHAT_PAIR = ("ask=prompt say=completion past=history", {"ask": TURNS[:1], "say": TURNS[1:]})
CASES = [
    (*TEXT, {"body": 7}, "'body' must be a string"),
    (*TEXT, {"body": None, "x": "y"}, "no 'body'.*columns found: x"),
    (*TEXT, {"body": " "}, "'body' has no text"),
    (*TEXT, {"body": "a\ud800"}, "'body' holds half"),
    (*TEXT, {"body": "<|endoftext|>"}, "'body' has special tokens alone"),
    (*TEXT, {"body": "<image>", "image": "a.png"}, "'image'"),
    (*TEXT, {"body": None, "text": None, "bodies": "x"}, "columns found: bodies"),
    (*CHAT, {"dialog": None, "conversation": []}, "no 'dialog'.*columns found: conversation"),
    (*CHAT, {"dialog": 7}, "'dialog' must be a list"),
    (*CHAT, {"dialog": []}, "'dialog' has no messages"),
    (*CHAT, {"dialog": turn(role="assistant", content=7)}, "'content' of message 1 of 'dialog'"),
    (*CHAT, {"dialog": turn(role="assistant")}, "message 1 of 'dialog' has no 'content'"),
    (*CHAT, {"dialog": turn(role="assistant", text=7)}, "'text' of message 1 of 'dialog'"),
    (*CHAT, {"dialog": turn(role="sytem", content="x")}, r"role 'sytem' \(did you mean system\?\)"),
    (*CHAT, {"dialog": turn(role="ssistant", content="x")}, "columns, as in ssistant=assistant"),
    (*CHAT, {"dialog": turn(content="x")}, "message 1 of 'dialog' has no 'role'"),
    (*CHAT, {"dialog": turn(role="assistant", content="")}, "'dialog'"),
    (*CHAT, {"dialog": turn(role="user", content="x")}, "no message of 'dialog' is the assistant"),
    (*CHAT, {"dialog": [{"user": 7, "bot": "x"}]}, "'user' of message 0 of 'dialog'"),
    (*CHAT, {"dialog": [{"question": "q", "bot": ["x", 1]}]}, "message 0 of 'dialog'"),
    (*CHAT, {"dialog": calls(of="function_call")}, "message 2 of 'dialog'"),
    (*CHAT, {"persona": 7}, "'persona' must be a string"),
    (*CHAT, {"dialog": [{"role": "system", "content": "x"}, *TURNS], "persona": "y"},
     "'persona' and"),
    (*CHAT, {"kw": 1}, "'kw'.*give a mapping"),
    (*CHAT, {"kw": {"enable_thinking": "False"}}, "'kw'.*write false without"),
    (*CHAT, {"fns": "none"}, "'fns' must be a list"),
    (*CHAT, {"functions": "none"}, "'functions' must be a list"),
    (*CHAT, {"functions": ["{}"], "fns": ['{"name": 1}']}, "'fns' and 'functions' differ"),
    (*CHAT, {"system_prompt": "x", "persona": "y"}, "'persona' and 'system_prompt'"),
    (*SHAREGPT, {"conversations": shared(**{"from": "gpt"})}, "has no 'value'"),
    (*SHAREGPT, {"conversations": shared(**{"from": "gpt", "value": 7})}, "'value' of message 1"),
    (*SHAREGPT, {"conversations": shared(**{"from": 7, "value": "x"})}, "'from' of message 1"),
    (*SHAREGPT, {"conversations": shared(value="x")}, "has no 'from'"),
    (*SHAREGPT, {"conversations": shared(**{"from": "you", "value": "x"})}, "the role 'you'"),
    (*SHAREGPT, {"conversations": shared(**{"from": "gpt", "words": "x"})},
     "'words' is not read: write 'value'"),
    (*SHAREGPT, {"conversations": shared(**{"from": "gpt", "value": ""})}, "of 'conversations'"),
    (*SHAREGPT, {"conversations": SHARED[:1]}, "of 'conversations' is the assistant"),
    (*SHAREGPT, {"system_prompt": 7}, "'system_prompt'"),
    (*SHAREGPT, {"conversations": [{"from": "system", "value": "y"}], "system_prompt": "x"},
     "'system_prompt' and"),
    (*SHAREGPT_COLUMNS, {"talk": None, "conversations": 7, "x": 1}, "no 'talk'"),
    (*SHAREGPT_COLUMNS, {"talk": 7}, "'talk' must be a list"),
    (*ALPACA, {"output": ""}, "'output' has no text"),
    (*ALPACA, {"instruction": ["x"]}, "'instruction' must be"),
    (*ALPACA, {"history": [1]}, "of 'history' must be an object"),
    (*QUESTIONS, {"answer": " "}, "'answer' has no text"),
    (*QUESTIONS, {"answer": 7}, "'answer' must be"),
    (*QUESTIONS, {"note": 7}, "'note' must be"),
    (*QUESTIONS, {"past": [1]}, "message 0 of 'past'"),
    (*QUESTIONS, {"past": [["x", ""]]}, "of 'past'"),
    (*QUESTIONS, {"answer": None, "reply": "x"}, "no 'answer'.*columns found: question, reply"),
    (*PAIR, {"completion": "<|endoftext|>"}, "'completion' has special"),
    (*PAIR, {"tools": [{"name": "f"}]}, "'tools' go with messages"),
    (*PAIR_COLUMNS, {"answer": "<|endoftext|>"}, "'answer' has special"),
    (*PAIR_COLUMNS, {"answer": ""}, "'answer' has no text"),
    (*PAIR_COLUMNS, {"answer": TURNS[1:]}, "'question' must be a list of messages, as 'answer' is"),
    (*PAIR_COLUMNS, {"persona": "x"}, "'persona' go"),
    (*PAIR_COLUMNS, {"system_prompt": "x"}, "'system_prompt' go"),
    (*PAIR_COLUMNS, {"functions": [{"name": "f"}]}, "'functions' go"),
    (*PAIR_COLUMNS, {"question": None, "ask": "x"}, "no 'question'.*columns found: answer, ask"),
    (*CHAT_PAIR, {"past": [["x", "y"]]}, "'past' goes into the messages of 'ask'"),
    (*CHAT_PAIR, {"say": ["x"]}, "'say' must be"),
    (*CHAT_PAIR, {"say": turn(role="assistant", content="")}, "of 'say'"),
    (*CHAT_PAIR, {"ask": TURNS}, "'ask' ends with the assistant's words.*move them into 'say'"),
    (*CHAT_PAIR, {"say": TURNS[:1]}, "no message of 'say' is the assistant"),
    (*CHAT_PAIR, {"ask": [{"role": "user"}]}, "message 0 of 'ask' has no 'content'"),
]
# fmt: on


REASONS = {  # the names under which some of these rows are counted
    "'body' must be a string": "wrong_type",
    "no 'body'.*columns found: x": "missing_field",
    "'body' has no text": "empty",
    "'body' holds half": "invalid_utf8",
    "'image'": "not_text",
    r"role 'sytem' \(did you mean system\?\)": "unknown_role",
    "'persona' and": "two_systems",
}


@pytest.mark.parametrize(("columns", "good", "bad", "named"), CASES)
def test_a_row_that_cannot_be_used_is_named_by_its_own_columns(columns, good, bad, named):
    row = {name: value for name, value in (good | bad).items() if value is not None}
    pairs = tuple(tuple(pair.split("=")) for pair in columns.split())
    (row_format,) = detect_formats(renamed(good, pairs))
    record = Record(row, Location("a.jsonl", "line", 3))
    found = parse_document(record, RowSettings(row_format, pairs))
    if not isinstance(found, BadRow):
        (found,) = DocumentTokenizer(samples.tiny_tokenizer())([found])
    message = str(found)
    assert re.search(rf"^a\.jsonl:3: .*{named}", message, re.DOTALL), message
    assert REASONS.get(named, found.reason) == found.reason
    ours = [word for word in OURS if re.search(rf"['\"]{word}['\"]", message)]
    assert all(word in json.dumps(row) for word in ours), message


PLANNED = [
    ("body=text", {"bodies": "x"}, "--columns names body.*columns: bodies"),
    ("", {"utterance": ["x"]}, r"no known format \(columns: utterance\)"),
    ("question=prompt", {"question": ["x"], "other": 1}, r"no known format \(columns: other, q"),
    ("question=instruction answer=output --format alpaca", {"prompt": "p", "completion": "c"},
     "the format alpaca needs question and answer"),
    ("q=prompt a=completion --format prompt_completion", {"q": "p", "a": 7}, "'a' must be"),
    ("said=conversations", {"said": [{"from": "gpt"}]}, "message 0 of 'said' has no 'value'"),
]  # fmt: skip


@pytest.mark.parametrize(("given", "row", "named"), PLANNED)
def test_the_first_row_is_named_by_its_own_columns(tmp_path, prepare, given, row, named):
    columns, _, row_format = given.partition("--format ")
    source = samples.write_jsonl(tmp_path / "a.jsonl", [row])
    with pytest.raises(ConfigurationError, match=rf"a\.jsonl:1: .*{named}"):
        prepare(
            "out", sources=[source], columns=columns.split(), format=row_format.strip() or "auto"
        )


def test_columns_of_a_recipe_are_named_as_the_file_names_them(tmp_path, prepare):
    source = samples.write_jsonl(tmp_path / "a.jsonl", [{"body": "words"}, {"body": 7}])
    entry = {"path": str(source), "columns": {"body": "text"}}
    with pytest.raises(ConfigurationError, match=r"a\.jsonl:2: 'body' must be a string"):
        prepare("out", sources=[entry])
