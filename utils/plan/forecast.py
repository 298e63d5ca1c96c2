"""Forecasts of a run's speed on the GPUs of another machine, and the best settings for these GPUs.

GPUs compute and communicate at the same time, so a micro-batch takes the longer of both times.
Matrix products and attention reach a share of the GPU's peak speed. The share depends on the
model's width. The shares were measured on one H200 with compiled layers (benchmarks/results/gpu). A
comment marks each constant that was not measured.
"""

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from utils.config.arguments import accumulation_steps
from utils.config.errors import ConfigurationError, Report
from utils.config.strategy import AssumedGpus, assumed_gpus
from utils.model.adapters import with_adapters
from utils.model.architecture import MODEL_ERRORS, error_text, has_experts, without_weights
from utils.model.flops import TokenProducts, token_products
from utils.plan.memory_estimate import GIB, estimate_memory
from utils.plan.memory_plan import (
    CONTEXT,
    GPU_MEMORY_VARIABLE,
    MEMORY_MARGIN,
    MICRO_BATCH,
    REPLICAS,
    RESERVED,
    accompanying_settings,
    context_sizes,
    planned_device,
    possible_checkpointing,
    remedies,
    with_changes,
)
from utils.plan.memory_trace import Setup

# Share of the peak in bf16 by width of the hidden states: `causal_mfu` of "Stoker, tuned" in
# gpt2_124m, qwen3_600m_sft, llama_1b_pretrain and llama_8b_lora.json.
SHARES = {768: 0.3612, 1024: 0.4292, 2048: 0.4884, 4096: 0.5157}
SOURCE = "shares of the peak as measured on an H200"
# Not measured here: each of several GPUs reaches 0.68 (torchtitan, Llama 3.1 8B) to 0.87 (MosaicML,
# MPT 7B) of a single GPU's share. tests/unit/plan/test_forecast.py has the published speeds.
MULTI_GPU = (0.68, 0.87)
# Not measured: factors on the share for layers that are not compiled, for experts, and for float32
# instead of bf16 (the peak of TF32 is half). SELECTIVE is a factor on the time. Selective
# recomputation adds a third of the time of norms and activations (benchmarks/hardware/roofline.py).
NOT_COMPILED, WITH_EXPERTS, FLOAT32, SELECTIVE = 0.8, 0.5, 0.5, 1.04
# Not measured: the share of a link's speed that communication reaches, and the network's speed in
# bytes per second (200 Gbit/s per GPU).
LINK_SHARE, NETWORK = 0.8, 25e9
HSDP = "hsdp"
STRATEGY_FILES = {"single": "single_gpu", "ddp": "multi_gpu"}  # where the file has another name
MICRO_BATCHES = (1, 2, 4, 8, 16, 32)
EQUALLY_FAST = 0.98  # a speed of at least this share of the fastest counts as equal
TABLE_ROWS = 4  # rows of the table
# The GPU whose speed orders the candidates if the GPUs' speed is not known.
DEFAULT_GPUS = assumed_gpus("1xH100-80GB")


@dataclass(frozen=True)
class Candidate:
    """Settings that a run could use, and their predicted memory and speed.

    recomputed: the mode of activation checkpointing. total_bytes: bytes per GPU. speeds: the lowest
    and the highest predicted tokens per second of all GPUs together. counted: False if total_bytes
    lacks the activations, which cannot be counted for some architectures. context_parallel: number
    of ranks that share each sequence.
    """

    strategy: str
    micro_batch: int
    recomputed: str
    total_bytes: int
    speeds: tuple[float, float]
    counted: bool
    context_parallel: int = 1


