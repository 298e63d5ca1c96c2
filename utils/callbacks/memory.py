"""Memory of each rank in training, evaluations and saves, and the headroom of a GPU."""

import logging
import resource
from collections.abc import Mapping, Sequence
from typing import Any

import psutil
import torch
from transformers import TrainerCallback, TrainerState
from typing_extensions import override

from utils.host.collectives import gathered
from utils.host.machine import host_name

logger = logging.getLogger(__name__)

GIB = 1024**3
LEFT = ("memory_free_gib", "memory_headroom_gib")  # the worst rank has the least


class MemoryMonitor(TrainerCallback):
    """Memory in GiB of the worst rank, most used or least free; `by_rank` has all ranks and hosts.

    torch's allocator counts the device memory. Host memory is the memory of this process without
    its workers. A peak belongs to training, to the evaluation of a split or to a save, and counts
    from the last line of the journal. `sequence_bytes` is the predicted memory of one more sequence
    in a micro-batch.
    """

    by_rank: Sequence[Mapping[str, Any]] = ()  # as of the last line of the journal
    # The training peak that an evaluation or a save would reset; the number of training logs.
    peak_bytes = logs = 0

    def __init__(self, sequence_bytes: int = 0) -> None:
        self.sequence_bytes = sequence_bytes

    @override
    def on_train_begin(self, args: Any, *_: Any, **kwargs: Any) -> None:
        """Begin to measure the peak here, so that loading the model does not count."""
        self.device, self.rows = args.device, args.per_device_train_batch_size
        self._new_peak()

    def _new_peak(self) -> int:
        """Begin a new peak measurement; return the last peak in bytes, 0 on a CPU."""
        if self.device.type != "cuda":
            return 0
        peak = torch.cuda.max_memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        return peak

    @override
    def on_step_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Save the training peak before an evaluation or a save resets it."""
        if control.should_evaluate or control.should_save:
            self.peak_bytes = max(self.peak_bytes, self._new_peak())

    def metrics(self) -> dict[str, float]:
        """Return the worst rank's figures of training; collective over ranks."""
        self.measure(self.peak_bytes)
        self.peak_bytes, self.logs = 0, self.logs + 1
        if self.logs == 2 and self.sequence_bytes and self.device.type == "cuda":
            logger.info("memory: %s", self.headroom())  # later steps have the same peak
        figures = {name: [one[name] for one in self.by_rank] for name in self.by_rank[0]}
        del figures["rank"], figures["host"]
        return {name: (min if name in LEFT else max)(each) for name, each in figures.items()}

    def measure(self, before: int = 0) -> Sequence[Mapping[str, Any]]:
        """Return all ranks' memory; the peak is at least `before` bytes. Collective over ranks."""
        peak_bytes = max(before, self._new_peak())
        resident = psutil.Process().memory_info().rss
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # may lag behind
        own: dict[str, float] = {
            "host_rss_gib": resident, "host_peak_rss_gib": max(peak, resident)
        }  # fmt: skip
        if self.device.type == "cuda":
            free, total = torch.cuda.mem_get_info(self.device)
            reserved = torch.cuda.memory_reserved(self.device)
            own |= {"memory_allocated_gib": torch.cuda.memory_allocated(self.device)}
            own |= {"memory_reserved_gib": reserved, "memory_peak_gib": peak_bytes}
            own |= {"memory_free_gib": free, "memory_total_gib": total}
            # CUDA itself and other processes use the rest.
            own["memory_headroom_gib"] = free + reserved - peak_bytes
        own = {name: size_bytes / GIB for name, size_bytes in own.items()}
        ranks = gathered((host_name(), own))
        self.by_rank = [
            {"rank": rank, "host": host, **sizes} for rank, (host, sizes) in enumerate(ranks)
        ]
        return self.by_rank

    def headroom(self) -> str:
        """Return the memory that the fullest GPU has left, and the micro-batch that would fit."""
        least = min(self.by_rank, key=lambda sizes: sizes["memory_headroom_gib"])
        room, total = least["memory_headroom_gib"], least["memory_total_gib"]
        fits = self.rows + max(int(room * GIB / (1.1 * self.sequence_bytes)), 0)  # 1.1: a margin
        fitting = f"{fits} would fit, " if fits > self.rows else ""
        where = f"{room:.1f} GiB of {total:.1f} on rank {least['rank']} ({least['host']})"
        return f"headroom {where}: micro-batch {fitting}{fits + 1} would not (predicted)"


def fullest_rank(line: Mapping[str, Any]) -> str:
    """Return " (rank 3 on n2)", the rank with the highest GPU peak; "" if all are about alike."""
    *_, last = ranks = sorted(line["memory_by_rank"], key=lambda one: one["memory_peak_gib"])
    apart = last["memory_peak_gib"] > 1.1 * ranks[0]["memory_peak_gib"]
    return f" (rank {last['rank']} on {last['host']})" * apart
