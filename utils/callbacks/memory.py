"""Each rank's device and host memory, with peaks of training, evaluation and saving apart."""

import resource
import sys
from typing import Any

import numpy as np
import psutil
import torch
from transformers import TrainerControl, TrainerState, TrainingArguments
from typing_extensions import override

from utils.callbacks.metrics import MetricCallback, gather_over_ranks
from utils.support.collectives import gathered
from utils.support.host import host_name

GIB = 1024**3
PHASES = ("train", "eval", "save")
_FIGURES = (
    "memory_allocated_gib",
    "memory_reserved_gib",
    "memory_free_gib",
    *(f"memory_peak_{phase}_gib" for phase in PHASES),
    "host_rss_gib",
    "host_peak_rss_gib",
)


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
        self.peaks_bytes: dict[str, float] = {}
        self.hosts = [host_name()]
        self.figures = np.full((1, len(_FIGURES)), np.nan)

    @override
    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Start the peaks here: loading the model is none of the phases."""
        super().on_train_begin(args, state, control, **kwargs)
        self.hosts = gathered(host_name())
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
        current: list[float] = [np.nan] * 3
        if self.device.type == "cuda":
            current = [
                torch.cuda.memory_allocated(self.device),
                torch.cuda.memory_reserved(self.device),
                torch.cuda.mem_get_info(self.device)[0],
            ]
        peaks = [self.peaks_bytes.get(phase, np.nan) for phase in PHASES]
        host = [psutil.Process().memory_info().rss, _peak_rss_bytes()]
        own = [value / GIB for value in [*current, *peaks, *host]]
        self.figures = gather_over_ranks(own, self.device)
        return {
            name: float(column.min() if name == "memory_free_gib" else column.max())
            for name, column in zip(_FIGURES, self.figures.T, strict=True)
            if not np.isnan(column).any()
        }

    @override
    def details(self) -> dict[str, Any]:
        """Return rank, host and figures in GiB of each rank, as of the last `metrics()`."""
        ranks = [
            {"rank": rank, "host": self.hosts[rank]}
            | {
                name: round(float(value), 3)
                for name, value in zip(_FIGURES, values, strict=True)
                if not np.isnan(value)
            }
            for rank, values in enumerate(self.figures)
        ]
        return {"memory_by_rank": ranks}


def _peak_rss_bytes() -> int:
    """Return the highest resident set of this process; getrusage counts KiB (bytes on macOS)."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