@dataclass(frozen=True)
class Planner:
    """A predictor of memory and speed on `gpus`, with the run's settings or with changed settings.

    document_tokens: the mean length of documents in tokens, weighted by length. products: the
    number of weights and the attention sizes, from which FLOPs per token are computed.
    """

    setup: Setup
    gpus: AssumedGpus
    document_tokens: float
    products: TokenProducts
    has_experts: bool

    def step_flops(self, recomputed: str) -> float:
        """Return the FLOPs per token of a step, including recomputation.

        A token attends to half of its document on average. Full recomputation repeats the forward
        pass without the LM head. The repeated pass takes 2 FLOPs per weight. Its attention
        takes 4 FLOPs per head, head dimension and visible token.
        """
        text, products = self.setup.config.get_text_config(decoder=True), self.products
        head = text.vocab_size * text.hidden_size
        masked = products.scores(self.document_tokens) / 2
        recomputation = 2 * (products.forward - head) + 4 * masked if recomputed == "full" else 0
        return products.flops(self.document_tokens) - 12 * masked + recomputation

    def speeds(self, setup: Setup, recomputed: str) -> tuple[float, float]:
        """Return the lowest and the highest predicted tokens/s, which are equal for one GPU."""
        slow, fast = (self.tokens_per_s(setup, recomputed, part) for part in MULTI_GPU)
        return slow, fast

    def tokens_per_s(self, setup: Setup, recomputed: str, multi_gpu: float = MULTI_GPU[1]) -> float:
        """Return tokens per second of all GPUs together. Padding tokens count.

        multi_gpu: the factor on each GPU's speed in a run on several GPUs. GPUs of unknown speed
        count as H100s. Raises ConfigurationError if the global batch does not divide into
        micro-batches.
        """
        gpus, known = self.gpus, self.gpus if self.gpus.flops else DEFAULT_GPUS
        assert known.flops is not None
        assert known.link is not None
        batch = setup.settings.run.global_batch_size
        accumulation = accumulation_steps(batch, setup.micro_batch, setup.data_ranks)
        size = setup.settings.run.context_parallel
        tokens = setup.micro_batch * setup.settings.data.sequence_length // size
        width = setup.config.get_text_config(decoder=True).hidden_size
        share = float(np.interp(math.log(width), np.log([*SHARES]), [*SHARES.values()]))
        factors = (
            (multi_gpu, gpus.world_size > 1),
            (NOT_COMPILED, not setup.compiles),
            (WITH_EXPERTS, self.has_experts),
            (FLOAT32, setup.autocast is None),
            (1 / SELECTIVE, recomputed == "selective"),
        )
        share *= math.prod(factor for factor, applies in factors if applies)
        work_s = tokens * self.step_flops(recomputed) / (share * known.flops)
        exchange_s, exchange_at_the_end_s = exchange_times(setup, gpus, known.link)
        each_s = max(work_s, exchange_s)
        # Attention waits until the ranks that share sequences have exchanged heads. These ranks are
        # on one node if their number divides the GPUs of a node.
        link_of_group = known.link if gpus.per_node % size == 0 else NETWORK
        each_s += tokens * self.head_bytes(setup, recomputed) / (link_of_group * LINK_SHARE)
        # The exchange at the end overlaps with the last backward pass, 2/3 of a micro-batch's time.
        last_s = max(exchange_at_the_end_s - work_s * 2 / 3, 0)
        return tokens * accumulation * gpus.world_size / (accumulation * each_s + last_s)

    def head_bytes(self, setup: Setup, recomputed: str) -> float:
        """Return the bytes per token that a rank sends to ranks with which it shares sequences.

        The forward pass exchanges queries, keys, values and outputs. The backward pass exchanges
        their gradients. Recomputation repeats the exchange of the forward pass. Returns 0.0
        if ranks share no sequences.
        """
        size, text = setup.settings.run.context_parallel, setup.config.get_text_config(decoder=True)
        if size == 1:
            return 0.0
        heads = text.num_attention_heads
        keys = max(getattr(text, "num_key_value_heads", None) or heads, size)
        states = 2 * self.products.scores(1) * (1 + keys / heads)
        passes = 2 if recomputed == "none" else 3
        return passes * states * (setup.autocast or setup.dtype).itemsize * (size - 1) / size

    def candidate(
        self, strategy: str, micro_batch: int, recomputed: str, size: int | None = None
    ) -> Candidate:
        """Predict memory and speed of the run with changed settings.

        size: the value of context_parallel. None means the run's own value. Raises
        ConfigurationError if the global batch does not divide into micro-batches.
        """
        size = size or self.setup.settings.run.context_parallel
        changes: dict[str, Any] = {"strategy": strategy, MICRO_BATCH: micro_batch, CONTEXT: size}
        if strategy == HSDP:
            copies = self.setup.launch.replicas
            changes |= {"strategy": "fsdp2", REPLICAS: copies if copies > 1 else self.gpus.nodes}
        setup = with_changes(self.setup, changes)
        speeds, memory = self.speeds(setup, recomputed), estimate_memory(setup, recomputed)
        predicted = (memory.total, speeds, memory.counted)
        return Candidate(strategy, micro_batch, recomputed, *predicted, size)

    @property
    def room(self) -> int:
        """The largest prediction that fits: a GPU's usable bytes divided by MEMORY_MARGIN."""
        return int(self.gpus.memory_gib * GIB * (1 - RESERVED["cuda"]) / MEMORY_MARGIN["cuda"])

    def candidates(self) -> list[Candidate]:
        """Return the settings that fit a GPU, with the smallest possible context_parallel.

        Returns [] if nothing fits.
        """
        for size in (self.setup.settings.run.context_parallel, *context_sizes(self.setup)):
            if fitting := list(self._fitting_candidates(size)):
                return fitting
        return []

    def _fitting_candidates(self, size: int) -> Iterator[Candidate]:
        """Yield the settings that fit a GPU, strategies with less sharding first.

        DeepSpeed's strategies are tried only if the run uses DeepSpeed. size: the number of ranks
        that share each sequence.
        """
        launch, batch = self.setup.launch, self.setup.settings.divisible_batch
        zero = ("zero1", "zero2", "zero3") if launch.strategy.startswith("zero") else ()
        hybrid = (HSDP,) if self.gpus.nodes > 1 and self.gpus.per_node > 1 else ()
        strategies = ("ddp", *zero, *hybrid, "fsdp2")
        for strategy in strategies if launch.world_size > 1 else ("single",):
            for choice in possible_checkpointing(with_changes(self.setup, {"strategy": strategy})):
                for micro_batch in MICRO_BATCHES:
                    if batch % (micro_batch * launch.world_size // size):
                        break
                    found = self.candidate(strategy, micro_batch, choice, size)
                    if not found.counted or found.total_bytes > self.room:
                        break
                    yield found


def exchange_times(setup: Setup, gpus: AssumedGpus, link: float) -> tuple[float, float]:
    """Return the seconds of communication per micro-batch, and the seconds at the end of a step.

    link: bytes/s between GPUs of a node. The GPUs exchange weights and gradients in a ring. Between
    nodes the ring uses the network cards of all GPUs of a node. HSDP has a ring for each copy of
    the states. At the end of a step, HSDP also sums the gradients over the copies, in float32. Each
    shard has its own ring for this sum.
    """
    replicas, shards = setup.launch.replicas, gpus.world_size // setup.launch.replicas
    network = link if gpus.nodes == 1 else min(link, gpus.per_node * NETWORK)
    within = link if shards <= gpus.per_node else network
    per_micro_batch, at_the_end = exchanged_bytes(setup, shards)
    end_s = at_the_end / (within * LINK_SHARE)
    if replicas > 1:
        sent = 8 * setup.parameters[1] / shards * (replicas - 1) / replicas
        end_s += sent / ((link if gpus.nodes == 1 else min(link, NETWORK)) * LINK_SHARE)
    return per_micro_batch / (within * LINK_SHARE), end_s


def exchanged_bytes(setup: Setup, ranks: int) -> tuple[float, float]:
    """Return the bytes that each GPU sends per micro-batch, and the bytes at the end of a step.

    Sharded weights are gathered for the forward and the backward pass, at 2 bytes per weight.
    Gradients are summed over the ranks at 4 bytes per weight. DeepSpeed and ddp_comm_hook sum at 2
    bytes per weight.
    """
    if ranks == 1:
        return 0.0, 0.0
    weights, trained = (number * (ranks - 1) / ranks for number in setup.parameters)
    ddp_bytes = 4 if setup.settings.run.ddp_comm_hook else 8
    return {
        "ddp": (0.0, ddp_bytes * trained), "zero1": (0.0, 4 * trained),
        "zero2": (2 * trained, 2 * trained), "zero3": (4 * weights + 2 * trained, 0.0),
    }.get(setup.launch.strategy, (4 * weights + 4 * trained, 0.0))  # fmt: skip


def rounded(number: float) -> int:
    """Round to two significant digits, because a forecast is not more exact."""
    return int(float(f"{number:.2g}"))


def best_of(candidates: Sequence[Candidate]) -> Candidate:
    """Return the fastest candidate. Speeds within 2 % of the fastest count as equal.

    Among equally fast candidates, prefer less sharding, then larger micro-batches.
    """
    fastest = max(one.speeds[1] for one in candidates)
    near = [one for one in candidates if one.speeds[1] >= EQUALLY_FAST * fastest]
    # candidates() yields strategies with less sharding first.
    least_sharded = [one for one in near if one.strategy == near[0].strategy]
    return max(least_sharded, key=lambda one: one.micro_batch)


def make_planner(setup: Setup, document_tokens: float) -> Planner:
    """Return a predictor of memory and speed for a dry run. document_tokens: see Planner.

    Raises ConfigurationError if the GPUs are unknown or the model's FLOPs cannot be counted.
    """
    config, assume = setup.config, setup.settings.run.assume
    _, size = planned_device(assume, os.environ)
    if size is None:
        raise ConfigurationError(
            f"--suggest has to know the GPUs: add --assume 8xH100-80GB, or set "
            f"{GPU_MEMORY_VARIABLE} (slurm/cluster.env)"
        )
    unnamed = AssumedGpus(f"GPUs of {size / GIB:.0f} GiB", 1, setup.launch.world_size, size / GIB)
    gpus = assumed_gpus(assume) if assume else unnamed
    try:
        # Call the class: AutoModel.from_config would split the weights over the ranks under ZeRO-3.
        plain = without_weights(config)
        experts = has_experts(plain)
        with torch.device("meta"):
            products = token_products(with_adapters(plain, setup.settings.model))
    except MODEL_ERRORS as error:
        raise ConfigurationError(
            f"--assume and --suggest: the FLOPs of {config.model_type} cannot be counted "
            f"({error_text(error)}): leave them out."
        ) from error
    return Planner(replace(setup, elsewhere=True), gpus, document_tokens, products, experts)


def suggest(planner: Planner, report: Report) -> None:
    """Report the fastest settings that fit. If none fit, report changes that make the run fit."""
    setup, gpus = planner.setup, planner.gpus
    most = possible_checkpointing(setup)[-1]
    if not planner.candidate(setup.launch.strategy, 1, most).counted:
        report.warn("suggest: nothing, for what activations take cannot be counted here")
        return
    fitting = planner.candidates()
    if not fitting:
        report.warn(f"suggest: nothing fits {gpus}; {remedies(setup, most, planner.room)}")
        return
    best, batch = best_of(fitting), setup.settings.run.global_batch_size
    strategy = STRATEGY_FILES.get(best.strategy, best.strategy)
    others = accompanying_settings(setup, {"strategy": strategy, MICRO_BATCH: best.micro_batch})
    lines = [
        f"suggest: the fastest that fits {gpus}, by forecast (global_batch_size {batch}):",
        f"  strategy: {strategy}",
        f"  per_device_train_batch_size: {best.micro_batch}",
        *([f"  {CONTEXT}: {best.context_parallel}"] if best.context_parallel > 1 else []),
        *(f"  {name}: {value}" for name, value in others.items()),
        f"  activation_checkpointing: {best.recomputed}",
        "the best of each kind:",
        f"  {'strategy':<11} {'micro-batch':>11} {'recomputation':<13} {'GiB a GPU':>9} "
        f"{'tokens/s':>22}",
    ]
    kinds: dict[tuple[str, str], Candidate] = {}
    while fitting:
        one = best_of(fitting)
        kinds.setdefault((one.strategy, one.recomputed), one)
        fitting.remove(one)
    for one in [*kinds.values()][:TABLE_ROWS]:
        speed = shown_speeds(one.speeds) if gpus.flops else "?"
        lines.append(
            f"  {STRATEGY_FILES.get(one.strategy, one.strategy):<11} {one.micro_batch:>11} "
            f"{one.recomputed:<13} {one.total_bytes / GIB:>9.1f} {speed:>22}"
        )
    report.say("\n".join(lines))


def forecast_line(
    planner: Planner, recomputed: str, total_steps: float, to_longest: bool = False
) -> str:
    """Return the log line on tokens per second and on the duration of the run.

    recomputed: the mode of activation checkpointing. to_longest: whether micro-batches are
    padded to their longest document, not to sequence_length.
    """
    gpus, settings = planner.gpus, planner.setup.settings
    if gpus.flops is None:
        return f"forecast: no speed, only the memory of {gpus} is known"
    speeds = planner.speeds(planner.setup, recomputed)
    step_tokens = settings.run.global_batch_size * settings.data.sequence_length
    seconds = " to ".join(dict.fromkeys(f"{step_tokens / speed:.2g}" for speed in speeds[::-1]))
    published = ", and by others on several H100s" if gpus.world_size > 1 else ""
    network = ", 200 Gbit/s of network a GPU" if gpus.nodes > 1 else ""
    less = "; less, as documents are shorter than sequence_length" if to_longest else ""
    # benchmarks/results/gpu/fp8.json
    fp8 = "; in bf16: with fp8 an 8B model was 1.11 times as fast on an H200, tensorwise 1.26 times"
    less += fp8 if settings.model.fp8 else ""
    return (
        f"forecast: {shown_speeds(speeds)} tokens/s on {gpus}, {seconds} s a step, "
        f"{shown_durations(total_steps * step_tokens, speeds)} in all without evaluation and saves "
        f"({SOURCE}{published}{network}){less}"
    )


def shown_speeds(speeds: tuple[float, float]) -> str:
    """Return two rounded speeds as text: "90,000 to 120,000", or one number if they are equal."""
    return " to ".join(dict.fromkeys(f"{rounded(speed):,}" for speed in speeds))


def shown_durations(tokens: float, speeds: tuple[float, float]) -> str:
    """Return the time for `tokens` at two speeds in tokens/s, as text: "3.6 to 4.6 hours"."""
    fast, slow = (rough_duration(tokens / speed) for speed in speeds[::-1])
    number, _, unit = fast.partition(" ")
    if fast == slow:
        return slow
    return f"{number if slow.endswith(unit) else fast} to {slow}"


def rough_duration(seconds: float) -> str:
    """Return a duration as text with two significant digits: "40 minutes", "13 hours"."""
    for unit, size in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"{float(f'{seconds / size:.2g}'):g} {unit}"
    return f"{math.ceil(seconds)} seconds"
