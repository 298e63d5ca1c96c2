"""This job's nodes, GPUs and time limit, from Slurm's environment variables and squeue."""

import contextlib
import datetime
import logging
import os
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from utils.config.declarations import is_true
from utils.config.errors import ConfigurationError, UnfitClusterError
from utils.config.strategy import AUTO, CONFIG_VARIABLE
from utils.host.machine import host_name

logger = logging.getLogger(__name__)

PROCESSES = "STOKER_PROCESSES_PER_NODE"
MAIN_ADDRESS = "STOKER_MAIN_ADDRESS"

# Ports below 32768, because Linux uses higher ports for outgoing connections. A job uses two
# ports. The number of pairs is prime, so jobs with near ids get different ports.
_FIRST_PORT = 20000
_PORT_PAIRS = 6133
_TIME = re.compile(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)")


@dataclass(frozen=True)
class Allocation:
    """The nodes and processes of the job.

    hosts          Slurm's names of all nodes
    node           index of this node in `hosts`
    processes      number of processes per node
    gpus           number of GPUs per node, equal to `processes`; None means that the job uses CPUs
    address, port  where rank 0 listens; on a single node the port is 0: accelerate chooses one
    """

    hosts: tuple[str, ...]
    node: int
    processes: int
    gpus: int | None
    address: str
    port: int

    @property
    def host(self) -> str:
        """The name of this node."""
        return self.hosts[self.node]

    @property
    def world_size(self) -> int:
        """The number of processes over all nodes."""
        return len(self.hosts) * self.processes


def read_allocation(
    environment: Mapping[str, str], devices: int, strategy: str = AUTO
) -> Allocation:
    """Return the Slurm job's nodes and processes. Outside of Slurm, the only node is this host.

    devices: the number of GPUs that torch sees, used if Slurm counts no GPUs. strategy: the value
    of --strategy. Raises ConfigurationError for wrong settings, UnfitClusterError for missing GPUs.
    """
    hosts, node = _hosts_and_index(environment)
    in_slurm, on_gpus = "SLURM_JOB_ID" in environment, not on_cpu(environment, strategy)
    gpus = 0
    if on_gpus:  # Slurm (22.05) sets the variable, except on clusters without GRES
        gpus = int(environment.get("SLURM_GPUS_ON_NODE") or 0) if in_slurm else devices
    requested = environment.get(PROCESSES)
    is_count = requested is None or re.fullmatch(r"[1-9][0-9]{0,3}", requested)
    if requested and (not is_count or gpus not in (0, int(requested))):
        raise ConfigurationError(
            f"{PROCESSES}={requested!r}, but this job has {gpus} GPU(s) on a node, which take one "
            "process each. Unset it, or give a number of processes where there are no GPUs."
        )
    processes = int(requested) if requested else gpus
    if in_slurm and on_gpus and not gpus and not (requested and devices):
        raise UnfitClusterError(
            "the job asked for no GPUs, but would train on GPUs. To train on CPUs, put "
            "ACCELERATE_USE_CPU=true in front of the command (ACCELERATE_USE_CPU=true "
            "slurm/submit.sh ...). For GPUs, ask for them (--gpus-per-node=4); where Slurm counts "
            f"no GPUs, set {PROCESSES}."
        )
    names = "JOB_ID", "STEP_ID", "RESTART_COUNT"
    job, step, restarts = (int(environment.get(f"SLURM_{name}", "0")) for name in names)
    pair = job * 31 + step + restarts * 2003  # a restart has another port
    several = len(hosts) > 1
    return Allocation(
        hosts=hosts,
        node=node,
        processes=processes or 1,
        gpus=processes if on_gpus and (gpus or in_slurm) else None,
        address=environment.get(MAIN_ADDRESS) or (hosts[0] if several else "127.0.0.1"),
        port=_FIRST_PORT + 2 * (pair % _PORT_PAIRS) if several else 0,
    )


