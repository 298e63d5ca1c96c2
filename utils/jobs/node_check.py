"""The first seconds of a job: every node sees its devices, and all nodes are fit for one run.

The nodes tell each other what they are and all judge the same list, so a fault of one node is
known, and said, on every node.
"""

import hashlib
import importlib.metadata
import logging
import os
import platform
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from utils.config.errors import UnfitClusterError
from utils.jobs.allocation import Allocation
from utils.jobs.meeting import Meeting

logger = logging.getLogger("launch_node")

MOST_CLOCK_SKEW_S = 60.0
_PACKAGES = ("torch", "transformers", "accelerate", "deepspeed")


def node_facts(allocation: Allocation, files: Sequence[Path], devices: int) -> dict[str, Any]:
    """Say what this node is; `files` are those that have to be the same on all nodes.

    `devices` is the number of GPUs that torch sees here.
    """
    versions = {name: _version(name) for name in _PACKAGES}
    return {
        "host": allocation.host,
        "processes": allocation.processes,
        "gpus": allocation.gpus,
        "devices": devices,
        "visible": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "versions": {"python": platform.python_version()} | versions,
        "code": _digest(files),
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _digest(files: Sequence[Path]) -> str:
    digest = hashlib.sha256()
    for path in files:
        digest.update(f"{path}\0".encode("utf-8", "surrogateescape"))
        digest.update(path.read_bytes() if path.is_file() else b"missing")
    return digest.hexdigest()[:12]


def check_nodes(allocation: Allocation, facts: Mapping[str, Any], meeting: Meeting | None) -> str:
    """Judge all nodes, by what they say in the meeting if there are several; return a line.

    Raises UnfitClusterError, the same one on every node that took part.
    """
    if meeting is None:
        everyone, clocks = [facts], [0.0]
    else:
        everyone = meeting.exchange("facts", facts)
        # All are here now, so the clocks are read within milliseconds of each other.
        clocks = [float(clock) for clock in meeting.exchange("clock", time.time())]
    problems = node_problems(everyone, clocks)
    if problems:
        raise UnfitClusterError(problems)
    for remark in _remarks(everyone):
        logger.warning("%s", remark)
    devices = "CPU only" if allocation.gpus is None else f"{allocation.gpus} GPU(s) each"
    if meeting is None:
        return f"node check: {allocation.host}, {devices}"
    shown = ", ".join(allocation.hosts[:8]) + (", ..." if len(everyone) > 8 else "")
    return (
        f"node check: {len(everyone)} nodes ({shown}), {devices}, the same code and versions, "
        f"clocks within {max(clocks) - min(clocks):.1f} s"
    )


def node_problems(everyone: Sequence[Mapping[str, Any]], clocks: Sequence[float]) -> list[str]:
    """Say what makes these nodes unfit for one run, as user messages."""
    problems = []
    for facts in everyone:
        asked, seen = facts["gpus"], facts["devices"]
        if asked is not None and seen < asked:
            visible = facts.get("visible")
            problems.append(
                f"{facts['host']}: the job has {asked} GPUs on this node, one process each, but "
                f"torch sees {seen}"
                + (f" (CUDA_VISIBLE_DEVICES={visible})" if visible is not None else "")
                + ". Check nvidia-smi on that node and that its torch is built for CUDA; leave the "
                "node out with sbatch --exclude."
            )
    first = everyone[0]
    for facts in everyone[1:]:
        problems += _differences(first, facts)
    latest, earliest = max(clocks), min(clocks)
    if latest - earliest > MOST_CLOCK_SKEW_S:
        ahead, behind = everyone[clocks.index(latest)], everyone[clocks.index(earliest)]
        problems.append(
            f"the clock of {ahead['host']} is {latest - earliest:.0f} s ahead of that of "
            f"{behind['host']}: time limits cannot be kept. Have both set by NTP, or leave one "
            "out with sbatch --exclude."
        )
    return problems


def _remarks(everyone: Sequence[Mapping[str, Any]]) -> list[str]:
    return [
        f"{facts['host']}: torch sees {facts['devices']} GPUs, and the job uses {facts['gpus']}: "
        "Slurm does not keep the others from it"
        for facts in everyone
        if facts["gpus"] is not None and facts["devices"] > facts["gpus"]
    ]


def _differences(first: Mapping[str, Any], facts: Mapping[str, Any]) -> list[str]:
    problems = []
    here, there = first["host"], facts["host"]
    if facts["processes"] != first["processes"]:
        problems.append(
            f"{here} has {first['processes']} processes (GPUs) for this job, {there} has "
            f"{facts['processes']}: all nodes need as many. Ask with --gpus-per-node=N."
        )
    for name, version in first["versions"].items():
        if facts["versions"].get(name) != version:
            problems.append(
                f"{name} is {version} on {here}, but {facts['versions'].get(name)} on {there}: "
                "activate one environment on a shared file system in slurm/cluster.env."
            )
    if facts["code"] != first["code"]:
        problems.append(
            f"the code differs between {here} ({first['code']}) and {there} ({facts['code']}): "
            "keep one repository on a shared file system, and do not edit it as jobs start."
        )
    return problems
