"""Rows of published datasets are read directly, or with a suggested flag, or refused.

The rows are invented; their columns, keys and types are those of the datasets in the comments.
"""

import json
import re
import shlex
from collections import Counter

import preparation_samples as samples
import pytest

from utils.config.errors import ConfigurationError
from utils.config.preparation import PreparationArguments
from utils.prepare.rows import ChatDocument, CompletionDocument, document_fields
from utils.prepare.units import read_documents
from utils.prepare.values import BadRow
from utils.prepare.work_plan import plan_preparation

CALL = {"name": "find", "arguments": {"city": "Bonn"}}
CALLED = [{"type": "function", "function": CALL}]
TOOLS = [{"type": "function", "function": {"name": "find", "parameters": {}}}]
Q, A = ("user", "q"), ("assistant", "a")
S = ("system", "s")


def turns(*pairs, role="role", content="content", **more):
    return [{role: who, content: what} for who, what in pairs]


def shares(*pairs):
    return turns(*pairs, role="from", content="value")


def said(document):
    """Return a document in a short form."""
    if isinstance(document, BadRow):
        return str(document)
    if isinstance(document, CompletionDocument):
        return [document.prompt, document.completion]
    if not isinstance(document, ChatDocument):
        return document.text
    found = []
    for number, message in enumerate(document.messages):
        calls = [call["function"] for call in message.get("tool_calls", ())]
        if message.get("weight") == 0 or number < document.first_trained:
            is_idle = message["role"] == "assistant"
        else:
            is_idle = False
        one = (message["role"], message["content"], *calls)
        found.append((*one, "untrained") if is_idle else one)
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


