"""The activation checkpointing that fits a device's memory, and changes that make a run fit."""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from utils.config.arguments import with_values
from utils.config.errors import ConfigurationError, Report
from utils.config.strategy import assumed_gpus
from utils.host.collectives import gathered
from utils.host.machine import host_name, memory_room_bytes
from utils.launch.processes import LaunchFacts
from utils.model.adapters import plan_adapters
from utils.model.architecture import causal_lm_class
from utils.model.finished_model import dtype_name
from utils.model.layers import CHOICES
from utils.plan.context_parallel import context_parallel_problems, indivisible_heads
from utils.plan.memory_estimate import (
    GIB,
    SHARDED_BY,
    MemoryEstimate,
    count_parameters,
    estimate_memory,
)
from utils.plan.memory_trace import Setup

GPU_MEMORY_VARIABLE = "STOKER_GPU_MEMORY_GIB"
# Shares of a device's memory that a run cannot use. On a GPU: the CUDA context, NCCL's buffers,
# kernels' workspaces, unused gaps between tensors. On a host: other processes.
RESERVED = {"cuda": 0.06, "cpu": 0.05}
# A run may need the predicted memory times this factor. A process on a CPU also holds kernels,
# their threads and gaps between tensors: small models need up to 1.8 times (docs/memory.md).
MEMORY_MARGIN = {"cuda": 1.10, "cpu": 2.0}
# A change that may make a run fit is {setting: value}. Two keys are no settings: GPUS is the number
# of GPUs, and REPLICAS is the number of copies of sharded states. If a change has a strategy and no
# REPLICAS, the number of copies becomes 1.
GPUS, REPLICAS = "GPUs", "copies"
MICRO_BATCH, CHECKPOINTING = "per_device_train_batch_size", "activation_checkpointing"
CONTEXT = "context_parallel"
MOST_REMEDIES = 3
LEAST_LENGTH = 256  # tokens
LORA_CHANGES = {"use_peft": True, "dtype": "bfloat16"}
QLORA = LORA_CHANGES | {"load_in_4bit": True, "use_bnb_nested_quant": True}


@dataclass(frozen=True)
class MemoryPlan:
    """The chosen activation checkpointing and the predicted memory, for provenance.json.

    choice: the chosen mode. requested: the setting, which may be auto. predicted_bytes: {mode:
    bytes per device}. room_bytes: usable bytes of the device with the least memory. None means
    unknown. sequence_bytes: bytes of one more sequence in a micro-batch (without a GPU, an upper
    bound). sharded_bytes: bytes per device under fsdp2 (without a GPU, under the run's strategy).
    context_bytes: {context_parallel: bytes per device} for the next larger possible value. {}
    without a GPU, or if a micro-batch has several sequences.
    """

    choice: str
    requested: str
    reason: str
    predicted_bytes: dict[str, int]
    room_bytes: int | None
    sequence_bytes: int = 0
    sharded_bytes: int = 0
    context_bytes: dict[int, int] = field(default_factory=dict)


