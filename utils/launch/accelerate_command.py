"""The command `accelerate launch` is given: the strategy's file, and this node among all nodes."""

import argparse
import importlib.util
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from utils.config.errors import ConfigurationError
from utils.launch.processes import requested_strategy
from utils.launch.slurm import CONFIG, Allocation, on_cpu

# Seconds in which all nodes' launchers have to join; they met a moment before.
JOIN_TIMEOUT_S = 120
# Seconds from SIGTERM to SIGKILL for the other workers of a node on which one failed.
SHUTDOWN_TIMEOUT_S = 5


def choose_config(environment: Mapping[str, str], allocation: Allocation) -> tuple[Path, str]:
    """Return the accelerate config of this launch and why it is this one."""
    given = environment.get(CONFIG)
    if given:
        return Path(given), f"as {CONFIG} says"
    if allocation.world_size == 1:
        return Path("accelerate_configs/single_gpu.yaml"), f"one process and no {CONFIG}"
    name = "cpu" if allocation.gpus is None else "multi_gpu"
    return Path(f"accelerate_configs/{name}.yaml"), f"several processes and no {CONFIG}: DDP"


def read_config(path: Path, allocation: Allocation) -> dict[str, Any]:
    """Read an accelerate config and check that it can start these processes.

    Raises ConfigurationError.
    """
    import yaml

    try:
        config = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigurationError(
            f"{CONFIG}={path}: {error.strerror}. Name a file of accelerate_configs/ or your own, "
            "from the repository's root."
        ) from error
    except (ValueError, yaml.YAMLError) as error:
        raise ConfigurationError(f"{CONFIG}={path} is not YAML: {error}") from error
    if not isinstance(config, dict) or "distributed_type" not in config:
        raise ConfigurationError(
            f"{CONFIG}={path} has no distributed_type: it has to be a file as `accelerate config` "
            "writes it; those in accelerate_configs/ are examples."
        )
    problem = _strategy_problem(config, allocation)
    if problem:
        raise ConfigurationError(f"{CONFIG}={path}: {problem}")
    return config


def _strategy_problem(config: Mapping[str, Any], allocation: Allocation) -> str | None:
    kind, place = config["distributed_type"], config.get("compute_environment", "LOCAL_MACHINE")
    if place != "LOCAL_MACHINE":
        return f"compute_environment {place} is not this cluster: write LOCAL_MACHINE."
    # YAML reads an unquoted NO as false.
    if kind in ("NO", False, "MULTI_CPU") and allocation.world_size > 1:
        better = "cpu" if allocation.gpus is None else "multi_gpu"
        return (
            f"distributed_type {kind or 'NO'} starts one process, but the job has "
            f"{allocation.world_size} ({len(allocation.hosts)} node(s) of {allocation.processes}): "
            f"use accelerate_configs/{better}.yaml, or ask for one GPU."
        )
    if kind == "DEEPSPEED" and importlib.util.find_spec("deepspeed") is None:
        return "DeepSpeed is not installed: pip install deepspeed, or use fsdp2.yaml."
    return None


def launch_arguments(
    path: Path, config: Mapping[str, Any], allocation: Allocation,
    environment: Mapping[str, str], command: Sequence[str],
) -> argparse.Namespace:  # fmt: skip
    """Return the parsed arguments of `accelerate launch` for this node and a script's command.

    Raises ConfigurationError for a first argument of the script that torchrun cannot pass on.
    """
    from accelerate.commands.launch import launch_command_parser

    options = [
        "--config_file", str(path),
        "--num_processes", str(allocation.world_size),
        "--num_machines", str(len(allocation.hosts)),
        "--machine_rank", str(allocation.node),
        "--main_process_ip", allocation.address,
        "--main_process_port", str(allocation.port),
    ]  # fmt: skip
    if len(allocation.hosts) > 1:
        is_host = int(allocation.node == 0)
        options += ["--rdzv_backend", "c10d"]
        options += ["--rdzv_conf", f"is_host={is_host},join_timeout={JOIN_TIMEOUT_S}"]
        if config["distributed_type"] == "DEEPSPEED":
            # Slurm starts one launcher a node; DeepSpeed's own default needs pdsh and ssh.
            options += ["--deepspeed_multinode_launcher", "standard"]
    by_torchrun = config["distributed_type"] not in ("NO", False, "MULTI_CPU")
    if not by_torchrun and on_cpu(environment):
        options += ["--cpu"]  # or accelerate sets ACCELERATE_USE_CPU=False for the script
    script, *script_args = command
    args = launch_command_parser().parse_args([*options, script])
    if by_torchrun:
        # torchrun takes ${local_rank} in arguments for its own, and $$ for $.
        script_args = [argument.replace("$", "$$") for argument in script_args]
        if script_args and script_args[0] in ("", "-"):
            raise ConfigurationError(
                f"the first argument of {script} is {script_args[0]!r}, which torchrun cannot "
                "pass on: put another one before it."
            )
    args.training_script, args.training_script_args = script, script_args
    # Not for the command line: accelerate hands them to torchrun. A stop signal is the launcher's
    # own affair; torchrun would end the workers. At the end of a terminal it has to, but for nohup.
    ends_with_terminal = signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN
    args.signals_to_handle = "SIGINT,SIGHUP" if ends_with_terminal else "SIGINT"
    args.shutdown_timeout = SHUTDOWN_TIMEOUT_S
    return args


# What a job's accelerate config means for its dry run: the strategy, and a launch's variables.


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
