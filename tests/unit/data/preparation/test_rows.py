"""Rows as published datasets have them become the messages and texts that they stand for."""

import json

import pytest

from utils.data.prepare.rows import (
    RowSettings,
    UnusableRowError,
    document_fields,
    naming_hint,
    renamed,
)

CALL = {"type": "function", "function": {"name": "find", "arguments": {"city": "Paris"}}}
TOOL = {"type": "function", "function": {"name": "find", "parameters": {"type": "object"}}}


def turns(fields, row_format="messages"):
    """The turns of a row as (role, content or calls)."""
    messages = document_fields(fields, row_format)["messages"]
    return [(m["role"], m.get("tool_calls") or m["content"]) for m in messages]


def said(*turns):
    return [{"from": who, "value": what} for who, what in turns]


def message(**keys):
    (found,) = document_fields({"messages": [keys]}, "messages")["messages"]
    return found


def test_sharegpt_becomes_messages():
    row = said(("system", "s"), ("human", "q"), ("gpt", "a"), ("user", "r"), ("model", "b"))
    roles = ["system", "user", "assistant", "user", "assistant"]
    assert turns({"conversations": row}, "sharegpt") == list(zip(roles, "sqarb", strict=True))


def test_calls_and_their_results_in_sharegpt_become_tool_calls():
    row = said(
        ("human", "q"),
        ("function_call", json.dumps(CALL["function"])),
        ("observation", '{"rain": true}'),
        ("gpt", "a"),
    )
    found = document_fields({"conversations": row, "tools": json.dumps([TOOL])}, "sharegpt")
    assert found["tools"] == [TOOL]
    assert found["messages"][1:3] == [
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": '{"rain": true}'},
    ]


def test_who_speaks_in_sharegpt_has_to_be_known():
    with pytest.raises(UnusableRowError, match=r"message 0 .* is from 'narrator'; known are human"):
        document_fields({"conversations": said(("narrator", "x"))}, "sharegpt")


@pytest.mark.parametrize(("given", "question"), [("", "i"), (None, "i"), ("in", "i\nin")])
def test_alpaca_becomes_messages(given, question):
    row = {"instruction": "i", "input": given, "output": "o"}
    assert turns(row, "alpaca") == [("user", question), ("assistant", "o")]


def test_history_and_system_of_alpaca_come_first():
    row = {"instruction": "i", "output": "o", "history": [["a", "b"]], "system": "s"}
    roles = ["system", "user", "assistant", "user", "assistant"]
    assert turns(row, "alpaca") == list(zip(roles, "sabio", strict=True))


def test_a_system_column_is_no_second_system_message():
    row = {"conversations": said(("system", "own"), ("human", "q")), "system": "own"}
    assert turns(row, "sharegpt") == [("system", "own"), ("user", "q")]
    with pytest.raises(UnusableRowError, match="different system texts"):
        turns(row | {"system": "other"}, "sharegpt")


@pytest.mark.parametrize(
    "call",
    [
        CALL,
        {**CALL, "id": None},
        json.dumps(CALL),
        CALL["function"],
        {"function": {"name": "find", "arguments": '{"city": "Paris"}'}, "type": "function"},
        {"function": {"name": "find", "arguments": json.dumps('{"city": "Paris"}')}},
    ],
)
def test_every_way_to_write_a_call_gives_one_call(call):
    expected = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    assert message(role="assistant", content=None, tool_calls=[call]) == expected


def test_the_old_way_of_calls_is_read():
    call = {"name": "find", "arguments": '{"city": "Paris"}'}
    found = message(role="assistant", content=None, function_call=call)
    assert found["tool_calls"] == [CALL]
    assert message(role="function", name="find", content="x")["role"] == "tool"
    row = {"messages": [{"role": "user", "content": "q"}], "functions": [TOOL["function"]]}
    assert document_fields(row, "messages")["tools"] == [TOOL]


@pytest.mark.parametrize(
    "tools",
    [[TOOL], json.dumps([TOOL]), [json.dumps(TOOL)], TOOL, [TOOL["function"]]],
)
def test_every_way_to_write_tools_gives_one_list(tools):
    row = {"messages": [{"role": "user", "content": "q"}], "tools": tools}
    assert document_fields(row, "messages")["tools"] == [TOOL]


