"""Compares the processes on this host with the devices that torch sees for them."""

from collections.abc import Mapping

from accelerate.utils.environment import str_to_bool


def missing_devices(environment: Mapping[str, str], visible_gpus: int) -> str | None:
    """Say that there are more processes on this host than GPUs to give them; None if not.

    torchrun starts all processes of a host with the same GPUs in sight: all of them refuse. Tasks
    that srun started may each see a GPU of their own, which is all that such a task can look for.
    """
    if str_to_bool(environment.get("ACCELERATE_USE_CPU", "0")):
        return None
    processes = int(environment.get("LOCAL_WORLD_SIZE", "1"))
    local_rank = int(environment.get("LOCAL_RANK", "0"))
    needed = processes if "TORCHELASTIC_RUN_ID" in environment else local_rank + 1
    if needed <= visible_gpus:
        return None
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    chosen = " is not set" if visible is None else f"={visible}"
    return (
        f"this host has {processes} processes (this is local rank {local_rank}), but torch sees "
        f"{visible_gpus} GPU{'s' if visible_gpus != 1 else ''} (CUDA_VISIBLE_DEVICES{chosen}): "
        "start as many processes as GPUs (--num_processes over all nodes), or ask Slurm for as "
        "many GPUs (--gpus-per-node)."
    )
