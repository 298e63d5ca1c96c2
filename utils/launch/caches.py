"""A job's private directory on its node's own disk, with the caches that libraries keep there.

Compiled code is thousands of small files and lock files: bad on shared storage, and two jobs of one
user would wait for each other's locks. So what torch and Triton compiled passes from job to job as
one archive in the user's cache, which a launcher unpacks at its start; the first node packs it
again at its end. It is replaced in one step; what two jobs add at once is compiled once more.
"""

import contextlib
import fcntl
import hashlib
import logging
import os
import shutil
import sys
import tarfile
import tempfile
from importlib import metadata
from pathlib import Path

from utils.config.errors import ConfigurationError, StorageError
from utils.launch.signals import NODE_DIR
from utils.support.files import cache_root, paths_inside
from utils.support.host import cpu_fact, host_name
from utils.support.notes import NOTES_DIR

logger = logging.getLogger(__name__)

LOCK = "lock"  # of a living launcher, in its directory
LARGEST_BYTES = 2**30  # a larger archive is begun anew
_CACHES = ("CUDA_CACHE_PATH", "HF_DATASETS_CACHE", "HF_MODULES_CACHE", "TORCH_EXTENSIONS_DIR")
_COMPILED = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
# A UNIX socket's path has 107 bytes, of which multiprocessing takes 32 behind TMPDIR.
_LONGEST_TMPDIR = 75


def enter_node_directory() -> Path:
    """Make this job's private (0700) directory on this node's own disk, and point libraries there.

    Under SLURM_TMPDIR, TMPDIR or /tmp; caches that the user set stay. Removes the directories there
    of launchers that were killed. Raises StorageError.
    """
    base = os.environ.get("SLURM_TMPDIR") or os.environ.get("TMPDIR") or "/tmp"  # noqa: S108
    prefix = f"stoker-{os.environ.get('SLURM_JOB_ID', 'local')}-"
    _remove_abandoned(Path(base))
    try:
        directory = Path(tempfile.mkdtemp(prefix=prefix, dir=base))
        for name in ("compiled", "notes", "tmp"):
            (directory / name).mkdir()
        _lock(directory)
    except OSError as error:
        raise StorageError(
            f"{host_name()}: no directory for caches can be made in {base} ({error.strerror}): set "
            "TMPDIR in slurm/cluster.env to a directory on the node's own disk."
        ) from error
    added = {name: str(directory / "cache" / name.lower()) for name in _CACHES}
    added |= {name: str(directory / "compiled" / name.lower()) for name in _COMPILED}
    added |= {"PYTHONUNBUFFERED": "1", NOTES_DIR: str(directory / "notes")}
    os.environ |= {name: value for name, value in added.items() if not os.environ.get(name)}
    os.environ[NODE_DIR] = str(directory)
    if len(os.fsencode(directory / "tmp")) <= _LONGEST_TMPDIR:
        os.environ["TMPDIR"] = str(directory / "tmp")
    return directory


def _lock(directory: Path) -> None:
    """Lock a file in the directory until this process ends, however it ends."""
    file = os.open(directory / "unlocked", os.O_CREAT | os.O_RDWR)  # never closed
    with contextlib.suppress(OSError):  # a file system without locks: nobody removes the directory
        fcntl.flock(file, fcntl.LOCK_EX)
        (directory / "unlocked").rename(directory / LOCK)


def _remove_abandoned(base: Path) -> None:
    for lock in base.glob(f"stoker-*/{LOCK}"):
        # The launcher lives, or another one removes the directory.
        with contextlib.suppress(OSError), lock.open("rb+") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(lock.parent)


def unpack_compiled(folder: Path) -> int:
    """Fill a folder with what earlier jobs compiled; return the number of files."""
    archive = archive_path()
    if archive.exists() and archive.stat().st_size <= LARGEST_BYTES:
        try:
            with tarfile.open(archive) as packed:
                members = [each for each in packed if not each.isdir()]
                paths_inside(folder, [each.name.removeprefix("./") for each in members], archive)
                if odd := [each.name for each in members if not each.isreg()]:
                    raise tarfile.TarError(f"{odd[0]} is a link or a device")
                packed.extractall(folder, members, filter="data")
        except (OSError, ConfigurationError, tarfile.TarError) as error:
            logger.warning("%s cannot be read (%s): layers compile again", archive, error)
    return _count(folder)


def pack_compiled(folder: Path, known: int) -> None:
    """Make the archive of a folder that holds more files than the `known` ones."""
    if _count(folder) == known:
        return
    archive = archive_path()
    draft = archive.with_name(f".{host_name()}.{os.getpid()}.tar")
    try:
        archive.parent.mkdir(parents=True, exist_ok=True)
        shutil.make_archive(str(draft.with_suffix("")), "tar", folder)
        draft.replace(archive)
    except (OSError, tarfile.TarError) as error:
        logger.warning("compiled code cannot be saved in %s (%s)", archive, error)
        draft.unlink(missing_ok=True)


def _count(folder: Path) -> int:
    return sum(path.is_file() for path in folder.rglob("*"))


def archive_path() -> Path:
    """Return this user's archive for this Python, torch and processor; a GPU is in entries' keys.

    C++ code is made for the processor.
    """
    facts = [sys.version, metadata.version("torch"), cpu_fact("model name")]
    name = hashlib.blake2b("\n".join(facts).encode(), digest_size=8).hexdigest()
    return cache_root() / "compiled" / f"{name}.tar"