TAKEN = {
    "OpenAI chat": ({"messages": turns(S, Q, A)}, [S, Q, A]),
    "OpenAI weight": (
        {"messages": [*turns(Q, A, Q), {"role": "assistant", "content": "b", "weight": 1}]},
        [Q, A, Q, ("assistant", "b")],
    ),
    "OpenAI weight 0": (
        {"messages": [*turns(Q), {"role": "assistant", "content": "a", "weight": 0}, *turns(Q, A)]},
        [Q, (*A, "untrained"), Q, A],
    ),
    "OpenAI function_call": (
        {
            "messages": [
                *turns(Q),
                {
                    "role": "assistant",
                    "content": None,
                    "function_call": {"name": "find", "arguments": '{"city": "Bonn"}'},
                },
                {"role": "function", "name": "find", "content": "r"},
                *turns(A),
            ],
            "functions": [{"name": "find", "parameters": {}}],
        },
        [Q, ("assistant", "", CALL), ("tool", "r"), A],
    ),
    "calls in plural": (
        {"messages": [*turns(Q), {"role": "assistant", "function_calls": json.dumps([CALL])}]},
        [Q, ("assistant", "", CALL)],
    ),
    "Mistral instruct": ({"messages": turns(("user", "q"), ("assistant", "a"))}, [Q, A]),
    "Llama calls": (
        {
            "messages": [
                *turns(Q),
                {
                    "role": "assistant",
                    "tool_calls": [{"name": "find", "parameters": {"city": "B"}}],
                },
            ]
        },
        [Q, ("assistant", "", {"name": "find", "arguments": {"city": "B"}})],
    ),
    "LLaMA-Factory v1": (
        {
            "messages": [
                {
                    "role": "user",
                    "content": [{"type": "text", "value": "q"}],
                    "loss_weight": 0.0,
                },
                {
                    "role": "assistant",
                    "content": [
                        {"type": "reasoning", "value": "t"},
                        {"type": "tool_call", "value": json.dumps(CALL)},
                    ],
                    "loss_weight": 1.0,
                },
            ]
        },
        [Q, ("assistant", "", CALL)],
    ),
    "ms-swift agent": (
        {
            "tools": json.dumps(TOOLS),
            "messages": turns(
                Q,
                ("tool_call", json.dumps(CALL)),
                ("tool_call", json.dumps({"name": "go", "arguments": {}})),
                ("tool_response", "r"),
                ("tool_response", "r2"),
                A,
            ),
        },
        [
            Q,
            ("assistant", "", CALL, {"name": "go", "arguments": {}}),
            *(("tool", "r"), ("tool", "r2"), A),
        ],
    ),
    "ms-swift loss": (
        {
            "messages": [
                *turns(Q),
                {"role": "assistant", "content": "a", "loss": False},
                *turns(Q, A),
            ]
        },
        [Q, (*A, "untrained"), Q, A],
    ),
    "Anthropic": (
        {
            "system": "s",
            "tools": [{"name": "find", "input_schema": {"type": "object"}}],
            "messages": [
                {"role": "user", "content": "q"},
                {
                    "role": "assistant",
                    "content": [
                        {"type": "text", "text": "a"},
                        {"type": "tool_use", "id": "1", "name": "find", "input": {"city": "Bonn"}},
                    ],
                },
                {
                    "role": "user",
                    "content": [
                        {"type": "tool_result", "tool_use_id": "1", "content": "r"},
                        {"type": "text", "text": "q2"},
                    ],
                },
                {"role": "assistant", "content": [{"type": "text", "text": "b"}]},
            ],
        },
        [S, Q, (*A, CALL), ("tool", "r"), ("user", "q2"), ("assistant", "b")],
    ),
    "axolotl sharegpt": (
        {
            "conversations": [
                {"from": "system", "value": "s", "train": False},
                {"from": "human", "value": "q", "train": False},
                {"from": "gpt", "value": "a", "train": False},
                {"from": "human", "value": "q", "train": False},
                {"from": "gpt", "value": "a", "train": True},
            ]
        },
        [S, Q, (*A, "untrained"), Q, A],
    ),
    "FastChat": ({"id": "0", "conversations": shares(("human", "q"), ("gpt", "a"))}, [Q, A]),
    "WizardLM": ({"idx": "1", "conversations": shares(("human", "q"), ("gpt", "a"))}, [Q, A]),
    "Magpie": (
        {"uuid": "u", "instruction": "q", "response": "a"}
        | {"conversations": shares(("human", "q"), ("gpt", "a"))},
        [Q, A],
    ),
    "ToolACE": (
        {
            "system": "s",
            "conversations": shares(("user", "q"), ("assistant", "[f()]"), ("tool", "r")),
        },
        [S, Q, ("assistant", "[f()]"), ("tool", "r")],
    ),
    "APIGen": (
        {
            "system": "s",
            "tools": json.dumps([CALL]),
            "conversations": shares(
                ("human", "q"),
                ("function_call", json.dumps(CALL)),
                ("observation", "r"),
                ("gpt", "a"),
            ),
        },
        [S, Q, ("assistant", "", CALL), ("tool", "r"), A],
    ),
    "Hermes": (
        {"conversations": shares(("system", "s"), ("human", "q"), ("gpt", "a"), ("tool", "r"))},
        [S, Q, A, ("tool", "r")],
    ),
    "NeMo": (
        {
            "mask": "User",
            "system": "s",
            "conversations": [
                {"from": "User", "value": "q", "label": None},
                {"from": "Assistant", "value": "a", "label": "quality:4"},
            ],
        },
        [S, Q, A],
    ),
    "OpenAssistant words": (
        {"conversations": shares(("prompter", "q"), ("assistant", "a"))},
        [Q, A],
    ),
    "LangChain words": ({"messages": turns(("Human", "q"), ("AI", "a"))}, [Q, A]),
    "upper case": ({"messages": turns(("USER", "q"), ("ASSISTANT", "a"))}, [Q, A]),
    "LIMA": ({"conversations": ["q", "a"], "source": "x"}, [Q, A]),
    "Bedrock": (
        {
            "system": [{"text": "s"}],
            "messages": [
                {"role": "user", "content": [{"text": "q"}]},
                {"role": "assistant", "content": [{"text": "a"}]},
            ],
        },
        [S, Q, A],
    ),
    "Cohere": ({"messages": turns(("System", "s"), ("User", "q"), ("Chatbot", "a"))}, [S, Q, A]),
    "system_prompt": (
        {"conversations": shares(("human", "q"), ("gpt", "a")), "system_prompt": "s"},
        [S, Q, A],
    ),
    "pandas in CSV": ({"messages": str(turns(Q, A))}, [Q, A]),
    "messages as JSON texts": ({"messages": [json.dumps(t) for t in turns(Q, A)]}, [Q, A]),
    "SlimOrca": (
        {
            "conversations": [
                {"from": "human", "value": "q", "weight": 0.0},
                {"from": "gpt", "value": "a", "weight": 1.0},
            ]
        },
        [Q, A],
    ),
    "ChatGLM": ({"conversations": turns(Q, A)}, [Q, A]),
    "old datasets": ({"conversations": {"from": ["human", "gpt"], "value": ["q", "a"]}}, [Q, A]),
    "R1 distilled": (
        {"messages": [*turns(Q), {"role": "assistant", "content": "a", "reasoning_content": "t"}]},
        [Q, A],
    ),
    "think tags": (
        {"messages": turns(Q, ("assistant", "<think>t</think>a"))},
        [Q, ("assistant", "<think>t</think>a")],
    ),
    "no_robots": (
        {"prompt": "q", "prompt_id": "i", "messages": turns(Q, A), "category": "c"},
        [Q, A],
    ),
    "ultrafeedback": (
        {"prompt": "q", "chosen": turns(Q, A), "rejected": turns(Q, ("assistant", "b"))}
        | {"messages": turns(Q, A)},
        [Q, A],
    ),
    "ms-swift DPO": ({"messages": turns(Q, A), "rejected_response": "b"}, [Q, A]),
    "alpaca": ({"instruction": "q", "input": "", "output": "a"}, [Q, A]),
    "alpaca with history": (
        {"instruction": "q", "input": "i", "output": "a", "history": [["q", "a"]], "system": "s"},
        [S, Q, A, ("user", "q\ni"), A],
    ),
    "BELLE": ({"instruction": "q\n", "input": "", "output": "a"}, [("user", "q\n"), A]),
    "TRL prompt": ({"prompt": "q", "completion": "a"}, ["q", "a"]),
    "TRL messages": ({"prompt": turns(Q), "completion": turns(A)}, [Q, A]),
    "text": ({"text": "### Human: q### Assistant: a"}, "### Human: q### Assistant: a"),
    "C4": ({"text": "t", "timestamp": "2019", "url": "u"}, "t"),
    "web page with a picture": ({"text": "t", "image": "http://a/b.png"}, "t"),
    "Vertex": (
        {
            "messages": [
                {"role": "user", "parts": [{"text": "q"}]},
                {"role": "model", "parts": [{"text": "a"}]},
            ]
        },
        [Q, A],
    ),
    "one call under its own key": (
        {"messages": [*turns(Q), {"role": "assistant", "tool_call": CALL}]},
        [Q, ("assistant", "", CALL)],
    ),
    "capitals and colons": (
        {"messages": [*turns(("User:", "q"), A), {"role": "Bot", "content": "b", "Loss": False}]},
        [Q, A, ("assistant", "b", "untrained")],
    ),
}
NAMED = {
    "GSM8K": ({"question": "q", "answer": "a"}, [[Q, A], ["q", "a"]]),
    "MetaMath": ({"query": "q", "response": "a", "type": "t"}, [[Q, A], ["q", "a"]]),
    "Dolly": (
        {"instruction": "q", "context": "c", "response": "a", "category": "x"},
        [[("user", "q\nc"), A]],
    ),
    "OpenOrca": (
        {"id": "1", "system_prompt": "s", "question": "q", "response": "a"},
        [[S, Q, A]],
    ),
    "GPTeacher": ({"instruction": "q", "input": "i", "response": "a"}, [[("user", "q\ni"), A]]),
    "Firefly": ({"kind": "k", "input": "q", "target": "a"}, [[Q, A], ["q", "a"]]),
    "input and output": ({"input": "q", "output": "a"}, [[Q, A], ["q", "a"]]),
    "Nemotron": (
        {"input": turns(Q), "output": "a", "system_prompt": "s", "category": "c"},
        [[S, Q, A]],
    ),
    "OASST words": ({"INSTRUCTION": "q", "RESPONSE": "a"}, [[Q, A], ["q", "a"]]),
    "ms-swift query": (
        {"system": "s", "query": "q", "response": "a", "history": [["q", "a"]]},
        [[S, Q, A, Q, A]],
    ),
    "ms-swift ShareGPT": (
        {"system": "s", "conversation": [{"human": "q", "assistant": "a"}]},
        [[S, Q, A]],
    ),
    "Capybara": ({"source": "x", "conversation": [{"input": "q", "output": "a"}]}, [[Q, A]]),
    "XTuner": ({"conversation": [{"system": "s", "input": "q", "output": "a"}]}, [[S, Q, A]]),
    "history of messages": (
        {"query": "q", "response": "a", "history": turns(Q, A)},
        [[Q, A, Q, A]],
    ),
    "messages and chosen": (
        {"messages": turns(Q), "chosen": "a", "rejected": "b"},
        [[Q, A]],
    ),
    "conversation of roles": ({"conversation": turns(Q, A)}, [[Q, A]]),
    "WildChat": ({"conversation": [t | {"language": "en"} for t in turns(Q, A)]}, [[Q, A]]),
    "chat": ({"chat": turns(Q, A)}, [[Q, A]]),
    "turns": ({"turns": ["q", "a"]}, [[Q, A]]),
    "UltraChat": ({"id": "0", "data": ["q", "a", "q", "a"]}, [[Q, A, Q, A]]),
    "Gemini": (
        {
            "systemInstruction": {"role": "system", "parts": [{"text": "s"}]},
            "contents": [
                {"role": "user", "parts": [{"text": "q"}]},
                {"role": "model", "parts": [{"text": "a"}]},
            ],
        },
        [[S, Q, A]],
    ),
    "xLAM": (
        {"id": 1, "query": "q", "answers": json.dumps([CALL]), "tools": json.dumps([CALL])},
        [[Q, ("assistant", "", CALL)]],
    ),
    "Glaive v2": (
        {"system": "SYSTEM: s", "chat": "USER: q ASSISTANT: a"},
        ["USER: q ASSISTANT: a"],
    ),
    "Baize": (
        {"topic": "t", "input": "[|Human|]q[|AI|]a"},
        ["[|Human|]q[|AI|]a", ["t", "[|Human|]q[|AI|]a"]],
    ),
    "Prosocial": ({"context": "q", "response": "a"}, [[Q, A], ["q", "a"]]),
    "P3": ({"inputs_pretokenized": "q", "targets_pretokenized": "a"}, [[Q, A], ["q", "a"]]),
    "ms-swift pretraining": ({"response": "t"}, ["t"]),
    "one unknown column": ({"sentence": "t", "n": 1}, ["t"]),
    "pairs": ({"conversation": [["q", "a"], ["q", "a"]]}, [[Q, A, Q, A]]),
    "roles and texts": ({"dialog": [["user", "q"], ["assistant", "a"]]}, [[Q, A]]),
    "OpenAI responses": (
        {
            "input": turns(Q),
            "output": [
                {
                    "type": "message",
                    "role": "assistant",
                    "content": [{"type": "output_text", "text": "a"}],
                }
            ],
        },
        [[Q, A]],
    ),
    "HH-RLHF": ({"chosen": "Human: q Assistant: a", "rejected": "b"}, ["Human: q Assistant: a"]),
    "Orca DPO": (
        {"system": "s", "question": "q", "chosen": "a", "rejected": "b"},
        [[S, Q, A]],
    ),
    "DPO texts": ({"prompt": "q", "chosen": "a", "rejected": "b"}, [[Q, A], ["q", "a"]]),
    "DPO messages": ({"prompt": "q", "chosen": turns(Q, A), "rejected": turns(Q, A)}, [[Q, A]]),
    "ORPO": ({"prompt": turns(Q), "chosen": turns(A), "rejected": turns(A)}, [[Q, A]]),
    "LLaMA-Factory DPO": (
        {
            "conversations": shares(("human", "q")),
            "chosen": {"from": "gpt", "value": "a"},
            "rejected": {"from": "gpt", "value": "b"},
        },
        [[Q, A]],
    ),
    "LLaMA-Factory v1 DPO": (
        {"chosen_messages": turns(Q, A), "rejected_messages": turns(Q, A)},
        [[Q, A]],
    ),
    "The Stack": ({"hexsha": "x", "content": "print()", "ext": "py"}, ["print()"]),
    "RedPajama 2": ({"raw_content": "t", "doc_id": "x"}, ["t"]),
    "body": ({"title": "x", "body": "text"}, ["text"]),
    "CNN": ({"article": "q", "highlights": "a", "id": "x"}, [[Q, A], ["q", "a"]]),
    "Flan": ({"inputs": "q", "targets": "a", "task": "x"}, [[Q, A], ["q", "a"]]),
    "spaces": ({"Question ": "x", "Instruction": "q", "Response": "a"}, [[Q, A], ["q", "a"]]),
    "alpaca with text": (
        {"instruction": "q", "input": "", "output": "a", "text": "t"},
        ["t", [Q, A]],
    ),
    "questions about a context": (  # sql-create-context
        {"question": "q", "context": "c", "answer": "a"},
        [[("user", "q\nc"), A]],
    ),
    "messages under any name": ({"trajectory": turns(Q, A), "reward": 1.0}, [[Q, A]]),
    "identifiers beside texts": (
        {"instance_id": "12", "statement": "q", "patch": "abc"},
        ["abc", ["q", "abc"]],
    ),
}
REFUSED = {
    "KTO": ({"prompt": "q", "completion": "a", "label": True}, "filter {label: true}"),
    "KTO chats": ({"messages": turns(Q, A), "label": False}, "filter {label: true}"),
    "LLaVA": (
        {"image": "a.jpg", "conversations": shares(("human", "<image>\nq"), ("gpt", "a"))},
        "the row has 'image': text alone",
    ),
    "LLaMA-Factory pictures": (
        {"messages": turns(("user", "<image>q"), A), "images": ["a.jpg"]},
        "the row has 'images': text alone",
    ),
    "sound": (
        {"messages": turns(("user", "<audio>q"), A), "audios": ["a.mp3"]},
        "the row has 'audios': text alone",
    ),
    "text with a picture": ({"text": "see <image>", "images": ["a"]}, "the row has 'images'"),
    "Ollama pictures": (
        {"messages": [{"role": "user", "content": "q", "images": ["a"]}, *turns(A)]},
        "message 0 of 'messages' has 'images'",
    ),
    "picture parts": (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]},
        "a part that is no text",
    ),
    "axolotl train_detail": (
        {
            "messages": [
                *turns(Q),
                {
                    "role": "assistant",
                    "content": "a",
                    "train_detail": [{"begin_offset": 0, "end_offset": 1, "train": False}],
                },
            ]
        },
        "'train_detail': .* write 'weight': 0",
    ),
    "axolotl parts": (
        {
            "messages": [
                *turns(Q),
                {
                    "role": "assistant",
                    "content": [
                        {"type": "text", "text": "t", "train": False},
                        {"type": "text", "text": "a", "train": True},
                    ],
                },
            ]
        },
        "some parts are not trained on",
    ),
    "Python calls": (
        {"messages": [*turns(Q), {"role": "assistant", "content": None, "function_calls": "f(x)"}]},
        "a call without the name of a function: 'f",
    ),
    "calls under another key": (
        {"messages": [*turns(Q), {"role": "assistant", "content": "", "actions": "f(x)"}]},
        "message 1 of 'messages' has no text, and 'actions' is not read",
    ),
    "OpenAI refusal": (
        {"messages": [*turns(Q), {"role": "assistant", "content": None, "refusal": "no"}]},
        "has no 'content', and 'refusal' is not read",
    ),
    "empty answer": (
        {"messages": turns(Q, ("assistant", " \n"))},
        "answer 1 of 'messages' has no text",
    ),
    "two calls keys": (
        {
            "messages": [
                *turns(Q),
                {"role": "assistant", "tool_calls": CALLED, "function_call": CALL},
            ]
        },
        "calls under 'tool_calls' and 'function_call'",
    ),
    "prompt with system": (
        {"prompt": "q", "completion": "a", "system": "s"},
        "'system' go with messages",
    ),
    "SQuAD": (
        {"context": "c", "question": "q", "answers": {"text": ["a"], "answer_start": [0]}},
        "'answers' must be a string, found dict",
    ),
    "HC3": (
        {"question": "q", "human_answers": ["a"], "chatgpt_answers": ["b"]},
        "'chatgpt_answers' must be a string, found list",
    ),
    "MMLU": ({"question": "q", "choices": ["a", "b"], "answer": 1}, "'answer' must be a string"),
    "stepwise": ({"prompt": "q", "completions": ["a"], "labels": [True]}, "no column can be read"),
    "translation": ({"translation": {"en": "a", "de": "b"}}, "no column can be read"),
    "numbered columns": ({f"c{i:02}": i for i in range(40)}, r"c19, \.\.\.\): no column"),
    "question alone": ({"instruction": "q", "input": "i"}, "no column can be read"),
    "datasets-server": ({"row_idx": 0, "row": {"text": "a"}}, "no column can be read"),
    "segments": ({"segments": [{"label": True, "text": "a"}]}, "no column can be read"),
    "MOSS": (
        {"meta_instruction": "s", "chat": {"turn_1": {"Human": "q", "MOSS": "a"}}},
        "'chat' must be a list of messages, found dict",
    ),
    "oasst1": (
        {"message_id": "1", "parent_id": None, "text": "q", "role": "prompter"},
        "each row is one message of a tree",
    ),
    "a message a row": ({"role": "user", "content": "q"}, "each row is one message"),
    "tokenized": ({"input_ids": [1], "labels": [1]}, "--train_data"),
    "arguments cut short": (
        {
            "messages": [
                *turns(Q),
                {"role": "assistant", "tool_calls": [CALL | {"arguments": '{"a'}]},
            ]
        },
        "a call whose arguments are no JSON",
    ),
    "two thoughts": (
        {"messages": [*turns(Q), turns(A)[0] | {"reasoning": "t", "reasoning_content": "u"}]},
        "other thoughts under 'reasoning_content' and 'reasoning'",
    ),
    "a thought that is no text": (
        {"messages": [*turns(Q), turns(A)[0] | {"thinking": True}]},
        "must be a string, found bool",
    ),
    "an answer twice": (
        {"conversations": [*shares(Q), shares(A)[0] | {"content": "b"}]},
        "has 'value' and 'content'",
    ),
    "other tools twice": (
        {"messages": turns(Q, A), "tools": TOOLS, "functions": [{"name": "other"}]},
        "'tools' and 'functions' differ",
    ),
    "tools among the variables": (
        {"messages": turns(Q, A), "chat_template_kwargs": {"tools": TOOLS}},
        "tools is given with each chat",
    ),
    "texts in a completion": (
        {"prompt": ["q", "q2"], "completion": ["a", "a2"]},
        "'completion' must be a text, or messages",
    ),
    "nobody answers": (
        {"messages": turns(Q, ("agent", "a"))},
        r"is the assistant's \(roles: user, agent\)",
    ),
    "other keys of messages": (
        {"messages": [{"speaker": "human", "text": "q"}]},
        r"has no 'role' \(keys: speaker, text\)",
    ),
}


