"""`profile_steps`: a trace of some steps, and what took the time of the device in them."""

import logging
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType
from transformers import TrainerCallback, TrainerState
from typing_extensions import override

from utils.data.loader import TrainLoader

logger = logging.getLogger(__name__)

DIRECTORY = "profile"
KERNELS = "kernels.txt"
SHOWN = 10
NAME_LENGTH = 90  # of a kernel: templates name theirs in thousands of characters
COLLECTIVES = ("nccl", "gloo", "c10d")


@dataclass(frozen=True)
class Share:
    """What one kernel took of the window, or one operator without those it calls."""

    name: str
    calls: int
    time_us: float


class ProfilerWindow(TrainerCallback):
    """Profiles the steps first, ..., stop - 1 on rank 0, into `output_dir`/profile.

    torch's profiler exists for these steps alone. It writes a Chrome trace, and the ten dearest
    kernels (on a CPU: operators) as a table. A profiler that does not work is a warning.
    """

    def __init__(self, first: int, stop: int, output_dir: Path):
        self.first, self.stop = first, stop
        self.directory = output_dir / DIRECTORY
        self.profiler: Any = None
        self.begun_at = 0  # the step that this start resumed after
        self.interrupted: set[str] = set()

    @override
    def on_train_begin(self, args: Any, state: TrainerState, *_: Any, **kwargs: Any) -> None:
        """Note where this start begins; take the loader over."""
        self.loader: TrainLoader = kwargs["train_dataloader"]
        self.begun_at = state.global_step
        if state.global_step >= self.first and state.is_world_process_zero:
            logger.info(
                "profile: none, this start begins after step %d, so step %d is behind it",
                state.global_step, self.first,
            )  # fmt: skip

    @override
    def on_step_begin(self, args: Any, state: TrainerState, *_: Any, **__: Any) -> None:
        """Begin before the window's first step."""
        if state.global_step != self.first - 1 or not state.is_world_process_zero:
            return
        activity = torch.profiler.ProfilerActivity
        self.device: torch.device = args.device
        on_gpu = [activity.CUDA] if self.device.type == "cuda" else []
        try:
            self._wait()
            self.profiler = torch.profiler.profile(activities=[activity.CPU, *on_gpu])
            self.profiler.start()
        except RuntimeError as error:  # of CUPTI: no permission, or another profiler has it
            logger.warning("profile: torch's profiler does not run here: %s", error)
            self.profiler = None
        self.begin_s, self.waited_s = time.perf_counter(), self.loader.wait_s

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    @override
    def on_step_end(self, args: Any, state: TrainerState, *_: Any, **__: Any) -> None:
        """End after the window's last step, and write what it showed."""
        if self.profiler is not None and state.global_step == self.stop - 1:
            self._finish(state.global_step)

    def on_evaluate(self, *_: Any, **__: Any) -> None:
        """Note that the window is not of training alone."""
        self.interrupted.add("an evaluation")

    def on_save(self, *_: Any, **__: Any) -> None:
        """Note that the window is not of training alone."""
        self.interrupted.add("a save")

    @override
    def on_train_end(self, args: Any, state: TrainerState, *_: Any, **__: Any) -> None:
        """End a window that a stop has cut."""
        if self.profiler is not None:
            self._finish(state.global_step)

    def _finish(self, last: int) -> None:
        self._wait()
        window_s = time.perf_counter() - self.begin_s
        waited_s = self.loader.wait_s - self.waited_s
        profiler, self.profiler = self.profiler, None
        trace = self.directory / f"steps{self.first}-{last}-rank0.json.gz"
        try:
            profiler.stop()
            self.directory.mkdir(exist_ok=True)
            profiler.export_chrome_trace(str(trace))
            on_gpu = self.device.type == "cuda"
            shares, busy_us = summarize(profiler.events(), on_gpu)
            head = f"steps {self.first} to {last}, {window_s:.3f} s with the profiler's own cost"
            if self.begun_at == self.first - 1:
                head += ", the first step of a start and what it compiles among them"
            if self.interrupted:
                head += f", with {' and '.join(sorted(self.interrupted))}"
            text = table(shares, busy_us, window_s, waited_s, on_gpu=on_gpu)
            (self.directory / KERNELS).write_text(f"{head}\n{text}", encoding="utf-8")
        except (RuntimeError, OSError) as error:
            logger.warning("profile: nothing was written: %s", error)
            return
        logger.info("profile: %s (ui.perfetto.dev opens it)\n%s", trace, f"{head}\n{text}".rstrip())


def summarize(events: Iterable[Any], on_gpu: bool) -> tuple[list[Share], float]:
    """Return kernels or operators by their time, and in how much of it any of them ran, in us."""
    times: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    spans = []
    wanted = DeviceType.CUDA if on_gpu else DeviceType.CPU
    for event in events:
        if event.device_type != wanted or event.is_user_annotation:
            continue
        # Kernels call none; of operators the part that is in none they call.
        time_us = event.time_range.elapsed_us() if on_gpu else event.self_cpu_time_total
        times[event.name] += time_us
        calls[event.name] += 1
        spans.append((event.time_range.start, event.time_range.end))
    shares = [Share(name, calls[name], time_us) for name, time_us in times.most_common()]
    return shares, covered(spans)


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """Return the length of the union of these intervals: kernels of several streams overlap."""
    total, until = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total


def table(
    shares: list[Share], busy_us: float, window_s: float, waited_s: float, *, on_gpu: bool
) -> str:
    """Return the ten dearest kernels, and for how much of the window nothing ran, and why."""
    total_us = sum(share.time_us for share in shares) or 1.0
    kind = "kernel" if on_gpu else "operator"
    lines = [f"  share      calls     mean   {kind}"]
    for share in shares[:SHOWN]:
        mean_ms, name = share.time_us / share.calls / 1e3, share.name
        name = name if len(name) <= NAME_LENGTH else f"{name[: NAME_LENGTH - 3]}..."
        lines.append(
            f"  {share.time_us / total_us:6.1%} {share.calls:9,d} {mean_ms:8.3f} ms  {name}"
        )
    communication = sum(s.time_us for s in shares if s.name.lower().startswith(COLLECTIVES))
    idle = max(0.0, 1 - busy_us / 1e6 / window_s)
    device = "the device" if on_gpu else "the CPU outside of torch's operators"
    lines.append(
        f"{device}: {'idle ' if on_gpu else ''}{idle:.1%} of the time; "
        f"waits for data {waited_s / window_s:.1%}; collectives {communication / total_us:.1%} of "
        f"all {kind}s' time"
    )
    return "\n".join(lines) + "\n"
