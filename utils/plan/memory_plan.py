"""The memory that a run needs on each device, and the activation checkpointing that fits.

No weight is loaded. memory_trace.py counts the memory of a micro-batch on the model itself.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from transformers import PreTrainedConfig

from utils.config.arguments import ModelArguments, RunArguments
from utils.config.assumed import assumed_gpus
from utils.config.declarations import is_true
from utils.config.errors import ConfigurationError, Report
from utils.config.settings import RunSettings
from utils.host.collectives import gathered
from utils.host.machine import host_name, memory_room_bytes
from utils.launch.processes import LaunchFacts
from utils.model.adapters import plan_adapters, trained_bytes, with_adapters
from utils.model.architecture import MISFITS, causal_lm_class
from utils.model.compilation import CHOICES
from utils.model.finished_model import name_of
from utils.model.quantization import quantized_layers
from utils.model.weights import weights_dtype
from utils.plan.memory_trace import Kernels, Workload, most_alive, trace
from utils.plan.remedies import Fits, remedies

GIB = 2**30
VARIABLE = "STOKER_GPU_MEMORY_GIB"
TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
# Bytes of a moment of Adam per parameter. int8: 1 byte, and a float32 scale for up to 256 of them.
BYTES_A_STATE = {"float32": 4.0, "bfloat16": 2.0, "int8": 1 + 4 / 256}
# cuBLAS's workspaces on Hopper. Forward and backward pass run in two threads with one each.
WORKSPACE_BYTES = 2 * 32 * 2**20
SHARDED_BY = {
    "weights": ("fsdp1", "fsdp2", "zero3"),
    "gradients": ("fsdp1", "fsdp2", "zero2", "zero3"),
    "optimizer": ("fsdp1", "fsdp2", "zero1", "zero2", "zero3"),
}
# Shares of a device's memory that a run cannot use. On a GPU: its context, NCCL's buffers, the
# kernels' workspaces, unused gaps between tensors. On a host: other processes.
RESERVED = {"cuda": 0.06, "cpu": 0.05}
# Factors by which a run may need more than predicted. A process on a CPU also holds kernels, their
# threads and gaps between tensors: small models need up to 1.8 times (docs/memory.md).
MARGIN = {"cuda": 1.10, "cpu": 2.0}


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes on each device at the peak of a step.

    activations: all other tensors at the peak, such as layers' inputs for the backward pass, logits
    of the loss head, gathered weights. counted: False if most of `activations` is missing. fault:
    a warning for the log, if something could not be counted.
    """

    weights: int
    gradients: int
    optimizer: int
    activations: int
    counted: bool
    fault: str = ""

    @property
    def total(self) -> int:
        """Return the sum of the parts."""
        return self.weights + self.gradients + self.optimizer + self.activations

    def __str__(self) -> str:
        names = ("weights", "gradients", "optimizer", "activations")
        parts = [f"{name} {getattr(self, name) / GIB:.2f}" for name in names if getattr(self, name)]
        bound = "at most" if self.counted else "over"
        return f"{bound} {self.total / GIB:.2f} GiB a device = {' + '.join(parts)}"


@dataclass(frozen=True)
class MemoryPlan:
    """The choice of activation checkpointing, as provenance.json records it.

    requested: the word in the settings. predicted_bytes: total per device, by choice. room_bytes:
    usable bytes of the device that has the fewest; None: not known. sequence_bytes: memory of one
    more sequence in a micro-batch (without a GPU, an upper bound). sharded_bytes: the total under
    fsdp2 (without a GPU, under the run's strategy).
    """

    choice: str
    requested: str
    reason: str
    predicted_bytes: dict[str, int]
    room_bytes: int | None
    sequence_bytes: int = 0
    sharded_bytes: int = 0


