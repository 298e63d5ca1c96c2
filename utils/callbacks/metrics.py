"""Callbacks that add figures to each training log: speed, memory, a mixture's sources."""

import logging
import resource
import time
from collections.abc import Callable
from typing import Any

import psutil
import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from typing_extensions import override

from utils.data.loader import TrainLoader
from utils.model.compilation import compiled_graphs
from utils.support.collectives import gathered
from utils.support.host import host_name

logger = logging.getLogger(__name__)

GIB = 1024**3


class MetricCallback(TrainerCallback):
    """A callback with figures for every training log.

    The trainer's `log()` merges `metrics()` of each of them into a training log before any logger
    sees it; all ranks call it together, at the same step. The journal, on rank 0, then asks for
    `details()`, which starts no communication.
    """

    device: torch.device = torch.device("cpu")

    @override
    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Note the device that the ranks communicate on."""
        self.device = args.device

    def metrics(self) -> dict[str, float]:
        """Return the figures since the last call, units in their names; collective over ranks."""
        return {}

    def details(self) -> dict[str, Any]:
        """Return JSON beside the figures of the last `metrics()`, for the journal alone."""
        return {}


class MixtureShares(MetricCallback):
    """The sources of a mixture, in figures that count from step 0 over all starts of the run.

    tokens_seen/NAME   real tokens of the source, padding excluded
    tokens_share/NAME  its share of all of them
    epochs/NAME        how often its sequences were used; a source that runs out is repeated

    NAME is the short one of utils/data/loader.py. Silent with one dataset. The weights of
    `train_data` are shares of the sequences; shares of the tokens differ as far as the sources fill
    their sequences differently.
    """

    @override
    def on_train_begin(self, *_: Any, **kwargs: Any) -> None:
        """Take the loader over; log what was asked for."""
        self.loader: TrainLoader = kwargs["train_dataloader"]
        if len(self.loader.tokens_seen.names) > 1:
            logger.info("mixture: %s", self._asked())

    @override
    def metrics(self) -> dict[str, float]:
        """Return the figures of all sources, up to the step that Throughput counted last."""
        seen, sampler = self.loader.tokens_seen, self.loader.batch_sampler
        if len(seen.names) == 1:
            return {}
        tokens = [seen.by_name[name] for name in seen.names]
        epochs = sampler.order.epochs_before(seen.steps * sampler.global_batch_size)
        figures: dict[str, float] = {}
        for name, own, epoch in zip(seen.names, tokens, epochs, strict=True):
            figures[f"tokens_seen/{name}"] = own
            figures[f"tokens_share/{name}"] = own / max(sum(tokens), 1)
            figures[f"epochs/{name}"] = epoch
        return figures

    def _asked(self) -> str:
        names, shares = self.loader.tokens_seen.names, self.loader.batch_sampler.order.shares()
        tokens = shares * [plan.sequence_tokens.mean() for plan in self.loader.dataset.plans]
        return ", ".join(
            f"{name} {share:.1%} of the sequences (of the tokens {own / tokens.sum():.1%})"
            for name, share, own in zip(names, shares, tokens, strict=True)
        )


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
        self.first_step_time_s: float | None = None

    @override
    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Take the loader over."""
        super().on_train_begin(args, state, control, **kwargs)
        self.loader: TrainLoader = kwargs["train_dataloader"]
        self.world_size, self.step = args.world_size, state.global_step
        self.window_step: int | None = None  # until the first step of this start is done
        self.interrupted_at = self.window_start = self.clock()
        self.excluded_s = 0.0

    @override
    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Begin the window after the first step; mark where an interruption begins."""
        self.step = state.global_step
        first = self.window_step is None
        interrupted = first or control.should_evaluate or control.should_save
        if interrupted and self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        now = self.interrupted_at = self.clock()
        # Counted now, while a GPU still works: at a log line it would wait for ten steps' counts.
        self.loader.tokens_seen.count(self.step)
        if first:
            self.first_step_time_s = now - self.window_start - self.excluded_s
            self._begin_window(now)

    def _end_interruption(self, *_: Any, **__: Any) -> None:
        """Leave out the evaluation of one split, or the writing of a checkpoint."""
        now = self.clock()
        self.excluded_s += now - self.interrupted_at
        self.interrupted_at = now

    on_evaluate = on_save = _end_interruption

    def _begin_window(self, now: float) -> None:
        self.window_step, self.window_start, self.excluded_s = self.step, now, 0.0
        self.window_wait_s = self.loader.wait_s
        self.window_tokens = self.loader.tokens_seen.count(self.step)
        self.interrupted_at = now

    @override
    def metrics(self) -> dict[str, float]:
        """Return the speed since the last call; collective over ranks."""
        assert self.window_step is not None, "metrics() belongs to a training log, after a step"
        now = self.clock()
        steps = self.step - self.window_step
        tokens_seen = self.loader.tokens_seen.count(self.step)
        figures: dict[str, float] = {}
        if self.first_step_time_s is not None:
            figures["first_step_time_s"] = self.first_step_time_s
            self.first_step_time_s = None
        if steps:
            elapsed_s = now - self.window_start - self.excluded_s
            own = (elapsed_s, self.loader.wait_s - self.window_wait_s)
            elapsed_s, wait_s = map(max, zip(*gathered(own), strict=True))
            per_s = (tokens_seen - self.window_tokens) / elapsed_s
            figures["tokens_per_s"] = per_s
            figures["tokens_per_s_per_device"] = per_s / self.world_size
            figures["step_time_s"] = elapsed_s / steps
            figures["data_wait_s"] = wait_s / steps
        figures["tokens_seen"] = tokens_seen
        self._begin_window(now)
        return figures


class MemoryMonitor(MetricCallback):
    """Memory per rank: the training log gets the worst rank, the journal every rank.

    Device figures come from torch's caching allocator: allocated (tensors), reserved (taken from
    the driver) and the peak of allocated; free is what the driver has left on that device, other
    processes counted. On a CPU there are host figures only: this process's resident set and its
    highest ever; data-loading workers are processes of their own and not in it.

    A peak belongs to the phase that ends at a hook: on_step_end closes train when an evaluation or
    a save follows, on_evaluate closes eval, on_save closes save, and each closing resets the peak.
    So callbacks that ask for a save or an evaluation stand before this one.
    """

    def __init__(self) -> None:
        self.peaks_bytes: dict[str, int] = {}
        self.by_rank: list[dict[str, Any]] = []

    @override
    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Start the peaks here: loading the model is none of the phases."""
        super().on_train_begin(args, state, control, **kwargs)
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)

    @override
    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Close the training phase when another follows."""
        if control.should_evaluate or control.should_save:
            self._close("train")

    on_epoch_end = on_step_end

    @override
    def on_evaluate(self, *_: Any, **__: Any) -> None:
        self._close("eval")

    @override
    def on_save(self, *_: Any, **__: Any) -> None:
        self._close("save")

    def _close(self, phase: str) -> None:
        if self.device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(self.device)
            self.peaks_bytes[phase] = max(self.peaks_bytes.get(phase, 0), peak)
            torch.cuda.reset_peak_memory_stats(self.device)

    @override
    def metrics(self) -> dict[str, float]:
        """Return the worst rank's figures in GiB: most used, least free. Collective over ranks."""
        self._close("train")  # the open phase at a training log
        sizes = {
            "host_rss_gib": psutil.Process().memory_info().rss,
            "host_peak_rss_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        }
        if self.device.type == "cuda":
            sizes |= {
                "memory_allocated_gib": torch.cuda.memory_allocated(self.device),
                "memory_reserved_gib": torch.cuda.memory_reserved(self.device),
                "memory_free_gib": torch.cuda.mem_get_info(self.device)[0],
            }
        for phase, peak in self.peaks_bytes.items():
            sizes[f"memory_peak_{phase}_gib"] = peak
        own = {name: size / GIB for name, size in sizes.items()}
        ranks = gathered((host_name(), own))
        self.by_rank = [
            {"rank": rank, "host": host, **{name: round(gib, 3) for name, gib in figures.items()}}
            for rank, (host, figures) in enumerate(ranks)
        ]
        return {
            name: (min if name == "memory_free_gib" else max)(figures[name] for _, figures in ranks)
            for name in own
        }

    @override
    def details(self) -> dict[str, Any]:
        """Return rank, host and figures in GiB of each rank, as of the last `metrics()`."""
        return {"memory_by_rank": self.by_rank}


class CompilationWatch(TrainerCallback):
    """Warns of each step after the first one of a start that compiled again, on every rank.

    Evaluations have shapes of their own: what they compile counts for no step.
    """

    def __init__(self) -> None:
        self.graphs: int | None = None  # None: the first step of this start is not done

    @override
    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Compare with the graphs that there were before this step."""
        graphs = compiled_graphs()
        if self.graphs is not None and graphs > self.graphs:
            logger.warning(
                "step %d compiled %d graphs more, though its shapes are those of the steps before: "
                "TORCH_LOGS=recompiles shows why; --compile false avoids the wait",
                state.global_step,
                graphs - self.graphs,
            )
        self.graphs = graphs

    @override
    def on_evaluate(self, *_: Any, **__: Any) -> None:
        """Take the graphs of the evaluation for known."""
        if self.graphs is not None:
            self.graphs = compiled_graphs()
