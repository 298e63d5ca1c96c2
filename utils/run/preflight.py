"""Checks before training: equal settings on all ranks; a shared, writable output_dir with space."""

import logging
import os
import secrets
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from utils.checkpoints.discovery import (
    LEAST_KEPT,
    committed_checkpoints,
    find_room,
    free_disk_bytes,
    max_checkpoints,
)
from utils.checkpoints.files import CONFIG, PROVENANCE, REPORT, readable
from utils.checkpoints.record import RunRecord
from utils.config.errors import (
    ConfigurationError,
    NoProgressError,
    StorageError,
    UnfitClusterError,
)
from utils.config.precision import CHOSEN
from utils.config.raw_data import PREPARED
from utils.config.settings import RunSettings
from utils.host.collectives import gathered, on_every_rank, on_rank_0
from utils.host.journal_file import FILE_NAME
from utils.host.machine import host_name
from utils.host.run_lock import LOCK_FOLDER
from utils.launch.processes import LaunchFacts
from utils.observe.history import read_run
from utils.observe.hours import hours_of
from utils.plan.run_plan import RunPlan
from utils.prepare.workspace import foreign_files

logger = logging.getLogger(__name__)

MARK = ".stoker-preflight-"  # prefix of a temporary file's name
SIGHT_LIMIT_S = 5.0  # an NFS client caches a directory's contents for some seconds
PROBE_BYTES = 2**14
STARTS_WITHOUT_PROGRESS = 3


def check_same_start(settings: RunSettings, launch: LaunchFacts) -> None:
    """Raise UnfitClusterError if bf16 or activation_checkpointing differs between ranks.

    Raise ConfigurationError if files of --callbacks or --loss differ. All ranks must call this.
    """
    chosen = {name: (settings.values[name], settings.values.shown(name)) for name in CHOSEN}
    first, *others = gathered((chosen, settings.own_code.digests()))
    for host, (values, digests) in zip(launch.hosts[1:], others, strict=True):
        for name, (value, shown) in values.items():
            if value != first[0][name][0]:
                raise UnfitClusterError(
                    f"the ranks would compute differently: {first[0][name][1]} on "
                    f"{launch.hosts[0]}, {shown} on {host}: set {name} yourself, or take nodes of "
                    "one kind."
                )
        if digests != first[1]:
            raise ConfigurationError(
                f"--callbacks, --loss: {host} and {launch.hosts[0]} have different files."
            )


def check_storage(plan: RunPlan, launch: LaunchFacts) -> None:
    """Make output_dir. Check that every host can write to output_dir and that checkpoints fit.

    Each host appends some bytes to a temporary file, because the free space does not show quotas.
    All ranks must call this. All raise the same error: StorageError, or ConfigurationError if
    output_dir is a file or has files that no run wrote.
    """
    output_dir = plan.settings.output_dir
    first_ranks = {launch.hosts.index(host) for host in launch.hosts}  # the first of each host

    def open_directory() -> tuple[str, str]:
        room = check_output_room(plan)
        name = MARK + secrets.token_hex(8)
        _append_bytes(output_dir / name)
        return name, room

    name, room = on_rank_0(open_directory)
    mark = output_dir / name
    try:
        on_every_rank(lambda: _append_to_mark(mark) if launch.rank in first_ranks else None)
    finally:
        if launch.rank == 0:
            mark.unlink(missing_ok=True)
    if launch.rank == 0:
        level = logging.INFO if len(first_ranks) > 1 else logging.DEBUG
        logger.log(level, "%d host(s) can write to %s, %s", len(first_ranks), output_dir, room)


def check_directory(output_dir: Path, *, writable: bool = True) -> Path:
    """Return output_dir or, if it does not exist yet, the nearest existing folder above it.

    Raises ConfigurationError if output_dir is a file or has files that no run wrote. With
    `writable`, raises StorageError if this user cannot write to the returned folder.
    """
    if output_dir.exists() and not output_dir.is_dir():
        raise ConfigurationError(f"--output_dir {output_dir} is a file: name a directory.")
    folder = next(path for path in (output_dir, *output_dir.absolute().parents) if path.is_dir())
    if writable and not os.access(folder, os.W_OK | os.X_OK):
        raise _not_writable_error(output_dir, f"{folder}: permission denied")
    has_run_files(output_dir)
    return folder


