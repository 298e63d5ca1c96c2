"""Chats: the template that renders them, checked before the work, and the ids and loss masks."""

import logging
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from jinja2 import TemplateError

from utils.config.errors import ConfigurationError
from utils.data.prepare.chat_masks import ChatMasks, MaskedChat
from utils.data.prepare.chat_templates import RENDERING_ERRORS, ChatRefused, ChatTemplate

if TYPE_CHECKING:
    from transformers import BatchEncoding, PreTrainedTokenizerBase


logger = logging.getLogger(__name__)

NO_CHAT_TEMPLATE = (
    "the tokenizer has no chat template: give --chat_template FILE, for example "
    "recipes/chat_templates/chatml.jinja"
)
# Chats that a template must be able to train on, one at least: some take no second turn, no plain
# chat without tools, or no tools.
TURN = [{"role": "user", "content": "probe"}, {"role": "assistant", "content": "reply"}]
CALL = {"type": "function", "function": {"name": "look", "arguments": {"place": "here"}}}
LOOK = {"name": "look", "description": "Look.", "parameters": {"type": "object", "properties": {}}}
CALLS = [TURN[0], {"role": "assistant", "content": "", "tool_calls": [CALL]}]
PROBES: Sequence[tuple[Any, Any]] = (
    ([*TURN, *TURN], None),
    (TURN, None),
    (TURN, [{"type": "function", "function": LOOK}]),
    (CALLS, [{"type": "function", "function": LOOK}]),
)


def attach_training_template(
    tokenizer: "PreTrainedTokenizerBase", template_file: str | None
) -> None:
    """Give the tokenizer the chat template that is trained with and saved beside the data.

    The file's template if there is one, else the tokenizer's own. Its loss masks come from its
    {% generation %} markers, else they are derived, which is logged. Raises ConfigurationError
    without a template, or where no chat could be trained on, with the reason.
    """
    origin = template_file or "the tokenizer's chat template"
    if template_file is not None:
        tokenizer.chat_template = read_chat_template(template_file)
    if tokenizer.chat_template is None:
        raise ConfigurationError(NO_CHAT_TEMPLATE)
    if isinstance(tokenizer.chat_template, dict):
        # Several named templates; conversations are rendered with the default one.
        tokenizer.chat_template = tokenizer.get_chat_template()
    if not tokenizer.is_fast:
        raise ConfigurationError(
            "chats need a fast tokenizer (tokenizer.json): loss masks come from its character "
            "offsets"
        )
    problem = _problem(tokenizer)
    if problem is None:
        if not ChatTemplate(tokenizer).has_markers:
            logger.info(
                "loss masks: %s has no {%% generation %%} markers, so what the assistant says is "
                "derived from its renderings, and checked for every chat",
                origin,
            )
        return
    if unknown := _unknown_tokens(tokenizer):
        raise ConfigurationError(
            f"{origin} cannot be trained with: {problem}. It prints {' '.join(unknown)}, and the "
            "tokenizer has no such tokens: give the template that belongs to the model with "
            f"--chat_template FILE, or add them with --add_tokens {shlex.join(unknown)}"
        )
    raise ConfigurationError(
        f"{origin} cannot be trained with: {problem}. Give another template with "
        "--chat_template (recipes/chat_templates/chatml.jinja is one), or put "
        "{% generation %} ... {% endgeneration %} in it around the assistant's words and the "
        "token that ends its turn"
    )


def read_chat_template(path: str) -> str:
    """Read a Jinja file; raises ConfigurationError when it is missing or no valid Jinja."""
    from transformers.utils.chat_template_utils import _compile_jinja_template

    try:
        template = Path(path).read_text(encoding="utf-8")
        _compile_jinja_template(template)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"chat_template: {path}: cannot be read ({error})") from error
    except TemplateError as error:
        raise ConfigurationError(f"chat_template: {path}: not valid Jinja ({error})") from error
    return template


def masks_from(tokenizer: "PreTrainedTokenizerBase") -> str:
    """Return what says which tokens of a chat are trained on: "template" markers, or "derived"."""
    return "template" if ChatTemplate(tokenizer).has_markers else "derived"


