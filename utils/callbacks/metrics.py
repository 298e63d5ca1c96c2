"""The base of callbacks that add figures to each training log, and their reduction over ranks."""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import PrinterCallback, ProgressCallback
from typing_extensions import override

from utils.data.loader import TokenCounts, TrainLoader
from utils.model.compilation import compiled_graphs


class MetricCallback(TrainerCallback):
    """A callback with figures for every training log.

    The trainer's `log()` merges `metrics()` of each of them into a training log before any logger
    sees it; all ranks call it together, at the same step. The journal, on rank 0, then asks for
    `details()` and `report()`, which start no communication.
    """

    device: torch.device = torch.device("cpu")

    @override
    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        """Note the device that the ranks communicate on."""
        self.device = args.device

    def metrics(self) -> dict[str, float]:
        """Return the figures since the last call, units in their names; collective over ranks."""
        return {}

    def carried(self) -> dict[str, Any]:
        """Return JSON for the checkpoint, of what was not logged yet; collective over ranks."""
        return {}

    def details(self) -> dict[str, Any]:
        """Return JSON beside the figures of the last `metrics()`, for the journal alone."""
        return {}

    def report(self) -> str | None:
        """Return one line for people about the last `metrics()`; None when nothing is new."""
        return None


def gather_over_ranks(values: Sequence[float], device: torch.device) -> np.ndarray:
    """Return every rank's values, float64 (ranks, values); all ranks call it with equally many.

    One small all-gather on `device`, so that it works with NCCL and gloo alike; NaN marks a figure
    that a rank does not have. A rank alone asks no device.
    """
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return np.array([list(values)], dtype=np.float64)
    own = torch.tensor(list(values), dtype=torch.float64, device=device)
    rows = [torch.empty_like(own) for _ in range(torch.distributed.get_world_size())]
    torch.distributed.all_gather(rows, own)
    return torch.stack(rows).cpu().numpy()


# The mean loss of a run's steps, over all of its starts.


@dataclass
class RunLoss:
    """Adds up what training logs say; Trainer's own sum begins anew with every start."""

    total: float = 0.0
    steps: int = 0
    through: int = 0  # the last step that is counted

    @classmethod
    def carried(cls, values: Mapping[str, Any], logged: int) -> "RunLoss":
        """Return what a checkpoint carries; of one that carries none, one that begins there.

        logged: the last step that a log counted.
        """
        return cls(**values.get("run_loss", {"through": logged}))

    def count(self, step: int, mean: float) -> None:
        """Count the steps since the last call up to `step`, with their mean loss."""
        steps = step - self.through
        self.total += mean * steps
        self.steps += steps
        self.through = step

    def mean(self) -> float | None:
        """Return the mean over all steps counted; None if there is none."""
        return self.total / self.steps if self.steps else None


# Which of Trainer's own reporters a run keeps: a progress bar on a terminal, else none.


class TerminalProgress(ProgressCallback):
    """Trainer's progress bars without its log lines: the journal writes those."""

    @override
    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Print nothing."""


def reporting_callbacks(is_terminal: bool) -> list[TrainerCallback]:
    """Return what stands beside the journal: bars on a terminal, nothing in a file."""
    return [TerminalProgress()] if is_terminal else []


def remove_default_reporting(trainer: Trainer) -> None:
    """Take Trainer's own printer and bar away, whichever it added; ours stay."""
    for callback in list(trainer.callback_handler.callbacks):
        # By exact type: TerminalProgress is a ProgressCallback too.
        if type(callback) in (PrinterCallback, ProgressCallback):
            trainer.remove_callback(callback)


# Logs what each of several training datasets has given to the run so far.

logger = logging.getLogger(__name__)


class MixtureShares(MetricCallback):
    """The sources of a mixture, in figures that count from step 0 over all starts of the run.

    tokens_seen/NAME   real tokens of the source, padding excluded
    tokens_share/NAME  its share of all of them
    epochs/NAME        how often its rows were gone through; a source that runs out is repeated

    NAME is the short one of utils/data/loader.py. Silent with one dataset. The weights of
    `train_data` are shares of the sequences: those of tokens differ as far as the sources fill
    their sequences differently, which is said at the start.
    """

    def __init__(self) -> None:
        self.step = 0

    @override
    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Take the loader over; say what was asked for."""
        self.loader: TrainLoader = kwargs["train_dataloader"]
        self.step = state.global_step
        if self._is_mixture:
            logger.info("mixture: %s", self._asked())

    @property
    def _is_mixture(self) -> bool:
        return len(self.loader.tokens_seen.names) > 1

    @override
    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Note the step."""
        self.step = state.global_step

    def metrics(self) -> dict[str, float]:
        """Return the figures of all sources; every rank counts the global batches itself."""
        if not self._is_mixture:
            return {}
        seen = self.loader.tokens_seen
        seen.count(self.step)
        counts = seen.by_source
        figures: dict[str, float] = {}
        shares = counts / max(int(counts.sum()), 1)
        sampler = self.loader.batch_sampler
        epochs = sampler.order.epochs_before(self.step * sampler.global_batch_size)
        for name, tokens, share, epoch in zip(seen.names, counts, shares, epochs, strict=True):
            figures[f"tokens_seen/{name}"] = int(tokens)
            figures[f"tokens_share/{name}"] = float(share)
            figures[f"epochs/{name}"] = epoch
        return figures

    def _asked(self) -> str:
        dataset, order = self.loader.dataset, self.loader.batch_sampler.order
        sequences = order.shares()
        per_row = np.array([plan.tokens / plan.sequences for plan in dataset.plans])
        tokens = sequences * per_row / (sequences * per_row).sum()
        return ", ".join(
            f"{name} {own:.1%} of the sequences (of the tokens {of_tokens:.1%})"
            for name, own, of_tokens in zip(
                self.loader.tokens_seen.names, sequences, tokens, strict=True
            )
        )


# Measures training speed: tokens per second, time per step, time spent waiting for data.


class MeasuredLoader(Protocol):
    """What a training loader tells about itself."""

    wait_s: float  # seconds that this rank has waited for batches so far
    tokens_seen: TokenCounts


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
        self.loader.tokens_seen.count(self.step)
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
        self.window_tokens = self.loader.tokens_seen.count(self.step)
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
        tokens_seen = self.loader.tokens_seen.count(self.step)
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


# Says what compiling costs, and that nothing is compiled again once all shapes were met.


class CompilationWatch(TrainerCallback):
    """Rank 0 says how long the first step took, and each rank warns of a later compilation.

    Evaluations have shapes of their own, and their first one compiles too.
    """

    def __init__(self) -> None:
        self.graphs: int | None = None  # None: the first step of this start is not done
        self.graphs_before = 0
        self.began_at = 0.0

    @override
    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Note when the first step begins, and what was compiled before it."""
        if self.graphs is None:
            self.began_at = time.perf_counter()
            self.graphs_before = compiled_graphs()

    @override
    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Compare with the graphs that there were before this step."""
        graphs = compiled_graphs()
        if self.graphs is None:
            seconds = time.perf_counter() - self.began_at
            made = graphs - self.graphs_before
            logger.info("compile: %d graphs; the first step took %.1f s", made, seconds)
        elif graphs > self.graphs:
            logger.warning(
                "step %d compiled %d graphs more, though its shapes are those of the steps before: "
                "TORCH_LOGS=recompiles says why, and with --compile false nothing waits for it",
                state.global_step,
                graphs - self.graphs,
            )
        self.graphs = graphs

    @override
    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Take the graphs of the evaluation for known."""
        if self.graphs is not None:
            self.graphs = compiled_graphs()
