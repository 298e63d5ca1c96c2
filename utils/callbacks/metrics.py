"""Callbacks that add speed and mixture metrics to training logs; see docs/metrics.md."""

import logging
import sys
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import extract_model_from_parallel
from transformers import TrainerCallback, TrainerState
from typing_extensions import override

from utils.data.loader import TrainLoader
from utils.host.collectives import gathered
from utils.launch.restart import recovery_s
from utils.model.architecture import MODEL_ERRORS
from utils.model.flops import effective_length, peak_flops, token_products

logger = logging.getLogger(__name__)

PROBE_S = 10.0  # the least time between two timings of the matrix product in OwnTime


class MixtureShares(TrainerCallback):
    """A callback with metrics of a data mixture: tokens and epochs of each source since step 0.

    Steps before a resume are included. The weights in `train_data` are shares of sequences. Shares
    of tokens differ from the weights if some sources have more padding.
    """

    @override
    def on_train_begin(self, *_: Any, **kwargs: Any) -> None:
        """Store the train loader, which counts the tokens of each source."""
        self.loader: TrainLoader = kwargs["train_dataloader"]

    def metrics(self) -> dict[str, float]:
        """Return tokens_seen/SOURCE, tokens_share/SOURCE and epochs/SOURCE of each source.

        Return {} if the run has one source. Call this after Throughput has counted the step's
        tokens.
        """
        seen, sampler = self.loader.tokens_seen, self.loader.batch_sampler
        if len(seen.names) == 1:
            return {}
        total = max(sum(seen.by_name[name] for name in seen.names), 1)
        epochs = sampler.order.epochs_before(sampler.samples_before(seen.steps))
        figures: dict[str, float] = {}
        for name, epoch in zip(seen.names, epochs, strict=True):
            figures[f"tokens_seen/{name}"] = seen.by_name[name]
            figures[f"tokens_share/{name}"] = seen.by_name[name] / total
            figures[f"epochs/{name}"] = epoch
        return figures


