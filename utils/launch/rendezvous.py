"""The first check of a launch: all nodes start, reach the first one, and are alike.

Each node's launcher sends facts about itself, as one line of JSON, to the first node, which listens
at the port after rank 0's and answers with everyone's. All nodes judge the same list, so each of
them reports what is wrong with any.
"""

import contextlib
import hashlib
import importlib.metadata
import json
import os
import platform
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from utils.config.errors import ConfigurationError, UnfitClusterError
from utils.launch.slurm import MAIN_ADDRESS, MAIN_PORT, Allocation

MOST_CLOCK_SKEW_S = 60.0
TIMEOUT = "STOKER_MEET_TIMEOUT_S"
_CONNECTION_TIMEOUT_S = 5.0
_PACKAGES = ("torch", "transformers", "accelerate", "deepspeed")


def with_free_port(allocation: Allocation) -> Allocation:
    """Return the allocation with a port that is free, if this node alone may choose one.

    Raises UnfitClusterError for a taken port that the user or other nodes count on.
    """
    if allocation.node > 0:
        return allocation
    try:
        listen(allocation.port).close()
        return allocation
    except OSError as error:
        if len(allocation.hosts) > 1 or os.environ.get(MAIN_PORT):
            raise _taken(allocation.host, allocation.port) from error
    with listen(0) as listener:
        return replace(allocation, port=listener.getsockname()[1])


def listen(port: int) -> socket.socket:
    """Listen at a port on all addresses, IPv6 too where there is any. Raises OSError."""
    with contextlib.suppress(OSError, ValueError):
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", port))


def _taken(host: str, port: int) -> UnfitClusterError:
    remedy = "unset it, or set" if os.environ.get(MAIN_PORT) else "set"
    return UnfitClusterError(
        f"{host}: port {port} is in use by another process: {remedy} {MAIN_PORT} to a free port "
        "(the one after it is used too)."
    )


