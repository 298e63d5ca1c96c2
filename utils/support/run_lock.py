"""One job per run directory: a second one is refused, a dead one's lock is taken over.

The folder .lock holds files owner-1, owner-2, ...; the highest number owns the run. A number is
taken by creating its file exclusively, which one process alone succeeds in, on NFS too (flock does
not work everywhere). The highest file is never removed: an owner that leaves writes so into it. So
of newcomers that find the same owner dead one alone gets the next number, however late they act.

The owner renews its file every few seconds. A newcomer knows that an owner is dead if its process
is gone (same machine), if Slurm no longer knows its job, or if nothing renews the file for a
while. No clocks are compared.
"""

import atexit
import contextlib
import dataclasses
import datetime
import json
import logging
import os
import re
import secrets
import subprocess
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from utils.config.errors import ConfigurationError
from utils.support.host import host_name

logger = logging.getLogger(__name__)

FOLDER = ".lock"
BEAT_S = 5.0
WATCH_S = 30.0  # storage may stall and a library may hold the interpreter: several beats
LOOK_S = 0.5
_PROC = Path("/proc")
_NAME = re.compile(r"owner-(\d+)")

_held: dict[Path, "RunLock"] = {}


def take_run_lock(output_dir: str | os.PathLike[str]) -> None:
    """Make this process the only one that trains in a directory; rank 0 alone calls it.

    Held until `leave_run_lock` or the end of the process. Raises OSError, and ConfigurationError
    that names a living owner; waits up to WATCH_S to learn whether one on another machine lives.
    """
    leave_run_lock(output_dir)  # of an earlier run in this process
    _held[Path(output_dir).resolve()] = RunLock(Path(output_dir))


def leave_run_lock(output_dir: str | os.PathLike[str]) -> None:
    """Let others have the directory; does nothing if this process does not hold it."""
    if lock := _held.pop(Path(output_dir).resolve(), None):
        lock.release()


def living_owner(output_dir: Path) -> str | None:
    """Name who trains in a directory just now, if that is known at once; writes nothing."""
    number, text = _newest(output_dir / FOLDER)
    owner = Owner.from_json(text)
    return str(owner) if number and owner and not _left(text) and owner.is_alive() else None


def taken_over(output_dir: str | os.PathLike[str]) -> str | None:
    """Say who took the directory from this process; None: nobody, or no lock was taken.

    A process that was suspended for longer than a newcomer watches may lose its lock: ask before
    writing what others rely on. Raises OSError.
    """
    lock = _held.get(Path(output_dir).resolve())
    return lock.taken_over() if lock else None


def known_loss(output_dir: str | os.PathLike[str]) -> str | None:
    """Return what the last heartbeat found of `taken_over`, without reading anything."""
    lock = _held.get(Path(output_dir).resolve())
    return lock.lost if lock else None


@atexit.register
def _leave_all() -> None:
    for output_dir in list(_held):
        leave_run_lock(output_dir)


