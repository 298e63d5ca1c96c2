"""The tokenizer of a run, and whether the model's embedding is of the same vocabulary.

Training takes the tokenizer and the chat template of its data, which lie beside it: they decided
what ends a document. The model's own may be another one (a base model and its chat sibling) as long
as its ids mean the same words. Tokens that it lacks get rows of their own in the embedding.
"""

import contextlib
import functools
import logging
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from utils.config.errors import ConfigurationError
from utils.config.settings import RunSettings
from utils.data.tokenizers import (
    chat_template_sha256,
    differences,
    foreign_token,
    load_tokenizer,
    vocabulary_size,
)
from utils.model.stages import stage_tokenizer

logger = logging.getLogger(__name__)

ROWS_MULTIPLE = 64  # of a larger embedding: products of other sizes are slow on GPUs


def compare_with_model(
    settings: RunSettings, tokenizer: PreTrainedTokenizerBase, directory: str
) -> None:
    """Log how the tokenizer of the run, in `directory`, differs from the model's own.

    Raises ConfigurationError where their ids mean other words, for the model would begin with other
    ones' embeddings.
    """
    model, own = _own_tokenizer(settings)
    if own is None or model == directory:
        return
    if foreign := foreign_token(tokenizer, own):
        raise ConfigurationError(
            f"the tokenizer in {directory} has another vocabulary than {model}: {foreign}. Prepare "
            f"the data with the model's (prepare_data.py --tokenizer_name_or_path {model}) and "
            "train without --tokenizer_name_or_path, or train a model that has this vocabulary."
        )
    other = differences(tokenizer, own)
    if chat_template_sha256(tokenizer) != chat_template_sha256(own):
        other.append("another chat template")
    if other:
        logger.info(
            "tokenizer: %s, not that of %s: %s; final/ gets it", directory, model, "; ".join(other)
        )


def new_token_ids(settings: RunSettings, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the ids that the model's own tokenizer, if it has one, does not know.

    No row was trained for them.
    """
    _, own = _own_tokenizer(settings)
    if own is None:
        return []
    return sorted(set(tokenizer.get_vocab().values()) - set(own.get_vocab().values()))


def fit_embedding(
    settings: RunSettings, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Give the configuration as many tokens as the new ones need; log what tokens have no row.

    LoRA trains the new rows beside its adapters, in PEFT's own layers, so the loss takes all
    logits then; raises ConfigurationError where the fused head was asked for. A tokenizer may have
    more tokens than its model, as published (Gemma 3 1B): the data is refused if it uses them.
    """
    text, new = config.get_text_config(), new_token_ids(settings, tokenizer)
    if new and settings.model.use_peft:
        if settings.model.loss_head == "fused":
            raise ConfigurationError(
                "--loss_head fused: with LoRA the rows of new tokens are trained in layers that it "
                "goes past: leave it out."
            )
        settings.model.loss_head = "logits"
    if new:
        before = text.vocab_size
        if new[-1] >= before:
            text.vocab_size = -(-(new[-1] + 1) // ROWS_MULTIPLE) * ROWS_MULTIPLE
        shown = ", ".join(tokenizer.convert_ids_to_tokens(new[:5])) + ", ..." * (len(new) > 5)
        logger.info(
            f"embedding: {len(new)} new tokens ({shown}), {text.vocab_size:,} rows, {before:,} "
            "before; new ones begin as the mean"
        )
    if (known := vocabulary_size(tokenizer)) > text.vocab_size:
        logger.info(
            f"vocabulary: the tokenizer has {known:,} tokens, the model {text.vocab_size:,}: data "
            "that uses the others is refused"
        )


@torch.no_grad()
def add_rows(model: PreTrainedModel, new: list[int], rows: int) -> None:
    """Give a loaded model `rows` tokens; the new ones and those beyond begin as the mean.

    Ranks that hold no weights yet (FSDP) get them from rank 0.
    """
    weight: Any = model.get_input_embeddings().weight
    before = getattr(weight, "ds_shape", weight.shape)[0]  # ZeRO-3 leaves a rank an empty one
    if rows != before:
        with torch.random.fork_rng(devices=[]):  # new rows are drawn first, and written over
            model.resize_token_embeddings(rows, mean_resizing=False)
    fresh = sorted({*new, *range(before, rows)})
    layers: list[Any] = [model.get_input_embeddings(), model.get_output_embeddings()]
    values = {id(value): value for layer in layers for value in layer.parameters(recurse=False)}
    for value in values.values():  # tied ones once
        if value.is_meta:
            continue
        with _gathered(value):
            known = torch.ones(value.shape[0], dtype=torch.bool, device=value.device)
            known[fresh] = False
            value[fresh] = value[known].float().mean(dim=0).to(value.dtype)


def _gathered(value: torch.Tensor) -> Any:
    """Return a context in which rank 0 has, and may change, all of a parameter under ZeRO-3."""
    if not hasattr(value, "ds_id"):
        return contextlib.nullcontext()
    from deepspeed import zero

    return zero.GatheredParameters([value], modifier_rank=0)


def _own_tokenizer(settings: RunSettings) -> tuple[str, PreTrainedTokenizerBase | None]:
    """Return where the weights come from, and the tokenizer beside them if there is one."""
    model = settings.model.model_name_or_path
    if settings.model.init_from is not None:
        model = stage_tokenizer(settings)
    return str(model), None if model is None else _load_own(model)


@functools.lru_cache(maxsize=1)
def _load_own(model: str) -> PreTrainedTokenizerBase | None:
    """Return the tokenizer beside a model's weights; None, logged, where none can be loaded."""
    directory = Path(model)
    if directory.is_dir() and not any(directory.glob("tokenizer*")):
        return None
    try:
        return load_tokenizer(model)
    except ConfigurationError as error:
        logger.info("%s has no tokenizer to compare with: %s", model, error)
        return None
