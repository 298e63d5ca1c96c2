"""The accelerate config of a launch: whether it can start the processes, the command it becomes."""

import argparse
import importlib.util
import signal
from collections.abc import Sequence

from utils.config.errors import ConfigurationError
from utils.config.launch_settings import PREFIXES, block
from utils.config.strategy import ONE_PROCESS, StrategyConfig
from utils.launch.slurm import Allocation

# What a config may have for TPUs, mpirun, fp8 and Megatron-LM, with which nothing is trained here.
OF_OTHERS = (
    *("downcast_bf16", "tpu_name", "tpu_env", "commands", "command_file", "mpirun_config"),
    *("fp8_config", "megatron_lm_config"),
)
# Seconds in which all nodes' launchers must join; they met a moment before.
JOIN_TIMEOUT_S = 120
# Seconds from SIGTERM to SIGKILL for the other workers of a node on which one failed.
SHUTDOWN_TIMEOUT_S = 5


def check_config(config: StrategyConfig, allocation: Allocation) -> None:
    """Refuse an accelerate config that cannot start these processes, by ConfigurationError."""
    if config.kind in ONE_PROCESS and allocation.world_size > 1:
        raise ConfigurationError(
            f"{config.chosen_by}: distributed_type {config.kind or 'NO'} starts one process, but "
            f"the job has {allocation.world_size} ({len(allocation.hosts)} node(s) of "
            f"{allocation.processes}): use strategy multi_gpu (without GPUs cpu), or ask for one "
            "GPU."
        )
    if config.kind == "DEEPSPEED" and importlib.util.find_spec("deepspeed") is None:
        raise ConfigurationError(
            f"{config.chosen_by}: DeepSpeed is not installed: pip install deepspeed, or use fsdp2."
        )


def ignored_settings(config: StrategyConfig) -> list[str]:
    """Return the settings of an accelerate config that do nothing here, for the log."""
    from accelerate.commands.launch import launch_command_parser

    read = {action.dest for action in launch_command_parser()._actions}
    ignored = [name for name in OF_OTHERS if config.content.get(name) not in (None, "no", False)]
    for name in PREFIXES:
        ignored += [f"{name}: {key}" for key in block(config.content, name) if key not in read]
    return ignored


def launch_arguments(
    config: StrategyConfig, allocation: Allocation, command: Sequence[str]
) -> argparse.Namespace:
    """Return the parsed arguments of `accelerate launch` for this node and a script's command."""
    from accelerate.commands.launch import launch_command_parser

    options = [
        "--config_file", str(config.path),
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
        if config.kind == "DEEPSPEED":
            # Slurm starts one launcher a node; DeepSpeed's own default needs pdsh and ssh.
            options += ["--deepspeed_multinode_launcher", "standard"]
    by_torchrun = config.kind not in ONE_PROCESS
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
