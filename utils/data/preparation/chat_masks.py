"""Loss masks of chats: which text of a rendering the assistant says, proved for every chat.

Where the template has {% generation %} markers they say it. Else it is derived: the chat is
rendered plainly and with marks around its texts (chat_marks.py), and each assistant turn is
delimited by two comparisons near its marks:

    start   the text since the message before it, and the same text when the template is asked for
            a generation prompt: what they share is given to the model, what follows it produces.
    end     the text up to the next message, and the same text when the turn is the last one: what
            they share ends the turn, up to its special token. A template without one (GLM) ends a
            turn with the token that opens the next message; it is appended to the last turn. If
            there is no special token at all, the last turn gets the tokenizer's EOS.

Both depend on the text and the kinds of the messages around it alone, so they are looked up, and a
chat costs two renderings. Whatever the way, every chat is checked alike (chat_checks.py).
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from utils.data.preparation.chat_checks import (
    MarkedRendering,
    check_spans,
    check_texts,
    ends_with_token,
    named,
    spans_of_markers,
)
from utils.data.preparation.chat_marks import (
    MARKS,
    NOBODY,
    TAGS,
    ChatRefused,
    MarkedChat,
    free_block,
    unmarked_place,
)
from utils.data.preparation.chat_template import RENDERING_ERRORS, ChatTemplate, Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# (outer marks, marks for empty texts), in the order in which they are tried.
MARKINGS = ((True, True), (True, False), (False, True), (False, False))
ASSISTANT = "assistant"
PROBE = "probe"
LOOKED_UP = 20_000  # starts and ends of turns that are remembered; a template has a few dozen


@dataclass(frozen=True)
class MaskedChat:
    """A rendering and [start, stop) of the text of each trained assistant turn, in characters.

    drops_thinking: the template leaves reasoning of earlier turns out, as published ones do.
    """

    text: str
    spans: Sequence[tuple[int, int]]
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
        self._headers: dict[Any, str] = {}
        self._starts: dict[Any, int] = {}
        self._ends: dict[Any, tuple[int, str]] = {}

    def __call__(
        self,
        messages: Sequence[Message],
        tools: Sequence[Any] | None = None,
        options: Mapping[str, Any] | None = None,
        first_trained: int = 0,
    ) -> MaskedChat:
        """Return the rendering of a chat and what is trained on.

        Turns before message `first_trained` and those with `weight: 0` are not trained on. Raises
        ChatRefused, with the reason, where the template does not fit the chat.
        """
        if len(self._starts) + len(self._ends) > LOOKED_UP:
            self._starts.clear()
            self._ends.clear()
        adapted = self.template.adapted(messages)
        try:
            return self._masked(adapted, tools, options, first_trained)
        except RENDERING_ERRORS as error:
            if isinstance(error, ChatRefused):
                raise
            filled = [{"content": "", **message} for message in adapted]
            if filled != adapted and not self.template.reads_parts:
                try:  # a message of calls alone, in a template that reads every content
                    return self._masked(filled, tools, options, first_trained)
                except RENDERING_ERRORS as second:
                    error = second
            if isinstance(error, ChatRefused):
                raise error from error
            raise ChatRefused(f"the chat template refuses this conversation ({error})") from error

    def _masked(
        self,
        messages: Sequence[Message],
        tools: Sequence[Any] | None,
        options: Mapping[str, Any] | None,
        first_trained: int,
    ) -> MaskedChat:
        blocks: list[tuple[int, int]] = []
        if self.template.has_markers:
            text, blocks = self.template.render_with_markers(messages, tools, options)
        else:
            text = self.template.render(messages, tools, options)
        chat = self._marked(text, messages, tools, options)
        drops_thinking = check_texts(chat, text)
        turns = [i for i, message in enumerate(messages) if message["role"] == ASSISTANT]
        if self.template.has_markers:
            spans = spans_of_markers(chat, turns, blocks)
            closing = self._missing_end(chat, spans, text)
        else:
            spans, closing = self._derived(chat, turns)
        text += closing
        trained = {
            turn: spans[turn]
            for turn in turns
            if turn >= first_trained and messages[turn].get("weight") != 0
        }
        check_spans(chat, trained, text, self._added, self._stop)
        return MaskedChat(text, [s for own in trained.values() for s in own], drops_thinking)

    def _marked(
        self,
        text: str,
        messages: Sequence[Message],
        tools: Sequence[Any] | None,
        options: Mapping[str, Any] | None,
    ) -> MarkedRendering:
        """Return the chat with marks that change nothing."""
        block, tried = free_block(text), []
        for outer, empty in MARKINGS:
            marked = MarkedChat(messages, block, outer, empty)
            if marked.marked in tried:
                continue
            tried.append(marked.marked)
            try:
                whole = self.template.render(marked.marked, tools, options)
            except RENDERING_ERRORS:
                continue  # it refuses the marks, not the chat
            chat = MarkedRendering(marked, tools, options, whole)
            if chat.plain == text:
                return chat
        raise ChatRefused("the template prints other text where marks are put around the messages'")

    def _derived(
        self, chat: MarkedRendering, turns: Sequence[int]
    ) -> tuple[dict[int, list[tuple[int, int]]], str]:
        """Return the span of each turn in the plain rendering, and what closes the last one."""
        spans: dict[int, list[tuple[int, int]]] = {}
        closing, last = "", 0
        for turn in turns:
            start, end, closing = self._span(chat, turn)
            start, last = max(start, last), end
            if closing and end != len(chat.whole):
                raise ChatRefused(f"{named(chat, turn)}: nothing ends it")
            plain = unmarked_place(chat.marks, start), unmarked_place(chat.marks, end)
            spans[turn] = [(plain[0], plain[1] + len(closing))]
        return spans, closing

    def _missing_end(
        self, chat: MarkedRendering, spans: dict[int, list[tuple[int, int]]], text: str
    ) -> str:
        """Return what ends a last turn that the markers leave open, and add it to the turn."""
        last = len(chat.marked.messages) - 1
        if not spans.get(last) or spans[last][-1][1] != len(text):
            return ""
        if ends_with_token(text[slice(*spans[last][-1])], self._added):
            return ""
        _, _, closing = self._span(chat, last)
        spans[last][-1] = spans[last][-1][0], len(text) + len(closing)
        return closing

    def _span(self, chat: MarkedRendering, turn: int) -> tuple[int, int, str]:
        """Return (start, end) of a turn in the marked rendering, and what is to be appended."""
        own, (low, high) = chat.own(turn), chat.between(turn)
        gap = chat.whole[low : own[0] if own else high]
        start = low + self._start(chat, turn, gap, bool(own))
        base = own[-1] + 1 if own else start
        length, closing = self._end(chat, turn, chat.whole[base:high], start - low, bool(own))
        return start, base + length, closing

    # --- where a turn starts

    def _start(self, chat: MarkedRendering, turn: int, gap: str, has_words: bool) -> int:
        """Return how much of the text since the message before is given to the model."""
        key = (gap, has_words, _context(chat, turn))
        if key not in self._starts:
            self._starts[key] = self._find_start(chat, turn, gap, has_words)
        return self._starts[key]

    def _find_start(self, chat: MarkedRendering, turn: int, gap: str, has_words: bool) -> int:
        cut, opening = self._cut(chat, turn, gap, has_words)
        # Where the prompt here is no guide: the header is the one that follows a user's turn.
        header = self._header(chat)
        role = re.sub(r"(?:\s*</?think>\s*)+$", "", header)
        line = re.match(r"\W*\w[^\n]*\n", header)
        for known in (header, role + "\n", role, line.group() if line else ""):
            at = gap.rfind(known) if has_words else gap.find(known)
            if known.strip() and at >= 0:
                return max(cut, at + len(known))
        if cut < 0 and turn == 0 and not header and chat.marked.messages[0].get("content"):
            return len(gap)  # no header at all: what precedes the first words is given
        if cut < 0:
            raise ChatRefused(
                f"{named(chat, turn)}: the template opens it with {_shown(gap)}, but its "
                f"generation prompt is {_shown(opening)}"
            )
        return cut

    def _cut(self, chat: MarkedRendering, turn: int, gap: str, has_words: bool) -> tuple[int, str]:
        """Return how much of a gap the prompt prints too, -1 if they are different, and that."""
        earlier = chat.marked.marked[:turn]
        try:
            bare = _tail(chat, self._render(chat, earlier))
            opening = _tail(chat, self._render(chat, earlier, generation_prompt=True))
        except RENDERING_ERRORS:
            return -1, ""  # nothing comes before, or nothing that may end a chat
        asked = opening != bare
        if not asked and has_words:
            # No generation prompt: the model is given what precedes any reply.
            reply = self._reply_opening(chat, turn)
            if not reply.startswith(bare) or re.search(r"\w", reply[len(bare) :]):
                opening = reply or opening  # else what it says begins with a blank, no header
        shared = _shared(gap, opening)
        if shared in (len(gap), len(opening)):
            return shared, opening
        # They part within, as <think></think> and <think>\n do: back to the end of the header.
        cuts = [m.end() for m in self._added.finditer(opening[:shared])]
        cuts += [k + 1 for k in range(shared) if opening[k] == "\n"]
        cut = max(cuts, default=0)
        if not asked and gap.startswith(bare):
            cut = max(cut, len(bare))  # the prompt is printed always
        known = _shared(opening, bare)
        has_header = re.search(r"\w", opening[known:cut]) is not None
        only_tags = not re.search(r"\w", TAGS.sub("", gap[cut:]))
        fits = cut >= known and (has_header or only_tags) if asked else cut > 0
        return cut if fits else -1, opening

    def _header(self, chat: MarkedRendering) -> str:
        """Return what the generation prompt prints after a user's turn."""
        key = (bool(chat.tools), _options(chat))
        if key not in self._headers:
            user = self.template.adapted([{"role": "user", "content": PROBE}])
            try:
                bare = self._render(chat, user)
                prompt = self._render(chat, user, generation_prompt=True)
                self._headers[key] = prompt[_shared(prompt, bare) :]
            except RENDERING_ERRORS:
                self._headers[key] = ""
        return self._headers[key]

    def _reply_opening(self, chat: MarkedRendering, turn: int) -> str:
        reply = self.template.adapted([{"role": ASSISTANT, "content": PROBE}])
        try:
            replied = self._render(chat, [*chat.marked.marked[:turn], *reply])
        except RENDERING_ERRORS:
            return ""
        return _tail(chat, replied).partition(PROBE)[0]

    # --- where it ends

    def _end(
        self, chat: MarkedRendering, turn: int, following: str, header: int, has_words: bool
    ) -> tuple[int, str]:
        """Return how much of what follows a turn's words belongs to it, and what to append."""
        is_last = turn == len(chat.marked.messages) - 1
        key = (following, header, has_words, is_last, _context(chat, turn + 1))
        if key not in self._ends:
            ended = _tail(chat, self._render(chat, chat.marked.marked[: turn + 1]))
            ended = ended if has_words else ended[header:]
            self._ends[key] = self._find_end(chat, turn, ended, following, is_last)
        return self._ends[key]

    def _find_end(
        self, chat: MarkedRendering, turn: int, ended: str, following: str, is_last: bool
    ) -> tuple[int, str]:
        going_on = self._if_continued(chat, turn) if is_last else following
        alike = ended[: _shared(ended, going_on)] if going_on or not is_last else ended
        end = self._shared_end(alike)
        if end:
            return end, ""
        one, two = self._specials.search(ended), self._specials.search(going_on)
        if one and two and ended[: one.start()] == going_on[: two.start()]:
            # One token closes the chat, another a turn within: <|return|> and <|end|>.
            return (one if is_last else two).end(), ""
        between = going_on[: two.start()] if two else ""
        is_call = bool(chat.marked.messages[turn].get("tool_calls"))
        closes = between.strip() == ended.strip() if is_call else not between.strip()
        if one is None and two and closes:
            # Nothing ends a last turn: it gets what ends others, or opens the next message.
            if not is_last:
                return two.end(), ""
            if going_on.startswith(ended):
                return len(following), MARKS.sub("", going_on[len(ended) : two.end()])
        if self._stop in following:  # it is printed otherwise where it comes last
            return following.index(self._stop) + len(self._stop), ""
        if one is None and two is None and is_last and not ended.strip():
            return len(following), self._stop  # no turn of this template has an end
        raise ChatRefused(
            f"{named(chat, turn)}: no special token ends it, so the model would never learn to "
            f"stop (after its words comes {_shown(going_on or ended)})"
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

    def _if_continued(self, chat: MarkedRendering, turn: int) -> str:
        """Return what follows a last turn when the chat goes on; "" if it cannot."""
        calls = chat.marked.messages[turn].get("tool_calls") or []
        answers: list[dict[str, Any]] = [{"role": "user", "content": PROBE}]
        if calls:
            function = calls[-1]["function"].get("name", "")
            name = {"name": function, "tool_call_id": calls[-1].get("id", "abcdefghi")}
            answers.insert(0, {"role": "tool", "content": PROBE, **name})
        for answer in self.template.adapted(answers):
            try:
                longer = self._render(chat, [*chat.marked.marked[: turn + 1], answer])
            except RENDERING_ERRORS:
                continue
            if PROBE in (rest := _tail(chat, longer)):
                return rest[: rest.rindex(PROBE)]
        return ""

    def _render(
        self, chat: MarkedRendering, messages: Sequence[Message], generation_prompt: bool = False
    ) -> str:
        return self.template.render(messages, chat.tools, chat.options, generation_prompt)


def _context(chat: MarkedRendering, turn: int) -> tuple[Any, ...]:
    """Return what delimits a turn besides the text around it: the kinds of messages there."""
    messages = chat.marked.messages
    kinds = tuple(
        (message["role"], bool(message.get("content")), bool(message.get("tool_calls")),
         bool(message.get("reasoning_content")))
        for message in messages[max(turn - 1, 0) : turn + 1]
    )  # fmt: skip
    return (
        turn == 0,
        kinds,
        chat.marked.outer,
        chat.marked.empty,
        bool(chat.tools),
        _options(chat),
    )


def _options(chat: MarkedRendering) -> str:
    return json.dumps(chat.options or {}, sort_keys=True, default=repr)


def _tail(chat: MarkedRendering, rendering: str) -> str:
    """Return what follows the last mark of a rendering."""
    marks = [mark for mark in chat.marked.find(rendering) if mark.message != NOBODY]
    return rendering[marks[-1].place + 1 :] if marks else rendering


def _shared(one: str, two: str) -> int:
    """Return the length of the common beginning of two strings."""
    for place, (a, b) in enumerate(zip(one, two, strict=False)):
        if a != b:
            return place
    return min(len(one), len(two))


def _pattern(tokens: set[str]) -> re.Pattern[str]:
    words = sorted((t for t in tokens if t.strip()), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, words)) or "(?!)")


def _shown(text: str) -> str:
    return repr(text if len(text) <= 80 else "..." + text[-80:])
