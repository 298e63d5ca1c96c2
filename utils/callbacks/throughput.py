"""Measures training speed: tokens per second, time per step, time spent waiting for data."""

import time
from collections.abc import Callable
from typing import Any, Protocol

import torch
from transformers import TrainerControl, TrainerState, TrainingArguments
from typing_extensions import override

from utils.callbacks.metrics import MetricCallback, gather_over_ranks
from utils.data.consumed import ConsumedTokens


class MeasuredLoader(Protocol):
    """What a training loader tells about itself."""

    wait_s: float  # seconds that this rank has waited for batches so far
    consumed: ConsumedTokens


class Throughput(MetricCallback):
    """Speed over the steps since the last training log, evaluation and saving left out.

    tokens_per_s             real tokens of the global batches over all ranks, padding excluded
    tokens_per_s_per_device  the same, per rank
    step_time_s              mean wall time of an optimizer step, slowest rank
    data_wait_s              mean wait for batches per step, slowest rank
    tokens_seen              real tokens since step 0, over all starts of the run
    first_step_time_s        in the first log after a start only: the first step (allocation,
                             compilation, data start-up), which no other figure includes

    The clock is read after the log's own wait for the device, so no step between two logs waits.
    A step before an evaluation or a save is waited for, as these would do anyway.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock
        self.loader: MeasuredLoader | None = None
        self.world_size = 1
        self.step = 0
        self.window_step: int | None = None  # None until the first step of this start is done
        self.window_start = 0.0
        self.window_wait_s = 0.0
        self.window_tokens = 0
        self.interrupted_at = 0.0
        self.excluded_s = 0.0
        self.first_step_time_s: float | None = None

    @override
    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Take the loader over."""
        super().on_train_begin(args, state, control, **kwargs)
        self.loader = kwargs["train_dataloader"]
        self.world_size = args.world_size
        self.step = state.global_step
        self.window_step = None
        self.interrupted_at = self.window_start = self.clock()
        self.excluded_s = 0.0

    @override
    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Begin the window after the first step; mark where an interruption begins."""
        self.step = state.global_step
        first = self.window_step is None
        if first or control.should_evaluate or control.should_save:
            self._wait_for_device()
        now = self.interrupted_at = self.clock()
        # Counted now, while a GPU still works: at a log line it would wait for ten steps' counts.
        assert self.loader is not None
        self.loader.consumed.count(self.step)
        if first:
            self.first_step_time_s = now - self.window_start - self.excluded_s
            self._begin_window(now)

    @override
    def on_evaluate(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        """Leave the evaluation of one split out."""
        self._end_interruption()

    @override
    def on_save(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        """Leave the writing of a checkpoint out."""
        self._end_interruption()

    def _end_interruption(self) -> None:
        now = self.clock()
        self.excluded_s += now - self.interrupted_at
        self.interrupted_at = now

    def _begin_window(self, now: float) -> None:
        assert self.loader is not None
        self.window_step, self.window_start, self.excluded_s = self.step, now, 0.0
        self.window_wait_s = self.loader.wait_s
        self.window_tokens = self.loader.consumed.count(self.step)
        self.interrupted_at = now

    def _wait_for_device(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def metrics(self) -> dict[str, float]:
        """Return the speed since the last call; collective over ranks."""
        assert self.loader is not None
        assert self.window_step is not None, "metrics() belongs to a training log, after a step"
        now = self.clock()
        steps = self.step - self.window_step
        tokens_seen = self.loader.consumed.count(self.step)
        tokens = tokens_seen - self.window_tokens
        figures: dict[str, float] = {}
        if self.first_step_time_s is not None:
            figures["first_step_time_s"] = self.first_step_time_s
            self.first_step_time_s = None
        if steps:
            own = [
                now - self.window_start - self.excluded_s,
                self.loader.wait_s - self.window_wait_s,
            ]
            elapsed_s, wait_s = gather_over_ranks(own, self.device).max(axis=0)
            figures["tokens_per_s"] = float(tokens / elapsed_s)
            figures["tokens_per_s_per_device"] = float(tokens / elapsed_s / self.world_size)
            figures["step_time_s"] = float(elapsed_s / steps)
            figures["data_wait_s"] = float(wait_s / steps)
        figures["tokens_seen"] = tokens_seen
        self._begin_window(now)
        return figures
