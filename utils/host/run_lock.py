"""One job per run directory: a second job is refused, a new start replaces a dead owner.

The folder .lock holds files owner-1, owner-2, ...; the highest number owns the run. The owner
rewrites its file every few seconds, and writes `left` into it when it ends. A new job that finds
the owner gone creates the file with the next number, exclusively: only one new job can succeed,
also on NFS, where flock may not work. No file is removed, so no number is used twice. No clocks are
compared.
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
from utils.host.redaction import redact

logger = logging.getLogger(__name__)

FOLDER = ".lock"
BEAT_S = 5.0
WATCH_S = 30.0  # several beats: storage may stall, a library may hold the interpreter
LOOK_S = 0.5
LONGEST_ERROR = 250  # characters; each takes up to twelve bytes of the file, which has SIZE bytes
SIZE = 4096

NAMELESS = "a process that left no name"

_held: dict[Path, "RunLock"] = {}


def take_run_lock(output_dir: Path) -> None:
    """Make this process the only one that trains in a directory; rank 0 alone calls it.

    The lock is held until `leave_run_lock` or the end of the process. Watches the heartbeat of an
    earlier owner for up to WATCH_S. Raises OSError, and ConfigurationError for a living owner.
    """
    leave_run_lock(output_dir)  # an earlier run of this process may hold it
    _held[output_dir.resolve()] = RunLock(output_dir)
    atexit.register(leave_run_lock, output_dir)


def leave_run_lock(output_dir: Path) -> None:
    """Release the lock if this process holds it; raises nothing."""
    if lock := _held.pop(output_dir.resolve(), None):
        lock.stop.set()
        lock.thread.join(timeout=BEAT_S)
        with contextlib.suppress(OSError):
            if not lock.thread.is_alive() and lock.new_owner() is None:
                lock.write(left=True)


def note_error(error: str) -> None:
    """Store the error that ends this process, without secrets, in the locks that it holds."""
    for lock in _held.values():
        lock.error = redact(error)[:LONGEST_ERROR]


def note_phase(phase: str) -> None:
    """Store what this process is doing; the next heartbeat writes this phase into the lock."""
    for lock in _held.values():
        lock.phase = phase


def held_runs() -> dict[Path, str]:
    """Return the run directories that this process holds, with the error of each ("": none)."""
    return {path: lock.error or "" for path, lock in _held.items()}


def taken_over(output_dir: Path) -> str | None:
    """Return a sentence about the job that took the directory from this process; else None.

    A process that was suspended for longer than WATCH_S may lose its lock. Call this before writing
    files that other jobs rely on. Returns None also if this process has no lock. Raises OSError.
    """
    lock = _held.get(output_dir.resolve())
    return lock.new_owner() if lock else None


def known_loss(output_dir: Path) -> str | None:
    """Return the answer of `taken_over` at the last heartbeat, without reading a file."""
    lock = _held.get(output_dir.resolve())
    return lock.lost if lock else None


def wait_until_left(output_dir: Path) -> None:
    """Wait until the owner of the directory releases it or is silent for WATCH_S."""
    for _, owner in _changes(output_dir / FOLDER):
        if owner and owner.left:
            return


@dataclass(frozen=True)
class RunOwner:
    """An owner of a run directory, as its file in .lock describes it.

    left: the owner released the lock. error: the error that ended the owner, None without one.
    since: when it took the directory, by its machine's clock. beat: its last heartbeat, by the
    storage's clock. phase: what it was doing at that heartbeat. replaced: a newer owner exists.
    Times are in unix seconds.
    """

    number: int
    token: str
    host: str
    machine: str
    pid: int
    job: str | None
    restart_count: int
    since: float
    beats: int
    left: bool
    error: str | None
    phase: str
    beat: float = field(compare=False)
    replaced: bool = False

    @property
    def age_s(self) -> float:
        """The time since the last heartbeat, by this machine's clock."""
        return time.time() - self.beat

    @property
    def gone(self) -> bool:
        """Whether the owner has ended for certain: replaced, or its process is gone from here."""
        if self.replaced or self.machine != _machine():
            return self.replaced
        try:
            os.kill(self.pid, 0)  # not psutil: /proc may hide other users' processes
        except ProcessLookupError:
            return True
        except PermissionError:
            pass  # another user's
        return False

    @property
    def alive(self) -> bool:
        """Whether the owner still runs. The clocks of storage and machines may differ a little."""
        return not self.left and not self.gone and self.age_s < 2 * WATCH_S

    def belongs_to(self, slurm: Mapping[str, Any]) -> bool:
        """Check whether the owner is the start of a job with this `slurm` in provenance.json."""
        start = slurm.get("job_id"), int(slurm.get("restart_count") or 0)
        return (self.job, self.restart_count) == start

    def __str__(self) -> str:
        job = f" (Slurm job {self.job})" if self.job else ""
        since = datetime.datetime.fromtimestamp(self.since, datetime.UTC).isoformat(sep=" ")
        return f"process {self.pid} on {self.host}{job}, since {since}"


def run_owners(output_dir: Path) -> Iterator[RunOwner]:
    """Yield the owners of a run directory, newest first, without waiting for a heartbeat.

    Damaged files are left out.
    """
    replaced = False
    for number in sorted(_numbers(output_dir / FOLDER), reverse=True):
        with contextlib.suppress(OSError):
            if owner := _read_owner(output_dir / FOLDER, number):
                yield replace(owner, replaced=replaced)
                replaced = True


