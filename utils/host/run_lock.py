"""The run lock: at most one job trains in a run directory.

The folder .lock has a file owner-1, owner-2, ... for each process that ever held the lock. The
process with the highest number is the owner. The owner rewrites its file every few seconds (the
heartbeat), and sets `left` in the file at its end. If the owner has ended, a new process creates
the next file with O_EXCL. So only one process succeeds, also on NFS, where flock may not work. To
see whether the owner lives, a new process waits until the owner's file changes. The clocks of two
hosts are not compared.
"""

import atexit
import contextlib
import datetime
import json
import logging
import math
import os
import secrets
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from utils.config.errors import ConfigurationError
from utils.host.machine import host_name
from utils.host.phase_times import PhaseTimes, valid_numbers
from utils.host.redaction import redact

logger = logging.getLogger(__name__)

LOCK_FOLDER = ".lock"
BEAT_S = 5.0
WATCH_S = 30.0  # several heartbeats, because storage or a library that holds the GIL may delay them
LOOK_S = 0.5  # between two reads of the owner's file
LONGEST_ERROR = 250  # characters, each at most 12 bytes as JSON; an owner file has SIZE bytes
SIZE = 4096

NAMELESS = "a process that left no name"
RESTART_IN_JOB = "STOKER_RESTART_IN_JOB"  # restarts since Slurm started the job
BY_USER = "interrupted by the user (Ctrl-C)"  # the error of a process that Ctrl-C ended

_locks: dict[Path, "RunLock"] = {}
_silent_owners: list["RunOwner"] = []  # owners that gave no heartbeat while this process waited


def take_run_lock(output_dir: Path) -> None:
    """Take the run lock of a directory for this process. Only rank 0 calls this function.

    This process holds the lock until it calls `leave_run_lock` or ends. If another process owns the
    lock, wait up to WATCH_S seconds for a heartbeat of that owner. Raises OSError, and
    ConfigurationError if a heartbeat comes.
    """
    leave_run_lock(output_dir)  # this process may still hold the lock of an earlier run
    _locks[output_dir.resolve()] = RunLock(output_dir)
    atexit.register(leave_run_lock, output_dir)


def refuse_if_in_use(output_dir: Path) -> None:
    """Raise ConfigurationError if another process probably uses a directory.

    `take_run_lock` decides later. This early check waits for a heartbeat only if the last one is
    less than WATCH_S / 2 seconds old.
    """
    owner = next(run_owners(output_dir), None)
    if owner is None or output_dir.resolve() in _locks:
        return
    if owner.alive and owner.age_s < WATCH_S / 2 and not _is_gone(owner):
        _wait_for_last_owner(output_dir)


def leave_run_lock(output_dir: Path) -> None:
    """Release the run lock if this process holds it. Raises nothing."""
    if lock := _locks.pop(output_dir.resolve(), None):
        lock.stop.set()
        lock.thread.join(timeout=BEAT_S)
        with contextlib.suppress(OSError):
            if not lock.thread.is_alive() and lock.new_owner() is None:
                lock.write(left=True)


def note_error(error: str) -> None:
    """Store the error that ends this process, with secrets masked.

    The run lock's next heartbeat or `leave_run_lock` writes this error to the process's owner file.
    """
    for lock in _locks.values():
        lock.error = redact(error)[:LONGEST_ERROR]


def note_phase(phase: str) -> None:
    """Begin a phase such as "training". The next heartbeat writes it to the owner file."""
    for lock in _locks.values():
        lock.phases.begin(phase)


def note_energy(kwh: float) -> None:
    """Store the training energy in kWh. The next heartbeat writes it to the owner file."""
    for lock in _locks.values():
        lock.kwh = kwh


def note_hang(silent_s: float) -> None:
    """Write into the owner file that the last `silent_s` seconds were a hang. Raises OSError."""
    for lock in _locks.values():
        lock.phases.take_hang(silent_s)
        if lock.new_owner() is None:
            lock.write()


