"""Checks the output directory before a run: shared, writable, with room, and no one else's."""

import logging
import os
import re
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from utils.checkpoints.discovery import (
    LEAST_KEPT,
    RESERVE_BYTES,
    committed_checkpoints,
    deletable,
    free_bytes,
    most_at_once,
    next_bytes,
    taken_bytes,
    uncommitted_checkpoints,
)
from utils.checkpoints.files import CONFIG, FINAL, PROVENANCE, known_run_id, readable
from utils.config.errors import ConfigurationError, StorageError
from utils.launch.processes import LaunchFacts, call_within
from utils.planning.job import Saves
from utils.support.collectives import on_every_rank, on_rank_0
from utils.support.host import host_name
from utils.support.run_lock import FOLDER

logger = logging.getLogger(__name__)

MARK = ".stoker-preflight-"  # begins the names of the files that are there for a moment
STORAGE_LIMIT_S = 30.0  # a file system that answers later would stall every save
SIGHT_LIMIT_S = 5.0  # NFS clients look at a directory again after some seconds
PROBE_BYTES = 2**20

Answer = TypeVar("Answer")


@dataclass(frozen=True)
class StorageNeeds:
    """The checkpoints of a run: about what one takes, over all ranks, and when they are written."""

    checkpoint_bytes: int
    saves: Saves
    total_steps: int


def check_storage(output_dir: Path, needs: StorageNeeds, launch: LaunchFacts) -> None:
    """Check that all hosts can write to one ``output_dir``, with room for checkpoints; make it.

    Collective: every rank raises the same StorageError, or ConfigurationError for a file of that
    name. Each host writes a small file, since quotas do not show in what is free.
    """
    first_ranks = {launch.hosts.index(host) for host in launch.hosts}  # of each host

    def open_directory() -> tuple[str, int, str]:
        room = _open(output_dir, needs)
        mark = MARK + secrets.token_hex(8)
        _write(output_dir / mark, 0)
        # No more than fits if room will only come with what is deleted.
        return mark, min(PROBE_BYTES, free_bytes(output_dir) // (2 * len(first_ranks))), room

    mark, probe_bytes, room = on_rank_0(lambda: _in_time(open_directory))

    def probe() -> None:
        if launch.rank in first_ranks:
            _in_time(lambda: _probe(output_dir / mark, probe_bytes, launch.rank))

    try:
        on_every_rank(probe)
    finally:
        if launch.rank == 0:
            (output_dir / mark).unlink(missing_ok=True)
    if launch.rank == 0:
        logger.info(
            "preflight: %d host(s), %d rank(s) can write to %s, %s",
            len(first_ranks), launch.world_size, output_dir, room,
        )  # fmt: skip


def check_room(output_dir: Path, needs: StorageNeeds) -> str:
    """Return what is free and what checkpoints take, in words; raise StorageError if too little.

    A new run needs as many checkpoints as will be there at once, a resumed one the next; if later
    ones will not fit that is a warning. What `make_room` may delete counts as free.
    """
    run_id, keep = known_run_id(output_dir / PROVENANCE), needs.saves.kept
    committed = [] if run_id is None else committed_checkpoints(output_dir, run_id)
    step = committed[0][1].step if committed else 0
    free = free_bytes(output_dir)
    if committed and step >= needs.total_steps:
        return f"{readable(free)} free (all checkpoints are there)"
    going: list[Path] = []
    if run_id is not None:  # what was not committed becomes incomplete.*
        going = [*uncommitted_checkpoints(output_dir), *deletable(output_dir, committed, keep)]
    staying = len({path for path, _ in committed} - set(going))
    freed = taken_bytes(going)
    one = next_bytes(committed, needs.checkpoint_bytes)
    ahead = needs.saves.scheduled(needs.total_steps, step)
    most = max(1, most_at_once(keep, staying + ahead) - staying)
    # Without a limit somebody may move some away meanwhile.
    now = 1 if committed else min(most, LEAST_KEPT) if keep is None else most
    for count in (now, most):
        missing = count * one + RESERVE_BYTES - free - freed
        if missing <= 0:
            continue
        problem = (
            f"{host_name()}: {output_dir} has {readable(free)} free, {readable(freed)} more once "
            f"old checkpoints are deleted, but {count} of about {readable(one)} will be there at "
            f"once (save_total_limit {'null' if keep is None else keep}; the older ones stay while "
            f"the next is written): {readable(missing)} are missing."
        )
        if count == now:
            raise StorageError(
                f"{problem} Make room there (see also your quota), or name another --output_dir; "
                "no checkpoint was touched."
            )
        logger.warning("%s The run will end with 74 when they are needed.", problem)
    return f"{readable(free)} free ({now} checkpoint(s) of about {readable(one)} needed)"


def _open(output_dir: Path, needs: StorageNeeds) -> str:
    """Make the directory and check its room; return the room in words."""
    if output_dir.exists() and not output_dir.is_dir():
        raise ConfigurationError(f"--output_dir {output_dir} is a file: name a directory.")
    is_new = not output_dir.exists()
    try:
        output_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(
            f"{host_name()}: --output_dir {output_dir} cannot be made ({error.strerror}): name a "
            "directory where you may write."
        ) from error
    try:
        return check_room(output_dir, needs)
    except StorageError:
        if is_new:
            output_dir.rmdir()
        raise


def _probe(mark: Path, probe_bytes: int, rank: int) -> None:
    """Find rank 0's mark from this host, and write a file."""
    output_dir, end = mark.parent, time.monotonic() + SIGHT_LIMIT_S
    while not (output_dir.is_dir() and mark.name in os.listdir(output_dir)):  # noqa: PTH208
        # Listed, not asked for by name: NFS remembers for a while that a file was not there.
        if time.monotonic() > end:
            problem = "is another directory here" if output_dir.is_dir() else "is not there"
            raise StorageError(
                f"{host_name()}: --output_dir {output_dir} {problem}, rank 0 made it on another "
                "host: name a directory on storage that all nodes share (not /tmp or a node's "
                "own scratch)."
            )
        time.sleep(0.1)
    own = mark.with_name(f"{mark.name}-{rank}")
    try:
        _write(own, probe_bytes)
    finally:
        own.unlink(missing_ok=True)


def _write(path: Path, size_bytes: int) -> None:
    try:
        with path.open("wb") as file:
            file.write(secrets.token_bytes(size_bytes))
            os.fsync(file.fileno())  # a quota may show only when the data is on its way
    except OSError as error:
        raise StorageError(
            f"{host_name()}: --output_dir {path.parent} cannot be written to ({error.strerror}): "
            "check its owner and mode, your quota, and whether this host has it mounted read-only."
        ) from error


def _in_time(action: Callable[[], Answer]) -> Answer:
    """Do something with storage that other ranks wait for; raises StorageError."""
    try:
        return call_within(STORAGE_LIMIT_S, action)
    except TimeoutError as error:
        raise StorageError(
            f"{host_name()}: the storage of --output_dir did not answer within "
            f"{STORAGE_LIMIT_S:g} s: see whether `ls` on it hangs there, and tell the "
            "administrators, or leave the node out (sbatch --exclude)."
        ) from error


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
    """Whether the checkpoint to resume from is the last one, and its model was written."""
    if resume_from is None or not (output_dir / FINAL).exists():
        return False
    return int(Path(resume_from).name.removeprefix("checkpoint-")) >= total_steps
