"""Watches each rank's device and host memory, with peaks told apart by train, eval and save."""

import resource
import sys
from typing import Any

import numpy as np
import psutil
import torch
from transformers import TrainerControl, TrainerState, TrainingArguments
from typing_extensions import override

from utils.callbacks.metrics import MetricCallback, gather_over_ranks
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
_WORST_IS_LEAST = ("memory_free_gib",)
# A maximum that grew by less than this share is not worth a line.
_NEWS = 0.05


class MemoryMonitor(MetricCallback):
    """Memory per rank: the training log gets the worst rank, the journal every rank.

    Device figures come from torch's caching allocator: allocated (tensors), reserved (taken from
    the driver) and the peak of allocated; free is what the driver has left on that device, other
    processes counted. On a CPU there are host figures only. Host figures are this process's
    resident set and its highest ever, in GiB; data-loading workers are processes of their own and
    not in it.

    A peak belongs to the phase that ends at a hook: on_step_end closes train when an evaluation or
    a save follows, on_evaluate closes eval, on_save closes save, and each closing resets the peak.
    So callbacks that ask for a save or an evaluation stand before this one.
    """

    def __init__(self) -> None:
        self.peaks_bytes: dict[str, float] = {}
        self.hosts: list[str] = []
        self.figures = np.full((1, len(_FIGURES)), np.nan)
        self.reported: dict[str, float] = {}

    @override
    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Start the peaks here: loading the model is none of the phases."""
        super().on_train_begin(args, state, control, **kwargs)
        self.hosts = _host_names()
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)

    @override
    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        """Close the training phase when another follows."""
        if control.should_evaluate or control.should_save:
            self._close("train")

    @override
    def on_epoch_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        """Close the training phase when another follows."""
        if control.should_evaluate or control.should_save:
            self._close("train")

    @override
    def on_evaluate(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        """Close the evaluation of one split."""
        self._close("eval")

    @override
    def on_save(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        """Close the writing of a checkpoint."""
        self._close("save")

    def _close(self, phase: str) -> None:
        if self.device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(self.device)
            self.peaks_bytes[phase] = max(self.peaks_bytes.get(phase, 0), peak)
            torch.cuda.reset_peak_memory_stats(self.device)

    def metrics(self) -> dict[str, float]:
        """Return the worst rank's figures in GiB: most used, least free. Collective over ranks."""
        # At a training log the open phase is train.
        self._close("train")
        self.figures = gather_over_ranks(self._own_figures(), self.device)
        return {
            name: float(column.min() if name in _WORST_IS_LEAST else column.max())
            for name, column in zip(_FIGURES, self.figures.T, strict=True)
            if not np.isnan(column).any()
        }

    def _own_figures(self) -> list[float]:
        """Return this rank's figures in GiB, in the order of _FIGURES; NaN where there is none."""
        if self.device.type == "cuda":
            current: list[float] = [
                torch.cuda.memory_allocated(self.device),
                torch.cuda.memory_reserved(self.device),
                torch.cuda.mem_get_info(self.device)[0],
            ]
        else:
            current = [np.nan] * 3
        peaks = [self.peaks_bytes.get(phase, np.nan) for phase in PHASES]
        host = [psutil.Process().memory_info().rss, _peak_rss_bytes()]
        return [value / GIB for value in [*current, *peaks, *host]]

    def by_rank(self) -> list[dict[str, Any]]:
        """Return one row per rank as of the last `metrics()`: rank, host and its figures in GiB."""
        hosts = self.hosts or [host_name()] * len(self.figures)
        return [
            {"rank": rank, "host": hosts[rank]}
            | {
                name: round(float(value), 3)
                for name, value in zip(_FIGURES, row, strict=True)
                if not np.isnan(value)
            }
            for rank, row in enumerate(self.figures)
        ]

    def details(self) -> dict[str, Any]:
        """Return every rank's row, for the journal."""
        return {"memory_by_rank": self.by_rank()}

    def report(self) -> str | None:
        """Describe the fullest rank when some maximum grew noticeably since the last line."""
        rows = self.by_rank()
        on_device = "memory_allocated_gib" in rows[0]
        peaks = [f"memory_peak_{phase}_gib" for phase in PHASES]
        watched = peaks if on_device else ["host_peak_rss_gib"]
        highest = {name: max(row.get(name, 0.0) for row in rows) for name in watched}
        if not any(highest[name] > self.reported.get(name, 0.0) * (1 + _NEWS) for name in watched):
            return None
        self.reported = highest
        fullest = max(rows, key=lambda row: max(row.get(name, 0.0) for name in watched))
        return _line(fullest, len(rows), on_device)


def _line(row: dict[str, Any], ranks: int, on_device: bool) -> str:
    where = f"rank {row['rank']} on {row['host']}" + (f", fullest of {ranks}" if ranks > 1 else "")
    host = f"host {row['host_rss_gib']:.2f} GiB (peak {row['host_peak_rss_gib']:.2f})"
    if not on_device:
        return f"memory ({where}): {host}"
    peaks = "  ".join(
        f"{phase} {row[f'memory_peak_{phase}_gib']:.2f}"
        for phase in PHASES
        if f"memory_peak_{phase}_gib" in row
    )
    return (
        f"memory ({where}): device {row['memory_allocated_gib']:.2f} GiB allocated, "
        f"{row['memory_reserved_gib']:.2f} reserved, {row['memory_free_gib']:.2f} free; "
        f"peaks {peaks}; {host}"
    )


def _host_names() -> list[str]:
    """Return each rank's host name; all ranks call it together."""
    own = host_name()
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return [own]
    names = [own] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(names, own)
    return names


def _peak_rss_bytes() -> int:
    """Return the highest resident set of this process; getrusage counts KiB (bytes on macOS)."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
