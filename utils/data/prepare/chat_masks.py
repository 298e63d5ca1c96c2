"""Loss masks of chats: which text of a rendering the assistant writes, verified for every chat.

Where the template has {% generation %} markers, they tell. Else it is derived: the chat is
rendered plainly and with marks around its texts (chat_templates.py), and each assistant turn is
delimited by two comparisons near its marks:

    start   the text since the message before it, and the same text when the template is asked for
            a generation prompt: what they share is given to the model, what follows it produces.
    end     the text up to the next message, and the same text when the turn is the last one: what
            they share ends the turn, up to its special token. A template without one (GLM) ends a
            turn with the token that opens the next message, which is appended to the last turn;
            without any special token the last turn gets the tokenizer's EOS.

Both depend on the text and the kinds of the messages around it alone, so they are cached, and a
chat costs two renderings. Either way every chat is checked: each message's text is in the
rendering, and of an assistant turn its own text and the token that ends it are trained on.
"""

import json
import re
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from os.path import commonprefix
from typing import TYPE_CHECKING, Any

from utils.data.prepare.chat_templates import NOBODY, RENDERING_ERRORS, ChatTemplate, MarkedChat
from utils.data.prepare.documents import ChatDocument, Message
from utils.data.prepare.rows import UnusableRowError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ASSISTANT = "assistant"
PROBE = "probe"
CACHED = 20_000  # kinds of turns that are remembered; a template has a few dozen

Span = tuple[int, int]  # [start, stop), in characters


@dataclass(frozen=True)
class MaskedChat:
    """A rendering and [start, stop) of the text of each trained assistant turn, in characters.

    drops_thinking: the template leaves reasoning of earlier turns out, as published ones do.
    """

    text: str
    spans: Sequence[Span]
    drops_thinking: bool = False


