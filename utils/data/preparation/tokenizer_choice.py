"""The tokenizer of a preparation: the given one, or one trained on the plan's documents."""

import hashlib
import logging
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from utils.config.errors import ConfigurationError
from utils.config.preparation import PreparationArguments
from utils.data.preparation.chat_template import ChatTemplate
from utils.data.preparation.chats import (
    NO_CHAT_TEMPLATE,
    attach_training_template,
    read_chat_template,
)
from utils.data.preparation.documents import texts_of
from utils.data.preparation.plan import PreparationPlan
from utils.data.preparation.records import BadRow
from utils.data.preparation.unit import TRAIN, is_held_out, read_documents, refuse_bad_row
from utils.data.preparation.workspace import partial_name
from utils.data.tokenizers import (
    chat_template_sha256,
    load_tokenizer,
    tokenizer_sha256,
    train_tokenizer,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)


def given_tokenizer(
    arguments: PreparationArguments, plan: PreparationPlan
) -> "PreTrainedTokenizerBase | None":
    """Load the tokenizer that the user names, with the chat template in use.

    None when one is to be trained; its chat template is checked for being readable all the same.
    """
    if arguments.tokenizer_name_or_path is None:
        if arguments.chat_template is not None:
            read_chat_template(arguments.chat_template)
        elif plan.needs_chat_template:
            raise ConfigurationError(NO_CHAT_TEMPLATE)
        return None
    tokenizer = load_tokenizer(arguments.tokenizer_name_or_path)
    _add_tokens(tokenizer, arguments.add_tokens)
    _attach_template(tokenizer, arguments, plan)
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
    return {
        "vocabulary": arguments.train_tokenizer,
        "sample_bytes": arguments.tokenizer_sample_bytes,
        "chat_template_sha256": _sha256(read_chat_template(template)) if template else None,
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
        _attach_template(tokenizer, arguments, plan)
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


def _add_tokens(tokenizer: "PreTrainedTokenizerBase", words: Sequence[str]) -> None:
    """Add tokens that text is cut at as they are written, with nothing stripped around them."""
    from transformers import AddedToken

    vocabulary = tokenizer.get_vocab() if words else {}
    known = [word for word in words if word in vocabulary]
    if known:
        logger.info("add_tokens: %s: a token already", ", ".join(known))
    new = [AddedToken(word, normalized=False) for word in words if word not in known]
    if new:
        tokenizer.add_tokens(new)
        logger.info("add_tokens: %d new, ids up to %d", len(new), len(tokenizer) - 1)


def _attach_template(
    tokenizer: "PreTrainedTokenizerBase", arguments: PreparationArguments, plan: PreparationPlan
) -> None:
    """Check the template where chats need it; a text dataset only passes a given one on."""
    if plan.needs_chat_template or arguments.chat_template is not None:
        attach_training_template(tokenizer, arguments.chat_template)
        if ChatTemplate(tokenizer).prints_the_date:
            logger.info(
                "the chat template prints today's date: it is %s in this data (--template_date)",
                plan.settings.template_date,
            )


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
                refuse_bad_row(document, settings)
            elif not is_held_out(document, settings.validation_fraction, settings.seed):
                for text in texts_of(document):
                    left -= len(text.encode())
                    yield text
            if left <= 0:
                break


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
