"""Passes what torch and Triton compiled from job to job, as one archive in the user's cache.

Jobs compile into a private directory on their node's own disk: thousands of small files and lock
files do badly on shared storage, and a node's disk is often emptied after the job. So a launcher
unpacks the archive at its start, and the first node packs it again at its end if there is more to
keep. It is replaced in one step; what two jobs add at once is at worst compiled once more.

The archive's name holds the versions and the processor, for which C++ code is made; GPUs are part
of the entries' own keys.
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

from utils.support.files import cache_root
from utils.support.host import cpu_fact

logger = logging.getLogger(__name__)

VARIABLES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
LARGEST_BYTES = 2**30  # of an archive; what would not fit begins a new one
_PACKAGES = ("torch", "triton")


class CompileCache:
    """The private directories of a job on this node, filled from the archive and packed again.

    Directories that the user placed elsewhere are left alone: they outlive the job by themselves.
    Nothing is raised: without an archive layers are compiled again, which is logged.
    """

    def __init__(self, node_directory: Path, environment: Mapping[str, str]):
        self.archive = archive_path()
        self.directories = {
            name: Path(environment[name])
            for name in VARIABLES
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
            logger.warning("what was compiled cannot be kept in %s (%s)", self.archive, error)
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
    """Return where this user's archive for these versions and this processor is."""
    versions = [f"{name} {_version(name)}" for name in _PACKAGES]
    cpu = cpu_fact("vendor_id"), cpu_fact("model name")
    facts = [*versions, sys.version, platform.machine(), *cpu]
    name = hashlib.blake2b("\n".join(facts).encode(), digest_size=8).hexdigest()
    return cache_root() / "compiled" / f"{name}.tar"


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "none"
