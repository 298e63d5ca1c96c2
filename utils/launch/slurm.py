"""What Slurm gave this job, read from its variables: nodes, processes, port, the time limit."""

import contextlib
import datetime
import logging
import os
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from utils.config.errors import ConfigurationError, UnfitClusterError
from utils.config.precision import is_true
from utils.config.strategy import AUTO, CONFIG
from utils.support.host import host_name

logger = logging.getLogger(__name__)

PROCESSES = "STOKER_PROCESSES_PER_NODE"
MAIN_ADDRESS = "STOKER_MAIN_ADDRESS"

# Below the ephemeral ports (32768 and up), which any outgoing connection takes; a prime number of
# pairs, so that jobs whose ids lie less than 6133 apart differ.
_FIRST_PORT = 20000
_PORT_PAIRS = 6133


@dataclass(frozen=True)
class Allocation:
    """This node among the nodes of the job.

    `hosts` are Slurm's names of all nodes, this one at `node`. `address` and `port` are where the
    processes find rank 0; on a single node accelerate takes a free port for 0. `gpus` is None on a
    CPU, else as many as `processes`, both of one node.
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


def read_allocation(
    environment: Mapping[str, str], devices: int, strategy: str = AUTO
) -> Allocation:
    """Work out the launch from Slurm's variables or, outside of Slurm, from this machine.

    `devices` are the GPUs that torch sees, which count outside of Slurm; `strategy` is that of the
    settings. Raises ConfigurationError for what the user set, UnfitClusterError for what Slurm
    gave.
    """
    hosts, node = _nodes(environment)
    in_slurm, on_gpus = "SLURM_JOB_ID" in environment, not on_cpu(environment, strategy)
    gpus = 0
    if on_gpus:  # there however they were asked for (Slurm 22.05), but for clusters without GRES
        gpus = int(environment.get("SLURM_GPUS_ON_NODE") or 0) if in_slurm else devices
    processes = _processes(environment, gpus)
    if in_slurm and on_gpus and not processes:
        raise UnfitClusterError(
            f"{hosts[node]}: Slurm gave this job no GPU. Ask for some (--gpus-per-node=4); where "
            f"Slurm does not count GPUs, set {PROCESSES}; to train on CPUs, set "
            "ACCELERATE_USE_CPU=true."
        )
    job, step = (int(environment.get(f"SLURM_{name}_ID", "0")) for name in ("JOB", "STEP"))
    several = len(hosts) > 1
    return Allocation(
        hosts=hosts,
        node=node,
        processes=processes or 1,
        gpus=processes if on_gpus and (gpus or in_slurm) else None,
        address=environment.get(MAIN_ADDRESS) or (hosts[0] if several else "127.0.0.1"),
        port=_FIRST_PORT + 2 * ((job * 31 + step) % _PORT_PAIRS) if several else 0,
    )


def _nodes(environment: Mapping[str, str]) -> tuple[tuple[str, ...], int]:
    """Return the names of the step's nodes and the index of this one."""
    tasks = int(environment.get("SLURM_STEP_NUM_TASKS", "0"))
    several = int(environment.get("SLURM_JOB_NUM_NODES", "1")) > 1
    in_job = "SLURM_NODEID" in environment  # else the shell that salloc gives, on the login node
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


def _processes(environment: Mapping[str, str], gpus: int) -> int:
    """Count the processes to start here: one a GPU; without GPUs as many as the user says, or 0."""
    given = environment.get(PROCESSES)
    if not given:
        return gpus
    if not re.fullmatch(r"[1-9][0-9]{0,3}", given) or gpus not in (0, int(given)):
        raise ConfigurationError(
            f"{PROCESSES}={given!r}, but this job has {gpus} GPU(s) on a node, which take one "
            "process each. Unset it, or give a number of processes where there are no GPUs."
        )
    return int(given)


def on_cpu(environment: Mapping[str, str], strategy: str = AUTO) -> bool:
    """Whether the user asked for the CPU: from accelerate, from DeepSpeed, or by cpu.yaml.

    That file cannot say so itself: with `use_cpu: true` accelerate starts one process alone.
    """
    return (
        is_true("ACCELERATE_USE_CPU", environment)
        or environment.get("DS_ACCELERATOR") == "cpu"
        or Path(environment.get(CONFIG) or strategy).name in ("cpu", "cpu.yaml")
    )


def expand_hosts(node_list: str) -> tuple[str, ...]:
    """Return the names in a node list of Slurm's, in its order: `n[01-03,7],x1` has five.

    Not by `scontrol show hostnames`: a container may have no scontrol.
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


def job_end_time() -> float | None:
    """Return when the job's time limit ends, in seconds since the epoch.

    Slurm 23 and later put it into the environment, else `squeue` is asked, once. None outside of a
    job and, with a warning, where nobody knows.
    """
    known, job = os.environ.get("SLURM_JOB_END_TIME", ""), os.environ.get("SLURM_JOB_ID")
    if known.isdecimal():
        return float(known)
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
    """Return when this start of the job was submitted and began, as far as Slurm tells: unix s."""
    with contextlib.suppress(OSError, subprocess.SubprocessError, ValueError):
        times = _squeue_times(os.environ["SLURM_JOB_ID"], "%V %S")
        return dict(zip(("submit_time", "start_time"), times, strict=True))
    known = os.environ.get("SLURM_JOB_START_TIME", "")  # of Slurm 22.05 and later
    return {"start_time": float(known)} if known.isdecimal() else {}


def _squeue_times(job: str, fields: str) -> list[float]:
    if array := os.environ.get("SLURM_ARRAY_JOB_ID"):
        # The id of an array's last task is the array's: squeue would show every task.
        job = f"{array}_{os.environ['SLURM_ARRAY_TASK_ID']}"
    done = subprocess.run(
        ["squeue", "--noheader", f"--jobs={job}", f"--format={fields}"],
        capture_output=True, text=True, timeout=10, check=True,
    )  # fmt: skip
    # Local times without an offset, as Slurm prints them: 2026-11-20T14:05:00.
    words = done.stdout.split()
    return [datetime.datetime.fromisoformat(word).timestamp() for word in words]