class ChatMasks:
    """Renders chats with one tokenizer's template and finds what of them is trained on."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", date: str | None = None):
        self.template = ChatTemplate(tokenizer, date)
        added = tokenizer.added_tokens_decoder.values()
        special = {str(t) for t in added if t.special} | set(tokenizer.all_special_tokens)
        self._specials = _pattern(special)
        self._added = _pattern(special | {str(t) for t in added})
        self._stop = str(tokenizer.eos_token)
        self._delimiters: dict[Any, tuple[int, int, str]] = {}

    def __call__(self, document: ChatDocument) -> MaskedChat:
        """Return the rendering of a chat and what is trained on.

        Turns before message `first_trained` and those with `weight: 0` are not trained on. Raises
        UnusableRowError where the template does not fit the chat.
        """
        try:
            return self._masked(
                replace(document, messages=self.template.adapted(document.messages))
            )
        except UnusableRowError:
            raise
        except RENDERING_ERRORS as error:
            message = f"the chat template refuses this conversation ({error})"
            raise UnusableRowError("template_refused", message) from error

    def _masked(self, chat: ChatDocument) -> MaskedChat:
        turns = [i for i, message in enumerate(chat.messages) if message["role"] == ASSISTANT]
        text, blocks = self.template.render_with_markers(chat)
        marked = MarkedChat(self.template, chat, text)
        drops_thinking = marked.drops_thinking()
        if self.template.has_markers:
            spans = _spans_of_blocks(marked, turns, blocks)
        else:
            spans, closing = self._derived(marked, turns)
            text += closing
        trained: list[Span] = []
        for turn in turns:
            if turn >= chat.first_trained and chat.messages[turn].get("weight") != 0:
                self._check_spans(marked, turn, spans[turn], text)
                trained += spans[turn]
        return MaskedChat(text, trained, drops_thinking)

    def _check_spans(self, chat: MarkedChat, turn: int, spans: Sequence[Span], text: str) -> None:
        """Raise UnusableRowError unless spans hold a turn's words, no other's, and its end."""
        words = [chat.indices[number] for number in chat.own.get(turn, ())]
        between = [(bisect_right(chat.indices, a), bisect_left(chat.indices, b)) for a, b in spans]
        inside = {mark.message for first, last in between for mark in chat.marks[first:last]}
        trained_text = "".join(text[slice(*span)] for span in spans)
        written = json.dumps(chat.messages[turn], ensure_ascii=False).count(self._stop)
        ending = text[slice(*spans[-1])].rstrip() if spans else ""
        problem, reason = "", "mask_incomplete"
        if not all(any(low <= index <= high for low, high in spans) for index in words):
            problem = "some of its words would not be trained on"
        elif inside - {turn, NOBODY}:
            problem, reason = "words of another message would be trained on", "mask_too_wide"
        elif trained_text.count(self._stop) > written + 1:
            problem, reason = "the template prints it as two turns", "mask_too_wide"
        elif not any(match.end() == len(ending) for match in self._added.finditer(ending)):
            problem = "the token that ends it would not be trained on"
        if problem:
            raise chat.refused(turn, problem, reason)

    # --- delimiting turns

    def _derived(self, chat: MarkedChat, turns: Sequence[int]) -> tuple[dict[int, list[Span]], str]:
        """Return the span of each turn in the plain rendering, and what closes the last one."""
        spans: dict[int, list[Span]] = {}
        closing, last = "", 0
        for turn in turns:
            low, first, behind, high = chat.around(turn)
            gap, following = chat.text[low:first], chat.text[behind:high]
            key = gap, following, _context(chat, turn)
            if key not in self._delimiters:
                if len(self._delimiters) > CACHED:
                    self._delimiters.clear()
                self._delimiters[key] = (
                    self._start(chat, turn, gap),
                    *self._end(chat, turn, following),
                )
            header, length, closing = self._delimiters[key]
            start, last = max(low + header, last), behind + length
            if closing and last != len(chat.text):
                raise chat.refused(turn, "nothing ends it")
            spans[turn] = [(start, last + len(closing))]
        return spans, closing

    def _start(self, chat: MarkedChat, turn: int, gap: str) -> int:
        """Return how much of the text between the message before and the turn is its header."""
        header = max(self._prompted(chat, turn, gap), self._headed(chat, gap))
        if header < 0:
            shown = _shown(gap)
            problem = f"the template opens it with {shown}, and its generation prompt otherwise"
            raise chat.refused(turn, problem)
        return header

    def _prompted(self, chat: MarkedChat, turn: int, gap: str) -> int:
        """Return how much of a gap the generation prompt prints too, -1 if they are different."""
        openings = self._openings(chat, chat.messages[:turn])
        if openings is None:
            return -1
        bare, opening = openings
        if opening == bare:
            # No generation prompt: the model is given what precedes any reply.
            reply, _, _ = self._around_probe(chat, turn, {"role": ASSISTANT}).partition(PROBE)
            if not reply.startswith(bare) or re.search(r"\w", reply[len(bare) :]):
                opening = reply or opening  # else what it says begins with a blank, no header
        shared = len(_shared(gap, opening))
        if shared in (len(gap), len(opening)):
            return shared
        # They part within, as <think></think> and <think>\n do: back to the end of the header.
        cuts = [match.end() for match in self._added.finditer(opening[:shared])]
        return max([*cuts, opening.rfind("\n", 0, shared) + 1]) or -1

    def _headed(self, chat: MarkedChat, gap: str) -> int:
        """Return the end of a header in the gap: what the prompt prints after a user's turn."""
        user = self.template.adapted([{"role": "user", "content": PROBE}])
        bare, prompt = self._openings(chat, user) or ("", "")
        header = prompt.removeprefix(_shared(prompt, bare))
        role = re.sub(r"(?:\s*</?think>\s*)+$", "", header)
        known = next((text for text in (header, role + "\n") if text.strip() and text in gap), None)
        return -1 if known is None else gap.rindex(known) + len(known)

    def _end(self, chat: MarkedChat, turn: int, following: str) -> tuple[int, str]:
        """Return how much of what follows a turn's words belongs to it, and what to append."""
        is_last = turn == len(chat.messages) - 1
        ended = self._tail(chat, chat.messages[: turn + 1])
        continued = self._if_continued(chat, turn) if is_last else following
        alike = _shared(ended, continued) if continued or not is_last else ended
        if end := self._shared_end(alike):
            return end, ""
        one, two = self._specials.search(ended), self._specials.search(continued)
        if one and two and ended[: one.start()] == continued[: two.start()]:
            # One token closes the chat, another a turn within: <|return|> and <|end|>.
            return (one if is_last else two).end(), ""
        between = continued[: two.start()] if two else ""
        is_call = bool(chat.chat.messages[turn].get("tool_calls"))
        closes = between.strip() == ended.strip() if is_call else not between.strip()
        if one is None and two and closes:
            # Nothing ends a last turn: it gets what ends others, or opens the next message.
            if not is_last:
                return two.end(), ""
            if continued.startswith(ended):
                return len(following), continued[len(ended) : two.end()]
        if self._stop in following:  # it is printed otherwise where it comes last
            return following.index(self._stop) + len(self._stop), ""
        if one is None and two is None and is_last and not ended.strip():
            return len(following), self._stop  # no turn of this template has an end
        raise chat.refused(
            turn,
            "no special token ends it, so the model would never learn to stop (after its words "
            f"comes {_shown(continued or ended)})",
        )

    def _shared_end(self, shared: str) -> int:
        """Return the end of the special tokens that end a turn whatever comes next, or 0."""
        if self._stop in shared:
            return shared.index(self._stop) + len(self._stop)
        end = 0
        for token in self._specials.finditer(shared):
            if end and shared[end : token.start()].strip(" "):
                break
            end = token.end()
        return end

    def _if_continued(self, chat: MarkedChat, turn: int) -> str:
        """Return what follows a last turn when another message comes; "" if none can."""
        answer = {"role": "user"}
        if calls := chat.chat.messages[turn].get("tool_calls"):
            name, number = calls[-1]["function"].get("name", ""), calls[-1].get("id", "abcdefghi")
            answer = {"role": "tool", "name": name, "tool_call_id": number}
        before, probe, _ = self._around_probe(chat, turn + 1, answer).rpartition(PROBE)
        return before if probe else ""

    def _around_probe(self, chat: MarkedChat, turn: int, message: Message) -> str:
        """Return what follows the first `turn` messages if `message` says PROBE; "" if refused."""
        (probe,) = self.template.adapted([{**message, "content": PROBE}])
        try:
            return self._tail(chat, [*chat.messages[:turn], probe])
        except RENDERING_ERRORS:
            return ""

    def _openings(self, chat: MarkedChat, messages: Sequence[Message]) -> tuple[str, str] | None:
        """Return what follows messages without and with a generation prompt; None if refused."""
        try:
            return self._tail(chat, messages), self._tail(chat, messages, generation_prompt=True)
        except RENDERING_ERRORS:
            return None  # nothing comes before, or nothing that may end a chat

    def _tail(
        self, chat: MarkedChat, messages: Sequence[Message], generation_prompt: bool = False
    ) -> str:
        """Return what is printed behind the words of the last of some messages."""
        given = replace(chat.chat, messages=messages)
        return chat.tail(self.template.render(given, generation_prompt))


