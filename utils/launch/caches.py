"""A job's private directory on its node's own disk, with the caches that libraries keep there.

Compiled code is thousands of small files and lock files: bad on shared storage, and two jobs of one
user would wait for each other's locks. So what torch and Triton compiled passes from job to job as
one archive in the user's cache, which a launcher unpacks at its start; the first node packs it
again at its end. It is replaced in one step; what two jobs add at once is compiled once more.
"""

import hashlib
import logging
import os
import platform
import sys
import tarfile
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

from utils.launch.signals import NODE_DIR
from utils.support.files import cache_root
from utils.support.host import cpu_fact
from utils.support.notes import NOTES_DIR

logger = logging.getLogger(__name__)

COMPILED = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
LARGEST_BYTES = 2**30  # of an archive; what would not fit begins a new one
_CACHES = (
    "CUDA_CACHE_PATH", "HF_DATASETS_CACHE", "HF_MODULES_CACHE", "MPLCONFIGDIR", "NUMBA_CACHE_DIR",
    "TORCH_EXTENSIONS_DIR", *COMPILED,
)  # fmt: skip
_OFFLINE = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE")
_DEBUG = {
    "NCCL_DEBUG": "INFO",
    "NCCL_DEBUG_SUBSYS": "INIT,ENV,NET,GRAPH",
    "TORCH_DISTRIBUTED_DEBUG": "DETAIL",
    "TORCH_SHOW_CPP_STACKTRACES": "1",
    # The flight recorder: the last collectives of each rank, written when one times out.
    "TORCH_NCCL_TRACE_BUFFER_SIZE": "2000",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
}
# A UNIX socket's path has 107 bytes, of which multiprocessing takes 32 behind TMPDIR.
_LONGEST_TMPDIR = 75


def debugging(environment: Mapping[str, str]) -> bool:
    """Whether STOKER_DEBUG asks NCCL and torch.distributed to log what they do."""
    return environment.get("STOKER_DEBUG", "") not in ("", "0")


def node_environment(environment: Mapping[str, str], directory: Path) -> dict[str, str]:
    """Return what is added for this node's processes; what the user set stays as it is."""
    added = {name: str(directory / "cache" / name.lower()) for name in _CACHES}
    if "SLURM_JOB_ID" in environment and "HF_HUB_OFFLINE" not in environment:
        added |= dict.fromkeys(_OFFLINE, "1")  # nodes seldom have internet: time-outs
    added |= {"PYTHONUNBUFFERED": "1", NOTES_DIR: str(directory / "notes")}
    if debugging(environment):
        added |= _DEBUG
    added = {name: value for name, value in added.items() if not environment.get(name)}
    added[NODE_DIR] = str(directory)
    if len(os.fsencode(directory / "tmp")) <= _LONGEST_TMPDIR:
        added["TMPDIR"] = str(directory / "tmp")
    return added


class CompileCache:
    """The private directories for compiled code, filled from the archive and packed again.

    Directories that the user placed elsewhere are left alone: they outlive the job by themselves.
    Nothing is raised: without an archive layers are compiled again, which is logged.
    """

    def __init__(self, node_directory: Path, environment: Mapping[str, str]):
        self.archive = archive_path()
        self.directories = {
            name: Path(environment[name])
            for name in COMPILED
            if Path(environment.get(name, "/")).is_relative_to(node_directory)
        }
        if self.directories and self.archive.exists():
            self._unpack()
        self.known = self._files().keys()

    def _unpack(self) -> None:
        try:
            with tarfile.open(self.archive) as tar:
                for member in tar:
                    name, _, path = member.name.partition("/")
                    if member.isfile() and name in self.directories:
                        tar.extract(
                            member.replace(name=path), self.directories[name], filter="data"
                        )
        except (OSError, tarfile.TarError) as error:
            logger.warning("%s cannot be read (%s): layers are compiled again", self.archive, error)

    def keep(self) -> None:
        """Pack what is in the directories, if it is more than at the start."""
        files = self._files()
        new = files.keys() - self.known
        if not new:
            return
        if sum(path.stat().st_size for path in files.values()) > LARGEST_BYTES:
            files = {name: files[name] for name in new}
        draft = self.archive.with_name(f".{self.archive.name}.{platform.node()}.{os.getpid()}")
        try:
            self.archive.parent.mkdir(parents=True, exist_ok=True)
            with tarfile.open(draft, "w") as tar:
                for name, path in files.items():
                    tar.add(path, name, recursive=False)
            draft.replace(self.archive)
        except (OSError, tarfile.TarError) as error:
            logger.warning("compiled code cannot be saved in %s (%s)", self.archive, error)
            draft.unlink(missing_ok=True)

    def _files(self) -> dict[str, Path]:
        """Return the finished files of each directory, by variable and relative path."""
        found = {}
        for variable, directory in self.directories.items():
            for path in sorted(directory.rglob("*")):
                unfinished = path.suffix in (".lock", ".tmp") or ".tmp." in path.name
                if path.is_file() and not unfinished:
                    found[f"{variable}/{path.relative_to(directory)}"] = path
        return found


def archive_path() -> Path:
    """Return this user's archive for these versions and this processor, which C++ code is made for.

    GPUs are part of the entries' own keys.
    """
    versions = []
    for package in ("torch", "triton"):
        try:
            versions.append(f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            continue
    cpu = cpu_fact("vendor_id"), cpu_fact("model name")
    facts = [*versions, sys.version, platform.machine(), *cpu]
    name = hashlib.blake2b("\n".join(facts).encode(), digest_size=8).hexdigest()
    return cache_root() / "compiled" / f"{name}.tar"