def held_runs() -> dict[Path, str]:
    """Return {run directory that this process has locked: error from `note_error`, or ""}."""
    return {path: lock.error or "" for path, lock in _locks.items()}


def lost_lock_message(output_dir: Path) -> str | None:
    """Return a message if another job took the run lock from this process, else None.

    A process that was suspended for longer than WATCH_S may lose the lock. Call this before writing
    files that other jobs rely on. Raises OSError.
    """
    lock = _locks.get(output_dir.resolve())
    return lock.new_owner() if lock else None


def last_lost_lock_message(output_dir: Path) -> str | None:
    """Return the result of `lost_lock_message` at the last heartbeat. Reads no file."""
    lock = _locks.get(output_dir.resolve())
    return lock.lost if lock else None


def wait_until_left(output_dir: Path) -> None:
    """Wait until the owner releases the run lock or gives no heartbeat for WATCH_S seconds."""
    for _, owner in _owner_changes(output_dir / LOCK_FOLDER):
        if owner and owner.left:
            return


@dataclass(frozen=True)
class RunOwner:
    """A process that holds or held the run lock, from a file owner-NUMBER in .lock.

    left      whether the process released the lock
    error     the error that ended the process, or None
    since     time when the process took the lock, in unix seconds of its host's clock
    beat      time of the last heartbeat, in unix seconds of the storage's clock
    phase     the phase of the run at the last heartbeat
    replaced  whether a file with a higher number exists
    spent     seconds of each phase until the last heartbeat; empty in files of older versions
    saved     seconds of each phase until the last save ended
    kwh       energy that the GPUs used in training; None if unknown
    """

    number: int
    token: str
    host: str
    machine: str
    pid: int
    job: str | None
    restart_count: int
    restart_in_job: int
    since: float
    beats: int
    left: bool
    error: str | None
    phase: str
    beat: float = field(compare=False)
    replaced: bool = False
    spent: Mapping[str, float] = field(default_factory=dict, compare=False)
    saved: Mapping[str, float] = field(default_factory=dict, compare=False)
    kwh: float | None = field(default=None, compare=False)

    @property
    def age_s(self) -> float:
        """The seconds since the last heartbeat, by this host's clock."""
        return time.time() - self.beat

    @property
    def gone(self) -> bool:
        """Whether the process certainly no longer holds the lock.

        Either another process took the lock, or the process ran on this host and has ended.
        """
        if self.replaced or self.machine != _machine():
            return self.replaced
        try:
            os.kill(self.pid, 0)  # not psutil: /proc may hide other users' processes
        except ProcessLookupError:
            return True
        except PermissionError:
            pass  # the process belongs to another user
        return False

    @property
    def alive(self) -> bool:
        """Whether the process probably runs: its last heartbeat is younger than 2 * WATCH_S."""
        return not self.left and not self.gone and self.age_s < 2 * WATCH_S

    def belongs_to(self, slurm: Mapping[str, Any]) -> bool:
        """Return whether job id and restart counts equal those in `slurm`, from provenance.json."""
        counts = (int(slurm.get(name) or 0) for name in ("restart_count", "restart_in_job"))
        return (self.job, *self.restart_counts) == (slurm.get("job_id"), *counts)

    @property
    def restart_counts(self) -> tuple[int, int]:
        """(number of restarts by Slurm, number of restarts inside the job since then)."""
        return self.restart_count, self.restart_in_job

    def __str__(self) -> str:
        job = f" (Slurm job {self.job})" if self.job else ""
        since = datetime.datetime.fromtimestamp(self.since, datetime.UTC).isoformat(sep=" ")
        return f"process {self.pid} on {self.host}{job}, since {since}"