class RunLock:
    """The lock of one directory, held from the constructor to `leave_run_lock`."""

    def __init__(self, output_dir: Path):
        self.output_dir, self.folder = output_dir, output_dir / FOLDER
        self.token = secrets.token_hex(8)
        self.owner: dict[str, Any] = {
            "token": self.token,
            "host": host_name(),
            "machine": _machine(),
            "pid": os.getpid(),
            "job": os.environ.get("SLURM_JOB_ID"),
            "restart_count": int(os.environ.get("SLURM_RESTART_COUNT") or 0),
            "since": datetime.datetime.now(datetime.UTC).isoformat(sep=" ", timespec="seconds"),
        }
        self.beats = 0
        self.lost: str | None = None
        self.error: str | None = None
        self.phase = "starting"
        self.folder.mkdir(exist_ok=True)
        while True:
            self.path = self.folder / f"owner-{self._wait_for_the_last_owner() + 1}"
            with contextlib.suppress(FileExistsError):  # another new job was faster
                self.write(os.O_CREAT | os.O_EXCL)
                break
        self.stop = threading.Event()
        self.thread = threading.Thread(target=self._keep_beating, name="run-lock", daemon=True)
        self.thread.start()

    def new_owner(self) -> str | None:
        """Return a sentence about the directory's new owner; None if it is still this process."""
        number, owner = _newest(self.folder)
        if owner is None and self.path.name == f"owner-{number}":
            return None  # this process's own file is damaged: the next heartbeat writes it again
        if owner and owner.token == self.token:
            return None
        return (
            f"{self.output_dir} was taken over by {owner or NAMELESS}: this run gave no sign of "
            f"life for longer than {WATCH_S:.0f} s (was it suspended?)."
        )

    def _wait_for_the_last_owner(self) -> int:
        """Return the number of the last owner once it is gone; 0 if there was none.

        Raises ConfigurationError if the owner shows a sign of life.
        """
        seen: RunOwner | None = None
        number, owner = _newest(self.folder)
        if number == 0 or (owner and owner.left):
            return number
        if owner is None or not self._is_gone(owner):
            logger.info(
                "the run directory belongs to %s: waiting up to %.0f s for its heartbeat",
                owner or NAMELESS, WATCH_S,
            )  # fmt: skip
            for number, owner in _changes(self.folder):
                if owner and owner.left:
                    return number
                # Storage may give nothing at one look, and then the same content again.
                if seen and owner and owner != seen:
                    raise ConfigurationError(
                        f"{self.output_dir} is in use by {owner}: two jobs in one directory would "
                        "overwrite each other. Wait for it to end, stop it (touch "
                        f"{self.output_dir / 'STOP'}), or name another --output_dir."
                    )
                seen = seen or owner
        logger.warning("%s: its last owner is gone (%s)", self.output_dir, owner or NAMELESS)
        return number

    def _is_gone(self, last: RunOwner) -> bool:
        """Check whether an owner is known to be gone. If not, its heartbeat has to be watched."""
        # Slurm starts a job again once every process of the earlier start is gone.
        job, start = self.owner["job"], self.owner["restart_count"]
        return last.gone or (job is not None and last.job == job and last.restart_count < start)

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
        """Write this owner's file in one call and in one size: no reader sees half of a file."""
        content = {"owner": self.owner, "beat": self.beats, "left": left, "error": self.error}
        content["phase"] = self.phase
        descriptor = os.open(self.path, os.O_WRONLY | flags, 0o644)
        with os.fdopen(descriptor, "wb") as file:  # closing sends it to an NFS server
            file.write((json.dumps(content).ljust(SIZE - 1) + "\n").encode())


def _machine() -> str:
    """Return the ids of the boot and the process namespace. Within both, a pid is unique."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{boot} {Path('/proc/self/ns/pid').readlink()}"


def _changes(folder: Path) -> Iterator[tuple[int, RunOwner | None]]:
    """Yield the newest number and owner now and after each change; end after a silent WATCH_S."""
    newest, until = None, math.inf
    while time.monotonic() < until:
        found = _newest(folder)
        if found != newest:
            newest, until = found, time.monotonic() + WATCH_S
            yield found
        time.sleep(LOOK_S)


def _newest(folder: Path) -> tuple[int, RunOwner | None]:
    """Return the highest number (0: none) and its owner, None if the file is damaged."""
    number = max(_numbers(folder), default=0)
    try:
        return number, _read_owner(folder, number)
    except (FileNotFoundError, IsADirectoryError):
        return number, None


def _numbers(folder: Path) -> list[int]:
    # List the folder: NFS remembers for a while that a file of some name was not there.
    names = [path.name.removeprefix("owner-") for path in folder.glob("owner-*")]
    return [int(name) for name in names if name.isdecimal()]


def _read_owner(folder: Path, number: int) -> RunOwner | None:
    """Return the owner of this number, None if its file is damaged. Raises OSError."""
    path = folder / f"owner-{number}"
    text, beat = path.read_bytes(), path.stat().st_mtime
    try:
        content = json.loads(text)
        given = content["owner"]
        owner = RunOwner(
            number, given.get("token") or "", given["host"], given["machine"], given["pid"],
            given["job"], given.get("restart_count") or 0,
            datetime.datetime.fromisoformat(given["since"]).timestamp(), content["beat"],
            content["left"], content.get("error"), content.get("phase") or "", beat,
        )  # fmt: skip
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError):
        return None
    texts = (owner.host, owner.machine, owner.job or "", owner.error or "", owner.phase)
    numbers = (owner.pid, owner.restart_count)
    fits = all(isinstance(text, str) for text in texts) and type(owner.left) is bool
    fits = fits and all(type(number) is int and 0 <= number < 2**31 for number in numbers)
    return owner if fits and owner.pid else None