@dataclass(frozen=True)
class Owner:
    """One process that took the lock, as it wrote itself down.

    `machine` is the boot and the pid namespace in which `pid` means something; `process_start`
    (clock ticks since boot) tells the process from a later one of the same pid. `since` is for
    people alone.
    """

    token: str
    host: str
    machine: str
    pid: int
    process_start: int | None
    cluster: str | None
    job: str | None
    restart_count: int
    since: str

    @classmethod
    def this_process(cls) -> "Owner":
        """Return this process and its Slurm job as an owner."""
        return cls(
            token=secrets.token_hex(8),
            host=host_name(),
            machine=_machine(),
            pid=os.getpid(),
            process_start=_process_start(os.getpid()),
            cluster=os.environ.get("SLURM_CLUSTER_NAME"),
            job=os.environ.get("SLURM_JOB_ID"),
            restart_count=_restart_count(),
            since=datetime.datetime.now(datetime.UTC).isoformat(sep=" ", timespec="seconds"),
        )

    @classmethod
    def from_json(cls, text: bytes | None) -> "Owner | None":
        """Return the owner that a lock file names; None if it names none (cut off, damaged)."""
        try:
            return cls(**json.loads(text or b"")["owner"])
        except (ValueError, TypeError, KeyError):
            return None

    def __str__(self) -> str:
        job = f" (Slurm job {self.job})" if self.job else ""
        return f"process {self.pid} on {self.host}{job}, since {self.since}"

    def is_alive(self) -> bool | None:
        """Whether this process lives; None: only its heartbeat tells."""
        if self.machine and self.machine == _machine():
            try:
                os.kill(self.pid, 0)
            except ProcessLookupError:
                return False
            except PermissionError:
                pass  # another user's, which /proc may hide (mount option hidepid)
            start = _process_start(self.pid)
            if start is not None and self.process_start is not None:
                return start == self.process_start
        # Job ids mean something within one cluster alone.
        cluster = os.environ.get("SLURM_CLUSTER_NAME")
        if self.job is None or cluster is None or cluster != self.cluster:
            return None
        if self.job == os.environ.get("SLURM_JOB_ID"):
            # Slurm starts a job again once every process of the earlier start is gone.
            return False if _restart_count() > self.restart_count else None
        # A job in the queue may have lost that process; a suspended one has no heartbeat and lives.
        state = _job_state(self.job)
        return {"": False, "SUSPENDED": True}.get(state) if state is not None else None


