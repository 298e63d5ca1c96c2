"""Which checkpoints stay when there are more than were asked for, and room for the next one."""

import json
import logging
from collections.abc import Sequence
from pathlib import Path

from utils.checkpoints.directory import (
    DAMAGED,
    DELETING,
    INCOMPLETE,
    RESHARDED,
    committed_checkpoints,
    delete_if_possible,
    leftovers,
)
from utils.checkpoints.manifest import Manifest
from utils.checkpoints.room import RESERVE, Room, free_room, next_room, shortage, taken_room
from utils.cluster.host import host_name
from utils.config.errors import StorageError

logger = logging.getLogger(__name__)

LEAST_KEPT = 2  # one may turn out to be damaged
TRAINER_STATE = "trainer_state.json"

Committed = Sequence[tuple[Path, Manifest]]  # newest first


def most_at_once(keep: int | None, saves: int) -> int:
    """Return how many checkpoints storage has to hold while the last of `saves` is written.

    Older ones beyond the newest `keep` go before a save if its room is needed, but LEAST_KEPT stay
    until it is committed: with a limit of 2 as with one of 3, three are there for a moment.
    """
    return saves if keep is None else min(saves, max(keep, LEAST_KEPT + 1))


def rotate(output_dir: Path, run_id: str, keep: int | None, best: Path | None) -> None:
    """Delete what is beyond the newest `keep` checkpoints (None: nothing) and the best one.

    Only committed checkpoints of this run are looked at, by step, never by a file's time. What
    cannot be deleted is said aloud: training goes on.
    """
    spare = _spare(committed_checkpoints(output_dir, run_id), keep, best)
    for directory in [*leftovers(output_dir, INCOMPLETE), *spare]:
        delete_if_possible(directory)


def make_room(
    output_dir: Path, run_id: str, keep: int | None, best: Path | None, estimate: Room
) -> None:
    """See that the next checkpoint fits; delete as much of `deletable` as that takes, if any.

    `estimate` counts while there is no checkpoint to go by. Raises StorageError, with nothing
    deleted, when all of it is not enough.
    """
    committed = committed_checkpoints(output_dir, run_id)
    needed = next_room(committed[0][1] if committed else None, estimate) + RESERVE
    free, freed = free_room(output_dir), Room(0, 0)
    doomed: list[Path] = []
    for directory in deletable(output_dir, committed, keep, best):
        if (free + freed).holds(needed):
            break
        doomed.append(directory)
        freed += taken_room([directory])
    if not (free + freed).holds(needed):
        staying = len({path for path, _ in committed} - set(doomed))
        raise StorageError(_no_room(output_dir, shortage(free, freed, needed), staying))
    for directory in doomed:
        logger.warning("%s is deleted before the save: its room is needed", directory)
        delete_if_possible(directory)  # what is missing then the save will say


def _no_room(output_dir: Path, words: tuple[str, str, str], staying: int) -> str:
    has, takes, missing = words
    ones = "the committed one stays" if staying == 1 else f"{staying} committed ones stay"
    stay = f", and {ones} until it is there" if staying else ""
    damaged = leftovers(output_dir, DAMAGED)
    useless = f", such as {damaged[0]} if you do not look into it any more" if damaged else ""
    return (
        f"{host_name()}: {output_dir} has {has}, the next checkpoint takes {takes}{stay}: "
        f"{missing} are missing. Remove files there{useless}, or have your quota raised (df -h, "
        "df -i, your site's quota command), then start the same command again: it goes on from "
        "the newest checkpoint, and none was touched."
    )


def deletable(
    output_dir: Path, committed: Committed, keep: int | None, best: Path | None
) -> Sequence[Path]:
    """Return what may be deleted before the next checkpoint is there, in the order to go.

    That is what starts left behind that were killed while they wrote or deleted, then what `rotate`
    would delete after the next commit, the oldest first, as long as LEAST_KEPT committed ones stay.
    """
    spare = _spare(committed, None if keep is None else keep - 1, best)
    most = max(0, len(committed) - LEAST_KEPT)
    return [*leftovers(output_dir, DELETING, RESHARDED, INCOMPLETE), *spare[:most]]


def best_checkpoint(checkpoint: Path) -> Path | None:
    """Return the best checkpoint so far, as a committed one has it; None where it names none."""
    try:
        state = json.loads((checkpoint / TRAINER_STATE).read_text(encoding="utf-8"))
        best = state["best_model_checkpoint"]
    except (OSError, ValueError, KeyError, TypeError):
        return None  # whoever loads it says what is wrong with it
    return None if best is None else checkpoint.with_name(Path(best).name)


def _spare(committed: Committed, keep: int | None, best: Path | None) -> Sequence[Path]:
    """Return the committed checkpoints beyond the newest `keep` and the best, oldest first."""
    if keep is None:
        return []
    newest_first = [directory for directory, _ in committed]
    kept_best = best and best.name
    return [path for path in reversed(newest_first[keep:]) if path.name != kept_best]
