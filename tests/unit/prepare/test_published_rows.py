"""Rows of published datasets are read directly, or with a suggested flag, or refused.

The rows are invented; their columns, keys and types are those of the datasets in the comments.
"""

import json
import re
from collections import Counter

import preparation_samples as samples
import pytest

from utils.config.errors import ConfigurationError
from utils.config.preparation import PreparationArguments
from utils.prepare.rows import (
    ChatDocument,
    CompletionDocument,
    PiecesDocument,
    document_fields,
)
from utils.prepare.units import read_documents
from utils.prepare.values import BadRow
from utils.prepare.work_plan import plan_preparation

CALL = {"name": "find", "arguments": {"city": "Bonn"}}
CALLED = [{"type": "function", "function": CALL}]
TOOLS = [{"type": "function", "function": {"name": "find", "parameters": {}}}]
S, Q, A, B = ("system", "s"), ("user", "q"), ("assistant", "a"), ("assistant", "b")
IDLE = (*A, "untrained")
CALLING = ("assistant", "", CALL)
TEXT_CALL = json.dumps(CALL)


def turns(*given, role="role", content="content"):
    """Return messages; a pair is a role and its content, a mapping is a message."""
    return [one if isinstance(one, dict) else {role: one[0], content: one[1]} for one in given]


def shares(*given):
    return turns(*given, role="from", content="value")


def chat(*given, **columns):
    return {"messages": turns(*given), **columns}


def shared(*given, **columns):
    return {"conversations": shares(*given), **columns}


def says(*content, **keys):
    """Return an assistant's message, with other keys and with a content if one is given."""
    return {"role": "assistant", **({"content": content[0]} if content else {}), **keys}


def part(text, key="text", **keys):
    return {"type": "text", key: text, **keys}


def said(document):
    """Return a document in a short form."""
    if isinstance(document, BadRow):
        return str(document)
    if isinstance(document, CompletionDocument):
        return [document.prompt, document.completion]
    if isinstance(document, PiecesDocument):
        return document.pieces
    if not isinstance(document, ChatDocument):
        return document.text
    found = []
    for number, message in enumerate(document.messages):
        calls = [call["function"] for call in message.get("tool_calls", ())]
        is_context = message.get("weight") == 0 or number < document.first_trained
        is_idle = is_context and message["role"] == "assistant"
        found.append((message["role"], message["content"], *calls, *["untrained"] * is_idle))
    return found


def documents(path, **settings):
    """Return the documents of a file with these settings; `unread` counts unread columns."""
    unread = settings.pop("unread", Counter())
    arguments = PreparationArguments(
        sources=settings.pop("sources", [settings.pop("source", str(path))]),
        tokenizer_name_or_path="none",
        output_dir=str(path.parent / "out"),
        **settings,
    )
    plan = plan_preparation(arguments)
    found = [d for unit in plan.units for d in read_documents(unit, plan.settings, unread)]
    return [said(document) for document in found]