@pytest.mark.parametrize("kind", TAKEN)
def test_a_published_row_is_taken_as_it_is(tmp_path, kind):
    row, expected = TAKEN[kind]
    assert documents(samples.write_jsonl(tmp_path / "a.jsonl", [row])) == [expected]


@pytest.mark.parametrize("kind", NAMED)
def test_every_flag_that_is_named_for_a_published_row_reads_it(tmp_path, kind):
    row, expected = NAMED[kind]
    path = samples.write_jsonl(tmp_path / "a.jsonl", [row])
    with pytest.raises(ConfigurationError) as refused:
        documents(path)
    advice = str(refused.value).partition(". Without")[0]
    flags = re.findall(r"--(columns|format) (.+?)(?=, for |, choose|, |$| or )", advice)
    assert len(flags) == len(expected), advice
    settings = [
        {"columns": shlex.split(value)} if name == "columns" else {"format": value}
        for name, value in flags
    ]
    assert [documents(path, **one) for one in settings] == [[document] for document in expected]


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_taken_says_why(tmp_path, kind):
    row, reason = REFUSED[kind]
    with pytest.raises(ConfigurationError, match=reason):
        documents(samples.write_jsonl(tmp_path / "a.jsonl", [row]))


def test_a_label_of_good_answers_is_a_filter(tmp_path):
    rows = [{"prompt": "q", "completion": word, "label": word == "a"} for word in "ab"]
    path = samples.write_jsonl(tmp_path / "a.jsonl", rows)
    found = documents(path, source={"path": str(path), "filter": {"label": True}})
    assert found[0] == ["q", "a"]
    assert "not selected" in found[1]


