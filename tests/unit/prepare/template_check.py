"""A structural check of loss masks, independent of the code that derives the masks.

Each text, argument, number and key of a chat is a word that occurs nowhere else. So the words alone
show where each message is in a rendering. The check requires for every trained turn:

- all words of the turn are in its span, and a span never has words of another message;
- the text before the span is exactly the generation prompt;
- the span ends with a special token, and with the same text if the chat ends after this turn;
- the last turn is followed by blanks, the end of the chat, or a header that is always printed.
"""

import re
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import product
from os.path import commonprefix

import numpy as np
from template_chats import ASK, KINDS, PLACE, Kind, document
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from utils.prepare.chat_masks import ChatMasks
from utils.prepare.chat_templates import ChatTemplate
from utils.prepare.rows import ChatDocument
from utils.prepare.tokenization import token_mask
from utils.prepare.values import UnusableRowError

NEVER_PRINTED = "<|never_printed|>"
SPECIAL = re.compile(
    r"<\|[^|<>\s'{}+~]{1,40}\|?>|<[^|<>\s'\"{}+~/]{1,30}\|>|<\uff5c[^\uff5c<>\s]+\uff5c>|</?s>"
    r"|</?(?:start|end|begin)_of_\w+>|<\[(?:begin|end)[^<>\s]*\]>|\[/?[A-Z_]{3,20}\]|\[\|\w+\|\]"
    r"|</?(?:eos|bos|sep|step|end|assistant|user|system|seed:\w+)>|\[gMASK\]|\]<\]\w+\[>\[|\[e~\["
    r"|\]~[!b]\w*\[|<[A-Z]+_\d+>|<(?:reserved|extra_id)_\d+>|<_\w+>|</?\w+_message>"
)
ADDED = re.compile(r"</?(?:tool_call|tool_calls|tool_response|think|function_call)>")
END = re.compile(
    r"<\|(?:im_end|eot_id|return|\w*END_OF_TURN\w*|TURN_END|eom|eot|eom_id|end_of_text|endoftext|end)\|>"
    r"|<turn\|>|<end_of_(?:turn|utterance)>|<\uff5cend\u2581of\u2581sentence\uff5c>|</s>|\[e~\["
)
SHOWN = ("system, two turns", "one turn", "call, string", "call, nested", "thought")

# --- a template's tokenizer


def byte_tokenizer(template, printed, eos):
    """Return a tokenizer of bytes and of the special tokens in a template and its renderings."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<s>",
        eos_token=eos,
        additional_special_tokens=list(dict.fromkeys(SPECIAL.findall(template + printed))),
        clean_up_tokenization_spaces=False,
    )
    added = dict.fromkeys(ADDED.findall(template))
    tokenizer.add_tokens([AddedToken(word, special=False, normalized=False) for word in added])
    tokenizer.chat_template = template
    return tokenizer


@cache
def renderings(template):
    """Return a template's output for some chats, or "" if it refuses all of them."""
    rendered = ChatTemplate(byte_tokenizer(template, "", "</s>"), "2026-01-02")
    texts = []
    for name, tools, prompt in product(SHOWN, (True, False), (True, False)):
        chat = document(KINDS[name], tools)
        with suppress(Exception):
            chat = replace(chat, messages=rendered.adapted(chat.messages))
            texts.append(rendered.render(chat, prompt))
    return "\n".join(texts)


@cache
def tokenizer_of(template, eos=""):
    """Return a template's tokenizer. By default EOS is the last printed token that ends turns."""
    printed = renderings(template)
    ends = [token for token in SPECIAL.findall(printed) if END.fullmatch(token)]
    return byte_tokenizer(template, printed, eos or (ends[-1] if ends else "</s>"))


# --- words

HEADER = re.compile(r"assistant|chatbot|model|bot\b", re.IGNORECASE)
FALSE = re.compile(r"keyg[^\n]{0,60}?\n?[^\n]{0,60}?false\b", re.IGNORECASE)
BRACKETS = re.compile(r"[\]}]\s*(<|\[|$)")  # the closing brackets of a call
HEADS = {
    "user": re.compile("user|human|question|<sep>|AVAILABLE_TOOLS", re.IGNORECASE),
    "tool": re.compile(
        "tool|result|function|ipython|obs|response|environment|user|human", re.IGNORECASE
    ),
}
TAG = re.compile(r"<[^<>\s]+>")


def words_of(value):
    """Yield the words of texts, keys and numbers."""
    if isinstance(value, dict):
        value = [*value, *value.values()]
    if isinstance(value, list):
        for item in value:
            yield from words_of(item)
    elif value is not None and not isinstance(value, bool):
        yield from re.findall(r"\d+\.\d+|\w+", TAG.sub(" ", str(value)))


