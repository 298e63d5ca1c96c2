"""The tokenizer of a preparation and its chat template, both checked before the work begins."""

import json
import logging
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from utils.config.errors import ConfigurationError
from utils.config.preparation import PreparationArguments
from utils.data.tokenizers import load_tokenizer
from utils.host.foreign import library_errors, reason
from utils.prepare.chat_templates import GENERATION, PROBE_LOCATION, TOOL
from utils.prepare.rows import ChatDocument
from utils.prepare.tokenization import DocumentTokenizer, TokenizedDocument
from utils.prepare.work_plan import PreparationPlan

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

# Chats of one and two turns, without and with tools, to try a template on. Some templates refuse a
# second turn or a chat without tools, so it is enough that one of these chats can be trained on.
TURN = [{"role": "user", "content": "probe"}, {"role": "assistant", "content": "reply"}]
PROBE_CHATS = tuple(
    ChatDocument(turns, PROBE_LOCATION, tools)
    for tools in (None, [TOOL])
    for turns in ([*TURN, *TURN], TURN)
)


def load_prepared_tokenizer(
    arguments: PreparationArguments, plan: PreparationPlan
) -> "PreTrainedTokenizerBase":
    """Load the tokenizer, add the words in `add_tokens` to it, and set its chat template.

    Raises ConfigurationError if the tokenizer or the chat template is unusable.
    """
    from transformers import AddedToken

    name, words = arguments.tokenizer_name_or_path, arguments.add_tokens
    tokenizer = load_tokenizer(name, is_cached=True)
    if words:
        known = tokenizer.get_vocab()
        # Match the words exactly as they are written, with the blanks around them.
        new = [AddedToken(word, normalized=False) for word in words if word not in known]
        tokenizer.add_tokens(new)
        logger.info(
            "add_tokens: %d of %d are new, ids up to %d", len(new), len(words), len(tokenizer) - 1
        )
    defaults = arguments.chat_template_kwargs or {}
    if plan.needs_chat_template or arguments.chat_template is not None:
        date = plan.settings.template_date
        with library_errors(name, "its chat template cannot be used"):
            attach_template(tokenizer, arguments.chat_template, date, defaults)
            for rows in plan.settings.sources:
                _warn_of_unread(tokenizer, rows.chat_template_kwargs or {})
    elif tokenizer.chat_template and any(
        rows.row_format == "prompt_completion" for rows in plan.settings.sources
    ):
        logger.warning(
            "prompts and completions are trained on as they are, without the tokenizer's chat "
            "template: to train a chat model name the columns instruction and output (--columns)"
        )
    elif defaults:
        logger.info("chat_template_kwargs have no effect: no chat template renders these documents")
    return tokenizer


# --- the chat template


def attach_template(
    tokenizer: "PreTrainedTokenizerBase",
    template_file: str | None,
    date: str | None = None,
    defaults: Mapping[str, Any] | None = None,
) -> None:
    """Set and check the tokenizer's chat template.

    template_file: None keeps the tokenizer's own template. defaults: default values for variables
    of the template. date: logged if the template prints today's date. Logs a line if the template
    has no {% generation %} markers. Raises ConfigurationError if the template is missing or
    invalid, if none of PROBE_CHATS can be trained on with it, or if the tokenizer is not fast.
    """
    if template_file is not None:
        with library_errors(template_file, "cannot be read"):
            tokenizer.chat_template = Path(template_file).read_text(encoding="utf-8")
    if tokenizer.chat_template is None:
        raise ConfigurationError(
            "the tokenizer has no chat template: give --chat_template FILE, for example "
            "recipes/chat_templates/chatml.jinja"
        )
    if not tokenizer.is_fast:
        raise ConfigurationError(
            "chats need a fast tokenizer (tokenizer.json): loss masks come from its character "
            "offsets"
        )
    _warn_of_unread(tokenizer, defaults or {})
    # A tokenizer may have several named templates; the default one renders conversations.
    template = tokenizer.get_chat_template()
    tokenizer.chat_template = template_with_defaults(template, defaults or {})
    origin = template_file or f"the chat template of {tokenizer.name_or_path}"
    try:
        _tokenize_probe(tokenizer)
    except Exception as problem:
        raise ConfigurationError(
            f"{origin} cannot be trained with: {reason(problem)}. {_template_advice(tokenizer)}"
        ) from problem
    if loss_mask_origin(tokenizer) == "derived":
        logger.info(
            "loss masks: %s has no {%% generation %%} markers, so what the assistant says is "
            "derived from its renderings, and checked for every chat",
            origin,
        )
    if "strftime_now" in str(tokenizer.chat_template):
        logger.info(
            "the chat template prints today's date: it is %s in this data (--template_date)", date
        )


