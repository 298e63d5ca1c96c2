"""Read `DIR=weight` and `NAME=DIR`, the two ways in which settings name token datasets."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_SPLIT_NAME = re.compile(r"[a-z0-9_]+")


@dataclass(frozen=True)
class TrainSource:
    """A token dataset to train on; its weight is its share of the samples, None without any."""

    directory: str
    weight: float | None = None


def train_sources(entries: Sequence[str]) -> tuple[TrainSource, ...]:
    """Read `DIR` or `DIR=weight` entries; raises ValueError on an entry that is neither."""
    return tuple(map(_train_source, entries))


def eval_splits(entries: Sequence[str]) -> dict[str, str]:
    """Read `NAME=DIR` entries, or `DIR` whose last folder is the name.

    Raises ValueError on an entry that is neither, or a name given twice.
    """
    splits: dict[str, str] = {}
    for entry in entries:
        name, equals, directory = entry.partition("=")
        if not equals:
            name, directory = re.sub(r"[^a-z0-9]+", "_", Path(entry).name.lower()).strip("_"), entry
        if not directory or not _SPLIT_NAME.fullmatch(name):
            raise ValueError(
                f"eval_data {entry!r}: expected NAME=DIR, the name of lower-case letters, digits "
                "and underscores (it becomes the metric eval_NAME_loss)"
            )
        if name in splits:
            raise ValueError(f"eval_data names {name!r} twice: {splits[name]} and {directory}")
        splits[name] = directory
    return splits


def weight_problems(sources: Sequence[TrainSource]) -> list[str]:
    """Say what is wrong with the training datasets taken together."""
    problems = []
    weighted = [source for source in sources if source.weight is not None]
    if weighted and len(weighted) < len(sources):
        bare = ", ".join(source.directory for source in sources if source.weight is None)
        problems.append(
            f"train_data gives weights to some datasets and none to {bare}: weight all or none"
        )
    directories = [source.directory for source in sources]
    for directory in dict.fromkeys(directories):
        if directories.count(directory) > 1:
            problems.append(f"train_data names {directory} twice: give it a weight instead")
    return problems


def _train_source(entry: str) -> TrainSource:
    directory, equals, tail = entry.rpartition("=")
    if not equals or "/" in tail:  # the sign belongs to the path
        return TrainSource(entry)
    try:
        weight = float(tail)
    except ValueError:
        weight = math.nan
    if not directory or not 0 < weight < math.inf:
        raise ValueError(
            f"train_data {entry!r}: expected DIR or DIR=weight, the weight a number above 0"
        )
    return TrainSource(directory, weight)