def said_words(message):
    arguments = [call["function"]["arguments"] for call in message.get("tool_calls") or []]
    return {word for word in words_of([message["content"], arguments]) if len(word) > 3}


def thought_words(message):
    inside = re.search(r"<think>(.*)</think>", message["content"], re.DOTALL)
    return set(words_of(message.get("reasoning_content") or (inside[1] if inside else "")))


def all_words(messages):
    return {word for one in messages for word in said_words(one) | thought_words(one)}


def places(words, text):
    """Return the spans of words in a text."""
    pattern = "|".join(map(re.escape, sorted(words, key=len, reverse=True))) or "(?!)"
    return [match.span() for match in re.finditer(pattern, text)]


def blankless(text):
    return re.sub(r"\s+", "", text)


# --- the check


@dataclass
class Checked:
    """The outcome for one template with one EOS."""

    trained: int = 0
    refused: dict[str, str] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)


class TemplateCheck:
    """Runs every kind of chat through one template with one EOS."""

    def __init__(self, template, eos=""):
        self.tokenizer = tokenizer_of(template, eos)
        self.eos = self.tokenizer.eos_token
        self.masks = ChatMasks(self.tokenizer, "2026-01-02")
        words = sorted(self.tokenizer.all_special_tokens, key=len, reverse=True)
        self.special = re.compile("|".join(map(re.escape, words)))

    def run(self):
        outcome = Checked()
        # Some templates refuse chats without tools.
        needs_tools = self._rendered(ChatDocument([ASK], PLACE), 1, False) is None
        for name, kind in KINDS.items():
            tools = kind.tools or needs_tools
            try:
                found = self.masks(document(kind, tools))
            except UnusableRowError as error:
                outcome.refused[name] = f"{error.reason}: {error}"
                continue
            outcome.trained += 1
            try:
                outcome.wrong += [f"{name}: {fault}" for fault in self.faults(kind, tools, found)]
            except UnusableRowError as error:
                outcome.wrong.append(f"{name}: cut or twin refused: {error}")
        return outcome

    def faults(self, kind, tools, found):
        """Yield what is wrong with the mask of a chat."""
        chat = document(kind, tools)
        trained = [
            i
            for i, message in enumerate(chat.messages)
            if message["role"] == "assistant"
            and message.get("weight") != 0
            and i >= kind.first_trained
        ]
        said = [found.text[start:stop] for start, stop in found.spans]
        encoded = self.tokenizer(found.text, add_special_tokens=False, return_offsets_mapping=True)
        mask = token_mask(found, np.array(encoded["offset_mapping"]))
        tokens = self.tokenizer.decode(np.array(encoded["input_ids"])[mask])
        if tokens != "".join(said):
            yield f"the loss tokens are {tokens!r}"
        if kind.twin:
            pattern, words = kind.twin
            replaced = [
                {**m, "content": re.sub(pattern, words, m["content"])} for m in kind.messages
            ]
            other = self.masks(document(Kind(replaced), tools))
            expected = [re.sub(pattern, lambda _: words, text) for text in said]
            if [other.text[a:b] for a, b in other.spans] != expected:
                yield f"twin: {[other.text[a:b] for a, b in other.spans]} for {expected}"
        yield from self._words_inside(chat.messages, trained, found)
        if self.masks.template.has_markers:
            return
        if len(said) != len(trained):
            yield f"{len(said)} spans for {len(trained)} turns"
            return
        for turn, span in zip(trained, found.spans, strict=True):
            yield from self._start(chat, turn, found.text, span)
            yield from self._end(chat, turn, found.text, span)

    def _words_inside(self, messages, trained, found):
        text = found.text
        said = " ".join(text[slice(*span)] for span in found.spans)
        for i, message in enumerate(messages):
            others = all_words([other for j, other in enumerate(messages) if j != i])
            own = all_words([message]) - others
            outside = [
                text[a:b]
                for a, b in places(own, text)
                if (i in trained) != any(start <= a and b <= stop for start, stop in found.spans)
            ]
            if outside:
                yield f"message {i}: wrong side of the mask: {outside}"
            missing = (said_words(message) - thought_words(message)) & own
            if missing := {word for word in missing if word not in text}:
                yield f"message {i}: {sorted(missing)} are not printed"
            if i in trained and message.get("tool_calls"):
                if "look_up" not in said:
                    yield f"message {i}: the name of the call is not trained on"
                if "keyg" in said and not FALSE.search(said):
                    yield f"message {i}: a boolean is not trained on"

    def _rendered(self, chat, stop, prompt):
        try:
            messages = self.masks.template.adapted(chat.messages[:stop])
            return self.masks.template.render(ChatDocument(messages, PLACE, chat.tools), prompt)
        except Exception:
            return None

    def _behind_words(self, chat, stop, text):
        """Return the text after the words of the messages before `stop`."""
        found = places(all_words(chat.messages[:stop]), text)
        return text[found[-1][1] if found else 0 :]

    def _start(self, chat, turn, text, span):
        prompt, bare = self._rendered(chat, turn, True), self._rendered(chat, turn, False)
        if prompt is None or bare is None:
            return
        given = blankless(self._behind_words(chat, turn, text[: span[0]]))
        opening = blankless(self._behind_words(chat, turn, prompt))
        if opening.startswith(given):
            rest = opening[len(given) :]
            token = self.special.match(rest)
            shared = token.group() if token else rest[:4]
            if rest and blankless(text[slice(*span)]).startswith(shared):
                yield f"message {turn}: {shared!r} of the prompt {opening!r} is trained on"
        elif prompt != bare and given.startswith(opening):
            yield f"message {turn}: {given[len(opening) :]!r} is left to the prompt {opening!r}"
        elif prompt != bare:
            alike = len(commonprefix([given, opening]))  # noqa: RUF071 - of letters
            # A thinking tag of the prompt may be missing in the chat.
            if not opening.endswith(given[alike:].removeprefix(given[:alike].rpartition("<")[2])):
                yield f"message {turn}: given {given!r}, but the prompt is {opening!r}"
        elif not given.startswith(opening) or HEADER.search(opening):
            yield f"message {turn}: no prompt: given {given!r} for {opening!r}"

    def _openers(self, chat):
        """Return the generation prompt's first token; without a prompt, a chat's first tokens."""
        stop = 1 + (chat.messages[0]["role"] == "system")
        prompt, bare = self._rendered(chat, stop, True), self._rendered(chat, stop, False)
        if prompt and bare is not None and prompt != bare:
            added = prompt.removeprefix(bare) if prompt.startswith(bare) else ""
            return {*self.special.findall(added)[:1]} - {self.eos}
        opening = re.match(rf"(?:\s*(?:{self.special.pattern}))*", bare or "").group()
        return {*self.special.findall(opening)} - {self.eos}

    def _end(self, chat, turn, text, span):
        said, rest = text[slice(*span)], text[span[1] :]
        messages = list(chat.messages)
        tokens = [m for m in self.special.finditer(said) if m.end() == len(said.rstrip())]
        if not tokens:
            yield f"message {turn}: no special token at the end of {said[-40:]!r}"
            return
        token, before = tokens[-1].group(), said[: tokens[-1].start()].rstrip()
        is_second = any(m.end() == len(before) for m in self.special.finditer(before))
        if is_second and token not in str(messages[turn]) and token in self._openers(chat):
            yield f"message {turn}: {token} opens the next message"
        if turn + 1 == len(messages):
            left = blankless(rest).removeprefix(self.eos)
            question = self._rendered(chat, 1 + (messages[0]["role"] == "system"), False) or ""
            if left and not blankless(question).endswith(left):
                yield f"message {turn}: behind the last turn comes {left!r}"
            return
        found = places(all_words(messages[turn + 1 :]), rest)
        header = self.special.sub("", (rest[: found[0][0]] if found else rest).split("\n")[0])
        head = HEADS.get(messages[turn + 1]["role"])
        if BRACKETS.search(header) and head and not head.search(rest.split("\n")[0]):
            yield f"message {turn}: closing brackets behind the turn: {header!r}"
        yield from self._as_last(chat, turn, said)

    def _as_last(self, chat, turn, said):
        """Check that a turn ends in the same way inside a chat and at the end of a chat."""
        try:
            cut = self.masks(ChatDocument(chat.messages[: turn + 1], PLACE, chat.tools, None, turn))
        except UnusableRowError as error:
            if not re.search("leaves out its reasoning|no special token|nothing ends", str(error)):
                yield f"message {turn}: alone it is refused: {error}"
            return
        own = said_words(chat.messages[turn])
        ends = []
        for trained in (said, cut.text[slice(*cut.spans[0])]):
            # Some templates print the id of a call only if the result of the call follows.
            one = re.sub(r', "id": "\w+"', "", trained)
            ends.append(one[max((stop for _, stop in places(own, one)), default=0) :])
        here, alone = (blankless(self.special.sub("", end)) for end in ends)
        if own and here != alone:
            yield f"message {turn}: ends with {ends[0]!r} here and with {ends[1]!r} as the last"
