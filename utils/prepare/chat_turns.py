"""The start and the end of an assistant's turn, found by comparing renderings of its chat.

"Words" are the texts of a message; the template prints other text before and behind the words.

start   Compare the text before the turn's words with the template's generation prompt. The part
        that both share, apart from blanks, is the header (<|im_start|>assistant). The header is
        not trained on. Some templates end every chat with a header, the "standing header", even if
        no generation prompt is requested.
end     Compare the text behind the turn's words in two renderings: with a next message, and with
        the chat cut behind this turn. The part that both share, up to its last special token, is
        trained on. Tool calls end like answers, or with a token that is printed once after all
        calls (<|call|>). If a template has no token to end a turn (GLM), the token that opens the
        next message ends the turn. If no special token follows, EOS is appended to the last turn.
"""

import re
from collections.abc import Sequence
from os.path import commonprefix
from typing import TYPE_CHECKING, Any

from utils.prepare.chat_marks import TAGS, MarkedChat, quoted
from utils.prepare.chat_templates import PROBE_ID, ChatTemplate
from utils.prepare.rows import Message
from utils.prepare.values import ASSISTANT

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CACHE_SIZE = 20_000  # maximum entries in the cache of delimiters; most templates need a few dozen
PROBE = "probe"
LEADING_TAGS = re.compile(rf"(?:\s*{TAGS.pattern})+\s*")
PARTIAL_TAG = re.compile(r"\s*(?:[<\[][|/\w]*)?")

Span = tuple[int, int]  # [start, stop), in characters


