"""Rows as published datasets have them become the messages and texts that they stand for."""

import json

import pytest

from utils.data.prepare.rows import RowSettings, UnusableRowError, document_fields, naming_hint

CALL = {"type": "function", "function": {"name": "find", "arguments": {"city": "Paris"}}}
TOOL = {"type": "function", "function": {"name": "find", "parameters": {"type": "object"}}}
QUESTION = {"role": "user", "content": "q"}


def turns(fields, row_format="messages"):
    return [(m["role"], m["content"]) for m in document_fields(fields, row_format)["messages"]]


def said(*turns):
    return [{"from": who, "value": what} for who, what in turns]


def message(**keys):
    (found,) = document_fields({"messages": [keys]}, "messages")["messages"]
    return found


def test_sharegpt_becomes_messages_and_its_calls_tool_calls():
    function = json.dumps(CALL["function"])
    row = said(
        *(("system", "s"), ("human", "q"), ("gpt", "a"), ("user", "r")),
        *(("function_call", function), ("observation", '{"rain": true}'), ("model", "b")),
    )
    found = document_fields({"conversations": row, "tools": json.dumps([TOOL])}, "sharegpt")
    assert found["tools"] == [TOOL]
    roles = ["system", "user", "assistant", "user", "assistant", "tool", "assistant"]
    assert [message["role"] for message in found["messages"]] == roles
    call, observed = found["messages"][4:6]
    assert call == {"role": "assistant", "content": "", "tool_calls": [CALL]}
    assert observed == {"role": "tool", "content": '{"rain": true}'}


@pytest.mark.parametrize(("given", "question"), [("", "i"), (None, "i"), ("in", "i\nin")])
def test_alpaca_becomes_messages_behind_history_and_system(given, question):
    row = {"instruction": "i", "input": given, "output": "o"}
    assert turns(row, "alpaca") == [("user", question), ("assistant", "o")]
    before = [("system", "s"), ("user", "a"), ("assistant", "b")]
    found = turns(row | {"history": [["a", "b"]], "system": "s"}, "alpaca")
    assert found == [*before, *turns(row, "alpaca")]


def test_a_system_column_is_no_second_system_message():
    row = {"conversations": said(("system", "own"), ("human", "q")), "system": "own"}
    assert turns(row, "sharegpt") == [("system", "own"), ("user", "q")]
    with pytest.raises(UnusableRowError, match="different system texts"):
        turns(row | {"system": "other"}, "sharegpt")


def test_every_way_to_write_a_call_gives_one_call():
    calls = [
        CALL,
        {**CALL, "id": None},
        json.dumps(CALL),
        CALL["function"],
        {"function": {"name": "find", "arguments": '{"city": "Paris"}'}, "type": "function"},
        {"function": {"name": "find", "arguments": json.dumps('{"city": "Paris"}')}},
    ]
    expected = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    for call in calls:
        assert message(role="assistant", content=None, tool_calls=[call]) == expected
        assert message(role="assistant", content=None, function_call=call) == expected
    assert message(role="function", name="find", content="x")["role"] == "tool"


def test_every_way_to_write_tools_gives_one_list():
    for tools in ([TOOL], json.dumps([TOOL]), [json.dumps(TOOL)], TOOL, [TOOL["function"]]):
        for column in ("tools", "functions"):
            row = {"messages": [QUESTION], column: tools}
            assert document_fields(row, "messages")["tools"] == [TOOL]


def test_parts_of_a_content_go_where_templates_read_them():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "value": "b"}, "c"]
    assert message(role="user", content=parts)["content"] == "abc"
    call = {"type": "tool_call", "value": json.dumps(CALL["function"])}
    for thought in ({"type": "reasoning", "value": "t"}, {"type": "thinking", "thinking": "t"}):
        found = message(role="assistant", content=[thought, {"type": "text", "value": "a"}, call])
        kept = {"role": "assistant", "content": "a", "reasoning_content": "t"}
        assert found == kept | {"tool_calls": [CALL]}
    for returned in ({"ü": [1]}, [{"ü": [1]}]):
        text = json.dumps(returned, ensure_ascii=False)
        assert message(role="tool", content=returned)["content"] == text


def test_a_weight_of_a_message_and_thinking_are_kept():
    found = message(role="assistant", content=None, reasoning_content="t", weight=0, name=None)
    assert found == {"role": "assistant", "content": "", "reasoning_content": "t", "weight": 0}
    assert message(role="assistant", content="a", loss_weight=0.0)["weight"] == 0


def test_unknown_columns_come_with_what_to_type():
    assert "--train_data" in naming_hint(["input_ids"])
    assert "--columns chosen=messages" in naming_hint(["prompt", "chosen", "rejected"])
    assert "--columns question=prompt answer=completion" in naming_hint(["x"])
    dolly = naming_hint(["Instruction", "context", "response"])
    assert "--columns Instruction=prompt response=completion" in dolly
    assert "--columns Instruction=instruction response=output context=input" in dolly
    assert naming_hint(["conversation"]) == "give --columns conversation=messages"


def test_filters_keep_values_lists_and_ranges():
    row = {"language": "en", "score": "3.5", "level": "3"}  # as CSV has it

    def keeps(**filters):
        return RowSettings("text", filters=tuple(filters.items())).selects(row)

    assert keeps(language="en", score={"min": 3, "max": 4})
    assert keeps(language=["de", "en"], level=3)
    assert keeps(level=[2, 3])
    assert not keeps(language="de")
    assert not keeps(score={"min": 4})
    assert not keeps(language={"min": 4})
    with pytest.raises(UnusableRowError, match="no 'quality', which the filter asks for"):
        keeps(quality=1)
