"""The command `accelerate launch` is given: the strategy's file, and this node among all nodes."""

import argparse
import importlib.util
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from utils.config.errors import ConfigurationError
from utils.jobs.allocation import CONFIG, Allocation, on_cpu

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