# fmt: off
TAKEN = {
    "OpenAI chat": (chat(S, Q, A), [S, Q, A]),
    "OpenAI weight 0": (chat(Q, says("a", weight=0), Q, A), [Q, IDLE, Q, A]),
    "OpenAI function_call": (
        chat(Q, says(None, function_call={"name": "find", "arguments": '{"city": "Bonn"}'}),
             {"role": "function", "name": "find", "content": "r"}, A,
             functions=[{"name": "find", "parameters": {}}]),
        [Q, CALLING, ("tool", "r"), A],
    ),
    "calls in plural": (chat(Q, says(function_calls=json.dumps([CALL]))), [Q, CALLING]),
    "one call under its own key": (chat(Q, says(tool_call=CALL)), [Q, CALLING]),
    "LLaMA-Factory v1": (
        chat({"role": "user", "content": [part("q", "value")], "loss_weight": 0.0},
             says([{"type": "reasoning", "value": "t"}, {"type": "tool_call", "value": TEXT_CALL}],
                  loss_weight=1.0)),
        [Q, CALLING],
    ),
    "ms-swift agent": (
        chat(Q, ("tool_call", TEXT_CALL), ("tool_call", '{"name": "go", "arguments": {}}'),
             ("tool_response", "r"), ("tool_response", "r2"), A, tools=json.dumps(TOOLS)),
        [Q, (*CALLING, {"name": "go", "arguments": {}}), ("tool", "r"), ("tool", "r2"), A],
    ),
    "ms-swift DPO": (chat(Q, A, rejected_response="b"), [Q, A]),
    "Anthropic": (
        chat(Q, says([part("a"), {"type": "tool_use", "id": "1", "name": "find",
                                  "input": {"city": "Bonn"}}]),
             ("user", [{"type": "tool_result", "tool_use_id": "1", "content": "r"}, part("q2")]),
             says([part("b")]),
             system="s", tools=[{"name": "find", "input_schema": {"type": "object"}}]),
        [S, Q, (*A, CALL), ("tool", "r"), ("user", "q2"), B],
    ),
    "axolotl sharegpt": (
        shared({"from": "system", "value": "s", "train": False},
               {"from": "human", "value": "q", "train": False},
               {"from": "gpt", "value": "a", "train": False},
               {"from": "human", "value": "q", "train": False},
               {"from": "gpt", "value": "a", "train": True}),
        [S, Q, IDLE, Q, A],
    ),
    "axolotl input_output": (
        {"segments": [{"label": False, "text": "<s>q "}, {"label": True, "text": "a</s>"}]},
        [("<s>q ", False), ("a</s>", True)]),
    "a transcript with segments": ({"text": "a", "segments": [{"start": 0}]}, "a"),
    "Magpie":
        (shared(("human", "q"), ("gpt", "a"), uuid="u", instruction="q", response="a"), [Q, A]),
    "APIGen": (
        shared(("human", "q"), ("function_call", TEXT_CALL), ("observation", "r"), ("gpt", "a"),
               system="s", tools=json.dumps([CALL])),
        [S, Q, CALLING, ("tool", "r"), A],
    ),
    "NeMo": (
        shared({"from": "User", "value": "q", "label": None},
               {"from": "Assistant", "value": "a", "label": "quality:4"}, mask="User", system="s"),
        [S, Q, A],
    ),
    "SlimOrca": (
        shared({"from": "human", "value": "q", "weight": 0.0},
               {"from": "gpt", "value": "a", "weight": 1.0}),
        [Q, A],
    ),
    "Cohere": (chat(("System", "s"), ("User", "q"), ("Chatbot", "a")), [S, Q, A]),
    "capitals and colons":
        (chat(("User:", "q"), A, {"role": "Bot", "content": "b", "Loss": False}),
         [Q, A, (*B, "untrained")]),
    "LIMA": ({"conversations": ["q", "a"], "source": "x"}, [Q, A]),
    "Bedrock":
        (chat(("user", [{"text": "q"}]), says([{"text": "a"}])), [Q, A]),
    "Vertex": (
        chat({"role": "user", "parts": [{"text": "q"}]},
             {"role": "model", "parts": [{"text": "a"}]}),
        [Q, A],
    ),
    "system_prompt": (shared(("human", "q"), ("gpt", "a"), system_prompt="s"), [S, Q, A]),
    "pandas in CSV": ({"messages": str(turns(Q, A))}, [Q, A]),
    "messages as JSON texts": ({"messages": [json.dumps(t) for t in turns(Q, A)]}, [Q, A]),
    "old datasets": ({"conversations": {"from": ["human", "gpt"], "value": ["q", "a"]}}, [Q, A]),
    "R1 distilled": (chat(Q, says("a", reasoning_content="t")), [Q, A]),
    "ultrafeedback":
        (chat(Q, A, prompt="q", chosen=turns(Q, A), rejected=turns(Q, B)), [Q, A]),
    "alpaca": ({"instruction": "q", "input": "", "output": "a"}, [Q, A]),
    "alpaca with history":
        ({"instruction": "q", "input": "i", "output": "a", "history": [["q", "a"]], "system": "s"},
         [S, Q, A, ("user", "q\ni"), A]),
    "TRL prompt": ({"prompt": "q", "completion": "a"}, ["q", "a"]),
    "TRL messages": ({"prompt": turns(Q), "completion": turns(A)}, [Q, A]),
    "text": ({"text": "### Human: q### Assistant: a"}, "### Human: q### Assistant: a"),
    "web page with a picture": ({"text": "t", "image": "http://a/b.png"}, "t"),
}
NAMED = {  # rows of unknown format, and the names with which they are read
    "Dolly":
        ({"instruction": "q", "context": "c", "response": "a", "category": "x"},
         "context=input response=output", [("user", "q\nc"), A]),
    "OpenOrca":
        ({"id": "1", "system_prompt": "s", "question": "q", "response": "a"},
         "question=instruction response=output", [S, Q, A]),
    "Nemotron":
        ({"input": turns(Q), "output": "a", "system_prompt": "s", "category": "c"},
         "input=prompt output=completion", [S, Q, A]),
    "ms-swift query":
        ({"system": "s", "query": "q", "response": "a", "history": [["q", "a"]]},
         "query=instruction response=output", [S, Q, A, Q, A]),
    "WildChat":
        ({"conversation": [t | {"language": "en"} for t in turns(Q, A)]},
         "conversation=messages", [Q, A]),
    "UltraChat": ({"id": "0", "data": ["q", "a", "q", "a"]}, "data=messages", [Q, A, Q, A]),
    "xLAM":
        ({"id": 1, "query": "q", "answers": json.dumps([CALL]), "tools": json.dumps([CALL])},
         "query=instruction answers=output", [Q, CALLING]),
    "roles and texts":
        ({"dialog": [["user", "q"], ["assistant", "a"]]}, "dialog=messages", [Q, A]),
    "OpenAI responses": (
        {"input": turns(Q),
         "output": [says([{"type": "output_text", "text": "a"}], type="message")]},
        "input=prompt output=completion", [Q, A],
    ),
    "Orca DPO":
        ({"system": "s", "question": "q", "chosen": "a", "rejected": "b"},
         "question=instruction chosen=output", [S, Q, A]),
    "DPO messages":
        ({"prompt": "q", "chosen": turns(Q, A), "rejected": turns(Q, A)}, "chosen=messages",
         [Q, A]),
    "LLaMA-Factory DPO": (
        shared(("human", "q"), chosen={"from": "gpt", "value": "a"},
               rejected={"from": "gpt", "value": "b"}),
        "conversations=prompt chosen=completion", [Q, A],
    ),
    "The Stack": ({"hexsha": "x", "content": "print()", "ext": "py"}, "content=text", "print()"),
}
REFUSED = {
    "KTO": ({"prompt": "q", "completion": "a", "label": True}, "filter {label: true}"),
    "KTO chats": (chat(Q, A, label=False), "filter {label: true}"),
    "LLaVA":
        (shared(("human", "<image>\nq"), ("gpt", "a"), image="a.jpg"), "the row has 'image': text"),
    "text with a picture": ({"text": "see <image>", "images": ["a"]}, "the row has 'images'"),
    "Ollama pictures":
        (chat({"role": "user", "content": "q", "images": ["a"]}, A),
         "message 0 of 'messages' has 'images'"),
    "picture parts":
        (chat(("user", [{"type": "image_url", "image_url": "x"}])), "a part that is no text"),
    "axolotl train_detail":
        (chat(Q, says("a", train_detail=[{"begin_offset": 0, "end_offset": 1, "train": False}])),
         "'train_detail': .* write 'weight': 0"),
    "axolotl parts":
        (chat(Q, says([part("t", train=False), part("a", train=True)])),
         "its parts have flags"),
    "Python calls":
        (chat(Q, says(None, function_calls="f(x)")), "a call without 'name' and 'arguments': 'f"),
    "calls under another key":
        (chat(Q, says("", actions="f(x)")),
         "message 1 of 'messages' has no 'content', and 'actions' is not read"),
    "empty answer": (chat(Q, says(" \n")), "answer 1 of 'messages' has no text"),
    "two calls keys":
        (chat(Q, says(tool_calls=CALLED, function_call=CALL)),
         "'tool_calls' and 'function_call': keep one"),
    "prompt with system": ({"prompt": "q", "completion": "a", "system": "s"}, "'system' go with"),
    "MMLU": ({"question": "q", "choices": ["a", "b"], "answer": 1}, "name its columns"),
    "numbered columns": ({f"c{i:02}": i for i in range(40)}, r"c19, \.\.\.\): name its"),
    "question alone": ({"instruction": "q", "input": "i"}, "name its columns"),
    "segments": ({"segments": [{"label": False, "text": "a"}]}, "no segment of 'segments'"),
    "segment of another kind": ({"segments": [{"start": 0, "text": "a"}]}, "must be {label: true"),
    "oasst1":
        ({"message_id": "1", "parent_id": None, "text": "q", "role": "prompter"},
         "each row is one message of a tree"),
    "a message a row": ({"role": "user", "content": "q"}, "each row is one message"),
    "tokenized": ({"input_ids": [1, 2], "labels": [-100, 1]}, "its rows are tokenized: name a"),
    "arguments cut short":
        (chat(Q, says(tool_calls=[CALL | {"arguments": '{"a'}])), "arguments are no JSON"),
    "a thought that is no text": (chat(Q, says("a", thinking=True)), "a string, found bool"),
    "an answer twice":
        (shared(Q, {"from": "gpt", "value": "a", "content": "b"}), "has 'value' and 'content'"),
    "other tools twice":
        (chat(Q, A, tools=TOOLS, functions=[{"name": "other"}]), "'tools' and 'functions' differ"),
    "tools among the variables":
        (chat(Q, A, chat_template_kwargs={"tools": TOOLS}), "tools is given with each chat"),
    "nobody answers": (chat(Q, ("agent", "a")), r"is the assistant's \(roles: user, agent\)"),
    "other keys of messages":
        ({"messages": [{"speaker": "human", "text": "q"}]},
         r"has no 'role' \(keys: speaker, text\)"),
}
# fmt: on