def plan_memory(setup: Setup, report: Report) -> MemoryPlan:
    """Predict a device's memory, choose the activation checkpointing, and add lines to `report`.

    All ranks must call this, because the device with the least free memory decides for all ranks.
    If the run trains on another machine, the device is the GPU that --assume or slurm/cluster.env
    names. Raises ConfigurationError if the prediction exceeds a GPU's memory times MEMORY_MARGIN,
    or if the weights alone do not fit a CPU's memory.
    """
    settings, launch = setup.settings, setup.launch
    requested, possible = checkpointing_choices(setup)
    if (quantized := setup.quantized) is not None:
        report.say(
            f"load_in_4bit: {quantized.weights:,} of {setup.parameters[0]:,} parameters are kept "
            f"in {settings.model.bnb_4bit_quant_type}, the rest in "
            f"{dtype_name(setup.computed_dtype)}"
        )
    choices = possible if requested == "auto" else [requested]
    predicted = {choice: estimate_memory(setup, choice) for choice in choices}
    for fault in dict.fromkeys(each.fault for each in predicted.values() if each.fault):
        report.warn(fault)
    own = planned_device(settings.run.assume, os.environ) if setup.elsewhere else own_device(launch)
    room, size = (
        min(filter(None, each), default=None) for each in zip(*gathered(own), strict=True)
    )
    margin = MEMORY_MARGIN.get("cuda" if setup.elsewhere else launch.device, 1.1)
    choice, reason = choose_checkpointing(requested, predicted, room, margin)
    needed, weights = predicted[choice].total, predicted[choice].weights
    all_parameters, trained = setup.parameters
    share = "all" if trained == all_parameters else f"{trained:,}"
    uncounted = "; fp8 counts as bf16" if settings.model.fp8 else ""
    total = f"{predicted[choice]}{uncounted}"
    report.say(f"memory: {all_parameters:,} parameters, {share} trained; {total}")
    if requested != "none" or settings.values.rank(CHECKPOINTING) > 0:
        report.say(f"activation checkpointing: {reason}")
    if room is not None and needed > room:
        problem = (
            f"memory: {needed / GIB:.1f} GiB predicted for a device of {(size or room) / GIB:.1f} "
            f"GiB (strategy {launch.name}, {launch.world_size} rank(s), micro-batch "
            f"{setup.micro_batch}); {remedies(setup, choice, room)}"
        )
        refused = weights > room if size is None else needed > margin * size
        if refused:
            raise ConfigurationError(problem)
        report.warn(f"{problem}. It will probably run out")
    totals = {name: estimate.total for name, estimate in predicted.items()}
    sequence, sharded = predicted[choice].activations // setup.micro_batch, needed
    shared: dict[int, int] = {}
    if launch.device == "cuda" and not setup.elsewhere:  # takes seconds; used if memory runs out
        totals = {name: totals.get(name) or estimate_memory(setup, name).total for name in possible}
        sequence = estimate_memory(setup, choice, setup.micro_batch + 1).total - needed
        sharded = estimate_memory(with_changes(setup, {"strategy": "fsdp2"}), choice).total
        for ranks in context_sizes(setup)[:1] if setup.micro_batch == 1 else ():
            shared[ranks] = estimate_memory(with_changes(setup, {CONTEXT: ranks}), choice).total
    return MemoryPlan(choice, requested, reason, totals, room, sequence, sharded, shared)


def checkpointing_choices(setup: Setup) -> tuple[str, list[str]]:
    """Return the requested mode (none, selective, full or auto) and all possible modes.

    Raises ConfigurationError if the requested mode is not possible.
    """
    value = setup.settings.training.activation_checkpointing
    word = value if isinstance(value, str) else "full" if value else "none"
    possible = possible_checkpointing(setup)
    if word == "auto" or word in possible:
        return word, possible
    raise ConfigurationError(
        f"activation_checkpointing: {word} is not possible for {setup.config.model_type} with "
        f"strategy {setup.launch.strategy}: set it to {' or '.join(possible)}. (Some models of "
        "transformers have none; ZeRO-3 gathers weights within each layer, where fsdp2 shards as "
        "much.) Where memory is short, lower per_device_train_batch_size."
    )


def possible_checkpointing(setup: Setup) -> list[str]:
    """Return the possible modes of activation checkpointing, least recomputation first."""
    if not causal_lm_class(setup.config).supports_gradient_checkpointing:
        return ["none"]
    strategy = setup.launch.strategy
    return [choice for choice in CHOICES if (strategy, choice) != ("zero3", "selective")]