class TurnDelimiter:
    """Finder of the start and the end of turns in the renderings of one template.

    Names for what the template prints around a message's own texts (its words):

    gap        from the previous message's words to the turn's words
    following  from the turn's words to the next message's words
    ended      behind the turn's words, if the chat ends with the turn
    continued  behind the turn's words, if another message follows
    bare       behind the previous message's words, if the chat ends there without a
               generation prompt

    stop: the tokenizer's EOS as text. added: a pattern of all added tokens, special or not.
    """

    def __init__(self, template: ChatTemplate, tokenizer: "PreTrainedTokenizerBase"):
        self._template = template
        added = tokenizer.added_tokens_decoder.values()
        special = {str(t) for t in added if t.special} | set(tokenizer.all_special_tokens)
        self._specials = _token_pattern(special)
        self.added = _token_pattern(special | {str(t) for t in added})
        self.stop = str(tokenizer.eos_token)
        self._standing_headers: dict[Any, str] = {}
        self._delimiters: dict[Any, tuple[int, int, str]] = {}
        (self._question,) = template.adapted([{"role": "user", "content": PROBE}])

    def spans(self, chat: MarkedChat, turns: Sequence[int]) -> tuple[dict[int, list[Span]], str]:
        """Return {turn: its spans to train on}, and a text to append to the rendering.

        turns: message indices of the assistant's turns. Spans are in characters of the rendering.
        The text to append ends the last turn. "" means that the template itself ends this turn.
        Raises UnusableRowError if a turn's start or end is not found.
        """
        spans: dict[int, list[Span]] = {}
        closing, last = "", 0
        for turn in turns:
            low, first, behind, high = chat.bounds(turn)
            tags = LEADING_TAGS.match(chat.text, first, behind)
            gap, following = chat.text[low : tags.end() if tags else first], chat.text[behind:high]
            key = self._cache_key(chat, turn, gap, following)
            found = self._delimiters.get(key)
            if found is None:
                found = (self._header_length(chat, turn, gap), *self._end(chat, turn, following))
                if len(self._delimiters) > CACHE_SIZE:
                    self._delimiters.clear()
                if not re.search(r"\d", found[2]):  # a text with a number fits only this turn
                    self._delimiters[key] = found
            header, length, closing = found
            start, last = max(low + header, last), behind + length
            if closing and last != len(chat.text):
                raise chat.refused(turn, "nothing ends it")
            spans[turn] = [(start, last + len(closing))]
        return spans, closing

    @staticmethod
    def _cache_key(chat: MarkedChat, turn: int, gap: str, following: str) -> tuple[Any, ...]:
        """Return a cache key. Turns with equal keys have headers and endings of equal length."""
        plain, messages = chat.chat, chat.chat.messages
        ids = [call.get("id") for call in messages[turn].get("tool_calls") or []]
        numbers = "|".join([*map(re.escape, filter(None, ids)), r"\d"])
        texts = [re.sub(numbers, lambda m: "0" * len(m[0]), text) for text in (gap, following)]
        keys = ("content", "tool_calls", "reasoning_content")
        kinds = [
            (message["role"], *(bool(message.get(key)) for key in keys))
            for message in messages[max(turn - 1, 0) : turn + 2]
        ]
        is_last = turn == len(messages) - 1
        return *texts, turn == 0, is_last, bool(plain.tools), repr((kinds, plain.template_options))

    # --- the start of a turn

    def _header_length(self, chat: MarkedChat, turn: int, gap: str) -> int:
        """Return the index in `gap` (the text before the turn's words) where the header ends.

        A header is a text such as <|im_start|>assistant. Raises UnusableRowError if none is found.
        """
        endings = self._endings(chat, chat.messages[:turn])
        header = self._header_like_prompt(chat, turn, gap, *endings) if endings else -1
        if header >= 0:
            return header
        # Compare with the generation prompt after a question.
        bare, prompt = self._endings(chat, [self._question]) or ("", "")
        opening = prompt.removeprefix(_common_prefix(prompt, bare))
        role = re.sub(r"(?:\s*</?think>\s*)+$", "", opening) + "\n"
        for candidate in (opening, role):
            if candidate.strip() and candidate in gap:
                return gap.rindex(candidate) + len(candidate)
        problem = (
            f"the chat template opens it with {quoted(gap[-80:])}, and its generation prompt is "
            f"{quoted(endings[1][-80:] if endings else '')} (--chat_template takes a template in "
            "which both are alike)"
        )
        raise chat.refused(turn, problem)

    def _header_like_prompt(
        self, chat: MarkedChat, turn: int, gap: str, bare: str, prompt: str
    ) -> int:
        """Return the index in `gap` where the header ends, or -1 if `prompt` has another header.

        The header is a text such as <|im_start|>assistant. gap: the text before the turn's words.
        bare: the text after the previous message's words, if the chat ends there. prompt: the same
        text, if a generation prompt is requested.
        """
        closed = self._end_of_previous_message(chat, turn, gap, bare)
        reply, _, _ = self._text_with_next(chat, turn, {"role": ASSISTANT}).partition(PROBE)
        if prompt == closed:
            # The template has no generation prompt. Use the text that it prints before any reply.
            if not reply.startswith(bare) or re.search(r"\w", reply[len(bare) :]):
                prompt = reply or prompt  # if nothing is in front of a reply, there is no header
            match = self._specials.match(bare.lstrip())
            token = match.group() if match else self.stop
            if reply and token != self.stop and not reply.lstrip().startswith(token):
                return -1  # this token closes a chat, and is not printed before a reply
            closed = ""
        shared, common = _common_ignoring_blanks(gap, prompt)
        rest = prompt[common:]
        if not gap.strip() and re.search(r"\w", rest) and not self.added.search(rest):
            return -1  # the prompt has words that the chat does not have
        if shared == len(gap) or not rest:
            return shared
        if (cut := self._header_before_difference(gap, prompt, closed, reply)) >= 0:
            return cut
        # A turn with calls may have no header where a turn with a reply has one.
        shared, common = _common_ignoring_blanks(gap, bare)
        return shared if not closed and bare.strip() and common == len(bare) else -1

    def _header_before_difference(self, gap: str, prompt: str, closed: str, reply: str) -> int:
        """Return the index in `gap` where the header ends, or -1 if `prompt` has another header.

        This method is for texts that differ after the header. For example, `gap` ends in
        <think></think>, and `prompt` in <think> and a line break. gap, prompt: the arguments of
        `_header_like_prompt`. closed: the text that ends the previous message. reply: the text
        between the previous message's words and the words of a test reply.
        """
        shared, _ = _common_ignoring_blanks(gap, prompt)
        start, _ = _common_ignoring_blanks(gap, closed)
        cut = max([start, *(match.end() for match in self.added.finditer(gap[:shared]))])
        cut = max(cut, gap.rfind("\n", 0, shared) + 1)
        tags = LEADING_TAGS.match(gap, cut)
        for tag in reversed([*TAGS.finditer(gap, cut, tags.end() if tags else cut)]):
            if prompt.rstrip().endswith(gap[cut : tag.end()].strip()):
                return tag.end()  # the prompt ends with </think> as well
        if not PARTIAL_TAG.fullmatch(gap[cut:shared]):
            return -1
        header = reply[_common_ignoring_blanks(reply, gap[:cut])[0] :].strip()
        is_other = header and not gap[start:cut].strip()
        has_words = re.search(r"\w", TAGS.sub("", header))
        return -1 if is_other or has_words else cut

    def _end_of_previous_message(self, chat: MarkedChat, turn: int, gap: str, bare: str) -> str:
        """Return the text that ends the previous message: `bare` without the next turn's header."""
        for role in ("user", "tool"):
            before, probe, _ = self._text_with_next(chat, turn, {"role": role}).rpartition(PROBE)
            if probe:
                closed = _common_ignoring_blanks(before, bare)[1]
                return bare[:closed] if _common_ignoring_blanks(gap, bare)[1] > closed else bare
        return self._without_standing_header(chat, bare)

    def _without_standing_header(self, chat: MarkedChat, text: str) -> str:
        header = self._standing_header(chat)
        ends = header and text.rstrip().endswith(header)
        return text.rstrip().removesuffix(header) if ends else text

    def _standing_header(self, chat: MarkedChat) -> str:
        """Return the header that the template prints at the end of every chat, or "".

        The header starts where the end of a chat differs from the text before a next question.
        """
        key = bool(chat.chat.tools), repr(chat.chat.template_options)
        if key in self._standing_headers:
            return self._standing_headers[key]
        asked, answer, more = self._template.adapted(
            {"role": role, "content": PROBE} for role in ("user", ASSISTANT, "user")
        )
        try:
            question = chat.text_behind_marks([asked]).rpartition(PROBE)[2]
            ended = chat.text_behind_marks([asked, answer]).rpartition(PROBE)[2]
            _, following, _ = chat.text_behind_marks([asked, answer, more]).rsplit(PROBE, 2)
        except Exception:  # the template refuses these messages
            question = ended = following = ""
        start = len(_common_prefix(ended, following))
        for text in (ended, following):  # move the start back if it is inside a special token
            tokens = (t.start() for t in self._specials.finditer(text) if t.end() > start)
            start = min(start, next(tokens, start))
        rest = ended[start:].strip()
        is_header = rest != self.stop and question.rstrip().endswith(rest)
        self._standing_headers[key] = rest if is_header else ""
        return self._standing_headers[key]

    # --- the end of a turn

    def _end(self, chat: MarkedChat, turn: int, following: str) -> tuple[int, str]:
        """Return the length of the text that ends the turn, and a text to append to the rendering.

        The length counts from the end of the turn's words. The text to append is "" if the template
        itself ends the turn. Raises UnusableRowError if nothing ends the turn. following: the text
        between the turn's words and the next message's words.
        """
        is_last = turn == len(chat.messages) - 1
        printed = chat.text_behind_marks(chat.messages[: turn + 1])
        ended = self._without_standing_header(chat, printed)
        continued = self._text_if_continued(chat, turn) if is_last else following
        if chat.chat.messages[turn].get("tool_calls"):
            found = self._end_after_calls(chat, turn, ended, continued)
        else:
            found = self._end_of_turn(chat, ended, continued, is_last)
        if found is None:
            raise chat.refused(
                turn,
                "no special token ends it, so the model would never learn to stop (after its words "
                f"comes {quoted((continued or ended)[-80:])}; --chat_template takes a template "
                "that ends turns with a token)",
            )
        length, closing = found
        remainder = printed[length:]
        # Only special tokens, or a text that also follows a question, may follow the end.
        if (
            not closing
            and continued.startswith(ended[:length])
            and self._specials.sub("", remainder.replace(self.stop, "")).strip()
        ):
            question, _ = self._endings(chat, [self._question]) or ("", "")
            if not question.rstrip().endswith(remainder.strip()):
                problem = f"the template prints {quoted(remainder)} behind the token that ends it"
                raise chat.refused(turn, problem, "mask_incomplete")
        return found

    def _end_after_calls(
        self, chat: MarkedChat, turn: int, ended: str, continued: str
    ) -> tuple[int, str] | None:
        """Return what `_end` returns for a turn with tool calls, or None if nothing ends it."""
        is_last = turn == len(chat.messages) - 1
        answer = self._text_with_next(chat, turn, {"role": ASSISTANT}).rpartition(PROBE)[2].strip()
        plain = answer.removesuffix(self._standing_header(chat)).strip()
        found = None
        if ended.rstrip().endswith(plain):  # calls end as answers do
            start = other_start = len(ended.rstrip()) - len(plain)
            if plain and not continued.startswith(ended[:start]):
                # `continued` has more of the calls before their end.
                other_start = continued.find(plain)
            if other_start >= 0:
                found = self._end_of_turn(chat, ended[start:], continued[other_start:], is_last)
            if found:
                found = found[0] + (start if is_last else other_start), found[1]
        if found is None or found[1] == self.stop:
            end = self._end_of_all_calls(chat, turn, ended, continued)
            found = (end, "") if end else found
        return found

    def _end_of_all_calls(self, chat: MarkedChat, turn: int, ended: str, continued: str) -> int:
        """Return the index in `ended` behind a token that ends all calls together, else 0."""
        end = self._end_of_shared_tokens(chat, ended, continued)
        tokens = (t.group() for t in self._specials.finditer(ended) if t.end() == end)
        if (token := next(tokens, None)) is None:
            return 0
        message, before = chat.messages[turn], chat.messages[:turn]
        doubled = {**message, "tool_calls": [*message["tool_calls"]] * 2}
        try:
            once, twice = (chat.rendered([*before, each]) for each in (message, doubled))
        except Exception:  # the template refuses a second call
            return end
        bare, prompt = self._endings(chat, [self._question]) or ("", "")
        header = prompt.removeprefix(bare).strip()
        is_turn = header and token + header in twice and len(message["tool_calls"]) == 1
        return end if twice.count(token) == once.count(token) or is_turn else 0

    def _end_of_turn(
        self, chat: MarkedChat, ended: str, continued: str, is_last: bool
    ) -> tuple[int, str] | None:
        """Return what `_end` returns for the texts behind a turn, or None if nothing ends it."""
        if end := self._end_of_shared_tokens(chat, ended, continued):
            return end, ""
        one, two = self._specials.search(ended), self._specials.search(continued)
        if one and two and ended[: one.start()].split() == continued[: two.start()].split():
            # The last turn and earlier turns end with different tokens: <|return|> and <|end|>.
            return (one if is_last else two).end(), ""
        is_bare = not ended.strip() and (not is_last or continued.startswith(ended))
        if one is None and two and is_bare and not continued[: two.start()].strip():
            # Nothing ends the last turn: append what the template prints behind other turns, up to
            # the special token that ends them or opens the next message.
            closing = continued[len(ended) : two.end()] if is_last else ""
            return len(ended) if is_last else two.end(), closing
        before, stop, _ = (ended if is_last else continued).partition(self.stop)
        if stop and not before.strip():  # EOS follows the words in this text only
            return len(before) + len(stop), ""
        has_no_end = one is None and two is None and is_last and not ended.strip()
        return (len(ended), self.stop) if has_no_end else None

    def _end_of_shared_tokens(self, chat: MarkedChat, ended: str, continued: str) -> int:
        """Return the index behind the token that ends a turn in both texts, or 0 if none does.

        This token is EOS if the texts' common prefix has EOS, else the prefix's last special token.
        """
        shared = _common_prefix(ended, continued) if continued else ended
        if self.stop in shared:
            return shared.index(self.stop) + len(self.stop)
        tokens = [*self._specials.finditer(shared)]
        if self._standing_header(chat):
            # Tokens that open the chat also open the standing header. They do not end the turn.
            opening = re.match(rf"(?:\s*(?:{self._specials.pattern}))*", chat.text)
            openers = self._specials.findall(opening.group() if opening else "")
            while tokens and tokens[-1].group() in openers:
                tokens.pop()
        return tokens[-1].end() if tokens else 0

    # --- renderings

    def _text_if_continued(self, chat: MarkedChat, turn: int) -> str:
        """Return the text from a turn to a test message behind it; "" if the template refuses."""
        answer = {"role": "user"}
        if calls := chat.chat.messages[turn].get("tool_calls"):
            name, number = calls[-1]["function"].get("name", ""), calls[-1].get("id", PROBE_ID)
            answer = {"role": "tool", "name": name, "tool_call_id": number}
        return self._text_with_next(chat, turn + 1, answer).rpartition(PROBE)[0]

    def _text_with_next(self, chat: MarkedChat, turn: int, message: Message) -> str:
        """Return the text behind the words of messages[:turn], if only `message` follows.

        PROBE replaces the content of `message`. The returned text includes PROBE. The text is "" if
        the template refuses the chat.
        """
        (probe,) = self._template.adapted([{**message, "content": PROBE}])
        try:
            return chat.text_behind_marks([*chat.messages[:turn], probe])
        except Exception:
            return ""

    @staticmethod
    def _endings(chat: MarkedChat, messages: Sequence[Message]) -> tuple[str, str] | None:
        """Return the text behind the last message's words, without and with a generation prompt.

        Returns None if the template refuses these messages.
        """
        try:
            prompted = chat.text_behind_marks(messages, generation_prompt=True)
            return chat.text_behind_marks(messages), prompted
        except Exception:  # the template refuses these messages, for example if there are none
            return None


def _common_ignoring_blanks(one: str, two: str) -> tuple[int, int]:
    """Return the index in each text where their common prefix ends. Ignores blanks."""
    i = j = 0
    shared = (0, 0)
    while i < len(one) and j < len(two):
        if one[i] == two[j]:
            shared = i, j = i + 1, j + 1
        elif one[i].isspace():
            i += 1
        elif two[j].isspace():
            j += 1
        else:
            break
    i, j = shared
    return i, j if two[j:].strip() else len(two)


def _common_prefix(one: str, two: str) -> str:
    return commonprefix([one, two])  # noqa: RUF071 - compares letters, as it should here


def _token_pattern(tokens: set[str]) -> re.Pattern[str]:
    words = sorted((t for t in tokens if t.strip()), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, words)) or "(?!)")
