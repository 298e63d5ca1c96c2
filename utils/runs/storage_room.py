"""Whether storage has room for the checkpoints that a start will write."""

import logging
from dataclasses import dataclass
from pathlib import Path

from utils.checkpoints.directory import committed_checkpoints, uncommitted_checkpoints
from utils.checkpoints.manifest import Manifest
from utils.checkpoints.room import (
    RESERVE,
    Room,
    estimated_room,
    free_room,
    next_room,
    shortage,
    taken_room,
)
from utils.checkpoints.rotation import (
    LEAST_KEPT,
    Committed,
    best_checkpoint,
    deletable,
    most_at_once,
)
from utils.checkpoints.run_record import PROVENANCE, known_run_id
from utils.checkpoints.sizes import readable
from utils.cluster.host import host_name
from utils.config.errors import StorageError
from utils.planning.job_checks import Saves

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class StorageNeeds:
    """The checkpoints of a run: about what one takes, over all ranks, and when they are written."""

    checkpoint_bytes: int
    ranks: int
    saves: Saves
    total_steps: int


@dataclass(frozen=True)
class _Demand:
    """Checkpoints that storage has to take at once, beside those that stay."""

    now: int  # or the start is refused
    later: int  # or the run ends early


def check_room(output_dir: Path, needs: StorageNeeds) -> str:
    """Return what is free and what checkpoints take, in words; raise where it does not suffice.

    A new run is refused unless as many fit as will be there at once. One that has checkpoints goes
    on as long as the next one fits, aloud where later ones do not. What `resume_point` and
    `make_room` will delete on the way counts as free. Raises StorageError.
    """
    run_id = known_run_id(output_dir / PROVENANCE)
    committed: Committed = [] if run_id is None else committed_checkpoints(output_dir, run_id)
    free, freed = free_room(output_dir), Room(0, 0)
    newest = committed[0][1] if committed else None
    if newest is not None and newest.step >= needs.total_steps:
        return f"{readable(free.size_bytes)} free (all checkpoints are there)"
    staying = len(committed)
    if run_id is not None:
        best = best_checkpoint(committed[0][0]) if committed else None
        going = [
            *uncommitted_checkpoints(output_dir),  # they become incomplete.*
            *deletable(output_dir, committed, needs.saves.kept, best),
        ]
        staying -= len({path for path, _ in committed} & set(going))
        freed = taken_room(going)
    demand = _demand(needs, newest.step if newest else None, staying)
    one = next_room(newest, estimated_room(needs.checkpoint_bytes, needs.ranks))
    wanted, needed = _wanted(demand.now), one.times(demand.now) + RESERVE
    if not (free + freed).holds(needed):
        has, takes, missing = shortage(free, freed, needed)
        raise StorageError(
            f"{host_name()}: {output_dir} has {has}, but {wanted} {takes}{_why(needs, demand)}: "
            f"{missing} are missing. Make room there (see also your quota), {_else(newest)}."
        )
    later = one.times(demand.later) + RESERVE
    if demand.later > demand.now and not (free + freed).holds(later):
        has, takes, missing = shortage(free, freed, later)
        logger.warning(
            "%s has %s, but %s %s%s: %s are missing, and the run will end with 74 when they are "
            "needed, with all checkpoints that are there by then.",
            output_dir, has, _wanted(demand.later), takes, _why(needs, demand), missing,
        )  # fmt: skip
    return f"{readable(free.size_bytes)} free ({wanted} {readable(needed.size_bytes)})"


def _demand(needs: StorageNeeds, reached: int | None, staying: int) -> _Demand:
    """Return what is needed beside `staying` checkpoints; `reached`: the newest one's step."""
    saves = needs.saves
    ahead = saves.scheduled(needs.total_steps, reached or 0)
    later = max(1, most_at_once(saves.kept, staying + ahead) - staying)
    if reached is not None:
        return _Demand(1, later)
    # Without a limit somebody may carry them away meanwhile.
    return _Demand(min(later, LEAST_KEPT) if saves.kept is None else later, later)


def _wanted(count: int) -> str:
    if count == 1:
        return "the next checkpoint of this run takes about"
    return f"{count} checkpoints of this run take about"


def _else(newest: Manifest | None) -> str:
    if newest is None:
        return "or name an --output_dir with more of it"
    return "then start the same command again: it goes on, and no checkpoint was touched"


def _why(needs: StorageNeeds, demand: _Demand) -> str:
    kept = needs.saves.kept
    if demand.later == 1:
        return ""
    if kept is None:
        return " (save_total_limit null keeps all)"
    return f" (save_total_limit {kept}: older ones stay while the next is written)"