def plan_memory(
    settings: RunSettings, config: PreTrainedConfig, launch: LaunchFacts, kernels: Kernels
) -> tuple[MemoryPlan, Report]:
    """Predict the memory of one device and choose the activation checkpointing.

    Returns the plan and its log lines. All ranks must call this; they choose by the device with the
    least room. If the run trains on another machine, the device is the GPU that --assume or
    slurm/cluster.env names. Raises ConfigurationError if the run does not fit a GPU even though the
    prediction may be too high by MARGIN, or if the weights alone do not fit the GPU or the host.
    """
    report = Report()
    requested, possible = checkpointing_choices(settings, config, launch)
    work = workload(settings, config, launch, kernels)
    counts = count_parameters(settings.model, config)
    if (quantized := work.quantized) is not None:
        report.say(
            f"load_in_4bit: {quantized.weights:,} of {counts[0]:,} parameters are kept in "
            f"{settings.model.bnb_4bit_quant_type}, the rest in {name_of(work.weights)}"
        )
    predicted = {
        choice: estimate_memory(settings, config, launch, work, choice, counts)
        for choice in (possible if requested == "auto" else [requested])
    }
    for fault in dict.fromkeys(each.fault for each in predicted.values() if each.fault):
        report.warn(fault)
    elsewhere = kernels.elsewhere
    own = planned_device(settings.run, os.environ) if elsewhere else own_device(launch)
    room, size = (
        min(filter(None, each), default=None) for each in zip(*gathered(own), strict=True)
    )
    margin = MARGIN.get("cuda" if elsewhere else launch.device, 1.1)
    choice, reason = choose(requested, predicted, room, margin)
    needed, weights = predicted[choice].total, predicted[choice].weights
    limit = room if size is None else int(margin * size)
    hopeless = limit is not None and weights > limit
    report.say(f"memory: {counts[0]:,} parameters, {counts[1]:,} trained; {predicted[choice]}")
    report.say(f"activation checkpointing: {reason}")
    if room is not None and (hopeless or needed > room):
        fits = fitting(room, config, kernels)
        others = remedies(settings, launch, choice, possible, fits)
        problem = (
            f"memory: {needed / GIB:.1f} GiB predicted for a device of {(size or room) / GIB:.1f} "
            f"GiB (strategy {launch.strategy}, {launch.world_size} rank(s), micro-batch "
            f"{work.rows}){_weights_alone(settings, config, weights) if hopeless else ''}; {others}"
        )
        if hopeless or (size is not None and needed > margin * size):
            raise ConfigurationError(problem, report)
        report.warn(f"{problem}. It will probably run out")

    def peak(choice: str, work: Workload, launch: LaunchFacts = launch) -> int:
        return estimate_memory(settings, config, launch, work, choice, counts).total

    totals = {name: estimate.total for name, estimate in predicted.items()}
    sequence, sharded = predicted[choice].activations // work.rows, needed
    if launch.device == "cuda" and not elsewhere:  # takes a second or two; used if memory runs out
        totals = {name: totals.get(name) or peak(name, work) for name in possible}
        sequence = peak(choice, replace(work, rows=work.rows + 1)) - needed
        rows = replace(work, weights=work.autocast or work.weights)
        sharded = peak(choice, rows, replace(launch, strategy="fsdp2"))
    return MemoryPlan(choice, requested, reason, totals, room, sequence, sharded), report


def _weights_alone(settings: RunSettings, config: PreTrainedConfig, weights: int) -> str:
    """Return a sentence that the weights alone are too large, with the file of their sizes."""
    source = settings.model.model_config or config.name_or_path
    return f". The weights alone take {weights / GIB:.1f} GiB: are the sizes in {source} right?"


def fitting(room: int, config: PreTrainedConfig, kernels: Kernels) -> Fits:
    """Return a function that tells whether a run with other settings fits into `room` bytes."""

    def fits(settings: RunSettings, launch: LaunchFacts, choice: str) -> bool:
        if launch.strategy == "fsdp2" and launch.device == "cpu" and not kernels.elsewhere:
            return False  # it needs GPUs
        model = settings.model
        if model.use_peft and not (model.lora_target_modules or model.lora_target_parameters):
            try:
                adapters = plan_adapters(model, config)
            except ConfigurationError:  # PEFT does not adapt every model
                return False
            assert adapters is not None, "use_peft is true"
            settings = replace(settings, model=adapters.model)
        work = workload(settings, config, launch, kernels)
        counts = count_parameters(settings.model, config)
        return estimate_memory(settings, config, launch, work, choice, counts).total <= room

    return fits


def workload(
    settings: RunSettings, config: PreTrainedConfig, launch: LaunchFacts, kernels: Kernels
) -> Workload:
    """Return the micro-batch of a rank, with the number types and kernels of this launch."""
    training = settings.training
    weights, mixed = weights_dtype(settings.model, config), TYPES.get(training.mixed_precision)
    if mixed is not None and launch.strategy.startswith(("fsdp", "zero")):
        weights = mixed  # the strategy computes with weights in this type
    rows, length = training.per_device_train_batch_size, settings.data.sequence_length
    device = "cuda" if launch.device == "cuda" else "cpu"
    quantized = quantized_layers(settings.model, config)
    kernels = kernels.under(launch.strategy)
    return Workload(rows, length, weights, mixed, device, kernels, quantized)