LONG = "a" * 100_000
FILES = {
    "lists of messages": (
        "a.jsonl",
        f"{json.dumps(turns(Q, A))}\n{json.dumps(turns(Q, A))}\n",
        [[Q, A]] * 2,
    ),
    "one list a line, the first very long": (
        "a.jsonl",
        f"{json.dumps(turns(Q, ('assistant', LONG)))}\n{json.dumps(turns(Q, A))}\n",
        [[Q, ("assistant", LONG)], [Q, A]],
    ),
    "one chat": ("a.json", json.dumps(turns(Q, A), indent=1), [[Q, A]]),
    "an array of chats": ("a.json", json.dumps([turns(Q, A)] * 2, indent=1), [[Q, A]] * 2),
    "one row over many lines": (
        "a.json",
        json.dumps({"messages": turns(Q, A)}, indent=1),
        [[Q, A]],
    ),
    "rows over many lines": ("a.jsonl", json.dumps({"text": "a"}, indent=1) * 2, ["a", "a"]),
    "an object around rows": (
        "a.json",
        json.dumps({"version": 1, "rows": [{"text": "a"}, {"text": LONG}]}),
        ["a", LONG],
    ),
    "an object around data": (
        "a.json",
        json.dumps({"data": [{"text": "a"}], "n": []}, indent=1),
        ["a"],
    ),
    "semicolons": ("a.csv", "prompt;completion\nq, q;a\n", [["q, q", "a"]]),
    "bars": ("a.csv", "prompt|completion\nq;q|a\n", [["q;q", "a"]]),
    "tabs": ("a.csv", "prompt\tcompletion\nq\ta\n", [["q", "a"]]),
    "Excel": ("a.csv", "\ufeffsep=;\nprompt;completion\nq;a\n", [["q", "a"]]),
    "one column": ("a.csv", "text\na;b|c\n", ["a;b|c"]),
    "a name with a comma": ("a.csv", '"text";"a,b"\nx;y\n', ["x"]),
    "JSON in cells": (
        "a.csv",
        'prompt,completion\n"[{""role"": ""user"", ""content"": ""q""}]",a\n',
        [[Q, A]],
    ),
    "columns of pandas": (
        "a.json",
        json.dumps({"prompt": {"0": "q", "2": "r"}, "completion": {"0": "a", "2": "b"}}),
        [["q", "a"], ["r", "b"]],
    ),
    "names and rows of pandas": (
        "a.json",
        json.dumps({"columns": ["prompt", "completion"], "index": [0], "data": [["q", "a"]]}),
        [["q", "a"]],
    ),
    "numbered rows of pandas": (
        "a.json",
        json.dumps({"0": {"text": "a"}, "5": {"text": "b"}}),
        ["a", "b"],
    ),
    "lists of columns": (
        "a.json",
        json.dumps({"prompt": ["q", "r"], "completion": ["a", "b"]}, indent=1),
        [["q", "a"], ["r", "b"]],
    ),
    "blanks and empty names in a header": ("a.csv", "prompt, completion,,\nq,a,,\n", [["q", "a"]]),
}


