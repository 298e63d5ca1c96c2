"""Chooses the activation checkpointing of a run by what it will need and what there is."""

import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedConfig

from utils.config.errors import ConfigurationError
from utils.config.settings import RunSettings
from utils.launch.processes import LaunchFacts
from utils.model.architecture import causal_lm_class
from utils.model.attention import AttentionChoice
from utils.model.compilation import CHOICES
from utils.model.loss_head import LossHeadChoice
from utils.model.weights import weights_dtype
from utils.planning.memory_estimate import GIB, MemoryEstimate, estimate_memory
from utils.planning.memory_trace import Workload
from utils.support.collectives import gathered
from utils.support.host import host_name, memory_room_bytes

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
# Of a GPU: its context, NCCL's buffers, the kernels' workspaces and what lies between tensors. Of
# a host: whatever else runs there.
RESERVED = {"cuda": 0.06, "cpu": 0.05}
# How much more than predicted may be needed. A process on a CPU grows by kernels, their threads and
# what malloc loses between tensors: up to 1.8 times small models (docs/memory.md).
MARGIN = {"cuda": 1.10, "cpu": 2.0}
TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}

Estimate = Callable[[LaunchFacts, Workload, str], MemoryEstimate]
logger = logging.getLogger(__name__)


class Kernels(NamedTuple):
    """What computes a step (attention None: no device to ask)."""

    attention: AttentionChoice | None
    loss_head: LossHeadChoice
    compiled: bool


@dataclass(frozen=True)
class MemoryPlan:
    """The choice of activation checkpointing, the word of the settings, and what it rests on.

    `predicted` holds bytes a device by choice. `room_bytes` is the least of all ranks', None where
    no device was asked.
    """

    choice: str
    requested: str
    reason: str
    predicted: dict[str, MemoryEstimate]
    room_bytes: int | None

    def facts(self) -> dict[str, Any]:
        """Return what the record of a start holds of it."""
        return {
            "choice": self.choice,
            "requested": self.requested,
            "reason": self.reason,
            "predicted_bytes": {name: each.total for name, each in self.predicted.items()},
            "room_bytes": self.room_bytes,
        }


def plan_memory(
    settings: RunSettings, config: PreTrainedConfig, launch: LaunchFacts, kernels: Kernels
) -> MemoryPlan:
    """Predict the memory of one device, choose the activation checkpointing, and log both.

    Hands Trainer the choice as the boolean it knows. Collective over ranks, which all choose by
    the smallest room. A dry run takes the GPU that slurm/cluster.env names. Raises
    ConfigurationError for what a GPU cannot hold even if the prediction is too high.
    """
    requested = requested_choice(settings, launch)
    work = _workload(settings, config, launch, kernels)
    estimate = partial(estimate_memory, settings, config)
    predicted = {
        choice: estimate(launch, work, choice) for choice in choices(requested, config, launch)
    }
    totals = {choice: each.total for choice, each in predicted.items()}
    elsewhere = kernels.attention is None
    own = planned_device(os.environ) if elsewhere else own_device(launch)
    room, size = (
        min(filter(None, each), default=None) for each in zip(*gathered(own), strict=True)
    )
    margin = MARGIN.get("cuda" if elsewhere else launch.device, 1.1)
    choice, reason = choose(requested, totals, room, margin)
    logger.info("memory: %s", predicted[choice])
    logger.info("activation checkpointing: %s", reason)
    if size is not None and totals[choice] > margin * size and predicted[choice].counted:
        raise ConfigurationError(refusal(totals[choice], size, launch, work, choice, estimate))
    if room is not None and totals[choice] > room:
        logger.warning(
            "memory: %.2f GiB predicted for a device that has %.2f GiB of room: it will probably "
            "run out. Lower per_device_train_batch_size (the global batch stays)%s",
            totals[choice] / GIB,
            room / GIB,
            ", or shard over more GPUs (fsdp2.yaml)"
            if choice == "full"
            else ", or set activation_checkpointing: auto",
        )
    training = settings.training
    training.activation_checkpointing = training.gradient_checkpointing = choice != "none"
    return MemoryPlan(choice, requested, reason, predicted, room)


def choices(requested: str, config: PreTrainedConfig, launch: LaunchFacts) -> Sequence[str]:
    """Return what `requested` leaves to choose from; raises ConfigurationError where nothing is."""
    supported = causal_lm_class(config).supports_gradient_checkpointing
    if requested in CHOICES[1:] and not supported:
        raise ConfigurationError(
            f"activation_checkpointing: {requested}: transformers has none for "
            f"{config.model_type}: set it to none; where memory is short, lower "
            "per_device_train_batch_size."
        )
    if requested != "auto":
        return [requested]
    possible = CHOICES if supported else CHOICES[:1]
    return [choice for choice in possible if choice != "selective" or launch.strategy != "zero3"]


