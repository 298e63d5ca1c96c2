"""Whether storage has room for the checkpoints that a start will write."""

import contextlib
import logging
import os
import re
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from utils.checkpoints.discovery import committed_checkpoints, uncommitted_checkpoints
from utils.checkpoints.files import readable
from utils.checkpoints.manifest import CONFIG, FINAL, PROVENANCE, Manifest, known_run_id
from utils.checkpoints.space import (
    LEAST_KEPT,
    RESERVE,
    Committed,
    Room,
    best_checkpoint,
    deletable,
    estimated_room,
    free_room,
    most_at_once,
    next_room,
    shortage,
    taken_room,
)
from utils.config.errors import ConfigurationError, StorageError, UnfitClusterError
from utils.launch.processes import LaunchFacts, call_within
from utils.planning.job import Saves
from utils.support.collectives import gathered, on_every_rank, on_rank_0
from utils.support.host import host_name
from utils.support.run_lock import FOLDER

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


# Looks at storage and clocks of all hosts, before anything is written that has to stay.

MARK = ".stoker-preflight-"  # begins the names of the files that are there for a moment
STORAGE_LIMIT_S = 30.0  # a file system that answers later would stall every save
SIGHT_LIMIT_S = 5.0  # NFS clients look at a directory again after some seconds
CLOCKS_REFUSED_S = 60.0
CLOCKS_SAID_S = 5.0
LEFT_BEHIND_S = 3600.0
PROBE_BYTES = 2**20

Answer = TypeVar("Answer")


def check_storage(output_dir: Path, needs: StorageNeeds, launch: LaunchFacts) -> None:
    """Check that all hosts write to one ``output_dir``, with room, and that their clocks agree.

    Every rank calls it, and every rank raises the same StorageError (UnfitClusterError for clocks,
    ConfigurationError for a file of that name). Makes the directory; after a refusal one that was
    not there before is gone again. For the room that is wanted see `check_room`.

    What a file system does not tell is not found: a quota with too little left (a small file is
    written to see whether it takes any at all), and what other jobs will write meanwhile.
    """
    made: list[Path] = []
    mark = ""
    hosts = {host: launch.hosts.index(host) for host in launch.hosts}
    try:
        mark, room, probe_bytes = on_rank_0(
            lambda: _in_time(lambda: _open(output_dir, needs, len(hosts), made))
        )
        first_of_host = launch.rank in hosts.values()
        own_mark = f"{mark}-{launch.rank}"
        on_every_rank(
            lambda: (
                _in_time(lambda: _check_sight(output_dir, own_mark, mark, probe_bytes))
                if first_of_host
                else None
            )
        )
        times = gathered(time.time())
        clocks = _check_clocks({host: times[rank] for host, rank in hosts.items()}, launch)
    except ConfigurationError:
        if launch.rank == 0:
            _clear(output_dir, mark, made)
        raise
    if launch.rank == 0:
        _clear(output_dir, mark, [])
        many = len(hosts) > 1
        same = "is the same everywhere" if many else f"on {host_name()} can be written to"
        logger.info(
            "preflight: %s, %s, %s %s, %s%s",
            _count(len(hosts), "host"),
            _count(launch.world_size, "rank"),
            output_dir,
            same,
            room,
            clocks if many else "",
        )


def _open(
    output_dir: Path, needs: StorageNeeds, hosts: int, made: list[Path]
) -> tuple[str, str, int]:
    """Make the directory, see that it has room, and leave a mark in it.

    Returns mark, room in words, and how much each host is to write for a trial: not more than fits
    where room will only come with what goes.
    """
    if output_dir.exists() and not output_dir.is_dir():
        raise ConfigurationError(f"--output_dir {output_dir} is a file: name a directory.")
    _make(output_dir, made)
    room = check_room(output_dir, needs)
    share = int(free_room(output_dir).size_bytes) // (2 * hosts)
    probe_bytes = max(1, min(PROBE_BYTES, needs.checkpoint_bytes, share))
    mark = MARK + secrets.token_hex(8)
    try:
        (output_dir / mark).touch(exist_ok=False)
    except OSError as error:
        raise StorageError(_takes_nothing(output_dir, error)) from error
    return mark, room, probe_bytes


def _make(output_dir: Path, made: list[Path]) -> None:
    """Make a directory and its parents, each of which joins `made`, the outermost first."""
    missing = [path for path in (output_dir, *output_dir.parents) if not path.exists()]
    for path in reversed(missing):
        try:
            path.mkdir(exist_ok=True)
        except OSError as error:
            raise StorageError(
                f"{host_name()}: --output_dir {output_dir} cannot be made ({path}: "
                f"{error.strerror}): name a directory where you may write."
            ) from error
        made.append(path)


