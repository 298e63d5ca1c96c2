"""The memory of the GPUs that a run is planned for, and what to do where a model exceeds it."""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from utils.cluster.launch import LaunchFacts
from utils.config.errors import ConfigurationError
from utils.kernels.activation_checkpointing import CHOICES
from utils.planning.memory_estimate import GIB, MemoryEstimate
from utils.planning.memory_trace import Workload

VARIABLE = "STOKER_GPU_MEMORY_GIB"
# GiB that torch reports of a GPU, about; by names in small letters, without a maker's.
GPUS = {
    "t4": 14.6, "v100": 31.7, "v100-16": 15.8, "a10": 22.0, "a10g": 22.0, "l4": 22.0,
    "rtx3090": 23.6, "rtx4090": 23.6, "rtx5090": 31.4, "a40": 44.4, "l40": 44.4, "l40s": 44.4,
    "a6000": 47.4, "rtx6000": 47.4, "a100-40": 39.4, "a100-80": 79.1, "a100": 79.1, "a800": 79.1,
    "h100": 79.1, "h800": 79.1, "h100nvl": 93.1, "gh200": 94.5, "h20": 95.0, "h200": 139.8,
    "b200": 178.3, "gb200": 184.0, "b300": 267.0, "mi250x": 64.0, "mi300x": 191.7, "mi325x": 255.7,
}  # fmt: skip
MOST_RANKS = 1024

Estimate = Callable[[LaunchFacts, Workload, str], MemoryEstimate]


def planned_device_bytes(environment: Mapping[str, str]) -> int | None:
    """Return the memory of a GPU of the nodes, as slurm/cluster.env says; None where it does not.

    That is a number of GiB or a GPU's name (H100, A100-40). Raises ConfigurationError.
    """
    given = environment.get(VARIABLE, "").strip()
    if not given:
        return None
    name = given.lower().removeprefix("nvidia").removeprefix("amd").lstrip(" _-")
    name = re.sub(r"(?<=\d)gb$", "", name.replace(" ", "").replace("_", "-"))
    try:
        size = GPUS[name] if name in GPUS else float(given.lower().removesuffix("gib").rstrip("gb"))
    except ValueError:
        size = 0.0
    if not 0 < size < 10_000:
        raise ConfigurationError(
            f"{VARIABLE}={given}: expected the GiB of one GPU, or one of "
            f"{', '.join(sorted(each.upper() for each in GPUS))}"
        )
    return int(size * GIB)


def refuse_too_large(
    needed: MemoryEstimate,
    device_bytes: int,
    margin: float,
    plan: tuple[LaunchFacts, Workload, str],
    estimate: Estimate,
) -> None:
    """Raise ConfigurationError for what cannot fit the device even if the prediction is too high.

    `margin` is by how much it may be wrong. What would fit is named: another activation
    checkpointing, a smaller micro-batch, another strategy, with that many GPUs.
    """
    if not needed.counted or needed.total <= margin * device_bytes:
        return
    launch, work, _ = plan
    found = [
        f"{words}: {total / GIB:.1f} GiB"
        for words, total in _alternatives(plan, estimate)
        if total <= device_bytes
    ]
    advice = "what fits: " + "; or ".join(found[:3])
    if not found:
        advice = (
            f"nothing fits it, up to {MOST_RANKS} GPUs under fsdp2: take a shorter "
            "sequence_length, a smaller model, or LoRA (sft_train.py --use_peft true)"
        )
    ranks = f"{launch.world_size} rank{'s' if launch.world_size > 1 else ''}"
    raise ConfigurationError(
        f"memory: {needed.total / GIB:.1f} GiB predicted for a GPU of {device_bytes / GIB:.1f} GiB "
        f"(strategy {launch.strategy}, {ranks}, micro-batch {work.rows}); {advice}"
    )


def _alternatives(
    plan: tuple[LaunchFacts, Workload, str], estimate: Estimate
) -> Iterator[tuple[str, int]]:
    """Yield what could be set instead, in the order of what it costs, with the bytes it takes."""
    launch, work, choice = plan
    full, one = CHOICES[-1], replace(work, rows=1)
    recompute = f"activation_checkpointing: {full}"
    if choice != full:
        yield recompute, estimate(launch, work, full).total
    if work.rows > 1:
        yield "per_device_train_batch_size: 1", estimate(launch, one, choice).total
    if choice != full and work.rows > 1:
        total = estimate(launch, one, full).total
        yield f"{recompute} with per_device_train_batch_size: 1", total
    ranks = max(2, launch.world_size)
    if launch.strategy.startswith("fsdp"):
        ranks *= 2
    while ranks <= MOST_RANKS:
        sharded = replace(launch, strategy="fsdp2", world_size=ranks)
        for rows in dict.fromkeys((work.rows, 1)):
            total = estimate(sharded, replace(work, rows=rows), full).total
            smaller = "" if rows == work.rows else ", per_device_train_batch_size: 1"
            yield f"accelerate_configs/fsdp2.yaml on {ranks} GPUs ({recompute}{smaller})", total
        ranks *= 2
