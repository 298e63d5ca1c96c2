"""The accelerate config of a launch: which file, the strategy it means, the command it becomes."""

import argparse
import importlib.util
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from utils.config.errors import ConfigurationError
from utils.launch.slurm import CONFIG, Allocation

# Seconds in which all nodes' launchers must join; they met a moment before.
JOIN_TIMEOUT_S = 120
# Seconds from SIGTERM to SIGKILL for the other workers of a node on which one failed.
SHUTDOWN_TIMEOUT_S = 5
_ONE_PROCESS = ("NO", False, "MULTI_CPU")  # YAML reads an unquoted NO as false


def choose_config(environment: Mapping[str, str], allocation: Allocation) -> Path:
    """Return the accelerate config of this launch: the user's, else one by the processes."""
    if given := environment.get(CONFIG):
        return Path(given)
    several = "cpu" if allocation.gpus is None else "multi_gpu"
    name = "single_gpu" if allocation.world_size == 1 else several
    return Path(f"accelerate_configs/{name}.yaml")


def read_config(path: Path, allocation: Allocation) -> dict[str, Any]:
    """Read an accelerate config that can start these processes. Raises ConfigurationError."""
    import yaml

    known = (*_ONE_PROCESS, "MULTI_GPU", "FSDP", "DEEPSPEED")
    try:
        config = yaml.safe_load(path.read_text(encoding="utf-8"))
        if (kind := config.get("distributed_type", "missing")) not in known:
            raise ValueError(f"distributed_type {kind} is not supported")
    except (OSError, ValueError, AttributeError, yaml.YAMLError) as error:
        raise ConfigurationError(
            f"{CONFIG}={path} is no accelerate config for Stoker ({error}): name a file of "
            "accelerate_configs/, or one that `accelerate config` wrote, from the repository's "
            "root."
        ) from error
    if kind in _ONE_PROCESS and allocation.world_size > 1:
        raise ConfigurationError(
            f"{CONFIG}={path}: distributed_type {kind or 'NO'} starts one process, but the job has "
            f"{allocation.world_size} ({len(allocation.hosts)} node(s) of {allocation.processes}): "
            "use accelerate_configs/multi_gpu.yaml (without GPUs cpu.yaml), or ask for one GPU."
        )
    if kind == "DEEPSPEED" and importlib.util.find_spec("deepspeed") is None:
        raise ConfigurationError(
            f"{CONFIG}={path}: DeepSpeed is not installed: pip install deepspeed, or use fsdp2."
        )
    return dict(config)


def launch_arguments(
    path: Path, config: Mapping[str, Any], allocation: Allocation, command: Sequence[str]
) -> argparse.Namespace:
    """Return the parsed arguments of `accelerate launch` for this node and a script's command."""
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
    by_torchrun = config["distributed_type"] not in _ONE_PROCESS
    if not by_torchrun and allocation.gpus is None:
        options += ["--cpu"]  # or accelerate sets ACCELERATE_USE_CPU=False for the script
    script, *script_args = command
    args = launch_command_parser().parse_args([*options, script])
    if by_torchrun:
        # torchrun takes ${local_rank} in arguments for its own, and $$ for $.
        script_args = [argument.replace("$", "$$") for argument in script_args]
    args.training_script, args.training_script_args = script, script_args
    # Not for the command line: accelerate hands them to torchrun. A stop signal is the launcher's
    # own affair; torchrun would end the workers. At the end of a terminal it has to, but for nohup.
    ends_with_terminal = signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN
    args.signals_to_handle = "SIGINT,SIGHUP" if ends_with_terminal else "SIGINT"
    args.shutdown_timeout = SHUTDOWN_TIMEOUT_S
    return args


def strategy_variables(config: Mapping[str, Any]) -> dict[str, str]:
    """Return what `accelerate launch` sets for a config, as far as the strategy follows from it."""
    variables = {"ACCELERATE_MIXED_PRECISION": str(config.get("mixed_precision") or "no").lower()}
    if config["distributed_type"] == "FSDP":
        own = config.get("fsdp_config") or {}
        checkpointing = str(own.get("fsdp_activation_checkpointing") or False).lower()
        variables |= {"ACCELERATE_USE_FSDP": "true", "FSDP_ACTIVATION_CHECKPOINTING": checkpointing}
        variables["FSDP_VERSION"] = str(own.get("fsdp_version") or 1)
    elif config["distributed_type"] == "DEEPSPEED":
        own = config.get("deepspeed_config") or {}
        variables["ACCELERATE_USE_DEEPSPEED"] = "true"
        if own.get("deepspeed_config_file"):
            variables["ACCELERATE_DEEPSPEED_CONFIG_FILE"] = str(own["deepspeed_config_file"])
        else:
            variables["ACCELERATE_DEEPSPEED_ZERO_STAGE"] = str(own.get("zero_stage", 2))
    return variables
