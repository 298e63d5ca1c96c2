"""Looks at storage and clocks of all hosts, before anything is written that has to stay."""

import contextlib
import logging
import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from utils.checkpoints.room import free_room
from utils.cluster.decisions import gathered, on_every_rank, on_rank_0
from utils.cluster.host import host_name
from utils.cluster.launch import LaunchFacts
from utils.cluster.limits import call_within
from utils.config.errors import ConfigurationError, StorageError, UnfitClusterError
from utils.runs.storage_room import StorageNeeds, check_room

logger = logging.getLogger(__name__)

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
