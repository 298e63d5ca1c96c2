"""One job per run directory: a second one is refused, a dead one's lock is taken over.

The folder .lock holds files owner-1, owner-2, ...; the highest number owns the run. A number is
taken by creating its file exclusively, which one process alone succeeds in (on NFS since version 3,
open(2)), and the highest file is never removed: the owner that leaves writes into it that it left,
and the next one removes it. So of any number of newcomers that find the same owner dead just one
gets the next number, and one that looked too long ago gets a number that exists or is too low.

The owner renews its file every few seconds. Whether an owner is dead is known at once on its own
machine, and through Slurm; otherwise a newcomer watches the file for a while. No clocks are
compared.
"""

import atexit
import contextlib
import json
import logging
import os
import re
import secrets
import threading
import time
from pathlib import Path

from utils.cluster.lock_owner import Fate, Owner
from utils.config.errors import ConfigurationError

logger = logging.getLogger(__name__)

FOLDER = ".lock"
BEAT_S = 5.0
# Storage may stall and a library may hold the interpreter: several beats.
WATCH_S = 30.0
LOOK_S = 0.5
_NAME = re.compile(r"owner-(\d+)")

_held: dict[Path, "RunLock"] = {}


def take_run_lock(output_dir: str | os.PathLike[str]) -> None:
    """Make this process the only one that trains in a directory; rank 0 alone calls it.

    Held until `leave_run_lock` or the end of the process, whichever way that ends. Waits up to
    WATCH_S for a sign of life where the owner is on another machine. Raises ConfigurationError
    naming the owner where there is a living one; OSError.
    """
    leave_run_lock(output_dir)  # of an earlier run in this process
    _held[_key(output_dir)] = RunLock(Path(output_dir))


def leave_run_lock(output_dir: str | os.PathLike[str]) -> None:
    """Let others have the directory; does nothing where this process does not hold it."""
    lock = _held.pop(_key(output_dir), None)
    if lock is not None:
        lock.release()


def living_owner(output_dir: Path) -> str | None:
    """Say who trains in a directory just now, where that is known at once; nothing is written."""
    files = (output_dir / FOLDER).glob("owner-*")
    numbers = [int(found[1]) for path in files if (found := _NAME.fullmatch(path.name))]
    if not numbers:
        return None
    try:
        text = (output_dir / FOLDER / f"owner-{max(numbers)}").read_bytes()
    except OSError:
        return None
    owner = None if _left(text) else Owner.from_json(text)
    alive = owner is not None and owner.fate(os.environ) is Fate.ALIVE
    return str(owner) if alive else None


def taken_over(output_dir: str | os.PathLike[str]) -> str | None:
    """Say who took the directory from this process meanwhile; None: it is still its own.

    A process that was suspended for longer than a newcomer watches has no heartbeat and may lose
    its lock. Ask before writing what others rely on. None, too, where no lock was taken. Raises
    OSError.
    """
    lock = _held.get(_key(output_dir))
    return None if lock is None else lock.taken_over()


def known_loss(output_dir: str | os.PathLike[str]) -> str | None:
    """Say what the last heartbeat found of `taken_over`; reads nothing, for what is done often."""
    lock = _held.get(_key(output_dir))
    return None if lock is None else lock.lost


@atexit.register
def _leave_all() -> None:
    for output_dir in list(_held):
        leave_run_lock(output_dir)


def _key(output_dir: str | os.PathLike[str]) -> Path:
    return Path(output_dir).resolve()