def run_owners(output_dir: Path) -> Iterator[RunOwner]:
    """Yield the processes that held the run lock, newest first. Damaged owner files are skipped."""
    replaced = False
    for number in sorted(_owner_numbers(output_dir / LOCK_FOLDER), reverse=True):
        with contextlib.suppress(OSError):
            if owner := _read_owner(output_dir / LOCK_FOLDER, number):
                yield replace(owner, replaced=replaced)
                replaced = True


class RunLock:
    """The run lock of one directory. The constructor takes it, `leave_run_lock` releases it."""

    def __init__(self, output_dir: Path):
        self.output_dir, self.folder = output_dir, output_dir / LOCK_FOLDER
        self.token = secrets.token_hex(8)
        self.owner: dict[str, Any] = {
            "token": self.token,
            "host": host_name(),
            "machine": _machine(),
            "pid": os.getpid(),
            "job": os.environ.get("SLURM_JOB_ID"),
            **dict(zip(("restart_count", "restart_in_job"), _restart_counts(), strict=True)),
            "since": datetime.datetime.now(datetime.UTC).isoformat(sep=" ", timespec="seconds"),
        }
        self.beats = 0
        self.lost: str | None = None
        self.error: str | None = None
        self.kwh: float | None = None
        self.phases = PhaseTimes("starting")
        self.folder.mkdir(exist_ok=True)
        while True:
            self.path = self.folder / f"owner-{_wait_for_last_owner(output_dir) + 1}"
            with contextlib.suppress(FileExistsError):  # another new job was faster
                self.write(os.O_CREAT | os.O_EXCL)
                break
        self.stop = threading.Event()
        self.thread = threading.Thread(target=self._keep_beating, name="run-lock", daemon=True)
        self.thread.start()

    def new_owner(self) -> str | None:
        """Return a message on the process that took the lock; None if this process owns it."""
        number, owner = _newest_owner(self.folder)
        if owner is None and self.path.name == f"owner-{number}":
            return None  # the file of this process is damaged: the next heartbeat rewrites it
        if owner and owner.token == self.token:
            return None
        return (
            f"{self.output_dir} was taken over by {owner or NAMELESS}: this run gave no sign of "
            f"life for longer than {WATCH_S:.0f} s (was it suspended?)."
        )

    def _keep_beating(self) -> None:
        warned = False
        while self.lost is None and not self.stop.wait(BEAT_S):
            self.beats += 1
            try:
                self.lost = self.new_owner()
                if self.lost is None:
                    self.write()
                else:
                    logger.error("%s", self.lost)
            except OSError as error:
                if not warned:
                    logger.warning("the lock of %s cannot be renewed: %s", self.output_dir, error)
                warned = True

    def write(self, flags: int = 0, *, left: bool = False) -> None:
        """Write this process's owner file in one call, so that no reader sees half a file.

        flags: additional flags for os.open. left: whether the process releases the lock.
        """
        content = {"owner": self.owner, "beat": self.beats, "left": left, "error": self.error}
        content |= {"phase": self.phases.now[0], "kwh": self.kwh}
        content |= {"spent": self.phases.seconds(), "saved": self.phases.saved}
        descriptor = os.open(self.path, os.O_WRONLY | flags, 0o644)
        with os.fdopen(descriptor, "wb") as file:  # closing sends it to an NFS server
            file.write((json.dumps(content).ljust(SIZE - 1) + "\n").encode())