def _check_sight(output_dir: Path, own_mark: str, mark: str, probe_bytes: int) -> None:
    """Find rank 0's mark from this host, and write a file of its own."""
    end = time.monotonic() + SIGHT_LIMIT_S
    while not _lists(output_dir, mark):
        if time.monotonic() > end:
            problem = "is another directory here" if output_dir.is_dir() else "is not there"
            raise StorageError(
                f"{host_name()}: --output_dir {output_dir} {problem}, rank 0 made it on another "
                "host: name a directory on storage that all nodes share (not /tmp or a node's "
                "own scratch)."
            )
        time.sleep(0.1)
    own = output_dir / own_mark
    try:
        with own.open("wb") as file:
            file.write(secrets.token_bytes(probe_bytes))
            os.fsync(file.fileno())  # a quota may speak only when the data is on its way
    except OSError as error:
        raise StorageError(_takes_nothing(output_dir, error)) from error
    finally:
        own.unlink(missing_ok=True)


def _lists(directory: Path, name: str) -> bool:
    """Whether a directory lists a name: NFS remembers for a while that a file was not there."""
    try:
        return name in os.listdir(directory)  # noqa: PTH208 - names are wanted
    except FileNotFoundError:
        return False


def _takes_nothing(output_dir: Path, error: OSError) -> str:
    return (
        f"{host_name()}: --output_dir {output_dir} cannot be written to ({error.strerror}): check "
        "its owner and mode, your quota, and whether this host has it mounted read-only."
    )


def _clear(output_dir: Path, mark: str, made: Sequence[Path]) -> None:
    """Remove this start's marks, those of starts long gone, and empty directories it made.

    A start that is at the same place just now still needs its own.
    """

    def clear() -> None:
        for path in output_dir.glob(f"{MARK}*"):
            own = mark and path.name.startswith(mark)
            if own or time.time() - path.stat().st_mtime > LEFT_BEHIND_S:
                path.unlink(missing_ok=True)
        for path in reversed(made):
            path.rmdir()

    with contextlib.suppress(StorageError, OSError):  # the reason was said, or will be
        _in_time(clear)


def _check_clocks(clocks: Mapping[str, float], launch: LaunchFacts) -> str:
    """Compare the hosts' clocks, read at one moment; return how far they are apart, in words."""
    fast, slow = max(clocks, key=clocks.__getitem__), min(clocks, key=clocks.__getitem__)
    apart_s = clocks[fast] - clocks[slow]
    problem = (
        f"the clock of {fast} is {apart_s:.1f} s ahead of that of {slow}: time limits, logs and "
        "the order of files go by them; ask the administrators to synchronise them (chronyc "
        "tracking)"
    )
    if apart_s > CLOCKS_REFUSED_S:
        raise UnfitClusterError(
            f"{problem}, or leave one of them out: sbatch --exclude={slow} or --exclude={fast}."
        )
    if apart_s > CLOCKS_SAID_S and launch.rank == 0:
        logger.warning("%s.", problem)
    return f", clocks within {apart_s:.1f} s"


def _in_time(action: Callable[[], Answer]) -> Answer:
    """Do something with storage that other ranks wait for; raises StorageError."""
    try:
        return call_within(STORAGE_LIMIT_S, action)
    except TimeoutError as error:  # an OSError too
        raise StorageError(
            f"{host_name()}: the storage of --output_dir did not answer within "
            f"{STORAGE_LIMIT_S:g} s: see whether `ls` on it hangs there, and tell the "
            "administrators, or leave the node out (sbatch --exclude)."
        ) from error
    except OSError as error:
        raise StorageError(f"{host_name()}: --output_dir cannot be looked at: {error}.") from error


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' if number != 1 else ''}"


# Whose a run directory is: a run's, nobody's, or something else's that is never written over.

# What a start that was killed before it wrote its settings leaves behind.
_DRAFTS = "|".join(map(re.escape, (CONFIG, PROVENANCE)))
_OURS = re.compile(rf"{re.escape(FOLDER)}|\.({_DRAFTS})\..*|{MARK}.*")


def known_files(output_dir: Path) -> bool:
    """Return whether the directory holds a run; raise when it holds something else."""
    if (output_dir / CONFIG).is_file() and (output_dir / PROVENANCE).is_file():
        return True
    names = {path.name for path in output_dir.iterdir()}
    if FOLDER in names:
        names.discard(CONFIG)  # of a start that was killed before it wrote the rest
    others = sorted(name for name in names if not _OURS.fullmatch(name))
    if others:
        raise ConfigurationError(
            f"--output_dir {output_dir} is not empty and holds no run of Stoker (it has {others[0]}"
            f"{', ...' if len(others) > 1 else ''}): name another directory; nothing is written "
            "over."
        )
    return False


def refuse_finished(output_dir: Path, resume_from: str | None) -> None:
    """Raise where a finished run's checkpoints are gone: a start would train over its model."""
    if resume_from is None and (output_dir / FINAL).exists():
        raise ConfigurationError(
            f"{output_dir} holds a finished run without checkpoints ({output_dir / FINAL}): name "
            "another --output_dir; nothing is written over."
        )


def is_finished(output_dir: Path, resume_from: str | None, total_steps: int) -> bool:
    """Whether the checkpoint to go on from is the last one, and its model was written."""
    if resume_from is None or not (output_dir / FINAL).exists():
        return False
    return int(Path(resume_from).name.removeprefix("checkpoint-")) >= total_steps
