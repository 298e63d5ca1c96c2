"""Where an assistant's turn starts and ends, by comparing renderings near the turn's words.

start   the text since the message before it, and the same text when the template is asked for a
        generation prompt. Both may differ by blanks. What they share is given to the model. A
        template may print the assistant's header without being asked.
end     the text up to the next message, and the same text when the turn is the last one. What they
        share belongs to the turn, up to its last special token. Calls end as answers do, or with a
        token that stands once behind all calls (<|call|>). A template without a token that ends a
        turn (GLM) ends it with the token that opens the next message. Without any special token
        the last turn gets the tokenizer's EOS.
"""

import re
from collections.abc import Sequence
from dataclasses import replace
from os.path import commonprefix
from typing import TYPE_CHECKING, Any

from utils.data.prepare.chat_templates import TAGS, ChatTemplate, MarkedChat
from utils.data.prepare.rows import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ASSISTANT = "assistant"
PROBE = "probe"
LEADING_TAGS = re.compile(rf"(?:\s*{TAGS.pattern})+\s*")
PARTIAL_TAG = re.compile(r"\s*(?:[<\[][|/\w]*)?")


class TurnDelimiter:
    """Finds the start and the end of turns in the renderings of one tokenizer's template.

    stop: the tokenizer's EOS. added: a pattern of all added tokens, special or not.
    """

    def __init__(self, template: ChatTemplate, tokenizer: "PreTrainedTokenizerBase"):
        self._template = template
        added = tokenizer.added_tokens_decoder.values()
        special = {str(t) for t in added if t.special} | set(tokenizer.all_special_tokens)
        self._specials = _pattern(special)
        self.added = _pattern(special | {str(t) for t in added})
        self.stop = str(tokenizer.eos_token)
        self._headers: dict[Any, str] = {}

    def start(self, chat: MarkedChat, turn: int, gap: str) -> int:
        """Return how much of the text between the message before and the turn is its header."""
        header = self._prompted(chat, turn, gap)
        if header < 0 and (header := self._headed(chat, gap)) < 0:
            _, prompt = self._openings(chat, chat.messages[:turn]) or ("", "")
            problem = (
                f"the chat template opens it with {_shown(gap)}, and its generation prompt is "
                f"{_shown(prompt)} (--chat_template takes a template in which both are alike)"
            )
            raise chat.refused(turn, problem)
        return header

    def _prompted(self, chat: MarkedChat, turn: int, gap: str) -> int:
        """Return how much of a gap the generation prompt prints too, -1 if they are different."""
        openings = self._openings(chat, chat.messages[:turn])
        if openings is None:
            return -1
        bare, opening = openings
        closed = self._closed(chat, turn, gap, bare)
        reply, _, _ = self._around_probe(chat, turn, {"role": ASSISTANT}).partition(PROBE)
        if opening == closed:
            # No generation prompt: the model is given what precedes any reply.
            if not reply.startswith(bare) or re.search(r"\w", reply[len(bare) :]):
                opening = reply or opening  # else what it says begins with a blank, no header
            match = self._specials.match(bare.lstrip())
            token = match.group() if match else self.stop
            if reply and token != self.stop and not reply.lstrip().startswith(token):
                return -1  # the chat ends otherwise than it goes on
            closed = ""
        shared, common = _alike(gap, opening)
        rest = opening[common:]
        if not gap.strip() and re.search(r"\w", rest) and not self.added.search(rest):
            return -1  # the prompt has words that the chat does not have
        if shared == len(gap) or not rest:
            return shared
        if (cut := self._parted(gap, opening, closed, reply)) >= 0:
            return cut
        shared, common = _alike(gap, bare)  # a call may have no header where a reply has one
        return shared if not closed and bare.strip() and common == len(bare) else -1

    def _parted(self, gap: str, opening: str, closed: str, reply: str) -> int:
        """Return the end of the header in a gap that differs from the prompt behind it, or -1.

        The chat may have <think></think> where the prompt has <think> and a line break. closed:
        what the message before ends with. reply: what precedes any answer in a chat.
        """
        shared, start = _alike(gap, opening)[0], _alike(gap, closed)[0]
        cut = max([start, *(match.end() for match in self.added.finditer(gap[:shared]))])
        cut = max(cut, gap.rfind("\n", 0, shared) + 1)
        tags = LEADING_TAGS.match(gap, cut)
        for tag in reversed([*TAGS.finditer(gap, cut, tags.end() if tags else cut)]):
            if opening.rstrip().endswith(gap[cut : tag.end()].strip()):
                return tag.end()  # the prompt ends with </think>, too
        header = reply[_alike(reply, gap[:cut])[0] :].strip()
        is_other = not gap[start:cut].strip() if header else False
        has_words = re.search(r"\w", TAGS.sub("", header))
        return cut if PARTIAL_TAG.fullmatch(gap[cut:shared]) and not (is_other or has_words) else -1

    def _closed(self, chat: MarkedChat, turn: int, gap: str, bare: str) -> str:
        """Return what of the end of a chat belongs to its last message.

        The rest is the assistant's header, printed without being asked for: no other message
        goes on so.
        """
        for role in ("user", "tool"):
            before, probe, _ = self._around_probe(chat, turn, {"role": role}).rpartition(PROBE)
            if probe:
                closed = _alike(before, bare)[1]
                return bare[:closed] if _alike(gap, bare)[1] > closed else bare
        header = self._always(chat)
        return bare.rstrip().removesuffix(header) if header else bare

    def _always(self, chat: MarkedChat) -> str:
        """Return the end of the header that is printed where a chat ends; "" if none is."""
        key = bool(chat.chat.tools), repr(chat.chat.template_options)
        if key not in self._headers:
            self._headers[key] = self._printed_always(chat)
        return self._headers[key]

    def _printed_always(self, chat: MarkedChat) -> str:
        asked, said, more = self._template.adapted(
            {"role": role, "content": PROBE} for role in ("user", ASSISTANT, "user")
        )
        try:
            question = self._tail(chat, [asked]).rpartition(PROBE)[2]
            ended = self._tail(chat, [asked, said]).rpartition(PROBE)[2]
            _, following, _ = self._tail(chat, [asked, said, more]).rsplit(PROBE, 2)
        except Exception:  # the template refuses these messages
            return ""
        start = len(_shared(ended, following))
        for text in (ended, following):  # not from within a token
            tokens = (t.start() for t in self._specials.finditer(text) if t.end() > start)
            start = min(start, next(tokens, start))
        rest = ended[start:].strip()
        return rest if rest != self.stop and question.rstrip().endswith(rest) else ""

    def _headed(self, chat: MarkedChat, gap: str) -> int:
        """Return the end of a header in the gap: what the prompt prints after a user's turn."""
        bare, prompt = self._openings(chat, self._question()) or ("", "")
        header = prompt.removeprefix(_shared(prompt, bare))
        role = re.sub(r"(?:\s*</?think>\s*)+$", "", header)
        known = next((text for text in (header, role + "\n") if text.strip() and text in gap), None)
        return -1 if known is None else gap.rindex(known) + len(known)

    def end(self, chat: MarkedChat, turn: int, following: str) -> tuple[int, str]:
        """Return how much of what follows a turn's words belongs to it, and what to append."""
        is_last = turn == len(chat.messages) - 1
        ended = self._tail(chat, chat.messages[: turn + 1])
        header = self._always(chat)
        printed = ended
        if header and ended.rstrip().endswith(header):
            ended = ended.rstrip().removesuffix(header)
        continued = self._if_continued(chat, turn) if is_last else following
        found = None
        if not chat.chat.messages[turn].get("tool_calls"):
            found = self._delimited(chat, ended, continued, is_last)
        else:
            plain = self._plain_end(chat, turn)
            if ended.rstrip().endswith(plain):
                # Calls end as other turns do.
                done = at = len(ended.rstrip()) - len(plain)
                if plain and not continued.startswith(ended[:done]):
                    at = continued.find(plain)  # more of the calls is printed there
                if at >= 0:
                    found = self._delimited(chat, ended[done:], continued[at:], is_last)
                found = found and (found[0] + (done if is_last else at), found[1])
            if found is None or found[1] == self.stop:
                own = self._end_of_calls(chat, turn, ended, continued)
                found = (own, "") if own else found
        if found is None:
            shown = _shown(continued or ended)
            raise chat.refused(
                turn,
                "no special token ends it, so the model would never learn to stop (after its words "
                f"comes {shown}; --chat_template takes a template that ends turns with a token)",
            )
        if not found[1] and _shared(ended[: found[0]], continued) == ended[: found[0]]:
            self._check_behind(chat, turn, printed[found[0] :])
        return found

    def _check_behind(self, chat: MarkedChat, turn: int, left: str) -> None:
        """Raise UnusableRowError if more of a last turn is printed behind its end.

        Tokens may close the chat there; so may what is printed behind a question, too.
        """
        if self._specials.sub("", left.replace(self.stop, "")).strip():
            question, _ = self._openings(chat, self._question()) or ("", "")
            if not question.rstrip().endswith(left.strip()):
                problem = f"the template prints {_shown(left)} behind the token that ends it"
                raise chat.refused(turn, problem, "mask_incomplete")

    def _end_of_calls(self, chat: MarkedChat, turn: int, ended: str, continued: str) -> int:
        """Return where the token is that ends calls alone; 0: there is none.

        Such a token ends a turn, not each of its calls.
        """
        end = self._shared_end(chat, ended, continued)
        tokens = (t.group() for t in self._specials.finditer(ended) if t.end() == end)
        if (token := next(tokens, None)) is None:
            return 0
        message = chat.messages[turn]
        given = [message, {**message, "tool_calls": [*message["tool_calls"]] * 2}]
        try:
            once, twice = (self._rendered(chat, [*chat.messages[:turn], m]) for m in given)
        except Exception:  # the template takes one call only
            return end
        bare, prompt = self._openings(chat, self._question()) or ("", "")
        header = prompt.removeprefix(bare).strip()
        is_turn = header and token + header in twice and len(message["tool_calls"]) == 1
        return end if twice.count(token) == once.count(token) or is_turn else 0

    def _question(self) -> list[dict[str, Any]]:
        return self._template.adapted([{"role": "user", "content": PROBE}])

    def _plain_end(self, chat: MarkedChat, turn: int) -> str:
        """Return what is printed behind an answer without calls in the place of a turn."""
        answer = self._around_probe(chat, turn, {"role": ASSISTANT})
        return answer.rpartition(PROBE)[2].strip().removesuffix(self._always(chat)).strip()

    def _delimited(
        self, chat: MarkedChat, ended: str, continued: str, is_last: bool
    ) -> tuple[int, str] | None:
        """Return where a turn ends behind its words, and what to append; None: nowhere.

        ended: what is printed behind the words of the chat's last turn; continued: of another.
        """
        if end := self._shared_end(chat, ended, continued):
            return end, ""
        one, two = self._specials.search(ended), self._specials.search(continued)
        if one and two and ended[: one.start()].split() == continued[: two.start()].split():
            # One token closes the chat, another a turn within: <|return|> and <|end|>.
            return (one if is_last else two).end(), ""
        is_bare = not ended.strip() and (not is_last or continued.startswith(ended))
        if one is None and two and is_bare and not continued[: two.start()].strip():
            # Nothing ends a last turn: it gets what ends others, or opens the next message.
            closing = continued[len(ended) : two.end()] if is_last else ""
            return len(ended) if is_last else two.end(), closing
        before, stop, _ = (ended if is_last else continued).partition(self.stop)
        if stop and not before.strip():  # it is printed otherwise where it comes last
            return len(before) + len(stop), ""
        has_no_end = one is None and two is None and is_last and not ended.strip()
        return (len(ended), self.stop) if has_no_end else None

    def _shared_end(self, chat: MarkedChat, ended: str, continued: str) -> int:
        """Return the end of the special tokens that end a turn whatever comes next, or 0."""
        alike = _shared(ended, continued) if continued else ended
        if self.stop in alike:
            return alike.index(self.stop) + len(self.stop)
        tokens = [*self._specials.finditer(alike)]
        while self._always(chat) and tokens and tokens[-1].group() in self._openers(chat):
            tokens.pop()  # of a header that is printed always, and of a user's
        return tokens[-1].end() if tokens else 0

    def _openers(self, chat: MarkedChat) -> set[str]:
        """Return the special tokens that a chat begins with."""
        openers: set[str] = set()
        end = 0
        for token in self._specials.finditer(chat.text):
            if chat.text[end : token.start()].strip():
                break
            openers.add(token.group())
            end = token.end()
        return openers

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
        (probe,) = self._template.adapted([{**message, "content": PROBE}])
        try:
            return self._tail(chat, [*chat.messages[:turn], probe])
        except Exception:  # the template refuses these messages
            return ""

    def _openings(self, chat: MarkedChat, messages: Sequence[Message]) -> tuple[str, str] | None:
        """Return what follows messages without and with a generation prompt; None if refused."""
        try:
            return self._tail(chat, messages), self._tail(chat, messages, generation_prompt=True)
        except Exception:  # the template refuses no messages, or these as the last ones
            return None

    def _tail(
        self, chat: MarkedChat, messages: Sequence[Message], generation_prompt: bool = False
    ) -> str:
        """Return what is printed behind the words of the last of some messages."""
        return chat.tail(self._rendered(chat, messages, generation_prompt))

    def _rendered(
        self, chat: MarkedChat, messages: Sequence[Message], generation_prompt: bool = False
    ) -> str:
        return self._template.render(replace(chat.chat, messages=messages), generation_prompt)


def _alike(one: str, two: str) -> tuple[int, int]:
    """Return how much of two strings is the same but for blanks before what is."""
    i = j = 0
    alike = (0, 0)
    while i < len(one) and j < len(two):
        if one[i] == two[j]:
            alike = i, j = i + 1, j + 1
        elif one[i].isspace():
            i += 1
        elif two[j].isspace():
            j += 1
        else:
            break
    i, j = alike
    return i, j if two[j:].strip() else len(two)


def _shared(one: str, two: str) -> str:
    """Return the common beginning of two strings."""
    return commonprefix([one, two])  # noqa: RUF071 - letter by letter is what is wanted


def _shown(text: str) -> str:
    return repr(text if len(text) <= 80 else "..." + text[-80:])


def _pattern(tokens: set[str]) -> re.Pattern[str]:
    words = sorted((t for t in tokens if t.strip()), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, words)) or "(?!)")