class Throughput(TrainerCallback):
    """A callback with speed metrics over the steps since the last training log.

    The time of evaluations and saves is left out. Trainer waits for the device at each training
    log, and the clock is read after this wait. Between logs, the host waits for the device only
    before an evaluation or a save, which would wait anyway.
    """

    def __init__(
        self, clock: Callable[[], float] = time.perf_counter, context_parallel: int = 1
    ) -> None:
        self.clock, self.context_parallel = clock, context_parallel
        self.of_first_step: dict[str, float] = {}  # the first log has them
        self.window_step: int | None = None  # step of the last log; None before the first step
        self.flops_per_token = 0.0  # forward and backward; 0 if they cannot be counted
        self.mfu_per_rate: float | None = None  # MFU of one token per second and device
        self.graphs = self.graphs_before = 0
        self.own: OwnTime | None = None  # None with one rank

    @override
    def on_train_begin(self, args: Any, *_: Any, **kwargs: Any) -> None:
        """Store the train loader; prepare to count FLOPs and the time that this rank computes."""
        self.loader: TrainLoader = kwargs["train_dataloader"]
        self.world_size = args.world_size
        if "model" in kwargs:
            model = extract_model_from_parallel(kwargs["model"])
            self._count_flops(model, args.device)
            if self.world_size > 1:
                self.own = OwnTime(model, args.device, exchanges=self.context_parallel > 1)
        self._restart_clock()
        self.elapsed_s = 0.0

    def _count_flops(self, model: Any, device: torch.device) -> None:
        """Compute and log the model's FLOPs per token; log the GPU's peak FLOP/s if known."""
        shares = self.loader.batch_sampler.order.shares()
        seen = effective_length(self.loader.dataset.plans, shares)
        try:
            self.flops_per_token = token_products(model).flops(seen)
        except MODEL_ERRORS as error:
            logger.warning(
                "MFU and total_flos are left out: the model's products cannot be counted (%r)",
                error,
            )
            return
        line = f"model: {self.flops_per_token / 1e9:.3g} GFLOPs a token"
        if (peak := peak_flops(device)) is not None:
            self.mfu_per_rate = self.flops_per_token / peak
            card = torch.cuda.get_device_name(device)
            logger.info("%s; MFU: the share of %s's %g TFLOP/s in bf16", line, card, peak / 1e12)
        else:
            logger.debug("%s; no MFU: the device's peak is not known", line)

    @override
    def on_step_end(self, args: Any, state: TrainerState, control: Any, **_: Any) -> None:
        """Add the step's time and tokens. The first step of this process is timed separately."""
        self.step, first = state.global_step, self.window_step is None
        interrupted = first or control.should_evaluate or control.should_save
        if interrupted and args.device.type == "cuda":
            torch.cuda.synchronize(args.device)
        self._count_time()
        # Count here. Counting at the log line would block the GPU for ten steps' worth of work.
        tokens = self.loader.tokens_seen.count(self.step)
        state.total_flos = self.flops_per_token * tokens  # Trainer saves and logs it
        if first:
            if self.own:
                self.own.take()
            self.of_first_step = {"first_step_time_s": self.elapsed_s}
            if (since_crash_s := recovery_s()) is not None:
                self.of_first_step["recovery_s"] = since_crash_s
            self._begin_window()

    def _count_time(self) -> None:
        before, graphs_before = self.counted_until, self.graphs_before
        self._restart_clock()
        self.elapsed_s += self.counted_until - before
        self.graphs += self.graphs_before - graphs_before

    def _restart_clock(self, *_: Any, **__: Any) -> None:
        """Read the clock. The time since the last reading does not count as time of steps."""
        self.counted_until = self.clock()
        dynamo = sys.modules.get("torch._dynamo.utils")  # absent until something is compiled
        # The number of graphs that torch has compiled in this process or loaded from its cache.
        self.graphs_before = int(dynamo.counters["stats"]["unique_graphs"]) if dynamo else 0

    on_evaluate = on_save = _restart_clock

    def _begin_window(self) -> None:
        self.window_step, self.elapsed_s, self.graphs = self.step, 0.0, 0
        self.window_wait_s = self.loader.wait_s
        self.window_tokens = self.loader.tokens_seen.count(self.step)

    def metrics(self) -> dict[str, float]:
        """Return the speed metrics since the last training log. All ranks must call this."""
        assert self.window_step is not None, "metrics() belongs to a training log, after a step"
        steps = self.step - self.window_step
        self._count_time()
        figures: dict[str, float] = {"tokens_seen": self.loader.tokens_seen.count(self.step)}
        figures |= self.of_first_step
        self.of_first_step = {}
        if steps:
            waited_s = self.loader.wait_s - self.window_wait_s
            ranks = gathered((self.elapsed_s, waited_s, *(self.own.take() if self.own else ())))
            elapsed_s, wait_s = (max(rank[place] for rank in ranks) for place in (0, 1))
            per_s = (figures["tokens_seen"] - self.window_tokens) / elapsed_s
            figures["tokens_per_s"] = per_s
            figures["tokens_per_s_per_device"] = per_s / self.world_size
            if self.mfu_per_rate is not None:
                figures["mfu"] = per_s / self.world_size * self.mfu_per_rate
            figures["step_time_s"] = elapsed_s / steps
            figures["data_wait_s"] = wait_s / steps
            sampler = self.loader.batch_sampler
            if sampler.grows:
                ends = (self.window_step, self.step, sampler.total_steps)
                begin, now, end = map(sampler.samples_before, ends)
                figures["remaining_s"] = elapsed_s / (now - begin) * (end - now)
            if self.graphs:
                figures["graphs_compiled"] = self.graphs
            if self.own:
                figures |= slowest_rank(ranks)
        self._begin_window()
        return figures


