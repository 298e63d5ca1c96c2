"""The tokenizer of a preparation and its chat template, checked before the work begins."""

import hashlib
import logging
import re
import shlex
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from utils.config.errors import ConfigurationError
from utils.config.preparation import PreparationArguments
from utils.data.prepare.chat_templates import GENERATION, PROBE, RENDERING_ERRORS
from utils.data.prepare.documents import ChatDocument, refuse_bad_row, texts_of
from utils.data.prepare.plan import TRAIN, PreparationPlan
from utils.data.prepare.records import BadRow
from utils.data.prepare.tokenization import DocumentTokenizer, TokenizedDocument
from utils.data.prepare.units import is_held_out, read_documents
from utils.data.prepare.workspace import partial_name
from utils.data.tokenizers import (
    chat_template_sha256,
    load_tokenizer,
    tokenizer_sha256,
    train_tokenizer,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

NO_CHAT_TEMPLATE = (
    "the tokenizer has no chat template: give --chat_template FILE, for example "
    "recipes/chat_templates/chatml.jinja"
)
# Chats of which a template must be able to train on one: some take no second turn.
TURN = [{"role": "user", "content": "probe"}, {"role": "assistant", "content": "reply"}]
PROBES = (ChatDocument([*TURN, *TURN], PROBE), ChatDocument(TURN, PROBE))


def given_tokenizer(
    arguments: PreparationArguments, plan: PreparationPlan
) -> "PreTrainedTokenizerBase | None":
    """Load the tokenizer that the user names, with the chat template in use.

    None when one is to be trained: `tokenizer_identity` reads its chat template.
    """
    if arguments.tokenizer_name_or_path is None:
        if plan.needs_chat_template and arguments.chat_template is None:
            raise ConfigurationError(NO_CHAT_TEMPLATE)
        return None
    tokenizer = load_tokenizer(arguments.tokenizer_name_or_path)
    _add_tokens(tokenizer, arguments.add_tokens)
    if plan.needs_chat_template or arguments.chat_template is not None:
        attach_template(tokenizer, arguments.chat_template, plan.settings.template_date)
    return tokenizer


def tokenizer_identity(
    tokenizer: "PreTrainedTokenizerBase | None", arguments: PreparationArguments
) -> dict[str, Any]:
    """Return what a tokenizer contributes to the digest, known before it is trained."""
    if tokenizer is not None:
        return {
            "sha256": tokenizer_sha256(tokenizer),
            "chat_template_sha256": chat_template_sha256(tokenizer),
        }
    template = arguments.chat_template
    text = read_chat_template(template) if template else None
    return {
        "vocabulary": arguments.train_tokenizer,
        "sample_bytes": arguments.tokenizer_sample_bytes,
        "chat_template_sha256": text and hashlib.sha256(text.encode()).hexdigest(),
    }


def trained_tokenizer(
    plan: PreparationPlan, arguments: PreparationArguments, folder: Path
) -> "PreTrainedTokenizerBase":
    """Train a tokenizer into `folder`, or load the one that an interrupted run left there."""
    from transformers import PreTrainedTokenizerFast

    if not folder.exists():
        assert arguments.train_tokenizer is not None
        logger.info("training a tokenizer of %s tokens", f"{arguments.train_tokenizer:,}")
        texts = _training_texts(plan, arguments.tokenizer_sample_bytes)
        tokenizer = train_tokenizer(texts, arguments.train_tokenizer)
        if plan.needs_chat_template or arguments.chat_template is not None:
            attach_template(tokenizer, arguments.chat_template, plan.settings.template_date)
        save_tokenizer(tokenizer, folder)
    return PreTrainedTokenizerFast.from_pretrained(folder)


def save_tokenizer(tokenizer: "PreTrainedTokenizerBase", folder: Path) -> None:
    """Write a tokenizer folder that is either complete or not there."""
    partial = partial_name(folder)
    tokenizer.save_pretrained(partial)
    if folder.exists():  # another shard was first
        shutil.rmtree(partial)
    else:
        partial.replace(folder)


def _training_texts(plan: PreparationPlan, sample_bytes: int) -> Iterator[str]:
    """Yield training texts: of each unit its beginning, in proportion to the unit's size.

    Held-out documents are left out: the tokenizer is part of what is evaluated on them.
    """
    settings = plan.settings
    units = [unit for unit in plan.units if unit.split == TRAIN]
    total = max(sum(unit.size for unit in units), 1)
    for unit in units:
        left = sample_bytes * unit.size // total
        for document in read_documents(unit, settings):
            if isinstance(document, BadRow):
                refuse_bad_row(document, settings.on_bad_row)
            elif not is_held_out(document, settings):
                for text in texts_of(document):
                    left -= len(text.encode())
                    yield text
            if left <= 0:
                break


def _add_tokens(tokenizer: "PreTrainedTokenizerBase", words: Sequence[str]) -> None:
    """Add tokens that text is cut at as they are written, with nothing stripped around them."""
    from transformers import AddedToken

    known = tokenizer.get_vocab() if words else {}
    new = [AddedToken(word, normalized=False) for word in words if word not in known]
    if words:
        tokenizer.add_tokens(new)
        logger.info(
            "add_tokens: %d of %d are new, ids up to %d", len(new), len(words), len(tokenizer) - 1
        )


# --- the chat template


def attach_template(
    tokenizer: "PreTrainedTokenizerBase", template_file: str | None, date: str | None = None
) -> None:
    """Give the tokenizer the chat template that is trained with and saved beside the data.

    The file's template if there is one, else the tokenizer's own. Its loss masks come from its
    {% generation %} markers, else they are derived; that and the date that it prints are logged.
    Raises ConfigurationError without a template, or where no chat could be trained on.
    """
    origin = template_file or "the tokenizer's chat template"
    if template_file is not None:
        tokenizer.chat_template = read_chat_template(template_file)
    if tokenizer.chat_template is None:
        raise ConfigurationError(NO_CHAT_TEMPLATE)
    # Of several named templates the default one renders conversations.
    tokenizer.chat_template = tokenizer.get_chat_template()
    if not tokenizer.is_fast:
        raise ConfigurationError(
            "chats need a fast tokenizer (tokenizer.json): loss masks come from its character "
            "offsets"
        )
    try:
        _trained_probe(tokenizer)
    except RENDERING_ERRORS as problem:
        raise ConfigurationError(
            f"{origin} cannot be trained with: {problem}. {_advice(tokenizer)}"
        ) from problem
    if masks_from(tokenizer) == "derived":
        logger.info(
            "loss masks: %s has no {%% generation %%} markers, so what the assistant says is "
            "derived from its renderings, and checked for every chat",
            origin,
        )
    if "strftime_now" in str(tokenizer.chat_template):
        logger.info(
            "the chat template prints today's date: it is %s in this data (--template_date)", date
        )


def _trained_probe(tokenizer: "PreTrainedTokenizerBase") -> TokenizedDocument:
    """Return a chat that the template can train on; raises ValueError, with why not."""
    found = DocumentTokenizer(tokenizer)(PROBES)
    trained = (probe for probe in found if isinstance(probe, TokenizedDocument))
    if (probe := next(trained, None)) is None:
        raise ValueError(str(found[0]))
    return probe


def _advice(tokenizer: "PreTrainedTokenizerBase") -> str:
    """Return what to do about a template that cannot be trained with."""
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


def read_chat_template(path: str) -> str:
    """Read a Jinja file; raises ConfigurationError when it is missing or no valid Jinja."""
    from transformers.utils.chat_template_utils import _compile_jinja_template

    try:
        template = Path(path).read_text(encoding="utf-8")
        _compile_jinja_template(template)
    except (OSError, UnicodeDecodeError, TemplateError) as error:
        problem = "not valid Jinja" if isinstance(error, TemplateError) else "cannot be read"
        raise ConfigurationError(f"chat_template: {path}: {problem} ({error})") from error
    return template


def masks_from(tokenizer: "PreTrainedTokenizerBase") -> str:
    """Return where the loss masks of chats come from: "template" markers, or "derived"."""
    return "template" if GENERATION.search(str(tokenizer.chat_template)) else "derived"


def end_of_turn_id(tokenizer: "PreTrainedTokenizerBase") -> int:
    """Return the id of the last token that is trained on in a chat, which ends generation."""
    probe = _trained_probe(tokenizer)
    trained = probe.ids[probe.loss_mask == 1].tolist()
    return next(token for token in reversed(trained) if str(tokenizer.decode([token])).strip())