def _hosts_and_index(environment: Mapping[str, str]) -> tuple[tuple[str, ...], int]:
    tasks = int(environment.get("SLURM_STEP_NUM_TASKS", "0"))
    several = int(environment.get("SLURM_JOB_NUM_NODES", "1")) > 1
    in_job = "SLURM_NODEID" in environment  # false in salloc's shell on the login node
    if "SLURM_JOB_ID" not in environment or (not tasks and in_job and not several):
        return (host_name(),), 0
    hosts = expand_hosts(environment.get("SLURM_STEP_NODELIST", ""))
    if tasks == 0 or tasks != len(hosts):
        raise ConfigurationError(
            f"slurm/launch_node.sh runs once a node, started by srun, but there are {tasks} tasks "
            f"on {len(hosts)} node(s): sbatch --ntasks-per-node=1 slurm/multinode_job.sh SCRIPT "
            "..., or srun --ntasks-per-node=1 slurm/launch_node.sh SCRIPT ... (and no --ntasks)."
        )
    return hosts, int(environment["SLURM_NODEID"])


def on_cpu(environment: Mapping[str, str], strategy: str = AUTO) -> bool:
    """Return whether an environment variable or the accelerate config cpu.yaml requests the CPU."""
    # cpu.yaml does not set `use_cpu: true`, because accelerate would then start only one process.
    return (
        is_true("ACCELERATE_USE_CPU", environment)
        or environment.get("DS_ACCELERATOR") == "cpu"
        or Path(environment.get(CONFIG_VARIABLE) or strategy).name in ("cpu", "cpu.yaml")
    )


def expand_hosts(node_list: str) -> tuple[str, ...]:
    """Return the host names in one of Slurm's lists, such as `n[01-03,7],x1`.

    Slurm's scontrol is not used, because a container may lack this command.
    """
    hosts: list[str] = []
    for word in re.findall(r"(?:[^,\[\]]|\[[0-9,-]+\])+", node_list):
        before, _, rest = word.partition("[")
        ranges, _, after = rest.partition("]")
        for part in filter(None, ranges.split(",")):
            first, _, last = part.partition("-")
            for number in range(int(first), int(last or first) + 1):
                hosts += expand_hosts(f"{before}{number:0{len(first)}d}{after}")
        hosts += [] if ranges else [word]
    return tuple(hosts)


def time_limit_s(text: str) -> int | None:
    """Return the seconds of a time limit such as 1-12:00:00 (1 day 12 h); None for UNLIMITED."""
    match = _TIME.fullmatch(text)
    if match is None:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds


def job_end_time() -> float | None:
    """Return the unix time in seconds at which this job's time limit ends; None if unknown."""
    end_time, job = os.environ.get("SLURM_JOB_END_TIME", ""), os.environ.get("SLURM_JOB_ID")
    if end_time.isdecimal():  # Slurm 23 and later
        return float(end_time)
    if not job:
        return None
    try:
        (end,) = _squeue_times(job, "%e")
        return end
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        logger.warning(
            "the end of the time limit is unknown (squeue: %s): the run will not stop before it by "
            "itself, signals and STOP still work", error,
        )  # fmt: skip
        return None


def job_times() -> dict[str, float]:
    """Return {"submit_time": ..., "start_time": ...} of this job in unix seconds.

    Unknown times are left out.
    """
    with contextlib.suppress(OSError, subprocess.SubprocessError, ValueError):
        times = _squeue_times(os.environ["SLURM_JOB_ID"], "%V %S")
        return dict(zip(("submit_time", "start_time"), times, strict=True))
    known = os.environ.get("SLURM_JOB_START_TIME", "")  # set by Slurm 22.05 and later
    return {"start_time": float(known)} if known.isdecimal() else {}


def _squeue_times(job: str, fields: str) -> list[float]:
    if array := os.environ.get("SLURM_ARRAY_JOB_ID"):
        # The last task of an array has the array's id. For this id squeue would show every task.
        job = f"{array}_{os.environ['SLURM_ARRAY_TASK_ID']}"
    done = subprocess.run(
        ["squeue", "--noheader", f"--jobs={job}", f"--format={fields}"],
        capture_output=True, text=True, timeout=10, check=True,
    )  # fmt: skip
    # Slurm prints local times without an offset: 2026-11-20T14:05:00.
    words = done.stdout.split()
    return [datetime.datetime.fromisoformat(word).timestamp() for word in words]
