"""What Slurm says about a step: its hosts, its port, and, without a launcher, each task's rank.

`srun --ntasks-per-node=4 python sft_train.py` starts the ranks itself; all that torch and
accelerate miss is the names of the variables they read.
"""

import errno
import re
import socket
from collections.abc import Mapping, MutableMapping
from pathlib import Path

from utils.cluster.host import host_name
from utils.config.errors import ConfigurationError, UnfitClusterError

MAIN_ADDRESS = "STOKER_MAIN_ADDRESS"
MAIN_PORT = "STOKER_MAIN_PORT"

# Below the ephemeral ports (32768 and up), which any outgoing connection takes; a prime number of
# pairs, so that jobs whose ids lie less than 6133 apart do not meet.
_FIRST_PORT = 20000
_PORT_PAIRS = 6133


def expand_hosts(node_list: str) -> tuple[str, ...]:
    """Return the names in a node list of Slurm's, in its order: `n[01-03,7],x1` has five.

    Raises ConfigurationError for anything else.
    """
    words = re.findall(r"(?:[^,\[\]]|\[[0-9,-]+\])+", node_list)
    if not words or ",".join(words) != node_list:
        raise ConfigurationError(f"'{node_list}' is no list of nodes: write it as n[1-4] or n1,n2.")
    hosts: list[str] = []
    for word in words:
        names = [""]
        for text, ranges in re.findall(r"([^\[\]]+)|\[([^\[\]]*)\]", word):
            endings = [text] if text else _numbers(ranges)
            names = [name + ending for name in names for ending in endings]
        hosts += names
    return tuple(hosts)


def _numbers(ranges: str) -> list[str]:
    """`01-03,7` is 01, 02, 03 and 7."""
    numbers = []
    for part in ranges.split(","):
        first, _, last = part.partition("-")
        width = len(first)
        numbers += [f"{number:0{width}d}" for number in range(int(first), int(last or first) + 1)]
    return numbers


def main_port(environment: Mapping[str, str]) -> int:
    """Return the port at which rank 0 is found; the one after it is the job's too.

    STOKER_MAIN_PORT wins. Without it every task of a step works out the same number from the ids
    of job and step. Raises ConfigurationError.
    """
    given = environment.get(MAIN_PORT)
    if not given:
        job, step = environment.get("SLURM_JOB_ID", "0"), environment.get("SLURM_STEP_ID", "0")
        return _FIRST_PORT + 2 * ((int(job) * 31 + int(step)) % _PORT_PAIRS)
    if not re.fullmatch(r"[0-9]{1,5}", given) or not 1024 <= int(given) <= 65534:
        raise ConfigurationError(
            f"{MAIN_PORT}={given!r} is no port: give a number from 1024 to 65534 (the port after "
            "it is used too), or unset it."
        )
    return int(given)


def can_listen(port: int) -> bool:
    """Whether a server could listen at this port on all addresses of this host, now."""
    try:
        listen(port).close()
    except OSError:
        return False
    return True


def listen(port: int) -> socket.socket:
    """Listen at a port on all addresses, IPv6 too where there is any. Raises OSError."""
    if socket.has_dualstack_ipv6():
        try:
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
        except OSError as error:
            if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):  # no IPv6 here
                raise
    return socket.create_server(("", port))


def adopt_slurm_tasks(environment: MutableMapping[str, str]) -> str | None:
    """Give a task that srun started as a rank of its own the variables that torch reads.

    Returns a line that says so. Changes nothing, and returns None, where a launcher did that
    (torchrun, accelerate) and where the step has one task. Raises ConfigurationError,
    UnfitClusterError.
    """
    tasks = int(environment.get("SLURM_STEP_NUM_TASKS", "1"))
    launched = {"RANK", "WORLD_SIZE", "ACCELERATE_MIXED_PRECISION"} & environment.keys()
    if tasks < 2 or launched or "SLURM_PROCID" not in environment:
        return None
    _refuse_unused_config(environment)
    # Slurm writes "2(x3),1" for nodes of 2, 2, 2 and 1 tasks.
    listed = re.findall(r"(\d+)(?:\(x(\d+)\))?", environment["SLURM_STEP_TASKS_PER_NODE"])
    counts = [int(count) for count, times in listed for _ in range(int(times or 1))]
    local_rank, local_tasks = _bound_to_devices(
        environment, int(environment["SLURM_LOCALID"]), counts[int(environment["SLURM_NODEID"])]
    )
    rank, port = environment["SLURM_PROCID"], main_port(environment)
    if rank == "0" and not can_listen(port):
        raise UnfitClusterError(taken_port_message(host_name(), port, environment))
    address = environment.get(MAIN_ADDRESS) or expand_hosts(environment["SLURM_STEP_NODELIST"])[0]
    environment.update(
        RANK=rank,
        WORLD_SIZE=str(tasks),
        LOCAL_RANK=str(local_rank),
        LOCAL_WORLD_SIZE=str(local_tasks),
        MASTER_ADDR=address,
        MASTER_PORT=str(port),
    )
    return f"launch: srun's {tasks} tasks are the ranks, rank 0 is at {address}:{port}"


def _refuse_unused_config(environment: Mapping[str, str]) -> None:
    """Without accelerate's launcher nothing reads the strategy, and the run would be plain DDP."""
    config = environment.get("ACCELERATE_CONFIG")
    if config and Path(config).name not in ("multi_gpu.yaml", "cpu.yaml"):
        raise ConfigurationError(
            f"ACCELERATE_CONFIG={config} would be ignored: srun started this script itself, one "
            "task a rank, which is plain DDP. Start one task a node with slurm/launch_node.sh in "
            "front of the script, or unset ACCELERATE_CONFIG."
        )


def _bound_to_devices(
    environment: Mapping[str, str], local_rank: int, local_tasks: int
) -> tuple[int, int]:
    """Return rank and number of the tasks that share this task's visible devices.

    accelerate takes the device with the number LOCAL_RANK. A task bound to one GPU
    (--gpus-per-task=1, --gpu-bind) sees that one as number 0, as if it were alone on the node.
    """
    visible = [name for name in environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    if not visible or len(visible) >= local_tasks:
        return local_rank, local_tasks
    if len(visible) == 1 and environment.get("SLURM_GPUS_ON_NODE", "") != "1":
        return 0, 1
    raise UnfitClusterError(
        f"{host_name()}: {local_tasks} tasks share {len(visible)} GPU(s) "
        f"(CUDA_VISIBLE_DEVICES={environment['CUDA_VISIBLE_DEVICES']}): ask for as many GPUs as "
        f"tasks a node (--gpus-per-node={local_tasks}), or for fewer tasks."
    )


def taken_port_message(host: str, port: int, environment: Mapping[str, str]) -> str:
    """Say that a port is in use, and what to do about it."""
    remedy = (
        f"unset {MAIN_PORT}, or give another"
        if environment.get(MAIN_PORT)
        else f"set {MAIN_PORT} to a free port (the one after it is used too)"
    )
    return f"{host}: port {port} is in use by another process: {remedy}."