class RunLock:
    """The lock of one directory, held by this process from the constructor to `release`."""

    def __init__(self, output_dir: Path):
        self.output_dir = output_dir
        self.folder = output_dir / FOLDER
        self.owner = Owner.this_process(secrets.token_hex(8), os.environ)
        self.beats = 0
        self.lost: str | None = None  # by now, as the last heartbeat found
        self.number = self._acquire()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._keep_beating, name="run-lock", daemon=True)
        self._thread.start()

    def release(self) -> None:
        """Write down that the run left; what it holds no more, or a parent holds, stays as it is.

        Never raises: the lock of a process that ended counts as left.
        """
        if os.getpid() != self.owner.pid:
            return  # a fork: the lock is its parent's
        self._stop.set()
        self._thread.join(timeout=BEAT_S)
        with contextlib.suppress(OSError):
            if not self._thread.is_alive() and self.taken_over() is None:
                self._write(os.O_WRONLY, left=True)

    def taken_over(self) -> str | None:
        """Say who has it now; None: this process."""
        number = self._newest()
        text = self._read(number)
        owner = Owner.from_json(text) if text is not None else None
        if owner is not None and owner.token == self.owner.token:
            return None
        if number == 0:
            return f"{self.folder} was removed, so another job may be in {self.output_dir} by now."
        by = owner or f"somebody who left no name ({self._path(number)})"
        return (
            f"{self.output_dir} was taken over by {by}: this run gave no sign of life for longer "
            f"than {WATCH_S:.0f} s (was it suspended?)."
        )

    def _acquire(self) -> int:
        """Return the number that this process got. Raises ConfigurationError, OSError."""
        self.folder.mkdir(exist_ok=True)
        watch = _Watch()
        while True:
            number = self._newest()
            text = self._read(number)
            owner = Owner.from_json(text) if text is not None else None
            fate = self._fate(number, text, owner)
            if fate is Fate.UNKNOWN:
                fate = watch.look(number, text, owner)
            if fate is Fate.ALIVE:
                assert owner is not None, "nothing unreadable is alive"
                raise ConfigurationError(self._refusal(owner))
            if fate is Fate.UNKNOWN:
                time.sleep(LOOK_S)
            elif self._create(number + 1):
                if owner is not None and not _left(text):
                    logger.warning("%s: its last owner is gone (%s)", self.output_dir, owner)
                return number + 1

    def _fate(self, number: int, text: bytes | None, owner: Owner | None) -> Fate:
        if number == 0 or _left(text):
            return Fate.GONE
        return Fate.UNKNOWN if owner is None else owner.fate(os.environ)

    def _refusal(self, owner: Owner) -> str:
        cancel = f", scancel {owner.job}" if owner.job else ""
        return (
            f"{self.output_dir} is in use by {owner}: two jobs in one directory would write over "
            f"each other. Wait for its end, stop it (touch {self.output_dir / 'STOP'}{cancel}), or "
            "name another --output_dir."
        )

    def _create(self, number: int) -> bool:
        """Take a number; False where another process was faster."""
        self.number = number
        try:
            self._write(os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        except FileExistsError:
            return False
        newest = self._newest()
        for other in self._numbers():
            # Too low a number, from a look too long ago; or the owners before.
            if other < newest:
                self._path(other).unlink(missing_ok=True)
        return newest == number

    def _keep_beating(self) -> None:
        said = False
        while not self._stop.wait(BEAT_S):
            self.beats += 1
            try:
                lost = self.taken_over()
                if lost is None:
                    self._write(os.O_WRONLY)
            except OSError as error:
                if not said:
                    logger.warning("the lock of %s cannot be renewed: %s", self.output_dir, error)
                said = True
                continue
            if lost is not None:
                self.lost = lost
                logger.error("%s", lost)
                return

    def _write(self, flags: int, *, left: bool = False) -> None:
        """Write this owner's file in one piece; never shorter than it was, so never half old."""
        content = {"owner": self.owner.as_dict(), "beat": self.beats, "left": left}
        text = json.dumps(content).ljust(1023) + "\n"
        descriptor = os.open(self._path(self.number), flags, 0o644)
        with os.fdopen(descriptor, "wb") as file:  # closing sends it to an NFS server
            file.write(text.encode())

    def _read(self, number: int) -> bytes | None:
        try:
            return self._path(number).read_bytes()
        except FileNotFoundError:
            return None

    def _newest(self) -> int:
        return max(self._numbers(), default=0)

    def _numbers(self) -> list[int]:
        # Listed, not asked for by name: NFS remembers for a while that a file was not there.
        try:
            names = [path.name for path in self.folder.iterdir()]
        except FileNotFoundError:
            return []  # removed by hand
        return [int(found[1]) for found in map(_NAME.fullmatch, names) if found]

    def _path(self, number: int) -> Path:
        return self.folder / f"owner-{number}"


class _Watch:
    """Watches an owner that cannot be asked: one whose file changes is alive."""

    def __init__(self) -> None:
        self.seen: tuple[int, bytes | None, Owner | None] | None = None
        self.began = 0.0

    def look(self, number: int, text: bytes | None, owner: Owner | None) -> Fate:
        """Say what is known after one more look: GONE where nothing moved for WATCH_S."""
        before, now = self.seen, (number, text, owner)
        if now == before:
            return Fate.GONE if time.monotonic() - self.began >= WATCH_S else Fate.UNKNOWN
        self.seen, self.began = now, time.monotonic()
        if before is not None and owner is not None and before[2] == owner:
            return Fate.ALIVE
        if before is None:
            who = owner or f"somebody who left no name (owner-{number})"
            logger.info(
                "the run directory belongs to %s: watching for %.0f s whether it is alive",
                who,
                WATCH_S,
            )
        return Fate.UNKNOWN


def _left(text: bytes | None) -> bool:
    """Whether the owner wrote down that it left."""
    try:
        content = json.loads(text or b"")
    except ValueError:
        return False
    return isinstance(content, dict) and content.get("left") is True