def test_text_parts_are_joined_and_other_parts_are_refused():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "value": "b"}, "c"]
    assert message(role="user", content=parts)["content"] == "abc"
    picture = [{"type": "image_url", "image_url": {"url": "x"}}, {"type": "text", "text": "a"}]
    with pytest.raises(UnusableRowError, match="parts of type image_url, text; text alone"):
        message(role="user", content=picture)


def test_thoughts_and_calls_among_the_parts_go_where_templates_read_them():
    call = {"type": "tool_call", "value": json.dumps(CALL["function"])}
    thought = {"type": "reasoning", "value": "t"}
    found = message(role="assistant", content=[thought, {"type": "text", "value": "a"}, call])
    assert found == {
        "role": "assistant",
        "content": "a",
        "reasoning_content": "t",
        "tool_calls": [CALL],
    }
    found = message(role="assistant", content=[{"type": "thinking", "thinking": "t"}])
    assert found == {"role": "assistant", "content": "", "reasoning_content": "t"}


def test_what_a_tool_returned_as_an_object_is_json():
    assert message(role="tool", content={"ü": [1]})["content"] == '{"ü": [1]}'


def test_a_weight_of_a_message_and_thinking_are_kept():
    found = message(role="assistant", content=None, reasoning_content="t", weight=0, name=None)
    assert found == {"role": "assistant", "content": "", "reasoning_content": "t", "weight": 0}
    assert message(role="assistant", content="a", loss_weight=0.0)["weight"] == 0


@pytest.mark.parametrize(
    ("fields", "row_format", "message"),
    [
        ({"id": 1}, "sharegpt", r"no 'conversations', .*format sharegpt needs \(columns found: id"),
        ({"instruction": "i", "output": " "}, "alpaca", "'output' has no text"),
        ({"instruction": "i", "output": "o", "history": [1]}, "alpaca", "'history' must hold"),
        ({"messages": [], "tools": "none"}, "messages", "'tools' must be a list"),
        ({"messages": [{"tool_calls": [1]}]}, "messages", "message 0 .* without the name"),
        ({"messages": [], "chat_template_kwargs": 1}, "messages", "must be an object"),
    ],
)
def test_a_row_that_cannot_be_used_says_why(fields, row_format, message):
    with pytest.raises(UnusableRowError, match=message):
        document_fields(fields, row_format)


@pytest.mark.parametrize(
    ("columns", "hint"),
    [
        (
            ["question", "answer"],
            "--columns question=prompt answer=completion, for chats --columns "
            "question=instruction answer=output",
        ),
        (["instruction", "context", "response"], "response=output context=input"),
        (["conversation"], "--columns conversation=messages"),
        (["content"], "--columns content=text"),
        (["input_ids"], "--train_data"),
        (["prompt", "chosen", "rejected"], "--columns chosen=messages"),
        (["prompt", "response"], "--columns response=completion, for chats --columns prompt="),
        (["Question", "Answer"], "--columns Question=prompt Answer=completion"),
        (["x"], "as in --columns"),
    ],
)
def test_unknown_columns_come_with_what_to_type(columns, hint):
    assert hint in naming_hint(columns)


def test_a_column_takes_another_name_and_the_place_of_its_owner():
    fields = {"question": "q", "prompt": "old", "other": 1}
    assert renamed(fields, [("question", "prompt")]) == {"prompt": "q", "other": 1}


def test_filters_keep_values_lists_and_ranges():
    row = {"language": "en", "score": "3.5", "level": "3"}  # as CSV has it

    def keeps(**filters):
        return RowSettings("text", filters=tuple(filters.items())).selects(row)

    assert keeps(language="en", score={"min": 3, "max": 4})
    assert keeps(language=["de", "en"])
    assert keeps(level=3)
    assert keeps(level=[2, 3])
    assert not keeps(language="de")
    assert not keeps(score={"min": 4})
    assert not keeps(language={"min": 4})
    with pytest.raises(UnusableRowError, match="no 'quality', which the filter asks for"):
        keeps(quality=1)
