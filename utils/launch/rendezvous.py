"""The first check of a launch: all nodes start, reach the first node, and have the same software.

Each node's launcher sends `node_facts` to the first node, as one line of JSON. The first node
listens at rank 0's port + 1, compares the facts and sends the problems of all nodes to every node.
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
from pathlib import Path
from typing import Any

from utils.config.errors import ConfigurationError, UnfitClusterError, UsedPortError
from utils.launch.slurm import MAIN_ADDRESS, Allocation

TIMEOUT = "STOKER_MEET_TIMEOUT_S"
_CONNECTION_TIMEOUT_S = 5.0
_MOST_CLOCK_SKEW_S = 60.0
_PACKAGES = ("torch", "transformers", "accelerate", "deepspeed")


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens at `port`. Raises UsedPortError if the port is in use.

    host: this host's name in the error message
    """
    try:
        return socket.create_server(("", port))
    except OSError as error:
        raise UsedPortError(
            f"{host}: port {port} is in use by another process. The port follows from the job's id "
            "and its restarts: the next start takes another one."
        ) from error


def node_facts(allocation: Allocation, files: Sequence[Path], devices: int) -> dict[str, Any]:
    """Return this node's host, GPUs and versions, and a hash of `files`, as JSON values.

    The values under the key `same` must be equal on all nodes. devices: the number of GPUs that
    torch sees.
    """
    code = hashlib.sha256()
    for path in files:
        code.update(f"{path}\0".encode("utf-8", "surrogateescape"))
        code.update(path.read_bytes() if path.is_file() else b"missing")
    same: dict[str, Any] = {"code": code.hexdigest()[:12], "python": platform.python_version()}
    for package in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            same[package] = importlib.metadata.version(package)
    return {
        "host": allocation.host,
        "gpus": allocation.gpus,
        "devices": devices,
        "clock_ahead_s": 0.0,  # relative to the first node, which sets this value
        "same": same | {"processes": allocation.processes},
    }


def check_nodes(allocation: Allocation, facts: Mapping[str, Any]) -> None:
    """Raise UnfitClusterError on every node if the nodes cannot run one job.

    facts: `node_facts` of this node. Raises ConfigurationError for a wrong STOKER_MEET_TIMEOUT_S.
    """
    if len(allocation.hosts) == 1:
        problems = node_problems([facts])
    else:
        text, timeout_s = os.environ.get(TIMEOUT, "60"), 0.0
        with contextlib.suppress(ValueError):
            timeout_s = float(text)
        if not 1 <= timeout_s <= 3600:
            raise ConfigurationError(f"{TIMEOUT}={text!r}: give seconds from 1 to 3600.")
        exchange = _collect_facts if allocation.node == 0 else _send_facts
        problems = exchange(allocation, facts, timeout_s)
    if problems:
        raise UnfitClusterError(problems)


def node_problems(everyone: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return messages that say why the nodes cannot run one job; [] if they can.

    everyone: `node_facts` of each node, beginning with the first node
    """
    problems = []
    first = everyone[0]
    for node in everyone:
        if node["gpus"] is not None and node["devices"] < node["gpus"]:
            problems.append(
                f"{node['host']}: the job has {node['gpus']} GPUs on this node, one process each, "
                f"but torch sees {node['devices']}. Check nvidia-smi and CUDA_VISIBLE_DEVICES on "
                "that node and that its torch is built for CUDA; leave the node out with sbatch "
                "--exclude."
            )
        problems += [
            f"{name}: {first['same'].get(name)} on {first['host']}, but {node['same'].get(name)} "
            f"on {node['host']}. All nodes need one repository and one environment on a shared "
            "file system (slurm/cluster.env), and equally many GPUs (--gpus-per-node=N)."
            for name in sorted(first["same"].keys() | node["same"].keys())
            if first["same"].get(name) != node["same"].get(name)
        ]
        if abs(node["clock_ahead_s"]) > _MOST_CLOCK_SKEW_S:
            problems.append(
                f"the clock of {node['host']} is {node['clock_ahead_s']:+.0f} s off that of "
                f"{first['host']}: time limits cannot be kept. Have both set by NTP, or leave the "
                "node out with sbatch --exclude."
            )
    return problems


def _collect_facts(allocation: Allocation, facts: Mapping[str, Any], timeout_s: float) -> list[str]:
    """Collect the facts of all nodes on the first node; send the problems to all nodes.

    Return the problems. timeout_s: seconds to wait for the other nodes.
    """
    hosts, nodes = allocation.hosts, {0: dict(facts)}
    deadline = time.monotonic() + timeout_s
    listen(allocation.host, allocation.port).close()  # test that rank 0's port is free
    with contextlib.ExitStack() as connections:
        listener = connections.enter_context(listen(allocation.host, allocation.port + 1))
        streams = []
        while len(nodes) < len(hosts) and (left := deadline - time.monotonic()) > 0:
            listener.settimeout(left)
            # Timeout, or a connection from outside this job: ignore.
            with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
                connection = connections.enter_context(listener.accept()[0])
                connection.settimeout(_CONNECTION_TIMEOUT_S)
                stream = connections.enter_context(connection.makefile("rw"))
                node, sent_at, sent = json.loads(stream.readline())
                if hosts[node] == sent["host"]:
                    nodes[node] = sent | {"clock_ahead_s": sent_at - time.time()}
                    streams.append(stream)
        problems = node_problems([nodes[node] for node in sorted(nodes)])
        if missing := [host for node, host in enumerate(hosts) if node not in nodes]:
            problems = [
                _timeout_message(allocation, f"{', '.join(missing)} did not come to", timeout_s)
            ]
        for stream in streams:
            with contextlib.suppress(OSError):
                print(json.dumps(problems), file=stream, flush=True)
    return problems


def _send_facts(allocation: Allocation, facts: Mapping[str, Any], timeout_s: float) -> list[str]:
    """Send this node's facts to the first node; return the problems that the first node sends back.

    timeout_s: seconds in which the first node must accept the connection
    """
    where = (allocation.address, allocation.port + 1)
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            with (
                socket.create_connection(where, timeout=_CONNECTION_TIMEOUT_S) as connection,
                connection.makefile("rw") as stream,
            ):
                message = [allocation.node, time.time(), facts]
                print(json.dumps(message), file=stream, flush=True)
                # The first node answers after all nodes have sent their facts.
                connection.settimeout(timeout_s + _CONNECTION_TIMEOUT_S)
                return list(json.loads(stream.readline()))
        except (OSError, ValueError) as error:
            if time.monotonic() >= deadline:
                reason = "the connection was closed"
                if isinstance(error, OSError):
                    reason = error.strerror or str(error)  # timed out
                what = f"{allocation.host} ({reason}) got no answer from"
                return [_timeout_message(allocation, what, timeout_s)]
        time.sleep(0.1)


def _timeout_message(allocation: Allocation, what: str, timeout_s: float) -> str:
    return (
        f"{what} {allocation.address}:{allocation.port + 1} within {timeout_s:g} s, where "
        f"{allocation.hosts[0]} waits for all nodes. Set {MAIN_ADDRESS} (slurm/cluster.env) to an "
        "address of it that all nodes reach, on the interface that NCCL_SOCKET_IFNAME names; "
        f"{TIMEOUT}=120 waits longer."
    )