def checkpointing_choices(
    settings: RunSettings, config: PreTrainedConfig, launch: LaunchFacts
) -> tuple[str, list[str]]:
    """Return the requested word (none, selective, full, auto) and the possible choices.

    Raises ConfigurationError if the word is not possible for this model and strategy, or if the
    accelerate config also sets recomputation.
    """
    value = settings.training.activation_checkpointing
    word = value if isinstance(value, str) else "full" if value else "none"
    by_launch = is_true("FSDP_ACTIVATION_CHECKPOINTING", settings.values.environment)
    if launch.strategy.startswith("fsdp") and by_launch:
        raise ConfigurationError(
            "fsdp_activation_checkpointing is on in the accelerate config: leave it to the recipe "
            "(activation_checkpointing: full), which says so for every strategy."
        )
    possible = possible_checkpointing(config, launch)
    if word == "auto" or word in possible:
        return word, possible
    raise ConfigurationError(
        f"activation_checkpointing: {word} is not possible for {config.model_type} with strategy "
        f"{launch.strategy}: set it to {' or '.join(possible)}. (Some models of transformers have "
        "none; ZeRO-3 gathers weights within each layer, where fsdp2 shards as much.) Where "
        "memory is short, lower per_device_train_batch_size."
    )


def possible_checkpointing(config: PreTrainedConfig, launch: LaunchFacts) -> list[str]:
    """Return the possible checkpointing modes, least recomputation first."""
    if not causal_lm_class(config).supports_gradient_checkpointing:
        return ["none"]
    return [choice for choice in CHOICES if (launch.strategy, choice) != ("zero3", "selective")]