@pytest.mark.parametrize("kind", FILES)
def test_files_are_read_as_people_write_them(tmp_path, kind):
    name, text, expected = FILES[kind]
    (tmp_path / name).write_text(text, encoding="utf-8")
    assert documents(tmp_path / name) == expected


def test_a_file_that_would_lose_something_is_refused(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("prompt,prompt,completion\nq,r,a\n")
    with pytest.raises(ConfigurationError, match="'prompt' twice"):
        documents(path)
    table = tmp_path / "a.json"
    table.write_text(json.dumps({"prompt": ["q", "r"], "completion": ["a"]}))
    with pytest.raises(ConfigurationError, match=r"different .* \(prompt 2, completion 1\)"):
        documents(table)
    path.write_bytes("prompt,completion\ncafé,a\n".encode("cp1252"))
    with pytest.raises(ConfigurationError, match=r"not UTF-8 .* iconv"):
        documents(path)


THOUGHTS = {
    "a key": turns(A)[0] | {"thinking": "t"},
    "two keys": turns(A)[0] | {"reasoning": "t", "reasoning_content": "t"},
    "a list": turns(A)[0] | {"reasoning": [{"type": "text", "text": "t"}]},
    "Mistral": {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": [{"type": "text", "text": "t"}]},
            {"type": "text", "text": "a"},
        ],
    },
    "Gemini": {"role": "model", "parts": [{"text": "t", "thought": True}, {"text": "a"}]},
}