def node_facts(allocation: Allocation, files: Sequence[Path], devices: int) -> dict[str, Any]:
    """Describe this node; `files` must be the same everywhere, `devices` is torch's GPU count."""
    code = hashlib.sha256()
    for path in files:
        code.update(f"{path}\0".encode("utf-8", "surrogateescape"))
        code.update(path.read_bytes() if path.is_file() else b"missing")
    return {
        "host": allocation.host,
        "processes": allocation.processes,
        "gpus": allocation.gpus,
        "devices": devices,
        "visible": os.environ.get("CUDA_VISIBLE_DEVICES", "unset"),
        "versions": {"python": platform.python_version()}
        | {name: _version(name) for name in _PACKAGES},
        "code": code.hexdigest()[:12],
        "clock_ahead_s": 0.0,  # of the first node's
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def check_nodes(allocation: Allocation, facts: Mapping[str, Any]) -> str:
    """Compare all nodes of the job and return a line for the log.

    Raises UnfitClusterError, the same one on every node that took part.
    """
    several = len(allocation.hosts) > 1
    everyone = exchange_facts(allocation, facts) if several else [facts]
    problems = node_problems(everyone)
    if problems:
        raise UnfitClusterError(problems)
    devices = "CPU only" if allocation.gpus is None else f"{allocation.gpus} GPU(s) each"
    if not several:
        return f"node check: {allocation.host}, {devices}"
    shown = ", ".join(allocation.hosts[:8]) + (", ..." if len(everyone) > 8 else "")
    clocks = [node["clock_ahead_s"] for node in everyone]
    return (
        f"node check: {len(everyone)} nodes ({shown}), {devices}, the same code and versions, "
        f"clocks within {max(clocks) - min(clocks):.1f} s"
    )


def exchange_facts(allocation: Allocation, facts: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the facts of every node, by node. Raises UnfitClusterError naming missing nodes."""
    answer = (_collect if allocation.node == 0 else _report)(allocation, facts, _timeout_s())
    if isinstance(answer, str):
        raise UnfitClusterError(answer)
    return answer


def _collect(
    allocation: Allocation, facts: Mapping[str, Any], timeout_s: float
) -> list[dict[str, Any]] | str:
    """On the first node: receive everyone's facts, and send all of them, or what is wrong."""
    port = allocation.port + 1
    try:
        listener = listen(port)
    except OSError as error:
        raise _taken(allocation.host, port) from error
    nodes: dict[int, dict[str, Any]] = {0: dict(facts)}
    deadline = time.monotonic() + timeout_s
    with contextlib.ExitStack() as connections:
        connections.enter_context(listener)
        reached = []
        while len(nodes) < len(allocation.hosts) and (left := deadline - time.monotonic()) > 0:
            listener.settimeout(left)
            try:
                connection = connections.enter_context(listener.accept()[0])
                connection.settimeout(_CONNECTION_TIMEOUT_S)
                node, sent_at, said = _receive(connection)
                if allocation.hosts[node] == said["host"]:
                    nodes[node] = said | {"clock_ahead_s": sent_at - time.time()}
                    reached.append(connection)
            except (OSError, ValueError, LookupError, TypeError):
                continue  # the limit, or somebody else's connection: no node of this job
        missing = [host for node, host in enumerate(allocation.hosts) if node not in nodes]
        answer: list[dict[str, Any]] | str = [nodes[node] for node in sorted(nodes)]
        if missing:
            answer = (
                f"{', '.join(missing)} did not come to {allocation.address}:{port} within "
                f"{timeout_s:g} s, where {allocation.host} waited. Is the node slow to start (a "
                f"cold file system)? {TIMEOUT}=120 waits longer. {_remedy(allocation)}"
            )
        for connection in reached:
            with contextlib.suppress(OSError):
                _send(connection, answer)
    return answer


def _report(
    allocation: Allocation, facts: Mapping[str, Any], timeout_s: float
) -> list[dict[str, Any]] | str:
    """On any other node: send its facts to the first node and return the answer."""
    where = (allocation.address, allocation.port + 1)
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            with socket.create_connection(where, timeout=_CONNECTION_TIMEOUT_S) as connection:
                _send(connection, [allocation.node, time.time(), facts])
                connection.settimeout(timeout_s + _CONNECTION_TIMEOUT_S)  # for the others to come
                return _receive(connection)
        except (OSError, ValueError) as error:
            if time.monotonic() >= deadline:
                raise UnfitClusterError(
                    f"{allocation.host}: {where[0]}:{where[1]}, the address of "
                    f"{allocation.hosts[0]} where the nodes meet, did not answer within "
                    f"{timeout_s:g} s ({error}). {_remedy(allocation)}"
                ) from error
        time.sleep(0.1)


def _send(connection: socket.socket, value: Any) -> None:
    connection.sendall(json.dumps(value).encode() + b"\n")


def _receive(connection: socket.socket) -> Any:
    with connection.makefile("rb") as stream:
        return json.loads(stream.readline())


def _remedy(allocation: Allocation) -> str:
    return (
        f"Set {MAIN_ADDRESS} (slurm/cluster.env) to an address of {allocation.hosts[0]} that all "
        f"nodes reach, on the interface that NCCL_SOCKET_IFNAME names; {MAIN_PORT} chooses another "
        "port."
    )


def _timeout_s() -> float:
    text = os.environ.get(TIMEOUT, "60")
    with contextlib.suppress(ValueError):
        if 1 <= float(text) <= 3600:
            return float(text)
    raise ConfigurationError(f"{TIMEOUT}={text!r}: give seconds from 1 to 3600.")


def node_problems(everyone: Sequence[Mapping[str, Any]]) -> list[str]:
    """Say what makes these nodes unfit for one run."""
    problems = []
    first = everyone[0]
    for node in everyone:
        here, there = first["host"], node["host"]
        if node["gpus"] is not None and node["devices"] < node["gpus"]:
            problems.append(
                f"{there}: the job has {node['gpus']} GPUs on this node, one process each, but "
                f"torch sees {node['devices']} (CUDA_VISIBLE_DEVICES is {node['visible']}). Check "
                "nvidia-smi on that node and that its torch is built for CUDA; leave the node out "
                "with sbatch --exclude."
            )
        if node["processes"] != first["processes"]:
            problems.append(
                f"{here} has {first['processes']} processes (GPUs) for this job, {there} has "
                f"{node['processes']}: all nodes need the same number. Ask with --gpus-per-node=N."
            )
        problems += [
            f"{name} is {version} on {here}, but {node['versions'].get(name)} on {there}: activate "
            "one environment on a shared file system in slurm/cluster.env."
            for name, version in first["versions"].items()
            if node["versions"].get(name) != version
        ]
        if node["code"] != first["code"]:
            problems.append(
                f"the code differs between {here} ({first['code']}) and {there} ({node['code']}): "
                "keep one repository on a shared file system, and do not edit it as jobs start."
            )
    by_clock = sorted(everyone, key=lambda node: node["clock_ahead_s"])
    skew_s = by_clock[-1]["clock_ahead_s"] - by_clock[0]["clock_ahead_s"]
    if skew_s > MOST_CLOCK_SKEW_S:
        problems.append(
            f"the clock of {by_clock[-1]['host']} is {skew_s:.0f} s ahead of that of "
            f"{by_clock[0]['host']}: time limits cannot be kept. Have both set by NTP, or leave "
            "one out with sbatch --exclude."
        )
    return problems