def choose(
    requested: str, predicted: Mapping[str, MemoryEstimate], room: int | None, margin: float
) -> tuple[str, str]:
    """Return the choice, and a line with the reason.

    auto takes the first of `predicted` (least recomputation first) whose bytes times `margin` fit
    into `room`. If none fits, or nothing could be counted, auto takes the last.
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
    """Return (free usable bytes of this rank's device, size of its GPU); None: unknown, no GPU."""
    if launch.device == "cuda":
        free, total = torch.cuda.mem_get_info()
        return free - int(RESERVED["cuda"] * total), total
    if launch.device != "cpu":
        return None, None
    ranks = max(1, launch.hosts.count(host_name()))
    return int(memory_room_bytes() * (1 - RESERVED["cpu"])) // ranks, None


def planned_device(
    run: RunArguments, environment: Mapping[str, str]
) -> tuple[int | None, int | None]:
    """Return (usable bytes, size) of the GPU of --assume or slurm/cluster.env; None: unknown."""
    given = environment.get(VARIABLE, "").strip()
    if run.assume:
        given = str(assumed_gpus(run.assume).memory_gib)
    if not given:
        return None, None
    try:
        size = float(given)
    except ValueError:
        size = 0.0
    if not 0 < size < 10_000:
        raise ConfigurationError(
            f"{VARIABLE}={given}: give the GiB of one GPU of the nodes as a number, 79 for an "
            "H100 of 80 GB (nvidia-smi says how many MiB it has)"
        )
    return int(size * GIB * (1 - RESERVED["cuda"])), int(size * GIB)


def estimate_memory(
    settings: RunSettings,
    config: PreTrainedConfig,
    launch: LaunchFacts,
    work: Workload,
    choice: str,
    counts: tuple[int, int],
) -> MemoryEstimate:
    """Estimate the memory of one device while it trains with this activation checkpointing.

    counts: (all, trained) parameters. The strategy of the launch determines what is sharded. If the
    architecture cannot run without data, activations are left out and `fault` gives the reason.
    """
    dtype = weights_dtype(settings.model, config)
    size, gradients = dtype.itemsize, trained_bytes(settings.model, config, dtype, counts[1])
    states = _optimizer_bytes(settings, launch, gradients, counts[1])
    if launch.strategy.startswith("zero") and work.autocast is not None:
        size, gradients = 2, 2 * counts[1]  # DeepSpeed computes with half precision
    weights = (counts[0] - counts[1]) * size + gradients
    shards = {
        kind: launch.world_size if launch.strategy in strategies else 1
        for kind, strategies in SHARDED_BY.items()
    }
    gradients //= shards["gradients"]
    at_once = settings.training.per_device_train_batch_size * launch.world_size
    accumulates = settings.run.global_batch_size > at_once
    ddp = launch.strategy == "ddp"
    # DDP's buckets hold the gradients from the first step on.
    held = gradients if accumulates or ddp else 0
    most, made = gradients, gradients  # while the optimizer steps
    gathered_weights, counted, fault = 0, False, ""
    try:
        stretches, gathered_weights, fault = trace(settings, config, work, choice)
        # FSDP2 adds a layer's gradients over the ranks in float32 (utils/launch/processes.py).
        sharded = launch.strategy == "fsdp2" and launch.world_size > 1
        copied = 4 / work.weights.itemsize if work.autocast else 1.0
        found = most_alive(
            stretches, shards["gradients"], held=held, copied=copied if sharded else 0.0
        )
        most, made = max((most, made), found)
        counted = True
    except MISFITS as error:
        fault = (
            f"memory: {type(config).__name__} does not run without data "
            f"({type(error).__name__}: {error!s:.200}), so activations are not counted"
        )
    activations = most - made
    if shards["weights"] > 1:
        activations += gathered_weights
    if work.device != "cpu" or work.kernels.elsewhere:  # a GPU, or a dry run for one
        activations += WORKSPACE_BYTES
    if work.quantized is not None:
        # At the peak one layer's weights are dequantized. Assume that it is the largest layer.
        activations += work.quantized.largest * dtype.itemsize
    if ddp and accumulates:
        made += gradients  # gradients of earlier micro-batches, beside the buckets
    if work.quantized is not None:
        weights -= work.quantized.bytes_saved(settings.model, dtype)
    weights, states = weights // shards["weights"], states // shards["optimizer"]
    return MemoryEstimate(weights, made, states, activations, counted, fault)


def optimizer_bytes_per_parameter(optim_states: str | None, trained_size: float) -> float:
    """Return the bytes of AdamW's states for each trained parameter of `trained_size` bytes."""
    return 2 * (BYTES_A_STATE[optim_states] if optim_states else trained_size)


def _optimizer_bytes(settings: RunSettings, launch: LaunchFacts, own_bytes: int, count: int) -> int:
    """Return the bytes of EMA and of the optimizer's states; an unknown optimizer counts as AdamW.

    count: number of trained weights. own_bytes: size of these weights.
    """
    averages = 0 if settings.run.ema_decay is None else 4 * count
    if launch.strategy.startswith("zero") and settings.training.mixed_precision in TYPES:
        return 12 * count  # float32 masters, two states ("ZeRO", arXiv 1910.02054, section 3.1)
    name = str(getattr(settings.training.optim, "value", settings.training.optim))
    if name in ("sgd", "adafactor", "lomo", "adalomo") or not count:
        return averages
    adamw = optimizer_bytes_per_parameter(settings.run.optim_states, own_bytes / count)
    kept = 2 if "8bit" in name else adamw
    one = "lion" in name or name in ("adagrad", "rmsprop")
    return averages + round(count * (kept / 2 if one else kept))


def checkpoint_bytes(settings: RunSettings, config: PreTrainedConfig, launch: LaunchFacts) -> int:
    """Return the approximate bytes of a checkpoint on disk, over all ranks: weights and states.

    A run with LoRA saves only the adapters. DeepSpeed saves the weights again in its own shards,
    with 2 bytes each in mixed precision.
    """
    parameters, trainable = count_parameters(settings.model, config)
    training, dtype = settings.training, weights_dtype(settings.model, config)
    own = trained_bytes(settings.model, config, dtype, trainable)
    kept = trainable if settings.model.use_peft else parameters
    weights = own if settings.model.use_peft else parameters * dtype.itemsize
    if launch.strategy.startswith("zero"):
        weights += kept * (2 if training.mixed_precision in TYPES else dtype.itemsize)
    if training.save_strategy == "no":  # final/ alone
        return weights
    return weights + _optimizer_bytes(settings, launch, own, trainable)


def count_parameters(model: ModelArguments, config: PreTrainedConfig) -> tuple[int, int]:
    """Return (all, trained) parameters, counted on the meta device."""
    with torch.device("meta"):
        # Call the class: AutoModel.from_config would split the weights over the ranks under ZeRO-3.
        built = with_adapters(causal_lm_class(config)(config), model)
    sizes = [(parameter.numel(), parameter.requires_grad) for parameter in built.parameters()]
    return sum(size for size, _ in sizes), sum(size for size, trained in sizes if trained)