@pytest.mark.parametrize("kind", THOUGHTS)
def test_a_thought_is_found_wherever_it_is_written(kind):
    answer = document_fields({"messages": [*turns(Q), THOUGHTS[kind]]}, "messages")["messages"][1]
    assert (answer["content"], answer["reasoning_content"]) == ("a", "t")


def test_columns_that_are_false_or_0_count_as_not_read(tmp_path):
    row = {"messages": turns(Q, A), "train": False, "weight": 0, "note": None, "tags": []}
    unread = Counter()
    documents(samples.write_jsonl(tmp_path / "a.jsonl", [row]), unread=unread)
    assert unread == {"column train": 1, "column weight": 1}


def test_an_object_with_several_lists_of_rows_is_refused(tmp_path):
    path = tmp_path / "a.json"
    path.write_text(json.dumps({"train": [{"text": "a"}], "test": [{"text": "b"}]}))
    with pytest.raises(ConfigurationError, match=r"several lists of records \(train, test\)"):
        documents(path)


def test_a_file_of_another_format_is_sent_to_an_entry_of_its_own(tmp_path):
    chats = samples.write_jsonl(tmp_path / "a.jsonl", [{"conversations": turns(Q, A)}])
    row = {"instruction": "q", "output": "a", "conversations": None}
    pairs = samples.write_jsonl(tmp_path / "b.jsonl", [row])
    first, second = documents(chats, sources=[str(chats), str(pairs)])
    assert first == [Q, A]
    assert "a row of the format alpaca: files of different formats go into a recipe" in second


