"""What a job's accelerate config means for its dry run: the strategy, and a launch's variables.

The dry run on a login node is told by the same variables as the processes of a job, so that its
memory estimate and checks are for the strategy that will run.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from utils.cluster.launch import requested_strategy
from utils.config.errors import ConfigurationError
from utils.jobs.accelerate_command import choose_config, read_config
from utils.jobs.allocation import Allocation


@dataclass(frozen=True)
class Strategy:
    """A strategy by name (as `LaunchFacts` has it), its file, and the variables of a launch.

    `variables` holds those of accelerate's that the dry run reads; its launcher sets more.
    """

    name: str
    file: str
    variables: Mapping[str, str]


def choose_strategy(
    environment: Mapping[str, str], nodes: int, processes_per_node: int, gpus_per_node: int | None
) -> Strategy:
    """Return the strategy that slurm/launch_node.sh will choose on that many nodes.

    `gpus_per_node` is None on a CPU. Raises ConfigurationError when the accelerate config cannot
    be used with this many processes.
    """
    hosts = tuple(f"node {number}" for number in range(nodes))
    allocation = Allocation(hosts, 0, processes_per_node, gpus_per_node, address="", port=0)
    path, _ = choose_config(environment, allocation)
    strategy = strategy_of(str(path), read_config(path, allocation), allocation.world_size)
    if gpus_per_node is None and environment.get("DS_ACCELERATOR") != "cpu":
        strategy = replace(strategy, variables={**strategy.variables, "ACCELERATE_USE_CPU": "true"})
    return strategy


def strategy_of(file: str, config: Mapping[str, Any], processes: int) -> Strategy:
    """Name the strategy of an accelerate config and what `accelerate launch` sets for it.

    The file's num_processes and num_machines are not looked at: the launcher sets them. Raises
    ConfigurationError for a distributed_type that nothing here trains with.
    """
    kind = str(config["distributed_type"] or "NO")  # YAML reads an unquoted NO as false
    mixed_precision = str(config.get("mixed_precision") or "no").lower()
    variables = {"ACCELERATE_MIXED_PRECISION": mixed_precision}
    if kind == "FSDP":
        version = str((config.get("fsdp_config") or {}).get("fsdp_version") or 1)
        variables |= {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": version}
    elif kind == "DEEPSPEED":
        variables |= _deepspeed(config.get("deepspeed_config") or {})
    elif kind != "NO" and not kind.startswith("MULTI_"):
        raise ConfigurationError(
            f"{file}: distributed_type {kind} is none that Stoker trains with: take one of "
            "accelerate_configs/ (multi_gpu, fsdp2, zero1, zero2, zero3, cpu, single_gpu)"
        )
    name = requested_strategy(variables, processes)
    return Strategy(name, file, variables)


def _deepspeed(config: Mapping[str, Any]) -> dict[str, str]:
    own_file = config.get("deepspeed_config_file")
    if own_file:
        decided = {"ACCELERATE_DEEPSPEED_CONFIG_FILE": str(own_file)}
    else:
        decided = {"ACCELERATE_DEEPSPEED_ZERO_STAGE": str(config.get("zero_stage", 2))}
    return {"ACCELERATE_USE_DEEPSPEED": "true", **decided}
