"""The environment of a job on one node: private caches, offline switches, threads, debugging."""

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

from utils.cluster.host import host_name
from utils.cluster.notes import NOTES_DIR
from utils.cluster.signals import NODE_DIR
from utils.config.errors import ConfigurationError, StorageError

# What jobs of one user would otherwise share in a home directory: two of them compiling the same
# kernel wait for each other's lock file, or for that of a job that was killed.
_CACHES = (
    "CUDA_CACHE_PATH", "HF_DATASETS_CACHE", "HF_MODULES_CACHE", "MPLCONFIGDIR", "NUMBA_CACHE_DIR",
    "TORCHINDUCTOR_CACHE_DIR", "TORCH_EXTENSIONS_DIR", "TRITON_CACHE_DIR",
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


def make_node_directory(environment: Mapping[str, str]) -> Path:
    """Make this job's private (0700) directory on this node's own disk.

    Under SLURM_TMPDIR, TMPDIR or /tmp. Raises StorageError.
    """
    name = next((name for name in ("SLURM_TMPDIR", "TMPDIR") if environment.get(name)), None)
    base = environment[name] if name else "/tmp"  # noqa: S108 - mkdtemp makes a private one in it
    job = environment.get("SLURM_JOB_ID", "local")
    try:
        return Path(tempfile.mkdtemp(prefix=f"stoker-{job}-", dir=base))
    except OSError as error:
        raise _no_caches(f"{base} ({name})" if name else base, error) from error


def node_environment(environment: Mapping[str, str], directory: Path) -> dict[str, str]:
    """Return what is added for this node's processes; what the user set stays as it is."""
    added = {name: str(directory / "cache" / name.lower()) for name in _CACHES}
    if "SLURM_JOB_ID" in environment and "HF_HUB_OFFLINE" not in environment:
        # Nodes seldom have internet, and would wait for time-outs.
        added |= dict.fromkeys(_OFFLINE, "1")
    added |= {"PYTHONUNBUFFERED": "1", NOTES_DIR: str(directory / "notes")}
    if debugging(environment):
        added |= _DEBUG
    added = {name: value for name, value in added.items() if not environment.get(name)}
    added[NODE_DIR] = str(directory)
    temporary = directory / "tmp"
    if len(os.fsencode(temporary)) <= _LONGEST_TMPDIR:
        added["TMPDIR"] = str(temporary)
    return added


def make_directories(directory: Path, added: Mapping[str, str]) -> None:
    """Make what `node_environment` named inside the node's directory. Raises StorageError."""
    inside = [value for value in added.values() if value.startswith(f"{directory}{os.sep}")]
    try:
        for path in inside:
            Path(path).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _no_caches(directory, error) from error


def _no_caches(directory: Path | str, error: OSError) -> StorageError:
    return StorageError(
        f"{host_name()}: no directory for caches can be made in {directory} ({error.strerror}): "
        "set TMPDIR in slurm/cluster.env to a directory on the node's own disk."
    )


def debugging(environment: Mapping[str, str]) -> bool:
    """Whether STOKER_DEBUG=1 is set. Raises ConfigurationError for other values than 1 and 0."""
    value = environment.get("STOKER_DEBUG", "")
    if value not in ("", "0", "1"):
        raise ConfigurationError(
            f"STOKER_DEBUG={value!r}: give 1 to turn it on, 0 to leave it off."
        )
    return value == "1"


def threads_per_process(environment: Mapping[str, str], processes: int) -> int:
    """Cores a process may use on this node: an equal share of what Slurm gave, or of all."""
    for name in ("SLURM_CPUS_PER_TASK", "SLURM_CPUS_ON_NODE"):
        if environment.get(name, "").isdecimal():
            return max(int(environment[name]) // processes, 1)
    return max(len(os.sched_getaffinity(0)) // processes, 1)
