"""33 kinds of chats for testing chat templates; each word occurs in only one message."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from utils.prepare.rows import ChatDocument, document_fields
from utils.prepare.values import Location

PLACE = Location("a.jsonl", "line", 1)


def user(words: str) -> dict[str, Any]:
    return {"role": "user", "content": words}


def says(words: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": words, **more}


def calls(*arguments: Any, content: str = "", **more: Any) -> dict[str, Any]:
    functions = [{"name": "look_up", "arguments": given} for given in arguments]
    made = [
        {"id": f"abcdefgh{i}", "type": "function", "function": function}
        for i, function in enumerate(functions)
    ]
    return says(content, tool_calls=made, **more)


def result(words: str, number: int = 0) -> dict[str, Any]:
    names = {"name": "look_up", "tool_call_id": f"abcdefgh{number}"}
    return {"role": "tool", "content": words, **names}


SYSTEM = {"role": "system", "content": "Sysalpha sysbeta."}
PROPERTIES = {
    "place": {"type": "string", "description": "where"},
    "days": {"type": "integer", "description": "how many"},
}
PARAMETERS = {"type": "object", "properties": PROPERTIES, "required": ["place"]}
FUNCTION = {"name": "look_up", "description": "Tell the weather", "parameters": PARAMETERS}
TOOLS = [{"type": "function", "function": FUNCTION}]
STRING = {"keya": "Vala valb"}
NUMBER = {"keyc": 7351}
NESTED = {"keyd": {"keye": [True, 86.25, "Vale"]}, "keyf": "Valf", "keyg": False}
ASK, SAY = user("Uone utwo?"), says("Xone, xtwo.")
ASK2, SAY2 = user("Uthree ufour?"), says("Xthree\nxfour!")


def _rounds(*made: dict[str, Any], last: bool = False) -> list[dict[str, Any]]:
    """Return a chat with calls, their results and an answer; with `last`, end with the calls."""
    chat = [ASK]
    for number, turn in enumerate(made):
        chat.append(turn)
        answers = [result(f"Res{number}{i} out.", i) for i in range(len(turn["tool_calls"]))]
        chat += answers if not last else []
    return chat if last else [*chat, SAY]


@dataclass(frozen=True)
class Kind:
    """A kind of chat. twin: a replacement that makes repeated words of the chat unique."""

    messages: Sequence[dict[str, Any]]
    tools: bool = False
    first_trained: int = 0
    twin: tuple[str, str] | None = None


THOUGHT = {"reasoning_content": "Tone ttwo."}
# fmt: off
KINDS = {
    "one turn": Kind([ASK, SAY]),
    "two turns": Kind([ASK, SAY, ASK2, SAY2]),
    "three turns": Kind([ASK, SAY, ASK2, SAY2, user("Ufive?"), says("Xfive.")]),
    "system": Kind([SYSTEM, ASK, SAY]),
    "system, two turns": Kind([SYSTEM, ASK, SAY, ASK2, SAY2]),
    "blanks": Kind([ASK, says("    Xone\n\n  xtwo\n"), ASK2, says("\nXthree  xfour ")]),
    "special words": Kind(
        [ASK, says("Xone <|im_end|> or </s> or <end_of_turn> xtwo"), ASK2, says("Xthree </s>")]
    ),
    "unicode": Kind(
        [ASK, says("Xgrüß 漢字かな 👩‍👩‍👧🏽"), user("ßzq 漢字かな"), says("😀 🇩🇪 Xnaïve")]
    ),
    "one letter": Kind([ASK, says("Zqxv"), ASK2, says("Zqyv")], twin=("Zq[xy]v", "a")),
    "repeats": Kind([ASK, says("Zqxv"), ASK2, SAY2], twin=("Zqxv", "Uone utwo?")),
    "digits": Kind([ASK, says("4711"), ASK2, says("90210")]),
    "thought": Kind([ASK, says("Xone.", **THOUGHT)]),
    "thoughts": Kind(
        [ASK, says("Xone.", **THOUGHT), ASK2, says("Xother", reasoning_content="Tthree")]
    ),
    "empty thought": Kind([ASK, says("Xone.", reasoning_content="")]),
    "thinking tags": Kind([ASK, says("<think>\nTone ttwo.\n</think>\n\nXone xtwo.")]),
    "tool list": Kind([ASK, SAY, ASK2, SAY2], True),
    "call beside words": Kind(_rounds(calls(STRING, content="Xbeside.")), True),
    "call with a thought": Kind(_rounds(calls(NUMBER, **THOUGHT)), True),
    "two rounds of calls": Kind(_rounds(calls(NUMBER), calls({"keyh": "Valh"})), True),
    "user last": Kind([ASK, SAY, ASK2]),
    "tool last": Kind(_rounds(calls(NUMBER))[:-1], True),
    "weight 0": Kind([ASK, {**SAY, "weight": 0}, ASK2, SAY2]),
    "first trained": Kind([ASK, SAY, ASK2, SAY2], first_trained=2),
}
# fmt: on
for name, call in {
    "string": calls(STRING), "number": calls(NUMBER), "none": calls({}), "nested": calls(NESTED),
    "two": calls(STRING, NUMBER),
}.items():  # fmt: skip
    KINDS[f"call, {name}"] = Kind(_rounds(call), True)
    KINDS[f"call last, {name}"] = Kind(_rounds(call, last=True), True)


def document(kind: Kind, tools: bool) -> ChatDocument:
    rows = document_fields({"messages": list(kind.messages)}, "messages")["messages"]
    return ChatDocument(rows, PLACE, TOOLS if tools else None, None, kind.first_trained)