def choose_checkpointing(
    requested: str, predicted: Mapping[str, MemoryEstimate], room: int | None, margin: float
) -> tuple[str, str]:
    """Return the mode of activation checkpointing, and the reason as text.

    requested: the mode to return, or "auto". predicted: {mode: estimate}, least recomputation
    first. "auto" selects the first mode whose estimate times `margin` fits into `room` bytes. It
    selects the last mode if no mode fits, if activations could not be counted, or if `room` is
    unknown (None).
    """
    if requested != "auto":
        return requested, f"{requested}, as set"
    fits = [
        choice
        for choice, estimate in predicted.items()
        if room is not None and estimate.counted and estimate.total * margin <= room
    ]
    choice = fits[0] if fits else list(predicted)[-1]
    listed = ", ".join(f"{name} {each.total / GIB:.2f}" for name, each in predicted.items())
    if room is None:
        return choice, f"auto: settled on the compute node; predicted GiB: {listed}"
    return choice, (
        f"auto: {choice}; predicted GiB: {listed}; room {room / GIB:.2f} GiB, of which a "
        f"prediction may take {1 / margin:.0%}{'' if fits else '; nothing fits with that margin'}"
    )


def own_device(launch: LaunchFacts) -> tuple[int | None, int | None]:
    """Return the bytes that this rank can use, and its GPU's total bytes. None means unknown."""
    if launch.device == "cuda":
        free, total = torch.cuda.mem_get_info()
        return free - int(RESERVED["cuda"] * total), total
    if launch.device != "cpu":
        return None, None
    ranks = max(1, launch.hosts.count(host_name()))
    return int(memory_room_bytes() * (1 - RESERVED["cpu"])) // ranks, None


def planned_device(
    assume: str | None, environment: Mapping[str, str]
) -> tuple[int | None, int | None]:
    """Return the usable and the total bytes of the GPU that --assume or cluster.env names.

    Returns (None, None) if neither names a GPU.
    """
    given = environment.get(GPU_MEMORY_VARIABLE, "").strip()
    if assume:
        given = str(assumed_gpus(assume).memory_gib)
    if not given:
        return None, None
    try:
        size = float(given)
    except ValueError:
        size = 0.0
    if not 0 < size < 10_000:
        raise ConfigurationError(
            f"{GPU_MEMORY_VARIABLE}={given}: give the GiB of one GPU of the nodes as a number, 79 "
            "for an H100 of 80 GB (nvidia-smi says how many MiB it has)"
        )
    return int(size * GIB * (1 - RESERVED["cuda"])), int(size * GIB)


def remedies(setup: Setup, choice: str, room: int) -> str:
    """Return advice as text: up to three changes of settings.

    With each of these changes alone, the run fits a device with `room` usable bytes.
    """
    found: list[Mapping[str, Any]] = []
    for changes in _possible_changes(setup, choice):
        extends = any(one.keys() <= changes.keys() for one in found)
        if len(found) < MOST_REMEDIES and not extends and _fits(setup, changes, choice, room):
            found.append(changes)
    if not found:
        return "no micro-batch, recomputation, sharding or LoRA makes it fit: take a smaller model"
    found = [{**one, **accompanying_settings(setup, one)} for one in found]
    texts = [", ".join(f"{name}: {value}" for name, value in one.items()) for one in found]
    return "by the same prediction this fits: " + "; or ".join(texts).replace("True", "true")


