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
        thoughts = [f"thinks {thought}"] if (thought := message.get("reasoning_content")) else []
        rest = (*thoughts, *calls, *["untrained"] * is_idle)
        found.append((message["role"], message["content"], *rest))
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
    "Llama calls":
        (chat(Q, says(tool_calls=[{"name": "find", "parameters": {"city": "Bonn"}}])),
         [Q, CALLING]),
    "one call under its own key": (chat(Q, says(tool_call=CALL)), [Q, CALLING]),
    "LLaMA-Factory v1": (
        chat({"role": "user", "content": [part("q", "value")], "loss_weight": 0.0},
             says([{"type": "reasoning", "value": "t"}, {"type": "tool_call", "value": TEXT_CALL}],
                  loss_weight=1.0)),
        [Q, ("assistant", "", "thinks t", CALL)],
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
    "axolotl pre-tokenized": (
        {"input_ids": [5, 6, 7], "attention_mask": [1, 1, 1], "labels": [-100, 6, 7]},
        [([5], False), ([6, 7], True)]),
    "TRL pre-tokenized": (
        {"input_ids": [5, 6], "completion_mask": [0, 1]}, [([5], False), ([6], True)]),
    "ids alone": ({"input_ids": [5, 6]}, [([5, 6], True)]),
    "a transcript with segments": ({"text": "a", "segments": [{"start": 0}]}, "a"),
    "Magpie":
        (shared(("human", "q"), ("gpt", "a"), uuid="u", instruction="q", response="a"), [Q, A]),
    "ToolACE":
        (shared(("user", "q"), ("assistant", "[f()]"), ("tool", "r"), system="s"),
         [S, Q, ("assistant", "[f()]"), ("tool", "r")]),
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
    "LLaMA-Factory thought before a call": (
        shared(("human", "q"), ("function_call", "<think>t</think>\n\n" + TEXT_CALL),
               ("observation", "r"), ("gpt", "a")),
        [Q, ("assistant", "<think>t</think>", CALL), ("tool", "r"), A],
    ),
    "thoughts before two calls": (
        shared(("human", "q"), *[("function_call", "<think>t</think>" + TEXT_CALL)] * 2),
        [Q, *[("assistant", "<think>t</think>", CALL)] * 2],
    ),
    "SlimOrca": (
        shared({"from": "human", "value": "q", "weight": 0.0},
               {"from": "gpt", "value": "a", "weight": 1.0}),
        [Q, A],
    ),
    "OpenAssistant words": (shared(("prompter", "q"), A), [Q, A]),
    "LangChain words": (chat(("Human", "q"), ("AI", "a")), [Q, A]),
    "Cohere": (chat(("System", "s"), ("User", "q"), ("Chatbot", "a")), [S, Q, A]),
    "upper case":
        (chat((" USER ", "q"), ("ASSISTANT", "a"), ("tool-response", "r")), [Q, A, ("tool", "r")]),
    "capitals and colons":
        (chat(("User:", "q"), A, {"role": "Bot", "content": "b", "Loss": False}),
         [Q, A, (*B, "untrained")]),
    "LIMA": ({"conversations": ["q", "a"], "source": "x"}, [Q, A]),
    "Bedrock":
        (chat(("user", [{"text": "q"}]), says([{"text": "a"}]), system=[{"text": "s"}]), [S, Q, A]),
    "Vertex": (
        chat({"role": "user", "parts": [{"text": "q"}]},
             {"role": "model", "parts": [{"text": "a"}]}),
        [Q, A],
    ),
    "system_prompt": (shared(("human", "q"), ("gpt", "a"), system_prompt="s"), [S, Q, A]),
    "pandas in CSV": ({"messages": str(turns(Q, A))}, [Q, A]),
    "messages as JSON texts": ({"messages": [json.dumps(t) for t in turns(Q, A)]}, [Q, A]),
    "ChatGLM": ({"conversations": turns(Q, A)}, [Q, A]),
    "old datasets": ({"conversations": {"from": ["human", "gpt"], "value": ["q", "a"]}}, [Q, A]),
    "R1 distilled": (chat(Q, says("a", reasoning_content="t")), [Q, (*A, "thinks t")]),
    "think tags": (chat(Q, says("<think>t</think>a")), [Q, ("assistant", "<think>t</think>a")]),
    "ultrafeedback":
        (chat(Q, A, prompt="q", chosen=turns(Q, A), rejected=turns(Q, B)), [Q, A]),
    "alpaca": ({"instruction": "q", "input": "", "output": "a"}, [Q, A]),
    "alpaca with history":
        ({"instruction": "q", "input": "i", "output": "a", "history": [["q", "a"]], "system": "s"},
         [S, Q, A, ("user", "q\ni"), A]),
    "alpaca without input": ({"instruction": "q", "input": None, "output": "a"}, [Q, A]),
    "BELLE": ({"instruction": "q\n", "input": "", "output": "a"}, [("user", "q\n"), A]),
    "TRL prompt": ({"prompt": "q", "completion": "a"}, ["q", "a"]),
    "TRL messages": ({"prompt": turns(Q), "completion": turns(A)}, [Q, A]),
    "text": ({"text": "### Human: q### Assistant: a"}, "### Human: q### Assistant: a"),
    "web page with a picture": ({"text": "t", "image": "http://a/b.png"}, "t"),
}
PAIR = [[Q, A], ["q", "a"]]
NAMED = {
    "GSM8K": ({"question": "q", "answer": "a"}, PAIR),
    "MetaMath": ({"query": "q", "response": "a", "type": "t"}, PAIR),
    "Dolly":
        ({"instruction": "q", "context": "c", "response": "a", "category": "x"},
         [[("user", "q\nc"), A]]),
    "OpenOrca":
        ({"id": "1", "system_prompt": "s", "question": "q", "response": "a"}, [[S, Q, A]]),
    "RACE":
        ({"article": "c", "question": "q", "options": ["a"], "answer": "a"},
         [[("user", "q\nc"), A]]),
    "DROP": ({"passage": "c", "question": "q", "answer": "a"}, [[("user", "q\nc"), A]]),
    "medical o1":
        ({"Question": "q", "Complex_CoT": "t", "Response": "a"}, [[Q, (*A, "thinks t")]]),
    "R1 distilled columns":
        ({"prompt": "q", "reasoning": "t", "response": "a"}, [[Q, (*A, "thinks t")]]),
    "R1 distilled prompts":
        ({"prompt": turns(Q), "reasoning_content": "t", "response": "a"},
         [[Q, (*A, "thinks t")]]),
    "Stack Exchange pairs": ({"question": "q", "response_j": "a", "response_k": "b"}, PAIR),
    "GPTeacher": ({"instruction": "q", "input": "i", "response": "a"}, [[("user", "q\ni"), A]]),
    "Firefly": ({"kind": "k", "input": "q", "target": "a"}, PAIR),
    "input and output": ({"input": "q", "output": "a"}, PAIR),
    "Nemotron":
        ({"input": turns(Q), "output": "a", "system_prompt": "s", "category": "c"}, [[S, Q, A]]),
    "OASST words": ({"INSTRUCTION": "q", "RESPONSE": "a"}, PAIR),
    "ms-swift query":
        ({"system": "s", "query": "q", "response": "a", "history": [["q", "a"]]},
         [[S, Q, A, Q, A]]),
    "ms-swift ShareGPT":
        ({"system": "s", "conversation": [{"human": "q", "assistant": "a"}]}, [[S, Q, A]]),
    "Capybara": ({"source": "x", "conversation": [{"input": "q", "output": "a"}]}, [[Q, A]]),
    "XTuner": ({"conversation": [{"system": "s", "input": "q", "output": "a"}]}, [[S, Q, A]]),
    "history of messages":
        ({"query": "q", "response": "a", "history": turns(Q, A)}, [[Q, A, Q, A]]),
    "messages and chosen": (chat(Q, chosen="a", rejected="b"), [[Q, A]]),
    "WildChat": ({"conversation": [t | {"language": "en"} for t in turns(Q, A)]}, [[Q, A]]),
    "chat": ({"chat": turns(Q, A)}, [[Q, A]]),
    "turns": ({"turns": ["q", "a"]}, [[Q, A]]),
    "UltraChat": ({"id": "0", "data": ["q", "a", "q", "a"]}, [[Q, A, Q, A]]),
    "Gemini": (
        {"systemInstruction": {"role": "system", "parts": [{"text": "s"}]},
         "contents": [{"role": "user", "parts": [{"text": "q"}]},
                      {"role": "model", "parts": [{"text": "a"}]}]},
        [[S, Q, A]],
    ),
    "xLAM":
        ({"id": 1, "query": "q", "answers": json.dumps([CALL]), "tools": json.dumps([CALL])},
         [[Q, CALLING]]),
    "Glaive v2":
        ({"system": "SYSTEM: s", "chat": "USER: q ASSISTANT: a"}, ["USER: q ASSISTANT: a"]),
    "Baize":
        ({"topic": "t", "input": "[|Human|]q[|AI|]a"},
         ["[|Human|]q[|AI|]a", ["t", "[|Human|]q[|AI|]a"]]),
    "Prosocial": ({"context": "q", "response": "a"}, PAIR),
    "P3": ({"inputs_pretokenized": "q", "targets_pretokenized": "a"}, PAIR),
    "ms-swift pretraining": ({"response": "t"}, ["t"]),
    "one unknown column": ({"sentence": "t", "n": 1}, ["t"]),
    "pairs": ({"conversation": [["q", "a"], ["q", "a"]]}, [[Q, A, Q, A]]),
    "roles and texts": ({"dialog": [["user", "q"], ["assistant", "a"]]}, [[Q, A]]),
    "OpenAI responses": (
        {"input": turns(Q),
         "output": [says([{"type": "output_text", "text": "a"}], type="message")]},
        [[Q, A]],
    ),
    "HH-RLHF": ({"chosen": "Human: q Assistant: a", "rejected": "b"}, ["Human: q Assistant: a"]),
    "Orca DPO": ({"system": "s", "question": "q", "chosen": "a", "rejected": "b"}, [[S, Q, A]]),
    "DPO texts": ({"prompt": "q", "chosen": "a", "rejected": "b"}, PAIR),
    "DPO messages": ({"prompt": "q", "chosen": turns(Q, A), "rejected": turns(Q, A)}, [[Q, A]]),
    "ORPO": ({"prompt": turns(Q), "chosen": turns(A), "rejected": turns(A)}, [[Q, A]]),
    "LLaMA-Factory DPO": (
        shared(("human", "q"), chosen={"from": "gpt", "value": "a"},
               rejected={"from": "gpt", "value": "b"}),
        [[Q, A]],
    ),
    "LLaMA-Factory v1 DPO":
        ({"chosen_messages": turns(Q, A), "rejected_messages": turns(Q, A)}, [[Q, A]]),
    "The Stack": ({"hexsha": "x", "content": "print()", "ext": "py"}, ["print()"]),
    "RedPajama 2": ({"raw_content": "t", "doc_id": "x"}, ["t"]),
    "body": ({"title": "x", "body": "text"}, ["text"]),
    "CNN": ({"article": "q", "highlights": "a", "id": "x"}, PAIR),
    "Flan": ({"inputs": "q", "targets": "a", "task": "x"}, PAIR),
    "spaces": ({"Question ": "x", "Instruction": "q", "Response": "a"}, PAIR),
    "alpaca with text":
        ({"instruction": "q", "input": "", "output": "a", "text": "t"}, ["t", [Q, A]]),
    "sql-create-context":
        ({"question": "q", "context": "c", "answer": "a"}, [[("user", "q\nc"), A]]),
    "messages under any name": ({"trajectory": turns(Q, A), "reward": 1.0}, [[Q, A]]),
    "identifiers beside texts":
        ({"instance_id": "12", "statement": "q", "patch": "abc"}, ["abc", ["q", "abc"]]),
}
REFUSED = {
    "KTO": ({"prompt": "q", "completion": "a", "label": True}, "filter {label: true}"),
    "KTO as numbers": ({"prompt": "q", "completion": "a", "label": 0}, "filter {label: 1}"),
    "KTO chats": (chat(Q, A, label=False), "filter {label: true}"),
    "LLaVA":
        (shared(("human", "<image>\nq"), ("gpt", "a"), image="a.jpg"), "the row has 'image': text"),
    "LLaMA-Factory pictures":
        (chat(("user", "<image>q"), A, images=["a.jpg"]), "the row has 'images': text alone"),
    "sound": (chat(("user", "<audio>q"), A, audios=["a.mp3"]), "the row has 'audios': text alone"),
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
    "OpenAI refusal":
        (chat(Q, says(None, refusal="no")), "has no 'content', and 'refusal' is not read"),
    "empty answer": (chat(Q, says(" \n")), "answer 1 of 'messages' has no text"),
    "two calls keys":
        (chat(Q, says(tool_calls=CALLED, function_call=CALL)),
         "'tool_calls' and 'function_call': keep one"),
    "prompt with a thought":
        ({"prompt": "q", "completion": "a", "reasoning_content": "t"},
         "'reasoning_content' go with messages.* names 'prompt' instruction"),
    "messages with a thought beside":
        ({"prompt": turns(Q), "completion": turns(A), "reasoning_content": "t"},
         "'reasoning_content' goes into the messages of 'prompt' or 'completion'"),
    "prompt with system": ({"prompt": "q", "completion": "a", "system": "s"}, "'system' go with"),
    "SQuAD":
        ({"context": "c", "question": "q", "answers": {"text": ["a"], "answer_start": [0]}},
         "'answers' must be a string, found dict"),
    "HC3":
        ({"question": "q", "human_answers": ["a"], "chatgpt_answers": ["b"]},
         "'chatgpt_answers' must be a string, found list"),
    "MMLU": ({"question": "q", "choices": ["a", "b"], "answer": 1}, "'answer' must be a string"),
    "stepwise": ({"prompt": "q", "completions": ["a"], "labels": [True]}, "no column can be read"),
    "translation": ({"translation": {"en": "a", "de": "b"}}, "no column can be read"),
    "numbered columns": ({f"c{i:02}": i for i in range(40)}, r"c19, \.\.\.\): no column"),
    "question alone": ({"instruction": "q", "input": "i"}, "no column can be read"),
    "datasets-server": ({"row_idx": 0, "row": {"text": "a"}}, "no column can be read"),
    "segments": ({"segments": [{"label": False, "text": "a"}]}, "no segment of 'segments'"),
    "segment of another kind": ({"segments": [{"start": 0, "text": "a"}]}, "must be {label: true"),
    "MOSS":
        ({"meta_instruction": "s", "chat": {"turn_1": {"Human": "q", "MOSS": "a"}}},
         "'chat' must be a list of messages, found dict"),
    "oasst1":
        ({"message_id": "1", "parent_id": None, "text": "q", "role": "prompter"},
         "each row is one message of a tree"),
    "a message a row": ({"role": "user", "content": "q"}, "each row is one message"),
    "labels of other tokens": ({"input_ids": [1, 2], "labels": [-100, 1]}, "'labels' must be -100"),
    "padded": ({"input_ids": [1, 2], "attention_mask": [1, 0]}, "take the padding out"),
    "a mask of another name": ({"input_ids": [1], "loss_mask": [1]}, "'loss_mask' looks like"),
    "packed rows": ({"input_ids": [1], "position_ids": [0]}, "its rows are packed already"),
    "two masks":
        ({"input_ids": [1], "completion_mask": [1], "labels": [1]}, "several loss masks"),
    "labels cut short": ({"input_ids": [1, 2], "labels": [1]}, "equally long"),
    "arguments cut short":
        (chat(Q, says(tool_calls=[CALL | {"arguments": '{"a'}])), "arguments are no JSON"),
    "two thoughts":
        (chat(Q, says("a", reasoning="t", reasoning_content="u")),
         "'reasoning_content' and 'reasoning': keep one"),
    "a thought in two places":
        (chat(Q, says("<think>t</think>a", reasoning_content="t")),
         "'reasoning_content' and '<think>': keep one"),
    "a thought that is no text": (chat(Q, says("a", thinking=True)), "a string, found bool"),
    "an answer twice":
        (shared(Q, {"from": "gpt", "value": "a", "content": "b"}), "has 'value' and 'content'"),
    "other tools twice":
        (chat(Q, A, tools=TOOLS, functions=[{"name": "other"}]), "'tools' and 'functions' differ"),
    "tools among the variables":
        (chat(Q, A, chat_template_kwargs={"tools": TOOLS}), "tools is given with each chat"),
    "texts in a completion":
        ({"prompt": ["q", "q2"], "completion": ["a", "a2"]},
         "'completion' must be a text, or messages"),
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
    "NaN of pandas":
        ("a.jsonl", '{"instruction": "q", "input": NaN, "output": "a"}\n', [[Q, A]]),
    "NaN of pandas in an array":
        ("a.json", '[{"instruction": "q", "input": NaN, "output": "a"}]', [[Q, A]]),
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
    ("a.json", json.dumps({"columns": ["a", "b"], "data": [["q", "a"]]}), 'orient="records"'),
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
    with pytest.raises(ConfigurationError, match="if agent is: --columns agent=assistant"):
        documents(path, columns=columns)
    names = [*columns, "agent=assistant", "bot=assistant", "policy=system"]
    assert documents(path, columns=names) == [[Q, IDLE, Q, A]]
    with pytest.raises(ConfigurationError, match="as in --columns speaker=role text=content"):
        documents(path, columns=["dialog=messages"])


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


def test_the_thought_of_a_column_goes_with_the_answer_unless_it_has_one(tmp_path):
    for output in ("a", "<think>t</think>a"):
        row = {"instruction": "q", "output": output, "reasoning_content": "t"}
        thinks = ["thinks t"] * (output == "a")
        path = samples.write_jsonl(tmp_path / "a.jsonl", [row])
        assert documents(path) == [[Q, ("assistant", output, *thinks)]]


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


def test_flags_that_other_messages_name_are_taken(tmp_path):
    pairs = samples.write_jsonl(tmp_path / "a.jsonl", [{"query": "q", "completion": "a"}])
    chats = samples.write_jsonl(tmp_path / "b.jsonl", [chat(Q, A)])
    columns = {"query": "prompt"}
    with pytest.raises(ConfigurationError) as refused:
        documents(chats, sources=[str(chats), {"path": str(pairs), "columns": columns}])
    named = re.search(r"columns (\S+)=instruction (\S+)=output", str(refused.value)).groups()
    columns = dict(zip(named, ("instruction", "output"), strict=True))
    both = [str(chats), {"path": str(pairs), "columns": columns}]
    assert documents(chats, sources=both) == [[Q, A], [Q, A]]
    with pytest.raises(ConfigurationError, match="--format messages"):
        documents(chats, format="text")
    row = {"question": "q", "answer": "a", "system": "s"}
    path = samples.write_jsonl(tmp_path / "c.jsonl", [row])
    with pytest.raises(ConfigurationError) as refused:
        documents(path, columns=["question=prompt", "answer=completion"])
    asked, answer = re.search(r"'(\w+)' instruction and '(\w+)' out", str(refused.value)).groups()
    columns = [f"{asked}=instruction", f"{answer}=output"]
    assert documents(path, columns=columns) == [[S, Q, A]]
