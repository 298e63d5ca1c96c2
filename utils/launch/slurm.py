"""What Slurm gave this job, read from its variables: nodes, processes, ports, the time limit.

`read_allocation` is for the launcher of a node, which starts one process a GPU. Tasks that srun
started as ranks of their own get what torch reads from `adopt_slurm_tasks`.
"""

import dataclasses
import datetime
import errno
import json
import logging
import os
import re
import socket
import subprocess
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path

from utils.config.errors import ConfigurationError, UnfitClusterError
from utils.support.host import host_name

logger = logging.getLogger(__name__)

CONFIG = "ACCELERATE_CONFIG"
PROCESSES = "STOKER_PROCESSES_PER_NODE"
MAIN_ADDRESS = "STOKER_MAIN_ADDRESS"
MAIN_PORT = "STOKER_MAIN_PORT"

# Below the ephemeral ports (32768 and up), which any outgoing connection takes; a prime number of
# pairs, so that jobs whose ids lie less than 6133 apart do not meet.
_FIRST_PORT = 20000
_PORT_PAIRS = 6133


@dataclass(frozen=True)
class Allocation:
    """This node among the nodes of the job.

    `hosts` are Slurm's names of all nodes, this one at `node`. `address` and `port` are where the
    processes find rank 0. `gpus` is None on a CPU, else as many as `processes`, both of one node.
    """

    hosts: tuple[str, ...]
    node: int
    processes: int
    gpus: int | None
    address: str
    port: int

    @property
    def host(self) -> str:
        """Slurm's name of this node."""
        return self.hosts[self.node]

    @property
    def world_size(self) -> int:
        """Processes over all nodes."""
        return len(self.hosts) * self.processes


def read_allocation(environment: Mapping[str, str], devices_here: Callable[[], int]) -> Allocation:
    """Work out the launch from Slurm's variables or, outside of Slurm, from this machine.

    `devices_here` counts the GPUs that torch sees; it is only asked outside of Slurm. Raises
    ConfigurationError for what the user set, UnfitClusterError for what Slurm gave.
    """
    hosts, node = _nodes(environment)
    gpus: int | None = None
    if not on_cpu(environment):
        in_slurm = "SLURM_JOB_ID" in environment
        gpus = allocated_gpus(environment) if in_slurm else devices_here()
        if in_slurm and not gpus and not environment.get(PROCESSES):
            raise UnfitClusterError(
                f"{hosts[node]}: Slurm gave this job no GPU. Ask for some (--gpus-per-node=4); "
                f"where Slurm does not count GPUs, set {PROCESSES}; to train on CPUs, set "
                "ACCELERATE_USE_CPU=true."
            )
    processes = _processes(environment, gpus, hosts[node])
    return Allocation(
        hosts=hosts,
        node=node,
        processes=processes,
        gpus=processes if gpus or (gpus is not None and "SLURM_JOB_ID" in environment) else None,
        address=environment.get(MAIN_ADDRESS) or (hosts[0] if len(hosts) > 1 else "127.0.0.1"),
        port=main_port(environment),
    )


def _nodes(environment: Mapping[str, str]) -> tuple[tuple[str, ...], int]:
    """Return the names of the step's nodes and the index of this one."""
    if "SLURM_JOB_ID" not in environment:
        return (host_name(),), 0
    if "SLURM_STEP_NUM_TASKS" not in environment:
        nodes = int(environment.get("SLURM_JOB_NUM_NODES", "1"))
        if nodes > 1 or "SLURM_NODEID" not in environment:
            raise ConfigurationError(
                "slurm/launch_node.sh was started inside a Slurm job, but not by srun, which "
                f"starts it on the job's {nodes} node(s): sbatch slurm/multinode_job.sh SCRIPT "
                "..., or srun --ntasks-per-node=1 slurm/launch_node.sh SCRIPT ..."
            )
        return (host_name(),), 0
    tasks = int(environment["SLURM_STEP_NUM_TASKS"])
    hosts = expand_hosts(environment["SLURM_STEP_NODELIST"])
    if tasks != len(hosts):
        raise ConfigurationError(
            f"srun started {tasks} tasks on {len(hosts)} node(s) ({', '.join(hosts[:4])}), but "
            "slurm/launch_node.sh is started once a node and starts the processes itself: "
            "give sbatch and srun --ntasks-per-node=1 (and no --ntasks)."
        )
    return hosts, int(environment["SLURM_NODEID"])


