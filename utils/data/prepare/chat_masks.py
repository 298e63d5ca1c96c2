"""Loss masks of chats: which text of a rendering the assistant writes, verified for every chat.

Where the template has {% generation %} markers, they tell. Else it is derived: the chat is
rendered plainly and with marks around its texts (chat_templates.py), and each assistant turn is
delimited by two comparisons near its marks:

    start   the text since the message before it, and the same text when the template is asked for
            a generation prompt: what they share is given to the model, what follows it produces.
    end     the text up to the next message, and the same text when the turn is the last one: what
            they share ends the turn, up to its special token. A template without one (GLM) ends a
            turn with the token that opens the next message; it is appended to the last turn. If
            there is no special token at all, the last turn gets the tokenizer's EOS.

Both depend on the text and the kinds of the messages around it alone, so they are cached, and a
chat costs two renderings. In either case every chat must pass the same checks: each message's text
is in the rendering, and what is trained on of an assistant turn is its own text and the token that
ends it.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from utils.data.prepare.chat_checks import Spans, check_spans, check_texts
from utils.data.prepare.chat_templates import (
    MARKS,
    RENDERING_ERRORS,
    TAGS,
    Chat,
    ChatRefused,
    ChatTemplate,
    MarkedChat,
    Message,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ASSISTANT = "assistant"
PROBE = "probe"
CACHED = 20_000  # starts and ends of turns that are remembered; a template has a few dozen


@dataclass(frozen=True)
class MaskedChat:
    """A rendering and [start, stop) of the text of each trained assistant turn, in characters.

    drops_thinking: the template leaves reasoning of earlier turns out, as published ones do.
    """

    text: str
    spans: Spans
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
        if len(self._starts) + len(self._ends) > CACHED:
            self._starts.clear()
            self._ends.clear()
        adapted = self.template.adapted(messages)
        tried = [adapted]
        if not self.template.reads_parts:  # a message of calls alone, for one that reads contents
            tried.append([{"content": "", **message} for message in adapted])
        refused: Exception | None = None
        for form in tried if tried[-1] != adapted else tried[:1]:
            try:
                return self._masked(Chat(form, tools, options), first_trained)
            except ChatRefused:
                raise
            except RENDERING_ERRORS as error:
                refused = error
        raise ChatRefused(f"the chat template refuses this conversation ({refused})") from refused

    def _masked(self, chat: Chat, first_trained: int) -> MaskedChat:
        turns = [i for i, message in enumerate(chat.messages) if message["role"] == ASSISTANT]
        if self.template.has_markers:
            text, blocks = self.template.render_with_markers(chat)
            marked = self._marked(chat, text)
            drops_thinking = check_texts(marked, text)
            spans = _spans_of_blocks(marked, turns, blocks)
        else:
            text = self.template.render(chat)
            marked = self._marked(chat, text)
            drops_thinking = check_texts(marked, text)
            spans, closing = self._derived(marked, turns)
            text += closing
        trained = {
            turn: spans[turn]
            for turn in turns
            if turn >= first_trained and chat.messages[turn].get("weight") != 0
        }
        check_spans(marked, trained, text, self._added, self._stop)
        return MaskedChat(text, [s for own in trained.values() for s in own], drops_thinking)

    def _marked(self, chat: Chat, text: str) -> MarkedChat:
        """Return the chat with marks that change nothing."""
        for edges in (True, False):
            try:
                marked = MarkedChat(self.template, chat, text, edges=edges)
            except ChatRefused:
                raise
            except RENDERING_ERRORS:
                continue  # it refuses the marks, not the chat
            if marked.plain == text:
                return marked
        raise ChatRefused("the template prints other text where marks are put around the messages'")

    def _derived(
        self, chat: MarkedChat, turns: Sequence[int]
    ) -> tuple[dict[int, list[tuple[int, int]]], str]:
        """Return the span of each turn in the plain rendering, and what closes the last one."""
        spans: dict[int, list[tuple[int, int]]] = {}
        closing, last = "", 0
        for turn in turns:
            own, (low, high) = chat.own(turn), chat.between(turn)
            gap = chat.whole[low : own[0] if own else high]
            header = self._start(chat, turn, gap, bool(own))
            base = own[-1] + 1 if own else low + header
            length, closing = self._end(chat, turn, chat.whole[base:high], header, bool(own))
            start, last = max(low + header, last), base + length
            if closing and last != len(chat.whole):
                raise ChatRefused(f"{chat.named(turn)}: nothing ends it")
            spans[turn] = [(chat.unmarked(start), chat.unmarked(last) + len(closing))]
        return spans, closing

    # --- where a turn starts

    def _start(self, chat: MarkedChat, turn: int, gap: str, has_words: bool) -> int:
        """Return how much of the text since the message before is given to the model."""
        key = (gap, has_words, _context(chat, turn))
        if key not in self._starts:
            self._starts[key] = self._find_start(chat, turn, gap, has_words)
        return self._starts[key]

    def _find_start(self, chat: MarkedChat, turn: int, gap: str, has_words: bool) -> int:
        cut, opening = self._cut(chat, turn, gap, has_words)
        # Where the prompt here is no guide: the header is the one that follows a user's turn.
        header = self._header(chat)
        role = re.sub(r"(?:\s*</?think>\s*)+$", "", header)
        line = re.match(r"\W*\w[^\n]*\n", header)
        for known in (header, role + "\n", role, line.group() if line else ""):
            at = gap.rfind(known) if has_words else gap.find(known)
            if known.strip() and at >= 0:
                return max(cut, at + len(known))
        if cut < 0 and turn == 0 and not header and chat.chat.messages[0].get("content"):
            return len(gap)  # no header at all: what precedes the first words is given
        if cut < 0:
            raise ChatRefused(
                f"{chat.named(turn)}: the template opens it with {_shown(gap)}, but its "
                f"generation prompt is {_shown(opening)}"
            )
        return cut

    def _cut(self, chat: MarkedChat, turn: int, gap: str, has_words: bool) -> tuple[int, str]:
        """Return how much of a gap the prompt prints too, -1 if they are different, and that."""
        earlier = chat.messages[:turn]
        try:
            bare = chat.tail(self._render(chat, earlier))
            opening = chat.tail(self._render(chat, earlier, generation_prompt=True))
        except RENDERING_ERRORS:
            return -1, ""  # nothing comes before, or nothing that may end a chat
        has_prompt = opening != bare
        if not has_prompt and has_words:
            # No generation prompt: the model is given what precedes any reply.
            reply = self._tail_with(chat, turn, {"role": ASSISTANT, "content": PROBE})
            reply = reply.partition(PROBE)[0]
            if not reply.startswith(bare) or re.search(r"\w", reply[len(bare) :]):
                opening = reply or opening  # else what it says begins with a blank, no header
        shared = _shared(gap, opening)
        if shared in (len(gap), len(opening)):
            return shared, opening
        # They part within, as <think></think> and <think>\n do: back to the end of the header.
        cuts = [m.end() for m in self._added.finditer(opening[:shared])]
        cuts += [k + 1 for k in range(shared) if opening[k] == "\n"]
        cut = max(cuts, default=0)
        if not has_prompt:
            if gap.startswith(bare):
                cut = max(cut, len(bare))  # the prompt is printed always
            return cut if cut > 0 else -1, opening
        known = _shared(opening, bare)
        has_header = re.search(r"\w", opening[known:cut]) is not None
        only_tags = not re.search(r"\w", TAGS.sub("", gap[cut:]))
        return cut if cut >= known and (has_header or only_tags) else -1, opening

    def _header(self, chat: MarkedChat) -> str:
        """Return what the generation prompt prints after a user's turn."""
        key = (bool(chat.chat.tools), _options(chat))
        if key not in self._headers:
            user = self.template.adapted([{"role": "user", "content": PROBE}])
            try:
                bare = self._render(chat, user)
                prompt = self._render(chat, user, generation_prompt=True)
                self._headers[key] = prompt[_shared(prompt, bare) :]
            except RENDERING_ERRORS:
                self._headers[key] = ""
        return self._headers[key]

    # --- where it ends

    def _end(
        self, chat: MarkedChat, turn: int, following: str, header: int, has_words: bool
    ) -> tuple[int, str]:
        """Return how much of what follows a turn's words belongs to it, and what to append."""
        is_last = turn == len(chat.messages) - 1
        key = (following, header, has_words, is_last, _context(chat, turn + 1))
        if key not in self._ends:
            ended = chat.tail(self._render(chat, chat.messages[: turn + 1]))
            ended = ended if has_words else ended[header:]
            self._ends[key] = self._find_end(chat, turn, ended, following, is_last)
        return self._ends[key]

    def _find_end(
        self, chat: MarkedChat, turn: int, ended: str, following: str, is_last: bool
    ) -> tuple[int, str]:
        continued = self._if_continued(chat, turn) if is_last else following
        alike = ended[: _shared(ended, continued)] if continued or not is_last else ended
        end = self._shared_end(alike)
        if end:
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
                return len(following), MARKS.sub("", continued[len(ended) : two.end()])
        if self._stop in following:  # it is printed otherwise where it comes last
            return following.index(self._stop) + len(self._stop), ""
        if one is None and two is None and is_last and not ended.strip():
            return len(following), self._stop  # no turn of this template has an end
        raise ChatRefused(
            f"{chat.named(turn)}: no special token ends it, so the model would never learn to "
            f"stop (after its words comes {_shown(continued or ended)})"
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
        calls = chat.chat.messages[turn].get("tool_calls") or []
        answers: list[dict[str, Any]] = [{"role": "user", "content": PROBE}]
        if calls:
            function = calls[-1]["function"].get("name", "")
            name = {"name": function, "tool_call_id": calls[-1].get("id", "abcdefghi")}
            answers.insert(0, {"role": "tool", "content": PROBE, **name})
        for answer in answers:
            rest = self._tail_with(chat, turn + 1, answer)
            if PROBE in rest:
                return rest[: rest.rindex(PROBE)]
        return ""

    def _tail_with(self, chat: MarkedChat, turn: int, message: Message) -> str:
        """Return what follows the first `turn` messages and has `message` in it; "" if refused."""
        try:
            longer = self._render(chat, [*chat.messages[:turn], *self.template.adapted([message])])
        except RENDERING_ERRORS:
            return ""
        return chat.tail(longer)

    def _render(
        self, chat: MarkedChat, messages: Sequence[Message], generation_prompt: bool = False
    ) -> str:
        given = Chat(messages, chat.chat.tools, chat.chat.options)
        return self.template.render(given, generation_prompt)


def _context(chat: MarkedChat, turn: int) -> tuple[Any, ...]:
    """Return what delimits a turn besides the text around it: the kinds of messages there."""
    kinds = tuple(
        (message["role"], *(bool(message.get(key)) for key in _CONTEXT_KEYS))
        for message in chat.chat.messages[max(turn - 1, 0) : turn + 1]
    )
    return turn == 0, kinds, chat.edges, bool(chat.chat.tools), _options(chat)


_CONTEXT_KEYS = ("content", "tool_calls", "reasoning_content")


def _options(chat: MarkedChat) -> str:
    return json.dumps(chat.chat.options or {}, sort_keys=True, default=repr)


def _shared(one: str, two: str) -> int:
    """Return the length of the common beginning of two strings."""
    for index, (a, b) in enumerate(zip(one, two, strict=False)):
        if a != b:
            return index
    return min(len(one), len(two))


def _pattern(tokens: set[str]) -> re.Pattern[str]:
    words = sorted((t for t in tokens if t.strip()), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, words)) or "(?!)")


def _shown(text: str) -> str:
    return repr(text if len(text) <= 80 else "..." + text[-80:])


# --- markers


def _spans_of_blocks(
    chat: MarkedChat, turns: Sequence[int], blocks: Spans
) -> dict[int, list[tuple[int, int]]]:
    """Return the {% generation %} blocks of each turn: with its marks, or next after others'."""
    indices = [(chat.unmarked(mark.at), mark.message) for mark in chat.marks]
    own: dict[int, list[tuple[int, int]]] = {turn: [] for turn in turns}
    for start, stop in blocks:
        if start == stop:
            continue
        inside = [message for at, message in indices if start <= at <= stop and message in own]
        earlier = max((message for at, message in indices if at <= start), default=-1)
        turn = min(inside, default=next((turn for turn in turns if turn > earlier), None))
        if turn is not None:
            own[turn].append((start, stop))
    return own
