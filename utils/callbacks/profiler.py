"""`profile_steps`: a trace of some steps, and where the time of the device went in them."""

import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.autograd import DeviceType
from transformers import TrainerCallback, TrainerControl, TrainerState
from typing_extensions import override

from utils.support.files import replace_text

logger = logging.getLogger(__name__)

SHOWN, NAMED = 10, 3  # of the dearest kernels: in the file, in the log
NAME_LENGTH = 90  # of a kernel: templates name theirs in thousands of characters
COLLECTIVES = ("nccl", "gloo:", "c10d::")
WAIT = "enumerate(DataLoader)#"  # torch's own mark around the wait for a batch
STEP = "step "  # ours


class ProfilerWindow(TrainerCallback):
    """Profiles the steps first, ..., stop - 1 on rank 0, into `output_dir`/profile.

    torch's profiler exists for these steps alone; one that does not work is a warning. A step
    begins where the one before it ends, with the wait for its data. Evaluations and saves, and the
    wait after them, are in the trace but in no figure.
    """

    def __init__(self, first: int, stop: int, output_dir: Path):
        self.first, self.stop, self.directory = first, stop, output_dir / "profile"
        self.profiler: Any = None
        self.mark: Any = None  # around the step under way
        self.remarks = ""

    @override
    def on_train_begin(self, args: Any, state: TrainerState, *_: Any, **__: Any) -> None:
        """Leave out the steps that are behind this start."""
        self.device, begun = args.device, state.global_step + 1
        self.first = max(self.first, begun)
        self.records = state.is_world_process_zero
        if self.first >= self.stop:
            logger.info("profile: none, this start begins after step %d", begun - 1)
            self.stop = 0
        elif self.first == begun:
            self.remarks = "; the first step of a start compiles and allocates, choose later ones"

    @override
    def on_step_begin(self, args: Any, state: TrainerState, *_: Any, **__: Any) -> None:
        """Begin the run's first step, or the first one behind an evaluation or a save."""
        self._begin(state.global_step + 1)

    @override
    def on_step_end(
        self, args: Any, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """End the step; write what the window showed, or begin the next one."""
        done = state.global_step
        ends = control.should_training_stop or done == self.stop - 1
        asked = {"an evaluation": control.should_evaluate, "a save": control.should_save}
        due = " and ".join(name for name, is_due in asked.items() if is_due)
        if self.mark is not None:
            if ends or due:
                self._wait()
            self.mark.__exit__(None, None, None)
            self.mark = None
        if ends:
            self._finish(done)
        elif not due:
            self._begin(done + 1)
        elif self.profiler is not None:
            self.remarks += f"; without {due} after step {done}"

    @override
    def on_train_end(self, args: Any, state: TrainerState, *_: Any, **__: Any) -> None:
        """Write what there is where an evaluation ended the run."""
        self._finish(state.global_step)

    def _begin(self, step: int) -> None:
        if not self.records or self.mark is not None or not self.first <= step < self.stop:
            return
        try:
            if self.profiler is None:
                self._wait()
                activity = torch.profiler.ProfilerActivity
                on_gpu = [activity.CUDA] if self.device.type == "cuda" else []
                profiler = torch.profiler.profile(activities=[activity.CPU, *on_gpu])
                profiler.start()
                self.profiler = profiler
            self.mark = torch.profiler.record_function(f"{STEP}{step}")
            self.mark.__enter__()
        except RuntimeError as error:  # of CUPTI: no permission, or another profiler has it
            logger.warning("profile: torch's profiler does not run here: %s", error)
            self.records = False

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _finish(self, last: int) -> None:
        """Close the window, collective over ranks; rank 0 writes what it showed."""
        if not self.first <= last < self.stop:
            return
        profiler, self.profiler, self.stop = self.profiler, None, 0
        if self.device.type == "cpu" and torch.distributed.is_initialized():
            # DDP has the gradients before gloo's threads end their events, in memory that
            # profiler.stop() frees. A barrier waits for all earlier work of this group.
            torch.distributed.barrier()
        if profiler is None:
            return
        trace = self.directory / f"steps{self.first}-{last}-rank0.json.gz"
        try:
            profiler.stop()
            self.directory.mkdir(exist_ok=True)
            profiler.export_chrome_trace(str(trace))
            rows, where = summarize(profiler.events(), self.device.type == "cuda")
            head = f"steps {self.first} to {last} of rank 0, {where}{self.remarks}"
            replace_text(self.directory / "kernels.txt", "\n".join([head, *rows, ""]))
        except (RuntimeError, OSError) as error:
            logger.warning("profile: no table of kernels: %s", error)
            return
        logger.info("profile: %s (ui.perfetto.dev opens it), kernels.txt beside it", trace)
        logger.info("profile: %s", head)
        for row in rows[: NAMED + 1]:
            logger.info("profile: %s", row)


def summarize(events: Iterable[Any], on_gpu: bool) -> tuple[list[str], str]:
    """Return a table of the dearest kernels (CPU: operators), and where the steps' time went."""
    events, kind = list(events), DeviceType.CUDA if on_gpu else DeviceType.CPU
    marks = [e for e in events if e.name.startswith(STEP) and e.device_type == DeviceType.CPU]
    steps = [(mark.time_range.start, mark.time_range.end) for mark in marks]
    total_us = sum(end - start for start, end in steps)
    times: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    computes: list[Any] = []
    collectives: list[Any] = []
    waits = []
    for event in events:
        if not any(start <= event.time_range.start < end for start, end in steps):
            continue
        if event.name.startswith(WAIT):
            waits.append(event)
        if event.device_type != kind or event.is_user_annotation:
            continue
        # Kernels call none; of operators the part that is in none they call.
        times[event.name] += event.time_range.elapsed_us() if on_gpu else event.self_cpu_time_total
        calls[event.name] += 1
        (collectives if event.name.startswith(COLLECTIVES) else computes).append(event)
    if not times:
        raise RuntimeError("the trace has no kernel of the GPU: has the user access to CUPTI?")
    if on_gpu:  # streams overlap, and kernels with the host's waits
        layers = computes, computes + collectives, computes + collectives + waits
        busy_us = np.diff([0.0, *(covered_us(layer, steps) for layer in layers)]).tolist()
    else:
        own = [sum(e.self_cpu_time_total for e in group) for group in (computes, collectives)]
        busy_us = [*own, covered_us(waits, steps)]
    shares = [f"{us / total_us:.1%}" for us in (*busy_us, max(0.0, total_us - sum(busy_us)))]
    where = (
        f"{total_us / 1e6:.3f} s with the profiler's own cost: the {'GPU' if on_gpu else 'CPU'} "
        f"computes {shares[0]}; else collectives {shares[1]}, waiting for data {shares[2]}, for "
        f"Python and launches {shares[3]}"
    )
    rows = [f" share     calls      mean  {'kernel' if on_gpu else 'operator'}"]
    for name, time_us in times.most_common(SHOWN):
        mean_ms, short = time_us / calls[name] / 1e3, name[:NAME_LENGTH]
        rows.append(f"{time_us / total_us:6.1%} {calls[name]:9,d} {mean_ms:6.3f} ms  {short}")
    return rows, where


def covered_us(events: Iterable[Any], steps: Sequence[tuple[float, float]]) -> float:
    """Return in how much of the steps any event is under way: kernels of streams overlap."""
    found = sorted((event.time_range.start, event.time_range.end) for event in events)
    ranges, total = np.array(found, dtype=np.float64).reshape(-1, 2), 0.0
    for begin, end in steps:
        starts, ends = ranges.clip(begin, end).T
        before = np.maximum.accumulate([begin, *ends])[:-1]
        total += float((ends - np.maximum(starts, before)).clip(min=0).sum())
    return total
