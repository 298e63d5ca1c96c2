"""Compares the launch that was asked for with what accelerate made of it, and refuses a difference.

A launch that went wrong seldom fails: processes that do not find each other each train alone and
write to one output directory, and a strategy that cannot run silently becomes another one.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass

from utils.cluster.first_contact import meet_all_ranks
from utils.cluster.host import host_name
from utils.config.errors import ConfigurationError, UnfitClusterError

# Set where a scheduler handed out GPUs; the value names or counts them.
ALLOCATED_DEVICES = ("CUDA_VISIBLE_DEVICES", "SLURM_STEP_GPUS", "SLURM_GPUS_ON_NODE")


@dataclass(frozen=True)
class LaunchFacts:
    """What this process is among all processes of the run.

    `strategy` is what the launcher asked for: single, ddp, fsdp1, fsdp2, zero1, zero2 or zero3
    (zero_file where a DeepSpeed config file decides). `hosts` holds one host name per rank.
    """

    rank: int
    world_size: int
    strategy: str
    hosts: tuple[str, ...]
    device: str


def check_launch() -> LaunchFacts:
    """Check that all processes found each other; every rank calls it, before the data is opened.

    Call it once TrainingArguments exists: parsing `use_cpu` sets accelerate's `PartialState` up.
    Raises ConfigurationError, UnfitClusterError where it is not the command that is wrong.
    """
    import torch
    from accelerate import PartialState

    state = PartialState()
    device = state.device.type
    visible_gpus = torch.cuda.device_count() if device == "cuda" else 0
    problem = launch_problem(os.environ, state.num_processes, visible_gpus)
    if problem is not None:
        raise problem
    hosts: tuple[str, ...] = (host_name(),)
    if state.num_processes > 1:
        hosts = meet_all_ranks(state.process_index, state.num_processes, state.device)
    return LaunchFacts(
        rank=state.process_index,
        world_size=state.num_processes,
        strategy=requested_strategy(os.environ, state.num_processes),
        hosts=hosts,
        device=device,
    )


def launch_problem(
    environment: Mapping[str, str], processes: int, visible_gpus: int
) -> ConfigurationError | None:
    """Say what is wrong with a launch of `processes` connected processes; None when nothing is."""
    asked = int(environment.get("WORLD_SIZE", "1"))
    if asked != processes:
        return _alone(environment, asked, processes)
    if "WORLD_SIZE" in environment:
        return None
    tasks = int(environment.get("SLURM_STEP_NUM_TASKS", "1"))
    if tasks > 1:
        return ConfigurationError(
            f"srun started {tasks} copies of this script that do not know of each other "
            f"(SLURM_STEP_NUM_TASKS={tasks}, no WORLD_SIZE). Start one task per node "
            "(--ntasks-per-node=1) with slurm/launch_node.sh or `accelerate launch` in it, which "
            "starts the processes."
        )
    if _single_cpu_process_of_several(environment):
        return ConfigurationError(
            "accelerate launch was asked for several processes, but starts only one with --cpu or "
            "use_cpu (it leaves the others to mpirun). Use accelerate_configs/cpu.yaml and give "
            "the script --use_cpu true. (One process is what you want? Then unset MASTER_ADDR.)"
        )
    if visible_gpus > 1:
        return ConfigurationError(
            f"{visible_gpus} GPUs are visible, but one process was started: transformers' Trainer "
            "would use DataParallel, which is slow and changes the batch. Use one GPU "
            "(CUDA_VISIBLE_DEVICES=0) or all of them (slurm/launch_node.sh, or accelerate launch "
            f"--config_file accelerate_configs/multi_gpu.yaml --num_processes {visible_gpus} ...)."
        )
    return None


def _alone(environment: Mapping[str, str], asked: int, processes: int) -> ConfigurationError:
    """Explain processes that did not connect: no devices where there should be, or none asked."""
    problem = (
        f"{host_name()}: the launcher started {asked} processes, but accelerate connected "
        f"{processes}: each would train alone and write to the same output directory. "
    )
    devices = next((name for name in ALLOCATED_DEVICES if environment.get(name)), None)
    if devices is not None:
        return UnfitClusterError(
            f"{problem}Devices were allocated here ({devices}={environment[devices]}), but torch "
            f"sees none: look at nvidia-smi on {host_name()} and whether torch is built for them."
        )
    return ConfigurationError(
        f"{problem}Without a GPU give the script --use_cpu true or set ACCELERATE_USE_CPU=true; "
        "with GPUs check that torch sees them on every node (nvidia-smi, CUDA_VISIBLE_DEVICES)."
    )


def _single_cpu_process_of_several(environment: Mapping[str, str]) -> bool:
    """Whether accelerate's simple launcher dropped processes.

    It sets MASTER_ADDR only for several processes and starts one all the same
    (accelerate/utils/launch.py, `prepare_simple_launcher_cmd_env`).
    """
    launched_on_cpu = asks_for_cpu(environment)
    by_accelerate = "ACCELERATE_MIXED_PRECISION" in environment
    return launched_on_cpu and by_accelerate and "MASTER_ADDR" in environment


def asks_for_cpu(environment: Mapping[str, str]) -> bool:
    """Whether ACCELERATE_USE_CPU asks for the CPU, in any of the words that accelerate takes."""
    words = ("1", "true", "yes", "on", "y", "t")  # accelerate/utils/environment.py, str_to_bool
    return environment.get("ACCELERATE_USE_CPU", "").lower() in words


def requested_strategy(environment: Mapping[str, str], processes: int) -> str:
    """Name the strategy that `accelerate launch` asked for through the environment."""
    if environment.get("ACCELERATE_USE_DEEPSPEED", "").lower() == "true":
        if environment.get("ACCELERATE_DEEPSPEED_CONFIG_FILE", "none") != "none":
            return "zero_file"
        return "zero" + environment.get("ACCELERATE_DEEPSPEED_ZERO_STAGE", "2")
    if environment.get("ACCELERATE_USE_FSDP", "").lower() == "true":
        return "fsdp" + environment.get("FSDP_VERSION", "1")
    return "ddp" if processes > 1 else "single"


def check_strategy(facts: LaunchFacts) -> None:
    """Check that accelerate runs the strategy that was asked for; call it once a Trainer exists.

    Raises ConfigurationError: with a CPU, for one, FSDP and DeepSpeed become plain DDP in silence.
    """
    from accelerate.state import AcceleratorState

    state = AcceleratorState()
    problem = strategy_problem(facts.strategy, actual_strategy(state), facts.device)
    if problem:
        raise ConfigurationError(problem)


def actual_strategy(state: object) -> str:
    """Name the strategy an initialised `AcceleratorState` runs, in `LaunchFacts` terms."""
    # `object`, and so the ignores below: naming AcceleratorState would import accelerate here.
    kind = getattr(state, "distributed_type").value  # noqa: B009 - unknown to `object`
    if kind == "DEEPSPEED":
        return f"zero{state.deepspeed_plugin.zero_stage}"  # type: ignore[attr-defined]
    if kind == "FSDP":
        return f"fsdp{state.fsdp_plugin.fsdp_version}"  # type: ignore[attr-defined]
    return "single" if kind == "NO" else "ddp"


def strategy_problem(requested: str, actual: str, device: str) -> str | None:
    """Say what is wrong when `actual` is not what was `requested`; None when it is."""
    if requested == actual or (requested, actual[:4]) == ("zero_file", "zero"):
        return None
    # A launcher with one process: accelerate wraps it as DDP of one, which changes nothing.
    if {requested, actual} == {"single", "ddp"}:
        return None
    on_cpu = (
        " FSDP and DeepSpeed need GPUs: on a CPU use accelerate_configs/cpu.yaml."
        if device == "cpu"
        else " Check the accelerate config and the script's --fsdp and --deepspeed flags."
    )
    return f"The launcher asked for {requested}, but accelerate runs {actual}.{on_cpu}"
