"""What a job was given, read from the environment: nodes, processes, rank 0's address and port."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from utils.cluster.host import host_name
from utils.cluster.launch import asks_for_cpu
from utils.cluster.slurm_tasks import MAIN_ADDRESS, expand_hosts, main_port
from utils.config.errors import ConfigurationError, UnfitClusterError

CONFIG = "ACCELERATE_CONFIG"
PROCESSES = "STOKER_PROCESSES_PER_NODE"


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


def on_cpu(environment: Mapping[str, str]) -> bool:
    """Whether the user asked for the CPU: from accelerate, from DeepSpeed, or by cpu.yaml.

    That file cannot say so itself: with `use_cpu: true` accelerate starts one process alone.
    """
    if asks_for_cpu(environment) or environment.get("DS_ACCELERATOR") == "cpu":
        return True
    return Path(environment.get(CONFIG, "")).name == "cpu.yaml"


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

    Slurm sets SLURM_GPUS_ON_NODE for --gres, --gpus, --gpus-per-node and --gpus-per-task alike
    (seen with 22.05); the others are for versions and plugins that do not.
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