def _wait_for_last_owner(output_dir: Path) -> int:
    """Wait until the last owner ends, or until WATCH_S seconds pass without a heartbeat.

    Return the number of the last owner's file, or 0 if the directory never had an owner. Raises
    ConfigurationError if the owner gives a heartbeat.
    """
    folder = output_dir / LOCK_FOLDER
    number, owner = _newest_owner(folder)
    if number == 0 or (owner and owner.left):
        return number
    if owner is None or not _is_gone(owner):
        last = f", the last came {owner.age_s:.0f} s ago" if owner else ""
        logger.info(
            "%s belongs to %s: waiting up to %.0f s for its heartbeat%s, before it is taken over",
            output_dir, owner or NAMELESS, WATCH_S, last,
        )  # fmt: skip
        seen: RunOwner | None = None
        for number, owner in _owner_changes(folder):
            if owner and owner.left:
                return number
            # A file that was unreadable once and then has the same content is no heartbeat.
            if seen and owner and owner != seen:
                raise ConfigurationError(
                    f"{output_dir} is in use by {owner}: two jobs in one directory would "
                    "overwrite each other. Wait for it to end, stop it (touch "
                    f"{output_dir / 'STOP'}), or name another --output_dir."
                )
            seen = seen or owner
        _silent_owners.extend([owner] if owner else [])
    logger.warning("%s: its last owner is gone (%s)", output_dir, owner or NAMELESS)
    return number


def _is_gone(last: RunOwner) -> bool:
    # Slurm and slurm/training_job.sh restart ranks only after all old processes of the job ended.
    job = os.environ.get("SLURM_JOB_ID")
    silent = last in _silent_owners  # False after a new heartbeat, because it changes `last.beats`
    earlier = job is not None and last.job == job and last.restart_counts < _restart_counts()
    return silent or last.gone or earlier


def _restart_counts() -> tuple[int, int]:
    """Return (number of restarts by Slurm, number of restarts inside the job since then)."""
    names = "SLURM_RESTART_COUNT", RESTART_IN_JOB
    by_slurm, in_job = (int(os.environ.get(name) or 0) for name in names)
    return by_slurm, in_job


def _machine() -> str:
    """Return the boot id and pid namespace. Processes have comparable pids only if both agree."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{boot} {Path('/proc/self/ns/pid').readlink()}"


def _owner_changes(folder: Path) -> Iterator[tuple[int, RunOwner | None]]:
    """Yield `_newest_owner(folder)` now and at each change. End after WATCH_S without a change."""
    newest, until = None, math.inf
    while time.monotonic() < until:
        found = _newest_owner(folder)
        if found != newest:
            newest, until = found, time.monotonic() + WATCH_S
            yield found
        time.sleep(LOOK_S)


def _newest_owner(folder: Path) -> tuple[int, RunOwner | None]:
    """Return the highest number of an owner file, and the owner that this file describes.

    Without an owner file, the number is 0. For a damaged file, the owner is returned as None.
    """
    number = max(_owner_numbers(folder), default=0)
    try:
        return number, _read_owner(folder, number)
    except (FileNotFoundError, IsADirectoryError):
        return number, None


def _owner_numbers(folder: Path) -> list[int]:
    # List the folder instead of testing names: NFS may cache for a while that a name is missing.
    names = [path.name.removeprefix("owner-") for path in folder.glob("owner-*")]
    return [int(name) for name in names if name.isdecimal()]


def _read_owner(folder: Path, number: int) -> RunOwner | None:
    path = folder / f"owner-{number}"
    text, beat = path.read_bytes(), path.stat().st_mtime
    try:
        content = json.loads(text)
        fields = content["owner"]
        owner = RunOwner(
            number, fields.get("token") or "", fields["host"], fields["machine"], fields["pid"],
            fields["job"], fields.get("restart_count") or 0, fields.get("restart_in_job") or 0,
            datetime.datetime.fromisoformat(fields["since"]).timestamp(), content["beat"],
            content["left"], content.get("error"), content.get("phase") or "", beat,
            spent=valid_numbers(content.get("spent")), saved=valid_numbers(content.get("saved")),
            kwh=valid_numbers(content).get("kwh"),
        )  # fmt: skip
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError):
        return None
    texts = (owner.host, owner.machine, owner.job or "", owner.error or "", owner.phase)
    numbers = (owner.pid, *owner.restart_counts)
    fits = all(isinstance(text, str) for text in texts) and type(owner.left) is bool
    fits = fits and all(type(number) is int and 0 <= number < 2**31 for number in numbers)
    return owner if fits and owner.pid else None