def check_output_room(plan: RunPlan) -> str:
    """Check that checkpoints fit and that GPU-hours are left. Return a text with the free space.

    A new run needs room for all checkpoints that exist at the same time. A resumed run needs room
    for its next checkpoint. Checkpoints that `make_room` may delete count as free space. Raises
    StorageError for too little space or a directory that is not writable. Raises ConfigurationError
    if output_dir is a file or max_gpu_hours are used up.
    """
    output_dir, keep = plan.settings.output_dir, plan.settings.training.save_total_limit
    folder = check_directory(output_dir)
    run_id = RunRecord(output_dir).run_id
    committed = [] if run_id is None else committed_checkpoints(output_dir, run_id)
    if committed and committed[0][1].step >= plan.total_steps:
        return f"{readable(free_disk_bytes(folder))} free (all checkpoints are there)"
    if (most_hours := plan.settings.run.max_gpu_hours) is not None:
        used = hours_of(read_run(output_dir, whole=False))
        if used.total >= most_hours:
            raise ConfigurationError(
                f"max_gpu_hours {most_hours:g}: {output_dir} has taken {used}. Nothing was "
                "started: give a larger --max_gpu_hours to continue the run."
            )
    count = 1
    if not committed:
        most = max_checkpoints(keep, max(1, plan.scheduled_saves))
        # Without a limit on the number of checkpoints, the user may move some away during the run.
        count = min(most, LEAST_KEPT) if keep is None else most
    find_room(folder, run_id, keep, plan.checkpoint_bytes, count)
    return f"{readable(free_disk_bytes(folder))} free ({count} more checkpoint(s) needed)"


def _append_to_mark(mark: Path) -> None:
    """Append some bytes to `mark`, the temporary file of rank 0.

    Raises StorageError if this host does not see the file or cannot write to the file.
    """
    output_dir, end = mark.parent, time.monotonic() + SIGHT_LIMIT_S
    # List the directory, because NFS caches for a while that a single name was missing.
    while not (output_dir.is_dir() and mark.name in os.listdir(output_dir)):  # noqa: PTH208
        if time.monotonic() > end:
            raise StorageError(
                f"{host_name()}: --output_dir {output_dir} is not the directory that rank 0 made "
                "on another host: name one on storage that all nodes share (not /tmp or a node's "
                "own scratch)."
            )
        time.sleep(0.1)
    _append_bytes(mark)


def _append_bytes(path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab") as file:
            file.write(bytes(PROBE_BYTES))
            os.fsync(file.fileno())  # some quotas only fail here
    except OSError as error:
        raise _not_writable_error(path.parent, str(error.strerror)) from error


def _not_writable_error(output_dir: Path, reason: str) -> StorageError:
    return StorageError(
        f"{host_name()}: --output_dir {output_dir} cannot be written to ({reason}): check its "
        "owner and mode, your quota, and whether this host has it mounted read-only."
    )


def has_run_files(output_dir: Path) -> bool:
    """Return whether output_dir has a run.

    Raises ConfigurationError for files that no run wrote, and for a link in place of a run's file.
    """
    # Do not follow links, because another user may have made this directory. Accept damaged files
    # of a run, because the start restores them.
    for path in (output_dir / name for name in (CONFIG, PROVENANCE, FILE_NAME, LOCK_FOLDER)):
        if path.is_symlink() or (path.name == LOCK_FOLDER and path.is_file()):
            kind = "a link" if path.is_symlink() else "no folder"
            raise ConfigurationError(
                f"{path} is {kind}: nothing was read or written there. Put what it stands for in "
                "its place, or remove it, or name another --output_dir."
            )
    if RunRecord(output_dir).exists:
        return True
    names = {path.name for path in output_dir.iterdir()} if output_dir.is_dir() else set()
    if LOCK_FOLDER in names:
        names -= {CONFIG, REPORT}  # left by a start that ended before it wrote the rest
    if not foreign_files(output_dir / PREPARED):
        names.discard(PREPARED)  # the data of a run that has not begun
    # Ignore hidden files: temporary files of a start that ended early, and files of file systems.
    if others := sorted(name for name in names if not name.startswith(".")):
        raise ConfigurationError(
            f"--output_dir {output_dir} is not empty and holds no run of Stoker (it has "
            f"{others[0]}): name another directory; nothing is written over."
        )
    return False


def check_progress(
    starts: Sequence[Mapping[str, Any]], resume_from: str | None, job: Mapping[str, Any] | None
) -> None:
    """Raise NoProgressError if a requeued job already resumed three times from `resume_from`.

    starts: earlier starts, the list in provenance.json. resume_from: the checkpoint from which this
    start resumes. None means step 0. job: the result of `slurm_job`. Restarts inside a job are not
    counted, because the job script checks them: after two starts at the same step it requeues the
    job. Nothing is raised in such a restart, or if the job was not requeued.
    """
    if job is None or int(job["restart_count"] or 0) == 0 or int(job.get("restart_in_job") or 0):
        return
    step_name = Path(resume_from or "step 0").name
    number = sum(
        Path(start["resumed_from"] or "step 0").name == step_name
        for start in starts
        if start["slurm"]
        and all(start["slurm"][key] == job[key] for key in ("cluster", "job_id"))
        and not int(start["slurm"].get("restart_in_job") or 0)
    )
    if number >= STARTS_WITHOUT_PROGRESS:
        raise NoProgressError(
            f"job {job['job_id']} began {number} times at {step_name} and reached no "
            "checkpoint beyond it. Look in its log for what ended it each time; if it was the time "
            "limit, give it more (--time) or save more often (a smaller save_steps). sbatch of the "
            "same command tries again."
        )
