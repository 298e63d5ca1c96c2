"""Which columns of a token dataset mean what: token ids, loss mask, padding."""

import logging
from collections.abc import Iterable, Iterator
from pathlib import Path

from utils.config.errors import ConfigurationError
from utils.data.list_columns import ListColumn, aligned_with, list_column, read_tables
from utils.data.splits import data_files

TOKENS = "input_ids"
PADDING = "attention_mask"
LABELS = "labels"
LOSS_MASKS = ("assistant_masks", "completion_mask", LABELS)
# Names under which other toolkits keep what is trained on; a prompt's mask says the opposite.
FOREIGN_MASKS = (
    *("loss_mask", "loss_masks", "assistant_mask", "completion_masks", "response_mask"),
    *("train_mask", "target_mask", "labels_mask"),
)
PROMPT_MASKS = ("prompt_mask", "prompt_masks", "source_mask", "instruction_mask")
# Columns of datasets whose rows hold several documents; read as one document each, those would
# see each other.
PACKED_MARKS = ("seq_lengths", "position_ids", "seq_idx")

logger = logging.getLogger(__name__)


def loss_mask_among(names: Iterable[str]) -> str | None:
    """Return the name of the loss-mask column, None without one."""
    return next((name for name in LOSS_MASKS if name in names), None)


def open_columns(directory: Path) -> dict[str, ListColumn]:
    """Open the columns that training reads, by name; all share one set of offsets.

    Raises ConfigurationError for columns that have no one meaning.
    """
    table = read_tables(data_files(directory))
    names = table.schema.names
    problems = _schema_problems(names)
    if problems:
        raise ConfigurationError([f"{directory}: {problem}" for problem in problems])
    tokens = list_column(TOKENS, table.column(TOKENS), str(directory))
    columns = {TOKENS: tokens}
    for name in (*LOSS_MASKS, PADDING):
        if name in names:
            column = list_column(name, table.column(name), str(directory))
            columns[name] = aligned_with(column, tokens, str(directory))
    unread = [name for name in names if name not in columns]
    if unread:
        logger.info("%s: columns not used: %s.", directory, ", ".join(unread))
    return columns


def _schema_problems(names: list[str]) -> list[str]:
    masks = [name for name in LOSS_MASKS if name in names]
    packed = [name for name in PACKED_MARKS if name in names]
    problems = [] if masks else list(_foreign_mask_problems(names))
    if TOKENS not in names:
        problems.append(
            f"no column {TOKENS!r}; it has {', '.join(names)}. Tokenize it with prepare_data.py."
        )
    if len(masks) > 1:
        problems.append(
            f"several loss masks ({', '.join(masks)}); keep the one that counts and remove the "
            "others."
        )
    if packed:
        problems.append(
            f"column {packed[0]!r} says that its rows are packed already; give one document per "
            "row, or remove the column if that is what the rows are."
        )
    return problems


def _foreign_mask_problems(names: list[str]) -> Iterator[str]:
    """Refuse a mask under a name that is not read: every token would be trained on."""
    for name in (*FOREIGN_MASKS, *PROMPT_MASKS):
        if name not in names:
            continue
        rename = f"dataset.rename_column({name!r}, 'completion_mask')"
        invert = (
            f"dataset.map(lambda row: {{'completion_mask': [1 - bit for bit in row[{name!r}]]}}, "
            f"remove_columns={name!r})"
        )
        yield (
            f"column {name!r} looks like a loss mask, but is not read under this name, so every "
            f"token would be trained on: save {invert if name in PROMPT_MASKS else rename} (1: "
            "trained on), or remove the column if every token is meant."
        )
