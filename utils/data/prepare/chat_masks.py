"""The checks that every chat must pass, whatever its loss mask comes from.

Each message's text is in the rendering, and what is trained on of an assistant turn is its own
text and the token that ends it.
"""

import json
import re
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from utils.data.prepare.chat_templates import (
    CONTENT,
    MARKS,
    NOBODY,
    REASONING,
    RENDERING_ERRORS,
    TAGS,
    ChatRefused,
    ChatTemplate,
    Mark,
    MarkedChat,
    Message,
    argument_keys,
    free_block,
    unmarked_place,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


TAKE_ANOTHER = "--chat_template takes one that prints it"
Spans = Sequence[tuple[int, int]]  # [start, stop), in characters


@dataclass
class MarkedRendering:
    """A chat rendered with marks (`whole`), and what was given to the template with it."""

    marked: MarkedChat
    tools: Sequence[Any] | None
    options: Mapping[str, Any] | None
    whole: str

    @cached_property
    def marks(self) -> list[Mark]:
        """Every mark of the rendering, in order."""
        return self.marked.find(self.whole)

    @cached_property
    def plain(self) -> str:
        """The rendering without its marks."""
        places = [-1, *(mark.place for mark in self.marks), len(self.whole)]
        return "".join(self.whole[a + 1 : b] for a, b in pairwise(places))

    @cached_property
    def _own(self) -> dict[int, list[int]]:
        found: dict[int, list[int]] = {}
        for mark in self.marks:
            found.setdefault(mark.message, []).append(mark.place)
        return found

    @cached_property
    def _others(self) -> list[Mark]:
        return [mark for mark in self.marks if mark.message != NOBODY]

    def own(self, message: int) -> list[int]:
        """Return the places of a message's marks, in order."""
        return self._own.get(message, [])

    def between(self, message: int) -> tuple[int, int]:
        """Return [low, high) of the text between the marks before a message's and behind them."""
        own, marks = self.own(message), self._others
        if own:
            before, behind = bisect_left(marks, (own[0],)), bisect_right(marks, (own[-1] + 1,))
        else:
            before = max((k + 1 for k, m in enumerate(marks) if m.message < message), default=0)
            later = (k for k, m in enumerate(marks) if m.message > message)
            behind = min(later, default=len(marks))
        low = marks[before - 1].place + 1 if before else 0
        return low, marks[behind].place if behind < len(marks) else len(self.whole)


def check_texts(chat: MarkedRendering, text: str) -> bool:
    """Raise ChatRefused unless the text of every message and every tool is in the rendering.

    Returns whether reasoning was left out of a turn that others follow, as many published
    templates do by design.
    """
    found = Counter((mark.message, mark.kind) for mark in chat.marks)
    dropped = False
    for (index, kind), expected in chat.marked.expected.items():
        if found[index, kind] >= expected:
            continue
        if kind != REASONING or not _is_past(chat, index):
            what = {CONTENT: "content", REASONING: "reasoning"}.get(kind, "tool calls")
            reason = f"{what.replace(' ', '_')}_left_out"
            raise ChatRefused(
                f"{named(chat, index)}: the chat template leaves out its {what} ({TAKE_ANOTHER})",
                reason,
            )
        dropped = True
    for index, message in enumerate(chat.marked.messages):
        for call in message.get("tool_calls") or []:
            for word in (str(call["function"].get("name", "")), *argument_keys(call)):
                if word not in text:
                    where = named(chat, index)
                    problem = f"{where}: the chat template leaves out {word!r} of its calls"
                    raise ChatRefused(f"{problem} ({TAKE_ANOTHER})", "tool_calls_left_out")
    for name in _tool_names(chat.tools):
        if name not in text:
            raise ChatRefused(
                f"the chat template leaves out the tool {name!r} ({TAKE_ANOTHER})", "tools_left_out"
            )
    return dropped


def _is_past(chat: MarkedRendering, index: int) -> bool:
    """Tell whether the user or the assistant speaks after a message."""
    return any(message["role"] != "tool" for message in chat.marked.messages[index + 1 :])


def _tool_names(tools: Sequence[Any] | None) -> list[str]:
    functions = [tool.get("function") or tool for tool in tools or [] if isinstance(tool, dict)]
    return [name for function in functions if isinstance(name := function.get("name"), str)]


def ends_with_token(said: str, tokens: re.Pattern[str]) -> bool:
    """Tell whether a text ends with one of the tokens, but for white space."""
    said = said.rstrip()
    return any(match.end() == len(said) for match in tokens.finditer(said))


def check_spans(
    chat: MarkedRendering,
    trained: Mapping[int, Spans],
    text: str,
    tokens: re.Pattern[str],
    stop: str,
) -> None:
    """Raise ChatRefused unless the spans of each turn hold its words, no other's, and its end.

    trained: message index -> spans of `text`. tokens: what may end a turn; stop: the EOS token,
    which the model says once.
    """
    places = [unmarked_place(chat.marks, mark.place) for mark in chat.marks]
    for turn, spans in trained.items():
        for place in chat.own(turn):
            plain = unmarked_place(chat.marks, place)
            if not any(low <= plain <= high for low, high in spans):
                message = f"{named(chat, turn)}: some of its words would not be trained on"
                raise ChatRefused(message, "mask_incomplete")
        for low, high in spans:
            inside = chat.marks[bisect_right(places, low) : bisect_left(places, high)]
            if any(mark.message not in (turn, NOBODY) for mark in inside):
                message = f"{named(chat, turn)}: words of another message would be trained on"
                raise ChatRefused(message, "mask_too_wide")
        said = "".join(text[slice(*span)] for span in spans)
        written = json.dumps(chat.marked.messages[turn], ensure_ascii=False).count(stop)
        if said.count(stop) > written + 1:
            message = f"{named(chat, turn)}: the template prints it as two turns"
            raise ChatRefused(message, "mask_too_wide")
        if not spans or not ends_with_token(text[slice(*spans[-1])], tokens):
            message = f"{named(chat, turn)}: the token that ends it would not be trained on"
            raise ChatRefused(message, "mask_incomplete")


def spans_of_markers(
    chat: MarkedRendering, turns: Sequence[int], blocks: Spans
) -> dict[int, list[tuple[int, int]]]:
    """Return the {% generation %} blocks of each turn: with its marks, or next after others'."""
    places = [(unmarked_place(chat.marks, mark.place), mark.message) for mark in chat.marks]
    own: dict[int, list[tuple[int, int]]] = {turn: [] for turn in turns}
    for start, stop in blocks:
        if start == stop:
            continue
        inside = [message for place, message in places if start <= place <= stop and message in own]
        earlier = max((message for place, message in places if place <= start), default=-1)
        turn = min(inside, default=next((turn for turn in turns if turn > earlier), None))
        if turn is not None:
            own[turn].append((start, stop))
    return own


def named(chat: MarkedRendering, index: int) -> str:
    """Return the name of a message for an error."""
    return f"message {index} ({chat.marked.messages[index]['role']})"


# Loss masks of chats: which text of a rendering the assistant says, proved for every chat.

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