def template_with_defaults(template: str, defaults: Mapping[str, Any]) -> str:
    """Return the chat template with lines in front that set undefined variables to `defaults`.

    With these lines, samples, chat.py, benchmarks and servers render chats as training did.
    Variables that the template does not read are left out.
    """
    lines = [
        f"{{%- if {name} is not defined %}}{{%- set {name} = {_to_jinja(value)} %}}{{%- endif %}}"
        for name, value in defaults.items()
        if value is not None and _template_reads(template, name)
    ]
    # Jinja does not print the line end after a block, so the template's first line is unchanged.
    return "".join(line + "\n" for line in lines) + template


def _to_jinja(value: Any) -> str:
    if isinstance(value, Mapping):
        items = (f"{json.dumps(str(key))}: {_to_jinja(item)}" for key, item in value.items())
        return "{" + ", ".join(items) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_to_jinja, value)) + "]"
    return "none" if value is None else json.dumps(value, ensure_ascii=False)


def _template_reads(template: str, name: str) -> bool:
    return re.search(rf"\b{re.escape(name)}\b", template) is not None


def _warn_of_unread(tokenizer: "PreTrainedTokenizerBase", variables: Mapping[str, Any]) -> None:
    template = tokenizer.get_chat_template()
    if unread := [name for name in variables if not _template_reads(template, name)]:
        logger.warning(
            "chat_template_kwargs: the chat template reads no %s, so it has no effect",
            " and no ".join(unread),
        )


def _tokenize_probe(tokenizer: "PreTrainedTokenizerBase") -> TokenizedDocument:
    """Return the first trainable chat of PROBE_CHATS, tokenized. Raises ValueError without one."""
    found = DocumentTokenizer(tokenizer)(PROBE_CHATS)
    trained = (probe for probe in found if isinstance(probe, TokenizedDocument))
    if (probe := next(trained, None)) is None:
        raise ValueError(str(found[0]))
    return probe


def _template_advice(tokenizer: "PreTrainedTokenizerBase") -> str:
    vocabulary = tokenizer.get_vocab()
    written = dict.fromkeys(re.findall(r"<\|\w+\|>", str(tokenizer.chat_template)))
    if unknown := [token for token in written if token not in vocabulary]:
        return (
            f"It prints {' '.join(unknown)}, and the tokenizer has no such tokens: give the "
            "template that belongs to the model with --chat_template FILE, or add them with "
            f"--add_tokens {shlex.join(unknown)}"
        )
    return (
        "Give another template with --chat_template (recipes/chat_templates/chatml.jinja is one), "
        "or put {% generation %} ... {% endgeneration %} in it around the assistant's words and "
        "the token that ends its turn"
    )


def loss_mask_origin(tokenizer: "PreTrainedTokenizerBase") -> str:
    """Return the origin of loss masks: "template" ({% generation %} markers) or "derived".

    "derived" means that renderings of the chat are compared (see chat_turns.py).
    """
    return "template" if GENERATION.search(str(tokenizer.chat_template)) else "derived"


def end_of_turn_id(tokenizer: "PreTrainedTokenizerBase") -> int:
    """Return the id of the token that ends an answer: the last trained token with visible text."""
    probe = _tokenize_probe(tokenizer)
    trained = probe.ids[probe.loss_mask == 1].tolist()
    return next(token for token in reversed(trained) if str(tokenizer.decode([token])).strip())
