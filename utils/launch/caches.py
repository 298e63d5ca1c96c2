"""A job's private directory on the node's own disk, with the caches of libraries.

The caches of torch and Triton have thousands of small files and locks, which are slow on shared
storage. So jobs share their compiled code as one tar file in the user's cache directory. Each
node's launcher unpacks the tar file at the start. The first node's launcher replaces the tar file
at the end. If two jobs end at the same time, the new code of one of them is lost, and a later job
compiles it again.
"""

import hashlib
import logging
import os
import shutil
import sys
import tarfile
from importlib import metadata
from pathlib import Path

from utils.config.errors import ConfigurationError, StorageError
from utils.host.atomic_files import cache_root, locked_directory, paths_inside, remove_abandoned
from utils.host.machine import cpu_fact, host_name
from utils.launch.signals import NODE_DIR
from utils.launch.verdict import NOTES_DIR

logger = logging.getLogger(__name__)

ARCHIVE_PREFIX = "stoker-"
LARGEST_ARCHIVE_BYTES = 2**30  # a larger archive is not read, and the job's end replaces it
_CACHES = ("CUDA_CACHE_PATH", "HF_DATASETS_CACHE", "HF_MODULES_CACHE", "TORCH_EXTENSIONS_DIR")
_COMPILER_CACHES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
# A UNIX socket's path has at most 107 bytes, and multiprocessing appends 32 to TMPDIR.
_LONGEST_TMPDIR = 75


def enter_node_directory() -> Path:
    """Make this job's private directory on this node's disk; return its path. Raises StorageError.

    The directory (mode 0700) is under SLURM_TMPDIR, TMPDIR or /tmp. Sets the environment variables
    of the libraries' caches to folders in the directory, unless the user set them. Deletes the
    directories that killed launchers left on this node.
    """
    base = os.environ.get("SLURM_TMPDIR") or os.environ.get("TMPDIR") or "/tmp"  # noqa: S108
    # On network storage a node sees only its own locks, so it must not remove other nodes' folders.
    prefix = f"{ARCHIVE_PREFIX}{host_name()}+"
    remove_abandoned(Path(base), prefix)
    try:
        job = os.environ.get("SLURM_JOB_ID", "local")
        directory, _ = locked_directory(Path(base), f"{prefix}{job}-")
        for name in ("compiled", "notes", "tmp"):
            (directory / name).mkdir()
    except OSError as error:
        raise StorageError(
            f"{host_name()}: no directory for caches can be made in {base} ({error.strerror}): set "
            "TMPDIR in slurm/cluster.env to a directory on the node's own disk."
        ) from error
    variables = {name: str(directory / "cache" / name.lower()) for name in _CACHES}
    variables |= {name: str(directory / "compiled" / name.lower()) for name in _COMPILER_CACHES}
    variables |= {"PYTHONUNBUFFERED": "1", NOTES_DIR: str(directory / "notes")}
    os.environ |= {name: value for name, value in variables.items() if not os.environ.get(name)}
    os.environ[NODE_DIR] = str(directory)
    if len(os.fsencode(directory / "tmp")) <= _LONGEST_TMPDIR:
        os.environ["TMPDIR"] = str(directory / "tmp")
    return directory


def unpack_compiled(folder: Path) -> int:
    """Unpack the archive of compiled code into `folder`; return the number of files in `folder`.

    If the archive cannot be read, a warning is logged.
    """
    archive = archive_path()
    if archive.exists() and archive.stat().st_size <= LARGEST_ARCHIVE_BYTES:
        try:
            with tarfile.open(archive) as tar:
                # Allow only regular files: the "data" filter of older Pythons can be bypassed.
                members = [member for member in tar if not member.isdir()]
                names = [member.name.removeprefix("./") for member in members]
                paths_inside(folder, names, archive)
                if special := [member.name for member in members if not member.isreg()]:
                    raise tarfile.TarError(f"{special[0]} is a link or a device")
                tar.extractall(folder, members, filter="data")
        except (OSError, ConfigurationError, tarfile.TarError) as error:
            logger.warning("%s cannot be read (%s): layers compile again", archive, error)
    return _count_files(folder)


def pack_compiled(folder: Path, known: int) -> None:
    """Replace the archive of compiled code with an archive of the files in `folder`.

    known: the number of files after `unpack_compiled`. If `folder` still has this number, nothing
    was compiled, and the archive stays. If writing fails, a warning is logged.
    """
    if _count_files(folder) == known:
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


def _count_files(folder: Path) -> int:
    return sum(path.is_file() for path in folder.rglob("*"))


def archive_path() -> Path:
    """Return the path of this user's archive of compiled code.

    The file name depends on the versions of Python and torch and on the CPU model, because compiled
    C++ code may fit one CPU model only. All GPU models share one archive, because the key of each
    cached file names the GPU model.
    """
    facts = [sys.version, metadata.version("torch"), cpu_fact("model name")]
    name = hashlib.blake2b("\n".join(facts).encode(), digest_size=8).hexdigest()
    return cache_root() / "compiled" / f"{name}.tar"
