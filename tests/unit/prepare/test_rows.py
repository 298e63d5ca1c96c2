"""Rows of published datasets become the right messages and texts."""

import json

import pytest

from utils.prepare.messages import check_answers, unread_keys
from utils.prepare.rows import RowSettings, document_fields
from utils.prepare.values import UnusableRowError

CALL = {"type": "function", "function": {"name": "find", "arguments": {"city": "Paris"}}}
TOOL = {"type": "function", "function": {"name": "find", "parameters": {"type": "object"}}}
QUESTION = {"role": "user", "content": "q"}
ANSWER = {"role": "assistant", "content": "a"}


def turns(fields, row_format="messages"):
    return [(m["role"], m["content"]) for m in document_fields(fields, row_format)["messages"]]


def said(*turns):
    return [{"from": who, "value": what} for who, what in turns]


def message(**keys):
    (found,) = document_fields({"messages": [keys]}, "messages")["messages"]
    return found


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


# Keys of the assistant's message, and whether it is trained on; None: refused.
SAID_OF_TRAINING = [
    *(({key: value}, bool(value))
      for key in ("loss", "train", "train_on_turn", "trainable", "training")
      for value in (True, False, 1, 0, 1.0, 0.0)),
    *(({key: value}, bool(value)) for key in ("weight", "loss_weight", "loss_scale", "loss_mask")
      for value in (True, 0, 1.0)),
    ({"mask": True}, False),
    ({"mask": False}, True),
    ({"masked": True}, False),
    ({"weight": None, "loss": None}, True),
    ({"weight": 0, "loss": False}, False),
    ({"weight": 1, "mask": False, "train": True}, True),
    *(({key: value}, None) for key in ("weight", "train", "loss", "loss_scale")
      for value in (0.5, -1, 2, "0", "true", [1], {"a": 1}, float("nan"))),
    ({"mask": 1}, None),  # unclear: 1 means trained on in a loss mask, but masked in other data
    ({"mask": [0, 1]}, None),
    ({"train_detail": [{"begin_offset": 0, "end_offset": 3, "train": False}]}, None),
    ({"loss_mask_spans": [[0, 1]]}, None),
    ({"weight": 1, "train": False}, None),
    ({"loss": True, "mask": True}, None),
]  # fmt: skip


@pytest.mark.parametrize(("keys", "is_trained"), SAID_OF_TRAINING, ids=repr)
def test_every_way_to_say_what_is_trained_on_is_read_or_refused(keys, is_trained):
    if is_trained is None:
        with pytest.raises(UnusableRowError, match="'weight'") as refused:
            message(**ANSWER, **keys)
        assert refused.value.reason == "unclear_weight"
    else:
        assert message(**ANSWER, **keys) == ANSWER | ({} if is_trained else {"weight": 0})


def test_what_others_than_the_assistant_say_of_training_is_dropped_or_left_to_be_counted():
    for key, value in (("loss_weight", 0.0), ("train", False), ("mask", True)):
        assert message(role="user", content="q", **{key: value}) == QUESTION
    asks = message(role="user", content="q", train=True)
    assert list(unread_keys([asks])) == ["message key train"]


def test_an_answer_without_text_is_refused_where_it_would_be_trained_on():
    empty = {"role": "assistant", "content": " "}
    for messages, first in (([QUESTION, empty], 0), ([empty, QUESTION, empty], 1)):
        with pytest.raises(UnusableRowError, match="has no text") as refused:
            check_answers(messages, first)
        assert refused.value.reason == "empty"
    for fine in (
        *(empty | {"weight": 0}, empty | {"tool_calls": [CALL]}),
        *({"role": "user", "content": ""}, {"role": "tool", "content": "", "id": "x"}),
    ):
        check_answers(document_fields({"messages": [fine, ANSWER]}, "messages")["messages"])
    check_answers([empty, QUESTION, ANSWER], 1)
    with pytest.raises(UnusableRowError, match=r"is the assistant's \(roles: user\)"):
        check_answers([ANSWER, QUESTION], 1)


@pytest.mark.parametrize(
    "cut",
    [
        {"thinking": "t", "content": None},
        {"content": "<think>t"},
        {"content": "<think>t</think>\n"},
    ],
)
def test_an_answer_that_was_cut_off_in_its_thought_is_refused(cut):
    row = {"messages": [QUESTION, {"role": "assistant", **cut}]}
    with pytest.raises(UnusableRowError, match="no text after its thought"):
        check_answers(document_fields(row, "messages")["messages"])
    row["messages"][1] |= {"tool_calls": [CALL]}
    check_answers(document_fields(row, "messages")["messages"])


RESULT = {"type": "tool_result", "content": "x"}


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"messages": [QUESTION, {"role": "tool", "content": {"x": b"y"}}, ANSWER]}, "not_text"),
        ({"messages": [QUESTION, {"role": "tool", "content": [{"x": b"y"}]}, ANSWER]}, "not_text"),
        ({"system": [RESULT], "messages": [QUESTION, ANSWER]}, "wrong_type"),
        ({"system": ["a", RESULT], "messages": [QUESTION, ANSWER]}, "wrong_type"),
    ],
)
def test_results_that_cannot_be_trained_on_are_bad_rows(row, reason):
    with pytest.raises(UnusableRowError) as refused:
        document_fields(row, "messages")
    assert refused.value.reason == reason


def test_a_variable_of_the_template_that_is_null_goes_with_a_text():
    row = {"prompt": "q", "completion": "a", "chat_template_kwargs": {"enable_thinking": None}}
    assert document_fields(row, "prompt_completion")["completion"] == "a"


def test_filters_keep_values_lists_and_ranges():
    row = {"language": "en", "score": "3.5", "level": "3"}  # as in a CSV

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


def test_a_call_that_is_a_message_of_its_own_joins_the_turn_before():
    call = {"role": "Tool-Call", "content": json.dumps(CALL["function"])}
    chat = [QUESTION, {"role": "assistant", "content": "a"}, call, call]
    found = document_fields({"messages": chat}, "messages")["messages"]
    assert found[1:] == [{"role": "assistant", "content": "a", "tool_calls": [CALL, CALL]}]
    chat[1] |= {"loss": False}  # now the calls are trained on and the text is not
    found = document_fields({"messages": chat}, "messages")["messages"]
    assert [one.get("weight", 1) for one in found[1:]] == [0, 1]


def test_texts_in_turn_may_be_json_and_parts_name_their_text_in_any_way():
    texts = ["q", '{"a": 1}', '["b", "c"]', "d"]
    assert [said for _, said in turns({"messages": texts})] == texts
    for key in ("text", "value", "content"):
        assert message(role="user", content=[{"type": "text", key: "q"}]) == QUESTION
    thought = {"type": "thinking", "thinking": "t"}
    for parts, keys in (
        ([thought], {"reasoning_content": "other"}),
        ([{"type": "tool_use", "name": "f", "input": {}}], {"tool_calls": [CALL]}),
    ):
        with pytest.raises(UnusableRowError, match="the same among its parts"):
            message(role="assistant", content=parts, **keys)
    with pytest.raises(UnusableRowError, match="a part that is no text"):
        message(role="assistant", content=[{"type": "thinking"}])