def allocated_gpus(environment: Mapping[str, str]) -> int:
    """Count the GPUs that Slurm gave this step on this node; 0 where it names none.

    SLURM_GPUS_ON_NODE is there however they were asked for (22.05); the others are for versions
    and plugins that do not set it.
    """
    count = environment.get("SLURM_GPUS_ON_NODE", "")
    if count.isdecimal():
        return int(count)
    for name in ("SLURM_STEP_GPUS", "CUDA_VISIBLE_DEVICES", "SLURM_JOB_GPUS"):
        listed = environment.get(name)
        if listed and listed != "NoDevFiles":
            return len(listed.split(","))
    for name in ("SLURM_GPUS_PER_NODE", "SLURM_GPUS_PER_TASK"):
        found = re.search(r"(?:^|:)([0-9]+)$", environment.get(name, ""))
        if found:
            return int(found[1])
    return 0


def _processes(environment: Mapping[str, str], gpus: int | None, host: str) -> int:
    """Count the processes to start here: one a GPU; without GPUs as many as the user says."""
    given = environment.get(PROCESSES)
    if not given:
        return gpus or 1
    if not re.fullmatch(r"[0-9]{1,4}", given) or int(given) < 1:
        raise ConfigurationError(
            f"{PROCESSES}={given!r} is no number of processes: give 1 or more."
        )
    if gpus and int(given) != gpus:
        raise ConfigurationError(
            f"{PROCESSES}={given}, but {host} has {gpus} GPU(s) for this job, which take one "
            f"process each: unset {PROCESSES} (it is for CPU runs)."
        )
    return int(given)


def asks_for_cpu(environment: Mapping[str, str]) -> bool:
    """Whether ACCELERATE_USE_CPU asks for the CPU, in any of the words that accelerate takes."""
    words = ("1", "true", "yes", "on", "y", "t")  # accelerate/utils/environment.py, str_to_bool
    return environment.get("ACCELERATE_USE_CPU", "").lower() in words


def on_cpu(environment: Mapping[str, str]) -> bool:
    """Whether the user asked for the CPU: from accelerate, from DeepSpeed, or by cpu.yaml.

    That file cannot say so itself: with `use_cpu: true` accelerate starts one process alone.
    """
    if asks_for_cpu(environment) or environment.get("DS_ACCELERATOR") == "cpu":
        return True
    return Path(environment.get(CONFIG, "")).name == "cpu.yaml"


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


def taken_port_message(host: str, port: int, environment: Mapping[str, str]) -> str:
    """Say that a port is in use, and what to do about it."""
    remedy = (
        f"unset {MAIN_PORT}, or give another"
        if environment.get(MAIN_PORT)
        else f"set {MAIN_PORT} to a free port (the one after it is used too)"
    )
    return f"{host}: port {port} is in use by another process: {remedy}."


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


def job_end_time() -> float | None:
    """Return the end of the job's time limit in seconds since the epoch; None outside of a job.

    Slurm 23 and later put it into the environment, else `squeue` is asked, once. None too, with a
    warning, where nobody knows.
    """
    known, job = os.environ.get("SLURM_JOB_END_TIME", ""), os.environ.get("SLURM_JOB_ID")
    if known.isdecimal():
        return float(known)
    if not job:
        return None
    if array := os.environ.get("SLURM_ARRAY_JOB_ID"):
        # The id of an array's last task is the array's: squeue would show every task.
        job = f"{array}_{os.environ['SLURM_ARRAY_TASK_ID']}"
    try:
        done = subprocess.run(
            ["squeue", "--noheader", f"--jobs={job}", "--format=%e"],
            capture_output=True, text=True, timeout=10, check=True,
        )  # fmt: skip
        # Local time without an offset, as Slurm prints times: 2026-11-20T14:05:00.
        return datetime.datetime.fromisoformat(done.stdout.strip()).timestamp()
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        logger.warning(
            "the end of the time limit is unknown (squeue: %s): the run will not stop before it by "
            "itself, signals and STOP still work",
            error,
        )
        return None


# What Slurm understood of a job on hold, for the dry run that utils/submit/check.py starts.

REQUEST = "STOKER_REQUEST"


@dataclass(frozen=True)
class JobRequest:
    """The part of a job that the run depends on.

    `time_limit_s` is None where there is none. `signal_lead_s` is how long before it Slurm sends
    USR1 to the batch shell, on which the run saves and stops; None if it does not.
    """

    job_script: str
    job_name: str
    nodes: int
    processes_per_node: int
    gpus_per_node: int
    strategy: str
    strategy_file: str
    time_limit_s: int | None
    signal_lead_s: int | None
    requeue: bool

    def to_json(self) -> str:
        """Write it for STOKER_REQUEST."""
        return json.dumps(dataclasses.asdict(self))


def request_from(environment: Mapping[str, str]) -> JobRequest | None:
    """Return the request of the job that this dry run stands for; None if there is no such job.

    Raises ConfigurationError.
    """
    text = environment.get(REQUEST)
    try:
        return JobRequest(**json.loads(text)) if text else None
    except (ValueError, TypeError) as error:
        raise ConfigurationError(
            f"{REQUEST} was not written by slurm/submit.sh ({error}): unset it."
        ) from error
