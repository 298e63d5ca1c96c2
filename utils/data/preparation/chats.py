"""Chats: the template that renders them, and the ids and loss masks it gives."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from jinja2 import TemplateError

from utils.config.errors import ConfigurationError
from utils.data.preparation.documents import ChatDocument, Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# What a template may raise on a conversation it was not written for (roles out of order, ...).
RENDERING_ERRORS = (TemplateError, TypeError, ValueError, KeyError)
NO_CHAT_TEMPLATE = (
    "the tokenizer has no chat template: give --chat_template FILE, for example "
    "recipes/chat_templates/chatml.jinja"
)


def attach_training_template(
    tokenizer: "PreTrainedTokenizerBase", template_file: str | None
) -> None:
    """Give the tokenizer the chat template that is trained with and saved beside the data.

    The file's template if there is one, else the tokenizer's own; a known template without
    {% generation %} markers is replaced by TRL's training version of it. Raises
    ConfigurationError without a template, without markers, or when the token that ends the
    assistant's turn would not be trained.
    """
    from trl.chat_template_utils import get_training_chat_template, has_generation_markers

    origin = template_file or "the tokenizer's chat template"
    if template_file is not None:
        tokenizer.chat_template = read_chat_template(template_file)
    if tokenizer.chat_template is None:
        raise ConfigurationError(NO_CHAT_TEMPLATE)
    if isinstance(tokenizer.chat_template, dict):
        # Several named templates; conversations are rendered with the default one.
        tokenizer.chat_template = tokenizer.get_chat_template()
    if not has_generation_markers(tokenizer.chat_template):
        try:
            tokenizer.chat_template = get_training_chat_template(tokenizer)
        except RENDERING_ERRORS as error:
            raise ConfigurationError(
                f"{origin} has no {{% generation %}} markers, so nothing says which tokens are the "
                "assistant's, and TRL has no training version of it: put the markers around the "
                "assistant's words and its end-of-turn token and give it with --chat_template "
                "(recipes/chat_templates/chatml.jinja shows how)"
            ) from error
    _check_end_of_turn(tokenizer, origin)


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


def _check_end_of_turn(tokenizer: "PreTrainedTokenizerBase", origin: str) -> None:
    from trl.chat_template_utils import is_chat_template_stop_token_trained

    if not tokenizer.is_fast:
        raise ConfigurationError(
            "chats need a fast tokenizer (tokenizer.json): loss masks come from its character "
            "offsets"
        )
    if not is_chat_template_stop_token_trained(tokenizer):
        raise ConfigurationError(
            f"{origin}: the token that ends the assistant's turn would not be trained, so the "
            "model would never stop: put it inside {% generation %} ... {% endgeneration %}, and "
            "make sure that it is one special token of this tokenizer"
        )


def end_of_turn_id(tokenizer: "PreTrainedTokenizerBase") -> int | None:
    """Return the token that ends a whole answer: the last trained one of it that is not blank.

    An answer that is followed by another turn may end otherwise (gpt-oss: `<|end|>`, with which its
    thinking ends too), so that counts only where the last answer of a chat ends with no token of
    its own.
    """
    probe = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}] * 2
    words: list[int] = []
    for messages in (probe[:2], probe[:3]):
        try:
            ids, mask = render(tokenizer, messages, None)
        except RENDERING_ERRORS:
            continue
        trained = [token for token, bears in zip(ids, mask, strict=True) if bears]
        words = [token for token in trained if str(tokenizer.decode([token])).strip()]
        if words and words[-1] in tokenizer.added_tokens_decoder:
            break
    return words[-1] if words else None


def render(
    tokenizer: "PreTrainedTokenizerBase",
    messages: Sequence[Message],
    tools: Sequence[Any] | None,
) -> tuple[list[int], list[int]]:
    """Return (input ids, loss mask) of one conversation; both (tokens,).

    Raises one of RENDERING_ERRORS when the template refuses the conversation.
    """
    encoded = _apply(
        tokenizer, list(messages), tools=tools or None, return_assistant_tokens_mask=True
    )
    return encoded["input_ids"], encoded["assistant_masks"]


def render_batch(
    tokenizer: "PreTrainedTokenizerBase", documents: Sequence[ChatDocument]
) -> tuple[list[list[int]], list[list[int]]]:
    """Render conversations without tools at once: (ids, masks), one list per document."""
    conversations = [list(document.messages) for document in documents]
    encoded = _apply(tokenizer, conversations, return_assistant_tokens_mask=True)
    return encoded["input_ids"], encoded["assistant_masks"]


def render_completion(
    tokenizer: "PreTrainedTokenizerBase",
    prompt: Sequence[Message],
    completion: Sequence[Message],
) -> tuple[list[int], list[int]]:
    """Return (ids, mask) of a prompt and completion given as messages.

    The assistant's tokens of the completion bear loss, those of the prompt do not. Raises
    ValueError when the rendered prompt is not where the rendered whole begins.
    """
    ids, mask = render(tokenizer, [*prompt, *completion], None)
    opening = _apply(tokenizer, list(prompt), add_generation_prompt=True)["input_ids"]
    if ids[: len(opening)] != opening:
        raise ValueError("the template renders the prompt differently when a completion follows")
    return ids, [0] * len(opening) + mask[len(opening) :]


def _apply(
    tokenizer: "PreTrainedTokenizerBase", conversation: list[Any], **options: Any
) -> Mapping[str, Any]:
    # apply_chat_template declares a union over all its modes; return_dict makes it a mapping.
    return cast(
        Mapping[str, Any],
        tokenizer.apply_chat_template(conversation, tokenize=True, return_dict=True, **options),
    )