def test_flags_that_other_messages_name_are_taken(tmp_path):
    pairs = samples.write_jsonl(tmp_path / "a.jsonl", [{"query": "q", "completion": "a"}])
    chats = samples.write_jsonl(tmp_path / "b.jsonl", [{"messages": turns(Q, A)}])
    columns = {"query": "prompt"}
    with pytest.raises(ConfigurationError) as refused:
        documents(chats, sources=[str(chats), {"path": str(pairs), "columns": columns}])
    named = re.search(r"columns (\S+)=instruction (\S+)=output", str(refused.value)).groups()
    columns = dict(zip(named, ("instruction", "output"), strict=True))
    both = [str(chats), {"path": str(pairs), "columns": columns}]
    assert documents(chats, sources=both) == [[Q, A], [Q, A]]
    with pytest.raises(ConfigurationError, match="--format messages") as refused:
        documents(chats, format="text")
    assert documents(chats, format=re.search(r"--format (\w+)", str(refused.value))[1]) == [[Q, A]]
    path = samples.write_jsonl(
        tmp_path / "c.jsonl", [{"question": "q", "answer": "a", "system": "s"}]
    )
    with pytest.raises(ConfigurationError) as refused:
        documents(path, columns=["question=prompt", "answer=completion"])
    names = re.search(r"'(\w+)' instruction and '(\w+)' output", str(refused.value))
    columns = [
        f"{name}={ours}"
        for name, ours in zip(names.groups(), ("instruction", "output"), strict=True)
    ]
    assert documents(path, columns=columns) == [[S, Q, A]]