class OwnTime:
    """A timer of the seconds that a rank computes, without waits for other ranks.

    Under DDP, this is the time of forward passes, and of backward passes down to the embedding. No
    collective delays these passes. On a GPU, CUDA events measure them. Under FSDP, DeepSpeed and
    context parallelism (`exchanges`), both passes wait for other ranks. Each rank then times a
    fixed matrix product every 10 s instead.
    """

    def __init__(self, model: Any, device: torch.device, exchanges: bool = False):
        self.device, self.on_gpu = device, device.type == "cuda"
        self.stream = torch.cuda.current_stream(device) if self.on_gpu else None
        self.spans = deque[tuple[Any, Any]]()  # (begin, end) of passes not yet in `seconds`
        self.seconds, self.product_s, self.probed = 0.0, 0.0, -PROBE_S
        sharded = PartialState().distributed_type.value in ("FSDP", "DEEPSPEED")
        self.waits = sharded or exchanges
        if not self.waits:
            # Hook the model inside DDP: DDP's own forward begins with a broadcast of buffers.
            model.register_forward_pre_hook(self._begin)
            model.register_forward_hook(self._forward_ends)
            model.get_input_embeddings().register_forward_hook(self._embedding_ends)

    def _forward_ends(self, model: torch.nn.Module, _: Any, output: Any) -> None:
        if model.training:
            self._end()
            output["loss"].register_hook(self._begin)

    def _embedding_ends(self, embedding: torch.nn.Module, _: Any, output: torch.Tensor) -> None:
        # If the embedding needs no gradient (LoRA), only forward passes are counted.
        if embedding.training and output.requires_grad:
            output.register_hook(self._end)

    def _now(self) -> Any:
        if not self.on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(self.stream)
        return event

    def _begin(self, *_: Any) -> None:
        self.begin = self._now()

    def _end(self, *_: Any) -> None:
        self.spans.append((self.begin, self._now()))
        while self.spans and (not self.on_gpu or self.spans[0][1].query()):
            begin, end = self.spans.popleft()
            self.seconds += begin.elapsed_time(end) / 1000 if self.on_gpu else end - begin

    def take(self) -> tuple[float, float]:
        """Return two times in seconds. A time that is not measured in this run is 0.

        The first is the time of forward and backward passes since the last call. The second is the
        time of the newest test matrix product.
        """
        own_s, self.seconds = self.seconds, 0.0
        if self.waits and time.monotonic() - self.probed >= PROBE_S:
            self.product_s = min(self._product_s() for _ in range(3))
            self.probed = time.monotonic()
        return own_s, self.product_s

    def _product_s(self) -> float:
        """Return the seconds of a matrix product (GPU: 0.2 TFLOP, 16 MiB) on an idle device."""
        size, kind, runs = (2048, torch.bfloat16, 10) if self.on_gpu else (512, torch.float, 1)
        factor, begin = torch.ones(size, size, dtype=kind, device=self.device), time.perf_counter()
        for _ in range(runs):
            torch.mm(factor, factor)
        if self.on_gpu:
            torch.cuda.synchronize(self.device)
        return time.perf_counter() - begin


def slowest_rank(ranks: list[tuple[float, float, float, float]]) -> dict[str, float]:
    """Return the metrics slowest_rank and slowest_cost.

    slowest_cost is the share of a step in which the other ranks wait for the slowest rank. `ranks`
    has for each rank: elapsed seconds, seconds of waiting for batches, and both results of
    `OwnTime.take`. If matrix products were timed, the rank with the slowest product is assumed to
    compute all the time. A rank that needs half as long for the product is assumed to compute half
    of the time.
    """
    elapsed_s, longest = max(rank[0] for rank in ranks), max(rank[3] for rank in ranks)
    busy_s = [
        wait_s + (elapsed_s * product_s / longest if longest else own_s)
        for _, wait_s, own_s, product_s in ranks
    ]
    slowest = busy_s.index(max(busy_s))
    others_s = (sum(busy_s) - busy_s[slowest]) / (len(busy_s) - 1)
    return {"slowest_rank": slowest, "slowest_cost": (busy_s[slowest] - others_s) / elapsed_s}
