"""Writes down where a run comes from: command, code, versions, machines, data, at each start."""

import datetime
import importlib.metadata
import json
import logging
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from utils.checkpoints.manifest import read_manifest
from utils.checkpoints.run_record import earlier_starts
from utils.cluster.launch import LaunchFacts
from utils.cluster.tokens import redact_argv
from utils.cluster.whole_files import replace_text

logger = logging.getLogger(__name__)

PACKAGES = (
    "torch", "transformers", "trl", "accelerate", "datasets", "tokenizers", "peft", "deepspeed",
    "flash-attn",
)  # fmt: skip
_SLURM_FIELDS = {
    "job_id": "SLURM_JOB_ID",
    "job_name": "SLURM_JOB_NAME",
    "array_task_id": "SLURM_ARRAY_TASK_ID",
    "cluster": "SLURM_CLUSTER_NAME",
    "partition": "SLURM_JOB_PARTITION",
    "node_list": "SLURM_JOB_NODELIST",
    "nodes": "SLURM_JOB_NUM_NODES",
    "restart_count": "SLURM_RESTART_COUNT",
}
_REPOSITORY = Path(__file__).resolve().parents[2]


def write_provenance(
    path: str | os.PathLike[str],
    launch: LaunchFacts,
    *,
    run_id: str,
    resumed_from: str | None = None,
    **facts: Any,
) -> dict[str, Any]:
    """Append this start to the list of starts in a JSON file and return it; rank 0 alone calls it.

    `facts` are what the caller knows of this start beyond command, code and machines; they must be
    JSON. The file is replaced in one step, so a kill leaves the old or the new one. Raises
    ConfigurationError when the file there is something else.
    """
    path = Path(path)
    starts = earlier_starts(path)
    entry = {
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "resumed_from": resumed_from,
        "argv": redact_argv(sys.argv),
        "python": platform.python_version(),
        "versions": package_versions(),
        "git": git_state(_REPOSITORY),
        "launch": {
            "strategy": launch.strategy,
            "world_size": launch.world_size,
            "hosts": list(dict.fromkeys(launch.hosts)),
            "devices": _device_names(launch.device),
        },
        "slurm": slurm_job(os.environ),
        **facts,
    }
    content = {"format": 1, "run_id": run_id, "starts": [*starts, entry]}
    replace_text(path, json.dumps(content, indent=2) + "\n")
    return entry


def package_versions() -> dict[str, str | None]:
    """Return the versions of the packages that make the numbers; None: not installed."""
    return {name: _version(name) for name in PACKAGES}


def say_other_versions(checkpoint: str) -> None:
    """Warn, in one line, of packages that have another version than those that wrote a checkpoint.

    The run goes on, but perhaps not as it would have: kernels and the order of sums change.
    """
    written = read_manifest(Path(checkpoint)).versions
    now = package_versions()
    changed = [
        f"{name} {written[name] or 'none'} -> {now[name] or 'none'}"
        for name in PACKAGES
        if name in written and written[name] != now[name]
    ]
    if changed:
        logger.warning(
            "%s was written with other versions: %s. From here on the numbers may differ in their "
            "last bits from those of a run that kept the old ones.",
            checkpoint,
            ", ".join(changed),
        )


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def git_state(folder: Path) -> dict[str, Any] | None:
    """Commit of the repository at `folder` and whether files differ from it; None without git.

    None too when `folder` only lies inside another repository, whose commit says nothing of it.
    """
    top = _git(folder, "rev-parse", "--show-toplevel")
    commit = _git(folder, "rev-parse", "HEAD")
    changes = _git(folder, "status", "--porcelain", "--untracked-files=no")
    if top is None or commit is None or changes is None or Path(top) != folder.resolve():
        return None
    return {"commit": commit, "dirty": bool(changes)}


def _git(folder: Path, *command: str) -> str | None:
    try:
        # optional locks off: other processes' git commands must not fail because of ours
        done = subprocess.run(
            ["git", "--no-optional-locks", "-C", str(folder), *command],
            capture_output=True, text=True, timeout=30, check=False,
        )  # fmt: skip
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def slurm_job(environment: Mapping[str, str]) -> dict[str, str | None] | None:
    """Slurm's facts about this job; None outside of one."""
    if "SLURM_JOB_ID" not in environment:
        return None
    return {field: environment.get(name) for field, name in _SLURM_FIELDS.items()}


def _device_names(device: str) -> list[str]:
    """Names of the devices that rank 0 sees."""
    if device != "cuda":
        return [device]
    import torch

    return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
