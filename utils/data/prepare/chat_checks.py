"""The checks that every rendered chat has to pass, whatever way its mask was found.

The text of each message and tool is in the rendering, and what is trained on of an assistant turn
is its own text and the token that ends it.
"""

import json
import re
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence

from utils.data.prepare.chat_templates import (
    CONTENT,
    NOBODY,
    REASONING,
    ChatRefused,
    MarkedChat,
    arguments_of,
)

TAKE_ANOTHER = "--chat_template takes one that prints it"

Spans = Sequence[tuple[int, int]]  # [start, stop), in characters


def check_texts(chat: MarkedChat, text: str) -> bool:
    """Raise ChatRefused unless the text of every message and every tool is in the rendering.

    Returns whether reasoning was left out of a turn that others follow, as many published
    templates do by design.
    """
    found = Counter((mark.message, mark.kind) for mark in chat.marks)
    dropped = False
    for (index, kind), expected in chat.expected.items():
        if found[index, kind] >= expected:
            continue
        is_past = any(message["role"] != "tool" for message in chat.messages[index + 1 :])
        if kind != REASONING or not is_past:
            what = {CONTENT: "content", REASONING: "reasoning"}.get(kind, "tool calls")
            raise ChatRefused(
                f"{chat.named(index)}: the chat template leaves out its {what} ({TAKE_ANOTHER})",
                f"{what.replace(' ', '_')}_left_out",
            )
        dropped = True
    for index, message in enumerate(chat.chat.messages):
        for call in message.get("tool_calls") or []:
            arguments = arguments_of(call["function"].get("arguments"))
            keys = arguments if isinstance(arguments, Mapping) else ()
            for word in map(str, (call["function"].get("name", ""), *keys)):
                if word not in text:
                    raise ChatRefused(
                        f"{chat.named(index)}: the chat template leaves out {word!r} of its calls "
                        f"({TAKE_ANOTHER})",
                        "tool_calls_left_out",
                    )
    for tool in chat.chat.tools or []:
        name = (tool.get("function") or tool).get("name") if isinstance(tool, dict) else None
        if isinstance(name, str) and name not in text:
            raise ChatRefused(
                f"the chat template leaves out the tool {name!r} ({TAKE_ANOTHER})", "tools_left_out"
            )
    return dropped


def check_spans(
    chat: MarkedChat,
    trained: Mapping[int, Spans],
    text: str,
    tokens: re.Pattern[str],
    stop: str,
) -> None:
    """Raise ChatRefused unless the spans of each turn hold its words, no other's, and its end.

    trained: message index -> spans of `text`. tokens: what may end a turn; stop: the EOS token,
    which the model says once.
    """
    indices = [chat.unmarked(mark.at) for mark in chat.marks]
    for turn, spans in trained.items():
        words = [chat.unmarked(index) for index in chat.own(turn)]
        inside = [
            mark.message
            for low, high in spans
            for mark in chat.marks[bisect_right(indices, low) : bisect_left(indices, high)]
        ]
        trained_text = "".join(text[slice(*span)] for span in spans)
        written = json.dumps(chat.messages[turn], ensure_ascii=False).count(stop)
        ending = text[slice(*spans[-1])].rstrip() if spans else ""
        problem, reason = "", "mask_incomplete"
        if not all(any(low <= index <= high for low, high in spans) for index in words):
            problem = "some of its words would not be trained on"
        elif set(inside) - {turn, NOBODY}:
            problem, reason = "words of another message would be trained on", "mask_too_wide"
        elif trained_text.count(stop) > written + 1:
            problem, reason = "the template prints it as two turns", "mask_too_wide"
        elif not any(match.end() == len(ending) for match in tokens.finditer(ending)):
            problem = "the token that ends it would not be trained on"
        if problem:
            raise ChatRefused(f"{chat.named(turn)}: {problem}", reason)