@pytest.mark.parametrize("kind", TAKEN)
def test_a_published_row_is_taken_as_it_is(tmp_path, kind):
    row, expected = TAKEN[kind]
    assert documents(samples.write_jsonl(tmp_path / "a.jsonl", [row])) == [expected]


@pytest.mark.parametrize("kind", NAMED)
def test_a_published_row_is_taken_with_names_of_its_columns(tmp_path, kind):
    row, names, expected = NAMED[kind]
    path = samples.write_jsonl(tmp_path / "a.jsonl", [row])
    with pytest.raises(ConfigurationError, match=r"--columns (question|conversations)="):
        documents(path)
    assert documents(path, columns=names.split()) == [expected]


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_taken_says_why(tmp_path, kind):
    row, reason = REFUSED[kind]
    try:
        found = documents(samples.write_jsonl(tmp_path / "a.jsonl", [row]))
    except ConfigurationError as error:
        found = error
    assert re.search(reason, str(found))


def test_names_of_keys_do_not_concern_an_answer_that_is_a_text(tmp_path):
    row = {"prompt": [{"who": "user", "says": "q"}], "completion": "a"}
    path = samples.write_jsonl(tmp_path / "a.jsonl", [row])
    assert documents(path, columns=["who=role", "says=content"]) == [[Q, A]]