def _context(chat: MarkedChat, turn: int) -> tuple[Any, ...]:
    """Return what delimits a turn besides the text around it: the kinds of messages there."""
    given = chat.chat
    keys = ("content", "tool_calls", "reasoning_content")
    kinds = [
        (message["role"], *(bool(message.get(key)) for key in keys))
        for message in given.messages[max(turn - 1, 0) : turn + 2]
    ]
    is_last = turn == len(given.messages) - 1
    return turn == 0, is_last, bool(given.tools), repr((kinds, given.template_options))


def _shared(one: str, two: str) -> str:
    """Return the common beginning of two strings."""
    return commonprefix([one, two])  # noqa: RUF071 - letter by letter is what is wanted


def _pattern(tokens: set[str]) -> re.Pattern[str]:
    words = sorted((t for t in tokens if t.strip()), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, words)) or "(?!)")


def _shown(text: str) -> str:
    return repr(text if len(text) <= 80 else "..." + text[-80:])


def _spans_of_blocks(
    chat: MarkedChat, turns: Sequence[int], blocks: Sequence[Span]
) -> dict[int, list[Span]]:
    """Return the {% generation %} blocks of each turn: with its marks, or next after others'."""
    own: dict[int, list[Span]] = {turn: [] for turn in turns}
    for start, stop in blocks:
        if start == stop:
            continue
        inside = [
            message for at, message, _ in chat.marks if start <= at <= stop and message in own
        ]
        earlier = max((message for at, message, _ in chat.marks if at <= start), default=-1)
        turn = min(inside, default=next((turn for turn in turns if turn > earlier), None))
        if turn is not None:
            own[turn].append((start, stop))
    return own
