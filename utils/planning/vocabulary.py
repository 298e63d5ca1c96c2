"""The tokenizer of a run, and whether the model's embedding is of the same vocabulary.

Training takes the tokenizer and the chat template of its data, which lie beside it: they decided
what ends a document. The model's own may be another one (a base model and its chat sibling) as long
as its ids mean the same words. Tokens that it lacks get rows of their own in the embedding.
"""

import functools
import logging
from pathlib import Path

from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from utils.config.errors import ConfigurationError
from utils.config.run_settings import RunSettings
from utils.data.tokenizers import (
    chat_template_sha256,
    differences,
    foreign_token,
    load_tokenizer,
    vocabulary_size,
)
from utils.planning.stages import stage_tokenizer

logger = logging.getLogger(__name__)

ROWS_MULTIPLE = 64  # of a larger embedding: products of other sizes are slow on GPUs


def compare_with_model(
    settings: RunSettings, tokenizer: PreTrainedTokenizerBase, directory: str
) -> None:
    """Log how the tokenizer of the run, in `directory`, differs from the model's own.

    Raises ConfigurationError where their ids mean other words, for the model would begin with other
    ones' embeddings.
    """
    model = _model_directory(settings)
    own = None if model is None else _own_tokenizer(model)
    if own is None or model == directory:
        return
    if foreign := foreign_token(tokenizer, own):
        raise ConfigurationError(
            f"the tokenizer in {directory}, with which the data was made, has another vocabulary "
            f"than {model}: {foreign}. Prepare the data with that one (prepare_data.py "
            f"--tokenizer_name_or_path {model}), or train a model that has this vocabulary."
        )
    other = differences(tokenizer, own)
    if chat_template_sha256(tokenizer) != chat_template_sha256(own):
        other.append("another chat template")
    if other:
        logger.info(
            "tokenizer: %s, not that of %s: %s; final/ gets it", directory, model, "; ".join(other)
        )


def new_token_ids(settings: RunSettings, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the ids that the model's own tokenizer does not know: no row was trained for them.

    None where the model has no tokenizer beside it, and of a model from random weights.
    """
    model = _model_directory(settings)
    own = None if model is None else _own_tokenizer(model)
    if own is None:
        return []
    return sorted(set(tokenizer.get_vocab().values()) - set(own.get_vocab().values()))


def fit_embedding(
    config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase, new: list[int]
) -> None:
    """Give the configuration as many tokens as the new ones need; log what tokens have no row.

    A tokenizer may have more tokens than its model, as published (Gemma 3 1B): the data is refused
    if it uses them.
    """
    text = config.get_text_config()
    if new:
        rows = text.vocab_size
        if new[-1] >= rows:
            text.vocab_size = -(-(new[-1] + 1) // ROWS_MULTIPLE) * ROWS_MULTIPLE
        shown = ", ".join(tokenizer.convert_ids_to_tokens(new[:5]))
        logger.info(
            "embedding: %d new tokens (%s%s), %s rows, %s before; new ones begin as the mean",
            len(new), shown, ", ..." if len(new) > 5 else "", f"{text.vocab_size:,}", f"{rows:,}",
        )  # fmt: skip
    beyond = vocabulary_size(tokenizer) - text.vocab_size
    if beyond > 0:
        logger.info(
            "vocabulary: the tokenizer has %s tokens, the model %s: data that uses the others is "
            "refused",
            f"{vocabulary_size(tokenizer):,}",
            f"{text.vocab_size:,}",
        )


def _model_directory(settings: RunSettings) -> str | None:
    """Return where the weights come from, as far as a tokenizer may be there."""
    if settings.model.init_from is not None:
        return stage_tokenizer(settings)
    return settings.model.model_name_or_path


@functools.lru_cache(maxsize=1)
def _own_tokenizer(model: str) -> PreTrainedTokenizerBase | None:
    """Return the tokenizer beside a model's weights; None, logged, where none can be loaded."""
    directory = Path(model)
    if directory.is_dir() and not any(directory.glob("tokenizer*")):
        return None
    try:
        return load_tokenizer(model)
    except ConfigurationError as error:
        logger.info("%s has no tokenizer to compare with: %s", model, error)
        return None
