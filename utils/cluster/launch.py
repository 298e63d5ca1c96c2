"""Compares the launch that was asked for with what accelerate made of it, and refuses a difference.

A launch that went wrong seldom fails: processes that do not find each other each train alone and
write to one output directory, and a strategy that cannot run silently becomes another one.
"""

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass

from utils.config.errors import ConfigurationError


@dataclass(frozen=True)
class LaunchFacts:
    """What this process is among all processes of the run.

    `strategy` is what the launcher asked for: single, ddp, fsdp1, fsdp2, zero1, zero2 or zero3
    (zero_file where a DeepSpeed config file decides). `hosts` holds one host name per rank.
    """

    rank: int
    local_rank: int
    world_size: int
    strategy: str
    hosts: tuple[str, ...]
    device: str


def check_launch() -> LaunchFacts:
    """Check that all processes found each other; every rank calls it, before the data is opened.

    Call it once TrainingArguments exists: parsing `use_cpu` sets accelerate's `PartialState` up.
    Raises ConfigurationError.
    """
    import torch
    from accelerate import PartialState

    state = PartialState()
    device = state.device.type
    visible_gpus = torch.cuda.device_count() if device == "cuda" else 0
    problems = launch_problems(os.environ, state.num_processes, visible_gpus)
    if problems:
        raise ConfigurationError(problems)
    hosts = [socket.gethostname()] * state.num_processes
    if state.num_processes > 1:
        torch.distributed.all_gather_object(hosts, socket.gethostname())
    return LaunchFacts(
        rank=state.process_index,
        local_rank=max(state.local_process_index, 0),
        world_size=state.num_processes,
        strategy=requested_strategy(os.environ, state.num_processes),
        hosts=tuple(hosts),
        device=device,
    )


def launch_problems(environment: Mapping[str, str], processes: int, visible_gpus: int) -> list[str]:
    """Say what is wrong with a launch of `processes` connected processes, as user messages."""
    asked = int(environment.get("WORLD_SIZE", "1"))
    if asked != processes:
        return [
            f"The launcher started {asked} processes, but accelerate connected {processes}: each "
            "would train alone and write to the same output directory. Without a GPU give the "
            "script --use_cpu true or set ACCELERATE_USE_CPU=true; with GPUs check that torch "
            "sees them on every node (nvidia-smi, CUDA_VISIBLE_DEVICES)."
        ]
    if "WORLD_SIZE" in environment:
        return []
    tasks = int(environment.get("SLURM_STEP_NUM_TASKS", "1"))
    if tasks > 1:
        return [
            f"srun started {tasks} copies of this script that do not know of each other "
            f"(SLURM_STEP_NUM_TASKS={tasks}, no WORLD_SIZE). Start one task per node "
            "(--ntasks-per-node=1) with `accelerate launch` in it, which starts the processes."
        ]
    if _single_cpu_process_of_several(environment):
        return [
            "accelerate launch was asked for several processes, but starts only one with --cpu or "
            "use_cpu (it leaves the others to mpirun). Use accelerate_configs/cpu.yaml and give "
            "the script --use_cpu true. (One process is what you want? Then unset MASTER_ADDR.)"
        ]
    if visible_gpus > 1:
        return [
            f"{visible_gpus} GPUs are visible, but one process was started: transformers' Trainer "
            "would use DataParallel, which is slow and changes the batch. Use one GPU "
            "(CUDA_VISIBLE_DEVICES=0) or all of them (accelerate launch --config_file "
            f"accelerate_configs/multi_gpu.yaml --num_processes {visible_gpus} ...)."
        ]
    return []


def _single_cpu_process_of_several(environment: Mapping[str, str]) -> bool:
    """Whether accelerate's simple launcher dropped processes.

    It sets MASTER_ADDR only for several processes and starts one all the same
    (accelerate/utils/launch.py, `prepare_simple_launcher_cmd_env`).
    """
    launched_on_cpu = environment.get("ACCELERATE_USE_CPU", "").lower() in ("true", "1", "yes")
    by_accelerate = "ACCELERATE_MIXED_PRECISION" in environment
    return launched_on_cpu and by_accelerate and "MASTER_ADDR" in environment


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