def accompanying_settings(setup: Setup, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return more settings {setting: value} that the user has to give together with `changes`.

    The present global_batch_size is returned if `changes` would otherwise change it. Settings that
    contradict `changes` get null or false.
    """
    run, model, strategy = setup.settings.run, setup.settings.model, changes.get("strategy")
    is_given = setup.settings.values.rank("global_batch_size") > 0
    changes_batch = {MICRO_BATCH, GPUS, CONTEXT} & changes.keys() and not is_given
    found: dict[str, Any] = {"global_batch_size": run.global_batch_size} if changes_batch else {}
    resets = {
        "ddp_comm_hook": run.ddp_comm_hook and strategy in ("fsdp2", "hsdp"),
        "dp_shard": run.dp_shard and strategy not in (None, "hsdp"),
        "freeze": model.freeze and "use_peft" in changes,
        "train_only": model.train_only and "use_peft" in changes,
    }
    if model.fp8 and "load_in_4bit" in changes:
        found["fp8"] = "false"
    return found | {name: "null" for name, is_refused in resets.items() if is_refused}


def _possible_changes(setup: Setup, choice: str) -> Iterator[dict[str, Any]]:
    """Yield changes {setting: value} that save memory, small changes first."""
    settings, micro_batch = setup.settings, setup.micro_batch
    possible = possible_checkpointing(setup)
    more = possible[possible.index(choice) + 1 :]
    least = {MICRO_BATCH: 1, CHECKPOINTING: possible[-1]}
    sizes = [size for size in range(micro_batch - 1, 0, -1) if micro_batch % size == 0]
    smaller = [{MICRO_BATCH: size} for size in sizes]
    yield from smaller
    yield from ({CHECKPOINTING: each} for each in more)
    if more:
        yield from (one | {CHECKPOINTING: possible[-1]} for one in smaller)
    ranks, length = setup.launch.world_size, settings.data.sequence_length
    groups, unsharded = setup.data_ranks, setup.launch.strategy not in SHARDED_BY["weights"]
    if ranks > 1 and (unsharded or setup.launch.replicas > 1):
        yield {"strategy": "fsdp2"}
        yield {"strategy": "fsdp2"} | least
    for size in context_sizes(setup):
        yield {CONTEXT: size} | least
        yield {CONTEXT: size, "strategy": "fsdp2"} | least
    while (groups := groups * 2) <= settings.divisible_batch:
        ranks *= 2
        if settings.divisible_batch % groups == 0:
            yield {GPUS: ranks, "strategy": "fsdp2"} | least
    if settings.script == "sft_train.py" and not settings.model.load_in_4bit:
        yield LORA_CHANGES | least
        yield QLORA | least
    while (length := length // 2) >= LEAST_LENGTH:
        yield {"sequence_length": length} | least


def context_sizes(setup: Setup) -> list[int]:
    """Return the possible values of context_parallel that are larger than the run's value."""
    run, ranks = setup.settings.run, setup.launch.world_size
    if setup.launch.strategy not in ("ddp", "fsdp2") or any(
        context_parallel_problems(setup.config, setup.attention)
    ):
        return []
    return [
        size
        for size in range(run.context_parallel + 1, ranks + 1)
        if ranks % size == 0
        and setup.settings.divisible_batch % (ranks // size) == 0
        and setup.settings.data.sequence_length % size == 0
        and not indivisible_heads(setup.config, size)
    ]


def _fits(setup: Setup, changes: Mapping[str, Any], choice: str, room: int) -> bool:
    try:
        other = with_changes(setup, changes)
    except ConfigurationError:  # PEFT does not adapt every model
        return False
    if other.launch.strategy == "fsdp2" and other.launch.device == "cpu" and not other.elsewhere:
        return False  # fsdp2 needs GPUs
    return estimate_memory(other, changes.get(CHECKPOINTING, choice)).total <= room


def with_changes(setup: Setup, changes: Mapping[str, Any]) -> Setup:
    """Return the setup with changed settings, strategy or number of GPUs.

    Raises ConfigurationError if `changes` turn LoRA on and PEFT does not support the model.
    """
    settings, launch, parameters = setup.settings, setup.launch, setup.parameters
    size = changes.get(CONTEXT, settings.run.context_parallel)
    settings = replace(settings, run=replace(settings.run, context_parallel=size))
    for part in ("training", "data", "model"):
        old = getattr(settings, part)
        own = {name: value for name, value in changes.items() if name in vars(old)}
        settings = replace(settings, **{part: with_values(old, **own)})
    if "use_peft" in changes:
        model = settings.model
        if not (model.lora_target_modules or model.lora_target_parameters):
            adapters = plan_adapters(model, setup.config)
            assert adapters is not None, "use_peft is true"
            settings = replace(settings, model=adapters.model)
        parameters = count_parameters(settings.model, setup.config)
    launch = replace(
        launch,
        strategy=changes.get("strategy", launch.strategy),
        world_size=changes.get(GPUS, launch.world_size),
        replicas=changes.get(REPLICAS, 1 if "strategy" in changes else launch.replicas),
    )
    return replace(setup, settings=settings, launch=launch, parameters=parameters)
