"""The launch of a script: its processes, its accelerate config, the arguments for accelerate."""

import argparse
import importlib.util
import signal
from collections.abc import Mapping, Sequence

from utils.config.declarations import DEFAULT, FLAGS_RANK, Given
from utils.config.errors import ConfigurationError
from utils.config.launch_settings import PREFIXES, block
from utils.config.strategy import AUTO, ONE_PROCESS, StrategyConfig, choose_config
from utils.launch.slurm import Allocation, read_allocation

# Keys of an accelerate config for TPUs, mpirun, fp8 and Megatron-LM, which Stoker does not use.
OF_OTHERS = (
    *("downcast_bf16", "tpu_name", "tpu_env", "commands", "command_file", "mpirun_config"),
    *("fp8_config", "megatron_lm_config"),
)
# Seconds in which the launchers of all nodes must join torchrun. They were compared just before.
JOIN_TIMEOUT_S = 120
# Seconds from SIGTERM to SIGKILL for the other workers of a node after one of them failed.
SHUTDOWN_TIMEOUT_S = 5


def plan_launch(
    arguments: Sequence[str], environment: Mapping[str, str], devices: int
) -> tuple[Allocation, StrategyConfig]:
    """Return the processes and the accelerate config for a script with these arguments.

    `devices` is the number of GPUs that torch sees. Raises ConfigurationError.
    """
    strategy = given_strategy(arguments)
    allocation = read_allocation(environment, devices, strategy.value)
    on_cpu = allocation.gpus is None
    config = choose_config(environment, strategy, allocation.world_size, on_cpu=on_cpu)
    check_config(config, allocation)
    return allocation, config


def given_strategy(arguments: Sequence[str]) -> Given:
    """Return the strategy that a script's arguments set, by a flag or else by a recipe.

    Wrong arguments are ignored here, because the script reports them.
    """
    from utils.config.command_line import CONFIG_FLAG, read_flags
    from utils.config.recipes import read_recipes

    flags, _ = read_flags(arguments)
    if words := flags.get("strategy"):
        return Given(words[0], "--strategy", FLAGS_RANK)
    entries, _ = read_recipes(flags.get(CONFIG_FLAG, []))
    given = entries.get("strategy", DEFAULT)
    return given if isinstance(given.value, str) else Given(AUTO, DEFAULT.source)


def check_config(config: StrategyConfig, allocation: Allocation) -> None:
    """Raise ConfigurationError for an accelerate config that cannot start these processes."""
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
    """Return the settings of an accelerate config that Stoker and accelerate do not read."""
    from accelerate.commands.launch import launch_command_parser

    read = {action.dest for action in launch_command_parser()._actions}
    ignored = [name for name in OF_OTHERS if config.content.get(name) not in (None, "no", False)]
    for name in PREFIXES:
        ignored += [f"{name}: {key}" for key in block(config.content, name) if key not in read]
    return ignored


def launch_arguments(
    config: StrategyConfig, allocation: Allocation, command: Sequence[str]
) -> argparse.Namespace:
    """Return the parsed arguments of `accelerate launch` that run a script on this node."""
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
            # Slurm starts one launcher per node. DeepSpeed's default would start them by ssh.
            options += ["--deepspeed_multinode_launcher", "standard"]
    by_torchrun = config.kind not in ONE_PROCESS
    if not by_torchrun and allocation.gpus is None:
        options += ["--cpu"]  # else accelerate sets ACCELERATE_USE_CPU=False for the script
    script, *script_args = command
    args = launch_command_parser().parse_args([*options, script])
    if by_torchrun:
        # torchrun replaces ${local_rank} in arguments, and $$ by $.
        script_args = [argument.replace("$", "$$") for argument in script_args]
    args.training_script, args.training_script_args = script, script_args
    # accelerate passes these signals to torchrun, which ends the workers when it gets one. The
    # launcher itself answers the stop signals. SIGHUP is the signal of a closed terminal. It ends
    # the workers except under nohup.
    ends_with_terminal = signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN
    args.signals_to_handle = "SIGINT,SIGHUP" if ends_with_terminal else "SIGINT"
    args.shutdown_timeout = SHUTDOWN_TIMEOUT_S
    return args
