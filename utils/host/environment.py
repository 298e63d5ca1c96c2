"""Environment variables that this process inherited, and its limit of open files."""

import logging
import os
import re
import resource
from collections.abc import Mapping

from utils.host.machine import global_rank

logger = logging.getLogger(__name__)

OPEN_FILES = 4096  # data workers, sockets between ranks and mapped files need them
LIMIT = "ulimit -n"
GPUS, THREADS = "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS"
# Variables that change the results or the speed of training. EFFECTS describes some of them.
_FAMILIES = re.compile(
    "(NCCL|CUDA|CUBLAS|CUDNN|OMP|MKL|KMP|GOMP|GLOO|UCX|HCOLL|OMPI_MCA|FI_|PYTORCH|TORCHDYNAMO|TRITON"
    "|NVIDIA_TF32|TORCH_(ALLOW_TF32|BLAS|COMPILE|CUDNN|DISTRIBUTED_DEBUG|LOGS)).*"
)
_HARMLESS = re.compile(
    ".*_(HOME|PATH|ROOT|DIR|DIRECTORY|VERSION)|CUDA_DEVICE_ORDER|CUDA_MODULE_LOADING|.*_CUDA_CHECK"
)
EFFECTS = {
    "several times slower": "CUDA_LAUNCH_BLOCKING|PYTORCH_NO_CUDA_MEMORY_CACHING",
    "slower between GPUs or nodes": "NCCL_(IB|P2P|SHM)_DISABLE|NCCL_P2P_LEVEL|NCCL_(ALGO|PROTO)",
    "only these GPUs are seen": GPUS,
    "the threads of each rank": THREADS,
    "overrules tf32": "NVIDIA_TF32_OVERRIDE|TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
    "nothing is compiled": "TORCH_COMPILE_DISABLE|TORCHDYNAMO_DISABLE",
}


def inherited(environment: Mapping[str, str]) -> list[str]:
    """Return NAME=VALUE of each environment variable that changes results or speed.

    The last text of the list is the limit of open files (`ulimit -n=NUMBER`).
    """
    names = (name for name in sorted(environment) if _FAMILIES.fullmatch(name))
    found = [f"{name}={environment[name]}" for name in names if not _HARMLESS.fullmatch(name)]
    return [*found, f"{LIMIT}={resource.getrlimit(resource.RLIMIT_NOFILE)[0]}"]


def without_indices(variable: str) -> str:
    """Replace the GPU indices in CUDA_VISIBLE_DEVICES=... by the number of GPUs.

    A job on a shared node may get GPUs with other indices at each start. Other variables are
    returned unchanged.
    """
    name, _, value = variable.partition("=")
    devices = value.split(",")
    if name != GPUS or not all(re.fullmatch(r"\d+|(GPU|MIG)-[\w/-]+", each) for each in devices):
        return variable
    return f"{name} has {len(devices)}"


def _add_effect(variable: str) -> str:
    """Add the effect of a variable in parentheses to NAME=VALUE, if EFFECTS has the variable."""
    name = variable.partition("=")[0]
    effects = (text for text, names in EFFECTS.items() if re.fullmatch(names, name))
    return variable + "".join(f" ({text})" for text in effects)


def report_environment() -> None:
    """Log inherited variables that change results or speed. Increase the limit of open files."""
    expected = {LIMIT}
    if {"SLURM_JOB_ID", "WORLD_SIZE"} & os.environ.keys():  # Slurm and launchers set these
        expected |= {GPUS, THREADS}
    found = [each for each in inherited(os.environ) if each.partition("=")[0] not in expected]
    if found and global_rank() == 0:
        usual = all(each.startswith((GPUS, THREADS)) for each in found)
        listed = ", ".join(map(_add_effect, found))
        logger.log(
            logging.INFO if usual else logging.WARNING, "inherited from the environment: %s", listed
        )
    if line := _increase_open_files():
        logger.warning("%s", line)


def _increase_open_files() -> str:
    """Increase this process's limit of open files to OPEN_FILES (4,096), or as far as allowed.

    Return a warning if the system allows fewer open files, else "".
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= OPEN_FILES:
        return ""
    allowed = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    low = f"{LIMIT} can be at most {hard:,} here: several ranks and data workers may need"
    return f"{low} {OPEN_FILES:,} open files" if allowed < OPEN_FILES else ""
