"""The forecast of a dry run for another machine's GPUs, and the best settings for these GPUs.

--assume names the GPUs. --suggest tries strategies, micro-batches and recomputation on them. Both
use the memory predictions of memory_plan.py and the speeds of forecast.py; nothing is measured.
"""

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from transformers import PreTrainedConfig

from utils.config.arguments import with_values
from utils.config.assumed import GPUS, AssumedGpus, assumed_gpus
from utils.config.errors import ConfigurationError, Report
from utils.config.settings import RunSettings
from utils.launch.processes import LaunchFacts
from utils.model.architecture import MISFITS, first_line
from utils.plan.arithmetic import accumulation_steps
from utils.plan.forecast import (
    SOURCE,
    ModelProducts,
    Step,
    model_products,
    tokens_per_s,
)
from utils.plan.memory_plan import (
    GIB,
    MARGIN,
    RESERVED,
    VARIABLE,
    estimate_memory,
    fitting,
    planned_device,
    possible_checkpointing,
    workload,
)
from utils.plan.memory_trace import Kernels
from utils.plan.remedies import remedies

FILES = {"single": "single_gpu", "ddp": "multi_gpu"}  # strategies whose file has another name
MICRO_BATCHES = (1, 2, 4, 8, 16, 32)
AS_FAST = 0.98  # speeds closer than this count as equal: then less sharding wins
ROWS = 4
# The GPU whose speed orders the candidates if the GPUs' speed is not known.
USUAL = GPUS["H100-80GB"]


@dataclass(frozen=True)
class Candidate:
    """Settings with their prediction: bytes per GPU, and tokens per second of all GPUs.

    counted: whether the bytes include activations. For some architectures they cannot be counted.
    """

    strategy: str
    micro_batch: int
    recomputed: str
    total_bytes: int
    tokens_per_s: float
    counted: bool


@dataclass(frozen=True)
class Planner:
    """Predictions of memory and speed on some GPUs, for the run's settings and for others."""

    settings: RunSettings
    config: PreTrainedConfig
    kernels: Kernels
    gpus: AssumedGpus
    document_tokens: float
    products: ModelProducts

    def candidate(self, launch: LaunchFacts, micro_batch: int, recomputed: str) -> Candidate:
        """Predict one choice. Raises ConfigurationError if the global batch does not divide."""
        speed = self.speed(launch, micro_batch, recomputed)
        training = with_values(self.settings.training, per_device_train_batch_size=micro_batch)
        settings = replace(self.settings, training=training)
        work = workload(settings, self.config, launch, self.kernels)
        counts = self.products.parameters
        memory = estimate_memory(settings, self.config, launch, work, recomputed, counts)
        return Candidate(
            launch.strategy, micro_batch, recomputed, memory.total, speed, memory.counted
        )

    def speed(self, launch: LaunchFacts, micro_batch: int, recomputed: str) -> float:
        """Predict tokens per second. For GPUs of unknown speed, return the speed on an H100."""
        total = self.settings.run.global_batch_size
        step = Step(
            rows=micro_batch,
            accumulation=accumulation_steps(total, micro_batch, launch.world_size),
            length=self.settings.data.sequence_length,
            document_tokens=self.document_tokens,
            recomputed=recomputed,
            compiled=self.kernels.under(launch.strategy).compiled,
            bf16=self.settings.training.mixed_precision != "no",
        )
        gpus = self.gpus
        if gpus.flops is None:
            _, tflops, link_gb_s = USUAL
            gpus = replace(gpus, flops=tflops * 1e12, link=link_gb_s * 1e9 / 2)
        return tokens_per_s(self.products, step, launch.strategy, gpus)

    @property
    def room(self) -> int:
        """Return the bytes that a prediction may take, as for activation_checkpointing: auto."""
        return int(self.gpus.memory_gib * GIB * (1 - RESERVED["cuda"]) / MARGIN["cuda"])

    def fits(self, candidate: Candidate) -> bool:
        """Return whether a candidate's memory is known and fits."""
        return candidate.counted and candidate.total_bytes <= self.room

    def candidates(self, launch: LaunchFacts) -> Iterator[Candidate]:
        """Yield all choices that fit, by strategy and recomputation; small micro-batches first."""
        for strategy in strategies(launch):
            other = replace(launch, strategy=strategy)
            for choice in possible_checkpointing(self.config, other):
                for size in MICRO_BATCHES:
                    if self.settings.run.global_batch_size % (size * launch.world_size):
                        break
                    found = self.candidate(other, size, choice)
                    if not self.fits(found):
                        break
                    yield found

    def row(self, candidate: Candidate) -> str:
        """Return the candidate's line in the table of --suggest."""
        strategy = FILES.get(candidate.strategy, candidate.strategy)
        speed = f"{rounded(candidate.tokens_per_s):>12,}" if self.gpus.flops else f"{'?':>12}"
        return (
            f"  {strategy:<11} {candidate.micro_batch:>11} {candidate.recomputed:<13} "
            f"{candidate.total_bytes / GIB:>9.1f} {speed}"
        )


