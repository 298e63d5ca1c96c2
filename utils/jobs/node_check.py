"""The first seconds of a job: every node sees its devices, and all nodes are fit for one run.

The launchers of all nodes meet at the port after rank 0's, tell each other what they are, and all
judge the same list. So a fault of one node is known on every node, and nobody waits for it.
"""

import hashlib
import importlib.metadata
import json
import os
import platform
import socket
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from utils.cluster.slurm_tasks import (
    MAIN_ADDRESS,
    MAIN_PORT,
    can_listen,
    listen,
    taken_port_message,
)
from utils.config.errors import ConfigurationError, UnfitClusterError
from utils.jobs.allocation import Allocation

MEET_TIMEOUT = "STOKER_MEET_TIMEOUT_S"
MOST_CLOCK_SKEW_S = 60.0
_SELF_CONNECT_TIMEOUT_S = 5.0
_PACKAGES = ("torch", "transformers", "accelerate", "deepspeed")


def node_facts(allocation: Allocation, files: Sequence[Path], devices: int) -> dict[str, Any]:
    """Say what this node is; `files` are those that have to be the same on all nodes.

    `devices` is the number of GPUs that torch sees here.
    """
    versions = {name: _version(name) for name in _PACKAGES}
    return {
        "host": allocation.hosts[allocation.node],
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


def check_nodes(allocation: Allocation, facts: Mapping[str, Any]) -> str:
    """Meet the other nodes and judge all; return a line that says what was found.

    Raises UnfitClusterError, the same one on every node that took part.
    """
    began = time.monotonic()
    everyone, clocks = [dict(facts)], [time.time()]
    if len(allocation.hosts) > 1:
        everyone, clocks = _meet(allocation, facts)
    problems = node_problems(everyone, clocks)
    if problems:
        raise UnfitClusterError(problems)
    devices = "CPU only" if allocation.gpus is None else f"{allocation.gpus} GPU(s) each"
    if len(everyone) == 1:
        return f"node check: {allocation.hosts[0]}, {devices}"
    shown = ", ".join(allocation.hosts[:8]) + (", ..." if len(everyone) > 8 else "")
    return (
        f"node check: {len(everyone)} nodes ({shown}), {devices}, the same code and versions, "
        f"clocks within {max(clocks) - min(clocks):.1f} s; took {time.monotonic() - began:.1f} s"
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


def _meet(allocation: Allocation, facts: Mapping[str, Any]) -> tuple[list[Any], list[float]]:
    """Exchange facts and clocks with the other nodes; both in the order of the nodes."""
    import torch.distributed as dist

    timeout = timedelta(seconds=_timeout_s())
    listener = _listen_as_main(allocation) if allocation.node == 0 else None
    _check_address(allocation)
    port = allocation.port + 1
    try:
        store = dist.TCPStore(
            allocation.address, port, is_master=listener is not None, timeout=timeout,
            wait_for_workers=False, master_listen_fd=listener.detach() if listener else None,
        )  # fmt: skip
        everyone = _exchange(store, "facts", facts, allocation)
        # All are here now, so clocks are read within milliseconds of each other.
        clocks = [float(clock) for clock in _exchange(store, "clock", time.time(), allocation)]
        store.set(f"read/{allocation.node}", "1")
        if listener is not None:  # the store ends with this process's last use of it
            store.wait([f"read/{node}" for node in range(len(allocation.hosts))], timeout)
    except RuntimeError as error:  # all of torch's network errors are some
        raise UnfitClusterError(
            f"{_here(allocation)} did not meet the other nodes at {allocation.address}:{port} "
            f"within {timeout.seconds} s ({_first_line(error)}). {_remedy(allocation)}"
        ) from error
    return everyone, clocks


def _exchange(store: Any, name: str, value: Any, allocation: Allocation) -> list[Any]:
    """Publish this node's value and return those of all nodes. JSON: nothing in it can run."""
    store.set(f"{name}/{allocation.node}", json.dumps(value))
    keys = [f"{name}/{node}" for node in range(len(allocation.hosts))]
    try:
        store.wait(keys)
    except RuntimeError as error:
        pairs = zip(keys, allocation.hosts, strict=True)
        missing = [host for key, host in pairs if not store.check([key])]
        if not missing:
            raise
        raise UnfitClusterError(
            f"{', '.join(missing)} did not come to {allocation.address}:{allocation.port + 1} "
            f"within {_timeout_s():g} s, where {_here(allocation)} waited. {_remedy(allocation)} "
            f"Is the node slow to start (a cold file system)? {MEET_TIMEOUT}=120 waits longer."
        ) from error
    return [json.loads(data) for data in store.multi_get(keys)]


def _listen_as_main(allocation: Allocation) -> socket.socket:
    """Take the port to meet at, and see that rank 0's own port is free."""
    if not can_listen(allocation.port):
        message = taken_port_message(_here(allocation), allocation.port, os.environ)
        raise UnfitClusterError(message)
    try:
        return listen(allocation.port + 1)
    except OSError as error:
        message = taken_port_message(_here(allocation), allocation.port + 1, os.environ)
        raise UnfitClusterError(f"{message} ({error.strerror})") from error


def _check_address(allocation: Allocation) -> None:
    """See that the address means something here, and on the first node leads back to it."""
    port = allocation.port + 1
    try:
        socket.getaddrinfo(allocation.address, port, type=socket.SOCK_STREAM)
        if allocation.node == 0:
            where = (allocation.address, port)
            socket.create_connection(where, timeout=_SELF_CONNECT_TIMEOUT_S).close()
    except OSError as error:
        unknown = isinstance(error, socket.gaierror)
        what = "is not known there" if unknown else "does not lead back to it"
        raise UnfitClusterError(
            f"{_here(allocation)}: the first node's address {allocation.address}:{port} {what} "
            f"({error.strerror or error}). {_remedy(allocation)}"
        ) from error


def _timeout_s() -> float:
    text = os.environ.get(MEET_TIMEOUT, "30")
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 1 <= seconds <= 3600:
        raise ConfigurationError(f"{MEET_TIMEOUT}={text!r}: give seconds from 1 to 3600.")
    return seconds


def _here(allocation: Allocation) -> str:
    return allocation.hosts[allocation.node]


def _remedy(allocation: Allocation) -> str:
    return (
        f"Set {MAIN_ADDRESS} (slurm/cluster.env) to an address of {allocation.hosts[0]} that all "
        f"nodes reach, on the interface that NCCL_SOCKET_IFNAME names; {MAIN_PORT} chooses "
        "another port."
    )


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:300]