def requested_choice(settings: RunSettings, launch: LaunchFacts) -> str:
    """Return none, selective, full or auto as the settings have it; raises ConfigurationError."""
    value = settings.training.activation_checkpointing
    word = value if isinstance(value, str) else CHOICES[-1] if value else CHOICES[0]
    by_launch = os.environ.get("FSDP_ACTIVATION_CHECKPOINTING", "false").lower() == "true"
    if launch.strategy.startswith("fsdp") and by_launch:
        raise ConfigurationError(
            "fsdp_activation_checkpointing is on in the accelerate config: leave it to the recipe "
            "(activation_checkpointing: full), which says so for every strategy."
        )
    if word == "selective" and launch.strategy == "zero3":
        raise ConfigurationError(
            "activation_checkpointing: selective does not go with ZeRO-3, whose hooks gather "
            "weights within each layer: take fsdp2.yaml, which shards as much, or full."
        )
    return word


def choose(
    requested: str, totals: dict[str, int], room: int | None, margin: float
) -> tuple[str, str]:
    """Return the choice and a line that says why; `totals` and `room` in bytes.

    auto takes the first of `totals` (least recomputation first) that fits `margin` times, and the
    last where none does.
    """
    if requested != "auto":
        return requested, f"{requested}, as set"
    listed = ", ".join(f"{choice} {total / GIB:.2f}" for choice, total in totals.items())
    if room is None:
        last = list(totals)[-1]
        return last, f"auto: settled on the compute node; predicted GiB: {listed}"
    fits = (choice for choice, total in totals.items() if total * margin <= room)
    choice = next(fits, list(totals)[-1])
    fitting = "" if totals[choice] * margin <= room else "; nothing fits with that margin"
    return choice, (
        f"auto: {choice}; predicted GiB: {listed}; room {room / GIB:.2f} GiB, "
        f"of which a prediction may take {1 / margin:.0%}{fitting}"
    )


def own_device(launch: LaunchFacts) -> tuple[int | None, int | None]:
    """Return the bytes that this rank's share of its device has left, and all of a GPU's.

    None where unknown; of a CPU, which has swap space, the second is.
    """
    if launch.device == "cuda":
        free, total = torch.cuda.mem_get_info()
        return free - int(RESERVED["cuda"] * total), total
    if launch.device != "cpu":
        return None, None
    ranks = max(1, launch.hosts.count(host_name()))
    return int(memory_room_bytes() * (1 - RESERVED["cpu"])) // ranks, None


def planned_device(environment: Mapping[str, str]) -> tuple[int | None, int | None]:
    """Return room and memory of a GPU of the nodes, as slurm/cluster.env says; else None.

    It gives GiB or a GPU's name (H100, A100-40). Raises ConfigurationError.
    """
    given = environment.get(VARIABLE, "").strip()
    if not given:
        return None, None
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
    return int(size * GIB * (1 - RESERVED["cuda"])), int(size * GIB)


def refusal(
    needed: int, size: int, launch: LaunchFacts, work: Workload, choice: str, estimate: Estimate
) -> str:
    """Say what a device of `size` bytes cannot hold, and what it can.

    That is another activation checkpointing, a smaller micro-batch or sharding over more GPUs.
    """
    fits = [
        f"{words}: {total / GIB:.1f} GiB"
        for words, total in _alternatives(launch, work, choice, estimate)
        if total <= size
    ]
    advice = "what fits: " + "; or ".join(fits[:3])
    if not fits:
        advice = (
            f"nothing fits it, up to {MOST_RANKS} GPUs under fsdp2: take a shorter "
            "sequence_length, a smaller model, or LoRA (sft_train.py --use_peft true)"
        )
    ranks = f"{launch.world_size} rank{'s' if launch.world_size > 1 else ''}"
    return (
        f"memory: {needed / GIB:.1f} GiB predicted for a GPU of {size / GIB:.1f} GiB "
        f"(strategy {launch.strategy}, {ranks}, micro-batch {work.rows}); {advice}"
    )


def _alternatives(
    launch: LaunchFacts, work: Workload, choice: str, estimate: Estimate
) -> Iterator[tuple[str, int]]:
    """Yield what could be set instead, in the order of what it costs, with the bytes it takes."""
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


def _workload(
    settings: RunSettings, config: PreTrainedConfig, launch: LaunchFacts, kernels: Kernels
) -> Workload:
    training = settings.training
    weights, mixed = weights_dtype(settings.model, config), TYPES.get(training.mixed_precision)
    if mixed is not None and launch.strategy.startswith(("fsdp", "zero")):
        weights = mixed  # the strategy gathers or keeps what is computed with in this type
    return Workload(
        rows=training.per_device_train_batch_size,
        sequence_length=settings.data.sequence_length,
        weights=weights,
        autocast=mixed,
        device="cuda" if launch.device == "cuda" else "cpu",
        attention=kernels.attention,
        loss_head=kernels.loss_head,
        compiled=kernels.compiled,
    )
