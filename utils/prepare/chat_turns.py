"""The start and the end of an assistant's turn, found by comparing renderings around its words.

start   Compare the text between the previous message and the turn with the text that the template
        prints as a generation prompt. The part that both share is the header, which the model is
        given. Blanks may differ. Some templates print the header at the end of every chat, even
        without a request for a generation prompt: this is the standing header.
end     Compare the text between the turn and the next message with the text behind the same turn
        at the end of a chat. The shared part, up to its last special token, belongs to the turn.
        Tool calls end as answers do, or with a token that is printed once after all calls
        (<|call|>). If a template has no token to end a turn (GLM), the token that opens the next
        message ends the turn. If the template has no special tokens at all, the tokenizer's EOS is
        appended to the last turn.
"""

import re
from collections.abc import Sequence
from dataclasses import replace
from os.path import commonprefix
from typing import TYPE_CHECKING, Any

from utils.prepare.chat_templates import TAGS, ChatTemplate, MarkedChat
from utils.prepare.rows import Message
from utils.prepare.values import ASSISTANT

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PROBE = "probe"
LEADING_TAGS = re.compile(rf"(?:\s*{TAGS.pattern})+\s*")
PARTIAL_TAG = re.compile(r"\s*(?:[<\[][|/\w]*)?")


class TurnDelimiter:
    """Finder of the start and the end of turns in the renderings of one template.

    The texts between the words of messages have these names everywhere:

    gap        between the previous message and the turn
    following  between the turn and the next message
    ended      behind the turn, if the turn is the last message of the chat
    continued  behind the turn, if another message follows
    bare       behind the last message of a chat without a generation prompt

    stop: the tokenizer's EOS. added: a pattern of all added tokens, special or not.
    """

    def __init__(self, template: ChatTemplate, tokenizer: "PreTrainedTokenizerBase"):
        self._template = template
        added = tokenizer.added_tokens_decoder.values()
        special = {str(t) for t in added if t.special} | set(tokenizer.all_special_tokens)
        self._specials = _pattern(special)
        self.added = _pattern(special | {str(t) for t in added})
        self.stop = str(tokenizer.eos_token)
        self._standing_headers: dict[Any, str] = {}
        (self._question,) = template.adapted([{"role": "user", "content": PROBE}])

    # --- the start of a turn

    def header_length(self, chat: MarkedChat, turn: int, gap: str) -> int:
        """Return the index in the gap where the turn's header ends.

        Raises UnusableRowError if the gap has no header that the generation prompt has as well.
        """
        header = self._header_like_prompt(chat, turn, gap)
        if header < 0:
            header = self._header_after_question(chat, gap)
        if header < 0:
            _, prompt = self._endings(chat, chat.messages[:turn]) or ("", "")
            problem = (
                f"the chat template opens it with {_shown(gap)}, and its generation prompt is "
                f"{_shown(prompt)} (--chat_template takes a template in which both are alike)"
            )
            raise chat.refused(turn, problem)
        return header

    def _header_like_prompt(self, chat: MarkedChat, turn: int, gap: str) -> int:
        """Return the end of the header in a gap, by comparison with the generation prompt there.

        Return -1 if gap and generation prompt share no header.
        """
        endings = self._endings(chat, chat.messages[:turn])
        if endings is None:
            return -1
        bare, prompt = endings
        closed = self._end_of_last_message(chat, turn, gap, bare)
        reply, _, _ = self._followed_by(chat, turn, {"role": ASSISTANT}).partition(PROBE)
        if prompt == closed:
            # The template has no generation prompt. Use the text that it prints before any reply.
            if not reply.startswith(bare) or re.search(r"\w", reply[len(bare) :]):
                prompt = reply or prompt  # otherwise the reply has no words in front, so no header
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
        """Return the end of the header if gap and prompt differ behind the header; else -1.

        For example, the chat has <think></think> and the prompt has <think> and a line break.
        closed: the text that ends the previous message. reply: the text that the template prints
        between the previous message and any short reply.
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

    def _end_of_last_message(self, chat: MarkedChat, turn: int, gap: str, bare: str) -> str:
        """Return the part of `bare` that ends the last message.

        The rest of `bare` is a standing header. The template prints this header at the end of a
        chat, but not before a message of another role.
        """
        for role in ("user", "tool"):
            before, probe, _ = self._followed_by(chat, turn, {"role": role}).rpartition(PROBE)
            if probe:
                closed = _common_ignoring_blanks(before, bare)[1]
                return bare[:closed] if _common_ignoring_blanks(gap, bare)[1] > closed else bare
        header = self._standing_header(chat)
        return bare.rstrip().removesuffix(header) if header else bare

    def _standing_header(self, chat: MarkedChat) -> str:
        """Return the last part of the standing header, or "" if the template has none.

        A standing header is an assistant's header at the end of every chat.
        """
        key = bool(chat.chat.tools), repr(chat.chat.template_options)
        if key not in self._standing_headers:
            self._standing_headers[key] = self._find_standing_header(chat)
        return self._standing_headers[key]

    def _find_standing_header(self, chat: MarkedChat) -> str:
        asked, answer, more = self._template.adapted(
            {"role": role, "content": PROBE} for role in ("user", ASSISTANT, "user")
        )
        try:
            question = self._after_last_mark(chat, [asked]).rpartition(PROBE)[2]
            ended = self._after_last_mark(chat, [asked, answer]).rpartition(PROBE)[2]
            whole = self._after_last_mark(chat, [asked, answer, more])
            _, following, _ = whole.rsplit(PROBE, 2)
        except Exception:  # the template refuses these messages
            return ""
        start = len(_common_prefix(ended, following))
        for text in (ended, following):  # do not cut a token in two
            tokens = (t.start() for t in self._specials.finditer(text) if t.end() > start)
            start = min(start, next(tokens, start))
        rest = ended[start:].strip()
        return rest if rest != self.stop and question.rstrip().endswith(rest) else ""

    def _header_after_question(self, chat: MarkedChat, gap: str) -> int:
        """Return the end of the header in a gap, by comparison with the prompt after a question.

        Return -1 if the gap does not have the header of this generation prompt.
        """
        bare, prompt = self._endings(chat, [self._question]) or ("", "")
        header = prompt.removeprefix(_common_prefix(prompt, bare))
        role = re.sub(r"(?:\s*</?think>\s*)+$", "", header) + "\n"
        known = next((text for text in (header, role) if text.strip() and text in gap), None)
        return -1 if known is None else gap.rindex(known) + len(known)

    # --- the end of a turn

    def end(self, chat: MarkedChat, turn: int, following: str) -> tuple[int, str]:
        """Return (the length of the turn's end in the text behind it, a text to append to it).

        The text to append is "" if the template itself ends the turn. Raises UnusableRowError if
        nothing ends the turn.
        """
        is_last = turn == len(chat.messages) - 1
        printed = self._after_last_mark(chat, chat.messages[: turn + 1])
        ended, header = printed, self._standing_header(chat)
        if header and printed.rstrip().endswith(header):
            ended = printed.rstrip().removesuffix(header)
        continued = self._text_if_continued(chat, turn) if is_last else following
        if chat.chat.messages[turn].get("tool_calls"):
            found = self._end_after_calls(chat, turn, ended, continued)
        else:
            found = self._end_of_turn(chat, ended, continued, is_last)
        if found is None:
            shown = _shown(continued or ended)
            raise chat.refused(
                turn,
                "no special token ends it, so the model would never learn to stop (after its words "
                f"comes {shown}; --chat_template takes a template that ends turns with a token)",
            )
        length, closing = found
        if not closing and continued.startswith(ended[:length]):
            self._check_behind(chat, turn, printed[length:])
        return found

    def _end_after_calls(
        self, chat: MarkedChat, turn: int, ended: str, continued: str
    ) -> tuple[int, str] | None:
        """Return the result of `end` for a turn with tool calls; None if no token ends the turn."""
        is_last = turn == len(chat.messages) - 1
        answer = self._followed_by(chat, turn, {"role": ASSISTANT}).rpartition(PROBE)[2].strip()
        plain = answer.removesuffix(self._standing_header(chat)).strip()
        found = None
        if ended.rstrip().endswith(plain):  # calls end as answers do
            done = at = len(ended.rstrip()) - len(plain)
            if plain and not continued.startswith(ended[:done]):
                at = continued.find(plain)  # `continued` has more of the calls before their end
            if at >= 0:
                found = self._end_of_turn(chat, ended[done:], continued[at:], is_last)
            if found:
                found = found[0] + (done if is_last else at), found[1]
        if found is None or found[1] == self.stop:
            own = self._end_of_all_calls(chat, turn, ended, continued)
            found = (own, "") if own else found
        return found

    def _check_behind(self, chat: MarkedChat, turn: int, left: str) -> None:
        """Raise UnusableRowError if words are printed behind the end of the last turn.

        Allowed are special tokens, and a text that the template prints after a question as well.
        """
        if self._specials.sub("", left.replace(self.stop, "")).strip():
            question, _ = self._endings(chat, [self._question]) or ("", "")
            if not question.rstrip().endswith(left.strip()):
                problem = f"the template prints {_shown(left)} behind the token that ends it"
                raise chat.refused(turn, problem, "mask_incomplete")

    def _end_of_all_calls(self, chat: MarkedChat, turn: int, ended: str, continued: str) -> int:
        """Return the end of the token that is printed once after all calls; 0 without such a token.

        A token that ends each call does not count.
        """
        end = self._end_of_shared_tokens(chat, ended, continued)
        tokens = (t.group() for t in self._specials.finditer(ended) if t.end() == end)
        if (token := next(tokens, None)) is None:
            return 0
        message, before = chat.messages[turn], chat.messages[:turn]
        doubled = {**message, "tool_calls": [*message["tool_calls"]] * 2}
        try:
            once, twice = (self._rendered(chat, [*before, each]) for each in (message, doubled))
        except Exception:  # the template takes one call only
            return end
        bare, prompt = self._endings(chat, [self._question]) or ("", "")
        header = prompt.removeprefix(bare).strip()
        is_turn = header and token + header in twice and len(message["tool_calls"]) == 1
        return end if twice.count(token) == once.count(token) or is_turn else 0

    def _end_of_turn(
        self, chat: MarkedChat, ended: str, continued: str, is_last: bool
    ) -> tuple[int, str] | None:
        """Return the result of `end`, from the texts behind a turn's words; None without an end.

        ended and continued: as in the class. is_last: the turn is the last one of this chat.
        """
        if end := self._end_of_shared_tokens(chat, ended, continued):
            return end, ""
        one, two = self._specials.search(ended), self._specials.search(continued)
        if one and two and ended[: one.start()].split() == continued[: two.start()].split():
            # One token ends the last turn, another one the turns before: <|return|> and <|end|>.
            return (one if is_last else two).end(), ""
        is_bare = not ended.strip() and (not is_last or continued.startswith(ended))
        if one is None and two and is_bare and not continued[: two.start()].strip():
            # Nothing ends the last turn: append the text up to the next special token, which ends
            # other turns or opens the next message.
            closing = continued[len(ended) : two.end()] if is_last else ""
            return len(ended) if is_last else two.end(), closing
        before, stop, _ = (ended if is_last else continued).partition(self.stop)
        if stop and not before.strip():  # the template prints something else behind a last turn
            return len(before) + len(stop), ""
        has_no_end = one is None and two is None and is_last and not ended.strip()
        return (len(ended), self.stop) if has_no_end else None

    def _end_of_shared_tokens(self, chat: MarkedChat, ended: str, continued: str) -> int:
        """Return the end of the special tokens in the common start of both texts; 0 without any."""
        shared = _common_prefix(ended, continued) if continued else ended
        if self.stop in shared:
            return shared.index(self.stop) + len(self.stop)
        tokens = [*self._specials.finditer(shared)]
        if self._standing_header(chat):
            # The tokens of a standing header open the next message, so they do not end the turn.
            openers = self._opening_tokens(chat)
            while tokens and tokens[-1].group() in openers:
                tokens.pop()
        return tokens[-1].end() if tokens else 0

    def _opening_tokens(self, chat: MarkedChat) -> set[str]:
        """Return the special tokens at the beginning of a chat."""
        openers: set[str] = set()
        end = 0
        for token in self._specials.finditer(chat.text):
            if chat.text[end : token.start()].strip():
                break
            openers.add(token.group())
            end = token.end()
        return openers

    # --- renderings

    def _text_if_continued(self, chat: MarkedChat, turn: int) -> str:
        """Return the text behind the last turn if another message followed; "" if none can."""
        answer = {"role": "user"}
        if calls := chat.chat.messages[turn].get("tool_calls"):
            name, number = calls[-1]["function"].get("name", ""), calls[-1].get("id", "abcdefghi")
            answer = {"role": "tool", "name": name, "tool_call_id": number}
        before, probe, _ = self._followed_by(chat, turn + 1, answer).rpartition(PROBE)
        return before if probe else ""

    def _followed_by(self, chat: MarkedChat, turn: int, message: Message) -> str:
        """Return the text behind the first `turn` messages if `message` follows, with text PROBE.

        The text goes on to the end of the chat. It is "" if the template refuses the chat.
        """
        (probe,) = self._template.adapted([{**message, "content": PROBE}])
        try:
            return self._after_last_mark(chat, [*chat.messages[:turn], probe])
        except Exception:
            return ""

    def _endings(self, chat: MarkedChat, messages: Sequence[Message]) -> tuple[str, str] | None:
        """Return the texts behind messages without and with generation prompt; None if refused."""
        try:
            bare = self._after_last_mark(chat, messages)
            return bare, self._after_last_mark(chat, messages, generation_prompt=True)
        except Exception:  # the template refuses an empty chat, or a chat that ends with these
            return None

    def _after_last_mark(
        self, chat: MarkedChat, messages: Sequence[Message], generation_prompt: bool = False
    ) -> str:
        """Render messages, and return the text behind the words of the last message."""
        return chat.after_last_mark(self._rendered(chat, messages, generation_prompt))

    def _rendered(
        self, chat: MarkedChat, messages: Sequence[Message], generation_prompt: bool = False
    ) -> str:
        return self._template.render(replace(chat.chat, messages=messages), generation_prompt)


def _common_ignoring_blanks(one: str, two: str) -> tuple[int, int]:
    """Return the length of the common beginning in each of two strings, ignoring blanks."""
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
    """Return the common beginning of two strings."""
    return commonprefix([one, two])  # noqa: RUF071 - compares letters, as it should here


def _shown(text: str) -> str:
    return repr(text if len(text) <= 80 else "..." + text[-80:])


def _pattern(tokens: set[str]) -> re.Pattern[str]:
    words = sorted((t for t in tokens if t.strip()), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, words)) or "(?!)")