def test_two_columns_cannot_both_be_the_system_text(tmp_path):
    path = samples.write_jsonl(tmp_path / "a.jsonl", [chat(Q, A) | {"rules": "r", "persona": "p"}])
    with pytest.raises(ConfigurationError, match="rules and persona are both system"):
        documents(path, columns=["rules=system", "persona=system"])


def test_a_label_of_good_answers_is_a_filter(tmp_path):
    rows = [{"prompt": "q", "completion": word, "label": word == "a"} for word in "ab"]
    path = samples.write_jsonl(tmp_path / "a.jsonl", rows)
    found = documents(path, source={"path": str(path), "filter": {"label": True}})
    assert found[0] == ["q", "a"]
    assert "not selected" in found[1]


LONG = "a" * 100_000
CHAT = json.dumps(turns(Q, A))
# fmt: off
FILES = {
    "lists of messages": ("a.jsonl", f"{CHAT}\n{CHAT}\n", [[Q, A]] * 2),
    "one list a line, the first very long":
        ("a.jsonl", f"{json.dumps(turns(Q, ('assistant', LONG)))}\n{CHAT}\n",
         [[Q, ("assistant", LONG)], [Q, A]]),
    "one chat": ("a.json", json.dumps(turns(Q, A), indent=1), [[Q, A]]),
    "an array of chats": ("a.json", json.dumps([turns(Q, A)] * 2, indent=1), [[Q, A]] * 2),
    "one row over many lines": ("a.json", json.dumps(chat(Q, A), indent=1), [[Q, A]]),
    "rows over many lines": ("a.jsonl", json.dumps({"text": "a"}, indent=1) * 2, ["a", "a"]),
    "an object around rows":
        ("a.json", json.dumps({"version": 1, "rows": [{"text": "a"}, {"text": LONG}]}),
         ["a", LONG]),
    "an object around data":
        ("a.json", json.dumps({"data": [{"text": "a"}], "n": []}, indent=1), ["a"]),
    "semicolons": ("a.csv", "prompt;completion\nq, q;a\n", [["q, q", "a"]]),
    "bars": ("a.csv", "prompt|completion\nq;q|a\n", [["q;q", "a"]]),
    "tabs": ("a.csv", "prompt\tcompletion\nq\ta\n", [["q", "a"]]),
    "Excel": ("a.csv", "\ufeffsep=;\nprompt;completion\nq;a\n", [["q", "a"]]),
    "one column": ("a.csv", "text\na;b|c\n", ["a;b|c"]),
    "a name with a comma": ("a.csv", '"text";"a,b"\nx;y\n', ["x"]),
    "blanks and empty names in a header":
        ("a.csv", "prompt, completion,,\nq,a,,\n", [["q", "a"]]),
    "JSON in cells":
        ("a.csv", 'prompt,completion\n"[{""role"": ""user"", ""content"": ""q""}]",a\n', [[Q, A]]),
}
LOSING = [
    ("a.csv", "prompt,prompt,completion\nq,r,a\n", "'prompt' twice"),
    ("a.csv", "prompt,completion\ncafé,a\n", r"not UTF-8 .* iconv"),
    ("a.json", json.dumps({"train": [{"text": "a"}], "test": [{"text": "b"}]}),
     r"several lists of records \(train, test\)"),
]
# fmt: on