def end_of_turn_id(tokenizer: "PreTrainedTokenizerBase") -> int | None:
    """Return the id of the last token that is trained on in a chat, which ends generation."""
    masks = ChatMasks(tokenizer)
    for messages, tools in ((TURN, None), *PROBES[2:]):
        try:
            ids, mask = render(tokenizer, masks, messages, tools)
        except ChatRefused:
            continue
        trained = [int(token) for token, bears in zip(ids, mask, strict=True) if bears]
        words = [token for token in trained if str(tokenizer.decode([token])).strip()]
        return words[-1] if words else None
    return None


def tokenize(
    tokenizer: "PreTrainedTokenizerBase", chats: Sequence[MaskedChat]
) -> list[tuple[np.ndarray, np.ndarray] | ChatRefused]:
    """Return (ids, loss mask), both (tokens,), of each chat, or why it has none.

    One that a token holds words of a trained turn and others of is refused.
    """
    encoded = tokenizer([chat.text for chat in chats], add_special_tokens=False)
    found: list[tuple[np.ndarray, np.ndarray] | ChatRefused] = []
    for index, chat in enumerate(chats):
        ids = np.array(encoded["input_ids"][index], dtype=np.int64)
        mask = np.zeros(len(ids), dtype=np.int8)
        try:
            for span in chat.spans:
                first, last = _tokens_of(encoded, index, chat.text, span)
                mask[first : last + 1] = 1
            found.append((ids, mask))
        except ChatRefused as refused:
            found.append(refused)
    return found


def render(
    tokenizer: "PreTrainedTokenizerBase", masks: ChatMasks, messages: Any, tools: Any = None
) -> tuple[np.ndarray, np.ndarray]:
    """Return (ids, loss mask) of one chat; raises ChatRefused."""
    (found,) = tokenize(tokenizer, [masks(messages, tools)])
    if isinstance(found, ChatRefused):
        raise found
    return found


def _tokens_of(
    encoded: "BatchEncoding", index: int, text: str, span: tuple[int, int]
) -> tuple[int, int]:
    """Return the first and the last token of a span of characters.

    A token that joins blanks of the turn to what precedes it (header and line break) is given to
    the model; one that joins blanks before or behind the turn to its words is the model's.
    """
    start, stop = span
    places = (encoded.char_to_token(index, place) for place in range(start, stop))
    first = next((token for token in places if token is not None), None)
    places = (encoded.char_to_token(index, place) for place in range(stop - 1, start - 1, -1))
    last = next((token for token in places if token is not None), None)
    if first is None or last is None:
        return 0, -1
    opening, final = encoded.token_to_chars(index, first), encoded.token_to_chars(index, last)
    assert opening is not None
    assert final is not None
    if opening.start < start and text[start : opening.end].isspace() and opening.end < stop:
        first += 1
    elif text[opening.start : start].strip():
        raise ChatRefused("one token holds the header of a turn and its first words", "straddled")
    while last + 1 < len(encoded["input_ids"][index]):
        following = encoded.token_to_chars(index, last + 1)
        if following is None or following.start >= stop or following.start >= final.end:
            break
        last += 1  # a character of several tokens
    if text[stop : final.end].strip():
        raise ChatRefused("one token holds the end of a turn and what follows it", "straddled")
    return first, last


def _unknown_tokens(tokenizer: "PreTrainedTokenizerBase") -> list[str]:
    """Return what the template writes like special tokens, `<|word|>`, and is several tokens."""
    written = dict.fromkeys(re.findall(r"<\|\w+\|>", str(tokenizer.chat_template)))
    known = tokenizer.get_vocab()
    return [token for token in written if token not in known]


def _problem(tokenizer: "PreTrainedTokenizerBase") -> str | None:
    """Return why the tokenizer's template cannot be trained with; None if it can."""
    try:
        masks, problem = ChatMasks(tokenizer), ""
        for messages, tools in PROBES:
            try:
                render(tokenizer, masks, messages, tools)
            except ChatRefused as refused:
                problem = problem or str(refused)
            else:
                return None
    except RENDERING_ERRORS as error:
        return str(error)
    return problem