def strategies(launch: LaunchFacts) -> tuple[str, ...]:
    """Return the strategies to try; DeepSpeed's only if the run uses one of them."""
    if launch.world_size == 1:
        return ("single",)
    zero = ("zero1", "zero2", "zero3") if launch.strategy.startswith("zero") else ()
    return ("ddp", *zero, "fsdp2")


def rounded(number: float) -> int:
    """Round to two significant digits. A forecast is not more exact."""
    return int(float(f"{number:.2g}"))


def best_first(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Sort by speed. Among nearly equal ones prefer less sharding, then a larger micro-batch."""
    rest, ordered = list(candidates), []
    while rest:
        fastest = max(rest, key=lambda one: one.tokens_per_s)
        near = [one for one in rest if one.tokens_per_s >= AS_FAST * fastest.tokens_per_s]
        # candidates() yields the strategy that shards least first. max takes the first of equals.
        simplest = near[0].strategy
        best = max(
            (one for one in near if one.strategy == simplest), key=lambda one: one.micro_batch
        )
        ordered.append(best)
        rest.remove(best)
    return ordered


def make_planner(
    settings: RunSettings,
    config: PreTrainedConfig,
    launch: LaunchFacts,
    kernels: Kernels,
    document_tokens: float,
) -> Planner:
    """Return the planner of a dry run. Raises ConfigurationError if the GPUs are not known.

    document_tokens: mean, over all tokens, of the length of the token's document.
    """
    if settings.run.assume:
        gpus = assumed_gpus(settings.run.assume)
    else:
        _, size = planned_device(settings.run, os.environ)
        if size is None:
            raise ConfigurationError(
                "--suggest has to know the GPUs: add --assume 8xH100-80GB, or set "
                f"{VARIABLE} (slurm/cluster.env)"
            )
        gpus = AssumedGpus(f"GPUs of {size / GIB:.0f} GiB", 1, launch.world_size, size / GIB)
    try:
        products = model_products(settings.model, config)
    except MISFITS as error:
        raise ConfigurationError(
            f"--assume and --suggest: the FLOPs of {config.model_type} cannot be counted "
            f"({first_line(error)}): leave them out."
        ) from error
    return Planner(settings, config, kernels, gpus, document_tokens, products)


def suggest(planner: Planner, launch: LaunchFacts) -> Report:
    """Return the lines of `--suggest`: the fastest settings that fit, else changes that fit."""
    report = Report()
    choices = possible_checkpointing(planner.config, launch)
    if not planner.candidate(launch, 1, choices[-1]).counted:
        report.warn("suggest: nothing, for what activations take cannot be counted here")
        return report
    ordered = best_first(list(planner.candidates(launch)))
    if not ordered:
        fits = fitting(planner.room, planner.config, planner.kernels)
        what = remedies(planner.settings, launch, choices[-1], choices, fits)
        report.warn(f"suggest: nothing fits {planner.gpus}; {what}")
        return report
    best, kept = ordered[0], planner.settings.run.global_batch_size
    kinds: dict[tuple[str, str], Candidate] = {}
    for one in ordered:
        kinds.setdefault((one.strategy, one.recomputed), one)
    lines = [
        f"suggest: the fastest that fits {planner.gpus}, by forecast (global_batch_size {kept}):",
        f"  strategy: {FILES.get(best.strategy, best.strategy)}",
        f"  per_device_train_batch_size: {best.micro_batch}",
        f"  activation_checkpointing: {best.recomputed}",
        "the best of each kind:",
        f"  {'strategy':<11} {'micro-batch':>11} {'recomputation':<13} {'GiB a GPU':>9} "
        f"{'tokens/s':>12}",
        *map(planner.row, [*kinds.values()][:ROWS]),
    ]
    report.say("\n".join(lines))
    return report


def forecast_line(planner: Planner, launch: LaunchFacts, recomputed: str, total_steps: int) -> str:
    """Return the forecast as text: tokens per second with these settings, duration of the run."""
    gpus, run = planner.gpus, planner.settings.run
    if gpus.flops is None:
        return f"forecast: no speed, the GPUs are known by their memory alone ({gpus})"
    micro_batch = planner.settings.training.per_device_train_batch_size
    speed = planner.speed(launch, micro_batch, recomputed)
    step_tokens = run.global_batch_size * planner.settings.data.sequence_length
    network = ", 200 Gbit/s of network a GPU" if gpus.nodes > 1 else ""
    return (
        f"forecast: {rounded(speed):,} tokens/s on {gpus}, {step_tokens / speed:.2g} s a step, "
        f"{duration(total_steps * step_tokens / speed)} in all without evaluation and saves "
        f"({SOURCE}{network})"
    )


def duration(seconds: float) -> str:
    """Return a duration with the precision of a forecast: 40 minutes, 13 hours, 4 days."""
    for unit, size in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"{float(f'{seconds / size:.2g}'):g} {unit}"
    return f"{math.ceil(seconds)} seconds"