class RunLock:
    """The lock of one directory, held by this process from the constructor to `release`."""

    def __init__(self, output_dir: Path):
        self.output_dir = output_dir
        self.folder = output_dir / FOLDER
        self.owner = Owner.this_process()
        self.beats = 0
        self.lost: str | None = None  # as the last heartbeat found
        self.folder.mkdir(exist_ok=True)
        while not self._create(number := self._wait_for_the_last_owner() + 1):
            pass
        self.number = number
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._keep_beating, name="run-lock", daemon=True)
        self._thread.start()

    def release(self) -> None:
        """Write down that the run left. Never raises: a process that ended counts as left."""
        if os.getpid() != self.owner.pid:
            return  # a fork: the lock is its parent's
        self._stop.set()
        self._thread.join(timeout=BEAT_S)
        with contextlib.suppress(OSError):
            if not self._thread.is_alive() and self.taken_over() is None:
                self._write(self.number, os.O_WRONLY, left=True)

    def taken_over(self) -> str | None:
        """Say who has the directory now; None: this process."""
        number, text = _newest(self.folder)
        owner = Owner.from_json(text)
        if owner is not None and owner.token == self.owner.token:
            return None
        if number == 0:
            return f"{self.folder} was removed, so another job may be in {self.output_dir} by now."
        return (
            f"{self.output_dir} was taken over by {owner or _nobody(number)}: this run gave no "
            f"sign of life for longer than {WATCH_S:.0f} s (was it suspended?)."
        )

    def _wait_for_the_last_owner(self) -> int:
        """Return the number of the last owner once it is gone, 0 if there was none.

        Raises ConfigurationError if it lives.
        """
        watched: tuple[int, Owner | None] | None = None
        before, since = b"", 0.0
        while True:
            number, text = _newest(self.folder)
            if number == 0 or _left(text):
                return number
            owner = Owner.from_json(text)
            alive = None
            if watched != (number, owner):
                alive = owner.is_alive() if owner else None
                if alive is None:
                    logger.info(
                        "the run directory belongs to %s: watching for %.0f s whether it is alive",
                        owner or _nobody(number),
                        WATCH_S,
                    )
                watched, before, since = (number, owner), text, time.monotonic()
            elif text != before and owner:
                alive = True
            elif time.monotonic() - since >= WATCH_S:
                alive = False
            if alive:
                raise ConfigurationError(self._refusal(owner))
            if alive is False:
                gone = owner or _nobody(number)
                logger.warning("%s: its last owner is gone (%s)", self.output_dir, gone)
                return number
            time.sleep(LOOK_S)

    def _refusal(self, owner: Owner | None) -> str:
        cancel = f", scancel {owner.job}" if owner and owner.job else ""
        return (
            f"{self.output_dir} is in use by {owner}: two jobs in one directory would overwrite "
            f"each other. Wait for its end, stop it (touch {self.output_dir / 'STOP'}{cancel}), or "
            "name another --output_dir."
        )

    def _create(self, number: int) -> bool:
        """Take a number; False if another process was faster."""
        try:
            self._write(number, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        except FileExistsError:
            return False
        numbers = _numbers(self.folder)
        for other in numbers:
            if other < max(numbers):  # the owners before, or ours, from a look too long ago
                (self.folder / f"owner-{other}").unlink(missing_ok=True)
        return max(numbers) == number

    def _keep_beating(self) -> None:
        warned = False
        while not self._stop.wait(BEAT_S):
            self.beats += 1
            try:
                self.lost = self.taken_over()
                if self.lost is None:
                    self._write(self.number, os.O_WRONLY)
            except OSError as error:
                if not warned:
                    logger.warning("the lock of %s cannot be renewed: %s", self.output_dir, error)
                warned = True
            if self.lost is not None:
                logger.error("%s", self.lost)
                return

    def _write(self, number: int, flags: int, *, left: bool = False) -> None:
        """Write this owner's file in one piece; never shorter than it was, so never half old."""
        content = {"owner": dataclasses.asdict(self.owner), "beat": self.beats, "left": left}
        text = json.dumps(content).ljust(1023) + "\n"
        descriptor = os.open(self.folder / f"owner-{number}", flags, 0o644)
        with os.fdopen(descriptor, "wb") as file:  # closing sends it to an NFS server
            file.write(text.encode())


def _numbers(folder: Path) -> list[int]:
    # Listed, not asked for by name: NFS remembers for a while that a file was not there.
    try:
        names = [path.name for path in folder.iterdir()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [int(found[1]) for found in map(_NAME.fullmatch, names) if found]


def _newest(folder: Path) -> tuple[int, bytes]:
    """Return the highest number (0: none) and what its file holds."""
    number = max(_numbers(folder), default=0)
    try:
        return number, (folder / f"owner-{number}").read_bytes() if number else b""
    except FileNotFoundError:
        return number, b""


def _nobody(number: int) -> str:
    return f"somebody who left no name (owner-{number})"


def _left(text: bytes) -> bool:
    """Whether the owner wrote down that it left."""
    try:
        content = json.loads(text)
    except ValueError:
        return False
    return isinstance(content, dict) and content.get("left") is True


def _restart_count() -> int:
    return int(os.environ.get("SLURM_RESTART_COUNT") or 0)


def _machine() -> str:
    """Name this boot of this machine and this pid namespace; empty if /proc does not say."""
    try:
        boot = (_PROC / "sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {(_PROC / 'self/ns/pid').readlink()}"
    except OSError:
        return ""


def _process_start(pid: int) -> int | None:
    """Return when a process began, in clock ticks since boot; -1: it only waits to be reaped.

    None if /proc does not say. See proc(5), /proc/PID/stat: the name may hold spaces and brackets.
    """
    try:
        fields = (_PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    state, *rest = fields.rpartition(")")[2].split()
    return -1 if state in ("Z", "X") else int(rest[18])


def _job_state(job: str) -> str | None:
    """Return a job's state in squeue's words; empty: it is not in the queue; None: no answer."""
    try:
        done = subprocess.run(
            ["squeue", "--noheader", f"--jobs={job}", "--format=%T"],
            capture_output=True, text=True, timeout=10, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return None
    if done.returncode == 0:
        return done.stdout.strip()
    return "" if "Invalid job id" in done.stderr else None
