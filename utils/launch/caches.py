"""A job's private directory on its node's own disk, with the caches that libraries keep there.

Compiled code is thousands of small files and lock files: bad on shared storage, and two jobs of one
user would wait for each other's locks. So what torch and Triton compiled passes from job to job as
one archive in the user's cache, which a launcher unpacks at its start; the first node packs it
again at its end. It is replaced in one step; what two jobs add at once is compiled once more.
"""

import hashlib
import logging
import os
import sys
import tarfile
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

from utils.launch.signals import NODE_DIR
from utils.support.files import cache_root
from utils.support.host import cpu_fact, host_name
from utils.support.notes import NOTES_DIR

logger = logging.getLogger(__name__)

LARGEST_BYTES = 2**30  # a larger archive is begun anew
_CACHES = (
    "CUDA_CACHE_PATH", "HF_DATASETS_CACHE", "HF_MODULES_CACHE", "MPLCONFIGDIR", "NUMBA_CACHE_DIR",
    "TORCH_EXTENSIONS_DIR",
)  # fmt: skip
_COMPILED = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
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
    added |= {name: str(directory / "compiled" / name.lower()) for name in _COMPILED}
    added |= {"PYTHONUNBUFFERED": "1", NOTES_DIR: str(directory / "notes")}
    if debugging(environment):
        added |= _DEBUG
    added = {name: value for name, value in added.items() if not environment.get(name)}
    added[NODE_DIR] = str(directory)
    if len(os.fsencode(directory / "tmp")) <= _LONGEST_TMPDIR:
        added["TMPDIR"] = str(directory / "tmp")
    return added


class CompileCache:
    """The node directory's folder for compiled code, filled from the archive and packed again.

    What the user placed elsewhere is not in it and outlives the job by itself. Nothing is raised:
    without an archive layers are compiled again, which is logged.
    """

    def __init__(self, node_directory: Path):
        self.folder = node_directory / "compiled"
        self.archive = archive_path()
        if self.archive.exists() and self.archive.stat().st_size <= LARGEST_BYTES:
            try:
                with tarfile.open(self.archive) as tar:
                    tar.extractall(self.folder, filter="data")
            except (OSError, tarfile.TarError) as error:
                logger.warning("%s cannot be read (%s): layers compile again", self.archive, error)
        self.known = self._files()

    def keep(self) -> None:
        """Pack what is in the folder, if it is more than at the start."""
        files = self._files()
        if not files - self.known:
            return
        draft = self.archive.with_name(f".{self.archive.name}.{host_name()}.{os.getpid()}")
        try:
            self.archive.parent.mkdir(parents=True, exist_ok=True)
            with tarfile.open(draft, "w") as tar:
                for path in sorted(files):
                    tar.add(path, path.relative_to(self.folder))
            draft.replace(self.archive)
        except (OSError, tarfile.TarError) as error:
            logger.warning("compiled code cannot be saved in %s (%s)", self.archive, error)
            draft.unlink(missing_ok=True)

    def _files(self) -> set[Path]:
        """Return all finished files."""
        paths = {path for path in self.folder.rglob("*") if path.is_file()}
        return {path for path in paths if not {".lock", ".tmp"} & set(path.suffixes)}


def archive_path() -> Path:
    """Return this user's archive for this Python, torch and processor; a GPU is in entries' keys.

    C++ code is made for the processor.
    """
    facts = [sys.version, metadata.version("torch"), cpu_fact("model name")]
    name = hashlib.blake2b("\n".join(facts).encode(), digest_size=8).hexdigest()
    return cache_root() / "compiled" / f"{name}.tar"
