"""Callbacks with `metrics()` for each training log; docs/metrics.md explains every figure."""

import logging
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from accelerate.utils import extract_model_from_parallel
from transformers import TrainerCallback, TrainerControl, TrainerState
from typing_extensions import override

from utils.callbacks.stragglers import OwnTime, slowest_rank
from utils.data.loader import TrainLoader
from utils.host.collectives import gathered
from utils.model.architecture import MISFITS
from utils.model.flops import effective_length, peak_flops, token_products

logger = logging.getLogger(__name__)


class MixtureShares(TrainerCallback):
    """Tokens and epochs of each source of a mixture, from step 0 over all starts.

    Sources have the short names of utils/data/loader.py. The weights in `train_data` are shares of
    the sequences. Shares of the tokens differ if some sources have more padding. A run on one
    dataset gets no figures.
    """

    @override
    def on_train_begin(self, *_: Any, **kwargs: Any) -> None:
        """Keep the loader; log the requested mixture."""
        self.loader: TrainLoader = kwargs["train_dataloader"]
        names, shares = self.loader.tokens_seen.names, self.loader.batch_sampler.order.shares()
        if len(names) > 1:
            tokens = shares * [plan.sequence_tokens.mean() for plan in self.loader.dataset.plans]
            asked = (
                f"{name} {share:.1%} of the sequences (of the tokens {own / tokens.sum():.1%})"
                for name, share, own in zip(names, shares, tokens, strict=True)
            )
            logger.info("mixture: %s", ", ".join(asked))

    def metrics(self) -> dict[str, float]:
        """Return the figures of all sources, up to the step that Throughput counted last."""
        seen, sampler = self.loader.tokens_seen, self.loader.batch_sampler
        if len(seen.names) == 1:
            return {}
        total = max(sum(seen.by_name[name] for name in seen.names), 1)
        epochs = sampler.order.epochs_before(seen.steps * sampler.global_batch_size)
        figures: dict[str, float] = {}
        for name, epoch in zip(seen.names, epochs, strict=True):
            figures[f"tokens_seen/{name}"] = seen.by_name[name]
            figures[f"tokens_share/{name}"] = seen.by_name[name] / total
            figures[f"epochs/{name}"] = epoch
        return figures


class Throughput(TrainerCallback):
    """Speed over the steps since the last training log, without evaluations and saves.

    The clock is read after the log's own wait for the device, so no step between two logs waits.
    Before an evaluation or a save this callback waits for the device, which these would do anyway.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock
        self.first_step_time_s: float | None = None
        self.window_step: int | None = None  # None until this start's first step is done
        self.flops_per_token = 0.0  # of the model, both passes; 0 if they cannot be counted
        self.mfu_per_rate: float | None = None  # MFU of one token per second and device
        self.graphs = self.graphs_before = 0
        self.own: OwnTime | None = None  # None with one rank

    @override
    def on_train_begin(self, args: Any, *_: Any, **kwargs: Any) -> None:
        """Keep the loader; prepare to count FLOPs and this rank's own time."""
        self.loader: TrainLoader = kwargs["train_dataloader"]
        self.world_size = args.world_size
        if "model" in kwargs:
            self._count_flops(kwargs["model"], args.device)
            if self.world_size > 1:
                self.own = OwnTime(extract_model_from_parallel(kwargs["model"]), args.device)
        self._leave_out()
        self.elapsed_s = 0.0

    def _count_flops(self, model: Any, device: torch.device) -> None:
        """Count and log the model FLOPs per token. Without a known peak there is no MFU."""
        shares = self.loader.batch_sampler.order.shares()
        seen = effective_length(self.loader.dataset.plans, shares)
        try:
            flops = token_products(extract_model_from_parallel(model)).flops(seen)
        except MISFITS as error:
            logger.warning(
                "MFU and total_flos are left out: the model's products cannot be counted (%r)",
                error,
            )
            return
        peak = peak_flops(device)
        known = "peak unknown, so no MFU"
        if peak is not None:
            known = f"MFU of {torch.cuda.get_device_name(device)}'s {peak / 1e12:g} TFLOP/s in bf16"
        document = f"a token's document has {seen:,.0f} tokens on average"
        logger.info(f"model: {flops / 1e9:.3g} GFLOPs a token ({document}); {known}")
        self.flops_per_token = flops
        self.mfu_per_rate = None if peak is None else flops / peak

    @override
    def on_step_end(
        self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Count the step's time. After the first step of this start, begin the window."""
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
            self.first_step_time_s = self.elapsed_s
            self._begin_window()

    def _count_time(self) -> None:
        before, graphs_before = self.counted_until, self.graphs_before
        self._leave_out()
        self.elapsed_s += self.counted_until - before
        self.graphs += self.graphs_before - graphs_before

    def _leave_out(self, *_: Any, **__: Any) -> None:
        """Restart the clock, so that the evaluation of a split or a save does not count."""
        self.counted_until, self.graphs_before = self.clock(), _compiled_graphs()

    on_evaluate = on_save = _leave_out

    def _begin_window(self) -> None:
        self.window_step, self.elapsed_s, self.graphs = self.step, 0.0, 0
        self.window_wait_s = self.loader.wait_s
        self.window_tokens = self.loader.tokens_seen.count(self.step)

    def metrics(self) -> dict[str, float]:
        """Return the speed since the last call; collective over ranks."""
        assert self.window_step is not None, "metrics() belongs to a training log, after a step"
        steps = self.step - self.window_step
        self._count_time()
        figures: dict[str, float] = {"tokens_seen": self.loader.tokens_seen.count(self.step)}
        if self.first_step_time_s is not None:
            figures["first_step_time_s"] = self.first_step_time_s
            self.first_step_time_s = None
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
            if self.graphs:
                figures["graphs_compiled"] = self.graphs
            if self.own:
                figures |= slowest_rank(ranks)
        self._begin_window()
        return figures


def _compiled_graphs() -> int:
    """Return how many graphs torch has compiled in this process or loaded from its cache."""
    dynamo = sys.modules.get("torch._dynamo.utils")  # absent until something is compiled
    return int(dynamo.counters["stats"]["unique_graphs"]) if dynamo else 0