def test_names_inside_messages_and_of_roles_are_given_by_columns(tmp_path):
    dialog = [
        {"speaker": "customer", "text": "q"},
        {"speaker": "agent", "text": "a", "use": 0},
        {"speaker": "customer", "text": "q"},
        {"speaker": "agent", "text": "a", "use": 1},
    ]
    path = samples.write_jsonl(tmp_path / "a.jsonl", [{"dialog": dialog}])
    columns = ["dialog=messages", "speaker=role", "text=content", "customer=user", "use=weight"]
    assert "if agent is: --columns agent=assistant" in str(documents(path, columns=columns))
    names = [*columns, "agent=assistant", "bot=assistant", "policy=system"]
    assert documents(path, columns=names) == [[Q, IDLE, Q, A]]
    told = str(documents(path, columns=["dialog=messages"]))
    assert "as in --columns speaker=role text=content" in told


@pytest.mark.parametrize("kind", FILES)
def test_files_are_read_as_people_write_them(tmp_path, kind):
    name, text, expected = FILES[kind]
    (tmp_path / name).write_text(text, encoding="utf-8")
    assert documents(tmp_path / name) == expected


@pytest.mark.parametrize(("name", "text", "problem"), LOSING)
def test_a_file_that_would_lose_something_is_refused(tmp_path, name, text, problem):
    (tmp_path / name).write_text(text, encoding="cp1252")
    with pytest.raises(ConfigurationError, match=problem):
        documents(tmp_path / name)


THOUGHTS = {
    "a key": says("a", thinking="t"),
    "two keys": says("a", reasoning="t", reasoning_content="t"),
    "a list": says("a", reasoning=[part("t")]),
    "Mistral": says([{"type": "thinking", "thinking": [part("t")]}, part("a")]),
    "Gemini": {"role": "model", "parts": [{"text": "t", "thought": True}, {"text": "a"}]},
}


@pytest.mark.parametrize("kind", THOUGHTS)
def test_a_thought_is_found_wherever_it_is_written(kind):
    answer = document_fields(chat(Q, THOUGHTS[kind]), "messages")["messages"][1]
    assert (answer["content"], answer["reasoning_content"]) == ("a", "t")


def test_columns_that_are_false_or_0_count_as_not_read(tmp_path):
    row = chat(Q, A, train=False, weight=0, note=None, tags=[])
    unread = Counter()
    documents(samples.write_jsonl(tmp_path / "a.jsonl", [row]), unread=unread)
    assert unread == {"column train": 1, "column weight": 1}


def test_a_file_of_another_format_is_sent_to_an_entry_of_its_own(tmp_path):
    chats = samples.write_jsonl(tmp_path / "a.jsonl", [{"conversations": turns(Q, A)}])
    row = {"instruction": "q", "output": "a", "conversations": None}
    pairs = samples.write_jsonl(tmp_path / "b.jsonl", [row])
    first, second = documents(chats, sources=[str(chats), str(pairs)])
    assert first == [Q, A]
    assert "a row of the format alpaca: files of different formats go into a recipe" in second
