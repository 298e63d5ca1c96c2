"""What a split holds, found by reading every token: once, then it is kept for later starts.

Kept by the files' paths, order, sizes and modification times, and never in the user's folder.
"""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from utils.cluster.kept import file_states, keep, kept_path, read_kept
from utils.data.columns import TOKENS, loss_mask_among
from utils.data.description import Description
from utils.data.list_columns import ListColumn
from utils.data.statistics import Statistics, measure

logger = logging.getLogger(__name__)


def measured_once(
    directory: Path, files: Sequence[Path], columns: Mapping[str, ListColumn], why: str
) -> Description:
    """Return statistics, fingerprint and loss mask of a split; `why` says what asks for it."""
    path = kept_path("statistics", file_states(files))
    found = read_kept(path, _description, "measuring the dataset again")
    if found is None:
        tokens = int(columns[TOKENS].offsets[-1])
        logger.info("%s %s: measuring its %s tokens once.", directory, why, f"{tokens:,}")
        loss_mask = loss_mask_among(columns)
        statistics, fingerprint = measure(columns, loss_mask)
        found = Description(statistics, fingerprint, loss_mask)
        keep(path, _content(found), "Statistics are not cached; every start measures them again")
    return found


def _content(found: Description) -> dict[str, Any]:
    return {
        "statistics": found.statistics.as_dict(),
        "fingerprint": found.fingerprint,
        "loss_mask": found.loss_mask,
    }


def _description(content: Mapping[str, Any]) -> Description:
    return Description(
        statistics=Statistics.from_dict(content["statistics"]),
        fingerprint=content["fingerprint"],
        loss_mask=content["loss_mask"],
    )
