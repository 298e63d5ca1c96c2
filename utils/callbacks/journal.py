"""Writers of metrics.jsonl and of the log lines of a run, and a live view on a terminal.

utils/host/journal_file.py reads metrics.jsonl.
"""

import atexit
import contextlib
import dataclasses
import logging
import math
import os
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text
from transformers import TrainerCallback, TrainerState
from typing_extensions import override

from utils.callbacks.memory import MemoryMonitor, fullest_rank
from utils.callbacks.progress import Phase, Progress
from utils.callbacks.stop import StopWatch
from utils.checkpoints.discovery import DAMAGED, set_aside
from utils.checkpoints.store import Checkpoints
from utils.host.journal_file import FILE_NAME, duration, read_lines, skipped_message, strict_json
from utils.host.run_lock import last_lost_lock_message
from utils.launch.ledger import Fault, number_from_environment, record_faults

logger = logging.getLogger(__name__)

READ_BYTES = 2**26  # read at the end of metrics.jsonl; other ranks wait meanwhile
LEVELS = "▁▂▃▄▅▆▇█"
LONG_S = 5.0  # a phase that takes longer shows its time on the terminal


class Journal(TrainerCallback):
    """A callback that writes metrics.jsonl (see docs/metrics.md) and log lines, on rank 0.

    `gpus`: the UUID of each rank's GPU.
    """

    def __init__(
        self, checkpoints: Checkpoints, memory: MemoryMonitor, stop: StopWatch,
        gpus: Sequence[str] = (),
    ):  # fmt: skip
        self.path = checkpoints.output_dir / FILE_NAME
        self.checkpoints, self.memory = checkpoints, memory
        self.stop = stop
        self.gpus, self.slowest, self.slow_times = gpus, 0, list[float]()
        self.slow_nodes: set[str] = set()  # already recorded in the ledger of bad nodes
        self.saves_written, self.memory_of = 0, dict[int, Any]()  # memory at a save, by step
        self.resumed_at = 0  # the step of the checkpoint that this process resumed from
        self.earlier: list[dict[str, Any]] = []  # lines of earlier starts, for ResumeCheck

    @override
    def on_train_begin(self, args: Any, state: TrainerState, *_: Any, **kwargs: Any) -> None:
        """Append the event `started` or `resumed` to metrics.jsonl.

        Damaged lines of metrics.jsonl stay in the file, and a warning names them.
        """
        if not state.is_world_process_zero:
            return
        try:
            with self.path.open("ab+") as file:
                file.seek(max(file.tell() - 1, 0))
                if file.read(1) not in (b"\n", b""):  # a process died while writing the last line
                    file.write(b"\n")
            self.earlier, damaged = read_lines(self.path, last=READ_BYTES, ranks=False)
            if damaged:
                logger.warning("%s: training goes on without them", skipped_message(damaged))
        except (IsADirectoryError, PermissionError) as error:
            name = set_aside(self.path, DAMAGED)
            logger.warning("%s: %s; set aside as %s", self.path, error.strerror, name)
        self.resumed_at = state.global_step
        event = "resumed" if self.resumed_at else "started"
        self.write({"event": event, "step": state.global_step, "max_steps": state.max_steps})

    @override
    def on_log(self, args: Any, state: TrainerState, *_: Any, logs: Any = None, **__: Any) -> None:
        """Append an event `train`, `eval`, `summary` or `stopped` to metrics.jsonl, and log it.

        `stopped` is not logged here, because finish_run logs a stop. All ranks must call this if
        `logs` has the loss of a held-out split.
        """
        losses = [key for key in logs or () if key.startswith("eval_") and key.endswith("_loss")]
        if losses:
            self.memory.measure()
        if not state.is_world_process_zero or not logs:
            return
        self._write_saves()  # of checkpoints that the background writer completed meanwhile
        line: dict[str, Any] = {"event": "train", "step": state.global_step, **logs}
        line["max_steps"] = state.max_steps
        if losses:
            split = losses[0].removeprefix("eval_").removesuffix("loss").removesuffix("_")
            line |= {"event": "eval", "split": split or None}
        elif "train_runtime" in logs:
            # Trainer's log at the end of training.
            stopped = {"event": "stopped", "reason": self.stop.reason}
            line |= stopped if self.stop.stopped else {"event": "summary"}
            logged = [entry["loss"] for entry in state.log_history if "loss" in entry]
            if logged:
                line["last_loss"] = logged[-1]
            line["resumed_at"] = self.resumed_at  # train_runtime and rates count from this step
        if line["event"] in ("train", "eval"):
            line["memory_by_rank"] = self.memory.by_rank
            if "slowest_rank" in logs:
                line["slowest_host"] = self.memory.by_rank[logs["slowest_rank"]]["host"]
                self._note_slow_node(line)
        self.write(line)
        if line["event"] != "stopped":
            logger.info("%s", readable_line(line, self.stop.limit_s()))

    def _note_slow_node(self, line: Mapping[str, Any]) -> None:
        """Record a node in the ledger of bad nodes if one of its ranks is slow.

        A rank is slow if it was the slowest rank in at least 10 logs in a row and for at least 300
        s. In each of these logs, the other ranks must have waited for this rank for more than
        STOKER_SLOW_SHARE of a step (default 0.1). The value 0 turns this check off. A node is
        recorded only once. line: the newest training log.
        """
        rank, cost, node = line["slowest_rank"], line["slowest_cost"], line["slowest_host"]
        slow = cost > number_from_environment("STOKER_SLOW_SHARE", 0.1) > 0
        if not slow or rank != self.slowest:
            self.slow_times = []
        self.slowest = rank
        self.slow_times += [time.monotonic()] * slow
        long = slow and self.slow_times[-1] - self.slow_times[0] >= SLOW_S
        if long and len(self.slow_times) >= SLOW_LOGS and node not in self.slow_nodes:
            self.slow_nodes.add(node)
            cause = f"rank {rank} is slowest: the others wait {cost:.0%} of a step for it"
            fault = Fault(node, "slow", cause, self.gpus[rank] if self.gpus else "")
            logger.warning("slow node %s: %s. %s", node, cause, record_faults([fault]))

    @override
    def on_save(self, args: Any, state: TrainerState, *_: Any, **kwargs: Any) -> None:
        """Measure memory; append an event `save` per new checkpoint. All ranks must call this."""
        memory = self.memory.measure()
        if state.is_world_process_zero:
            self.memory_of[state.global_step] = memory
            self._write_saves()

    def _write_saves(self) -> None:
        for save in self.checkpoints.saves[self.saves_written :]:
            memory = {"memory_by_rank": self.memory_of.pop(save.step, ())}
            self.write({"event": "save", **dataclasses.asdict(save), **memory})
            self.saves_written += 1

    def write(self, line: Mapping[str, Any]) -> None:
        """Append a line to metrics.jsonl. Do nothing if another job has locked the directory."""
        if last_lost_lock_message(self.path.parent) is not None:
            return
        text = strict_json({**line, "time": round(time.time(), 3)})
        with self.path.open("a", encoding="utf-8") as file:
            file.write(text + "\n")


# Formats of metrics. Most have a fixed width, so that log lines align.
_FIGURES = {
    "loss": "loss {:7.4f}",
    "perplexity": "perplexity {:.4g}",
    "accuracy": "accuracy {:.1%}",
    "learning_rate": "lr {:.2e}",
    "grad_norm": "grad {:7.3f}",
    "tokens_per_s": "{:>9,.0f} tokens/s",
    "mfu": "MFU {:5.1%}",
    "step_time_s": "{:6.3g} s/step",
    "memory_peak_gib": "memory {:.1f} GiB",
    "memory_free_gib": "{:.1f} free",
    "train_loss": "mean loss {:.4f}",
}
# A NaN of these metrics is a fault, and is shown. A NaN of other metrics means no value.
_SHOWN_NAN = ("loss", "grad_norm")
SLOW_LOADER = 0.01  # share of a step; longer waits for data are shown
SLOW_LOGS, SLOW_S = 10, 300.0  # least logs in a row and least time for `_note_slow_node`
SLOW_RANK = 0.03  # share of a step; longer waits for the slowest rank are shown


def readable_line(line: Mapping[str, Any], limit_s: float | None = None) -> str:
    """Return the text of the log line for an event of metrics.jsonl (`line`).

    In the text, `eta` is the time for the remaining steps, without evaluations and saves.
    limit_s: the seconds until the job's time limit, or None without a limit.
    """
    event, step, prefix, ending = line["event"], line["step"], "", []
    if event == "eval":
        named = ["eval", *([line["split"]] if line["split"] else [])]
        begin, prefix, ending = " ".join(named), "_".join(named) + "_", [f"(step {step})"]
    elif event in ("summary", "stopped"):
        ended = "stopped" if event == "stopped" else "finished"
        since = f", resumed at step {line['resumed_at']}" if line.get("resumed_at") else ""
        begin = f"{ended} at step {step}{since} after {duration(line['train_runtime'])}"
    else:
        begin = f"step {step:>{len(str(line['max_steps']))}}/{line['max_steps']}"
        ending = _remarks(line, limit_s)
    figures = [
        text.format(line[prefix + key]) + (fullest_rank(line) if "peak" in key else "")
        for key, text in _FIGURES.items()
        if prefix + key in line and (key in _SHOWN_NAN or math.isfinite(line[prefix + key]))
    ]
    return "  ".join([begin, *figures, *ending])


def _remarks(line: Mapping[str, Any], limit_s: float | None) -> list[str]:
    remarks, step_s = [], line.get("step_time_s")
    if step_s is not None:
        left_s = line.get("remaining_s", step_s * (line["max_steps"] - line["step"]))
        if round(left_s):
            limit = "" if limit_s is None else f" (time limit {duration(limit_s)})"
            remarks.append(f"eta {duration(left_s)}{limit}")
        if (share := line.get("data_wait_s", 0.0) / step_s) > SLOW_LOADER:
            remarks.append(f"waits for data {share:.0%}")
        if (cost := line.get("slowest_cost", 0.0)) > SLOW_RANK:
            rank = f"rank {line['slowest_rank']} on {line['slowest_host']}"
            remarks.append(f"{rank} is slowest: the others wait {cost:.0%} of a step for it")
    if "first_step_time_s" in line:
        remarks.append(f"first step {line['first_step_time_s']:.1f} s")
    if "recovery_s" in line:
        remarks.append(f"{line['recovery_s']:.1f} s after the crash")
    if graphs := line.get("graphs_compiled"):
        remarks.append(f"compiled {graphs} graph{'s' * (graphs > 1)} meanwhile")
    return remarks


class LiveView(TrainerCallback):
    """A display of rank 0's progress and last training log at the bottom of a terminal.

    A thread of the library rich draws the display. This thread waits for no device and no rank. The
    setting disable_tqdm turns the display off.
    """

    def __init__(self, progress: Progress, stop: StopWatch):
        self.progress, self.stop, self.live = progress, stop, contextlib.ExitStack()
        self.figures: dict[str, Any] = {}
        self.losses: deque[float] = deque(maxlen=24)  # in the sparkline

    @override
    def on_train_begin(self, args: Any, state: Any, *_: Any, **kwargs: Any) -> None:
        if args.disable_tqdm or args.process_index or not fits_terminal():
            return
        self.state = state
        for logs in state.log_history:  # logs before a resume
            self.on_log(logs=logs)
        # With soft_wrap the terminal wraps log lines, and rich does not.
        console, before = Console(highlight=False, soft_wrap=True), sys.stdout
        self.live.enter_context(Live(  # redraws take a millisecond or two of a CPU core
            console=console, get_renderable=self._rendered, refresh_per_second=2, transient=True,
            redirect_stderr=sys.stderr.isatty(),
        ))  # fmt: skip
        console.show_cursor(True)  # a killed process could not make the cursor visible again
        for handler in logging.root.handlers:
            if isinstance(handler, logging.StreamHandler) and handler.stream is before:
                handler.setStream(sys.stdout)  # now rich's stream
                self.live.callback(handler.setStream, before)
        atexit.register(self.live.close)  # after an error or Ctrl-C

    def close(self) -> None:
        """Remove the display from the terminal; let the log write to stdout directly again."""
        self.live.close()

    @override
    def on_log(self, *_: Any, logs: Mapping[str, Any] | None = None, **__: Any) -> None:
        if logs and "loss" in logs:
            self.figures = dict(logs)
            self.losses += [logs["loss"]] if math.isfinite(logs["loss"]) else []

    def _rendered(self) -> Group:
        step, steps, now = self.state.global_step, self.state.max_steps, self.progress
        doing = str(now.phase)
        if now.phase == Phase.EVALUATE and now.split:
            doing += f" {now.split} {now.batches_done}/{now.batches}"
        if (since_s := time.monotonic() - now.since) > LONG_S:
            doing += f", for {duration(since_s)}"
        values = list(self.losses)  # a copy: another thread may append a loss
        low = min(values, default=0.0)
        scale = (len(LEVELS) - 1) / ((max(values, default=low) - low) or 1.0)
        losses = "".join(LEVELS[round((value - low) * scale)] for value in values)
        row = Table.grid(padding=(0, 1))
        row.add_row(
            f"{step / max(steps, 1):4.0%}", ProgressBar(steps, step, 20), losses, Text(doing)
        )
        event = {**self.figures, "event": "train", "step": step, "max_steps": steps}
        line = Text(readable_line(event, self.stop.limit_s()), no_wrap=False, overflow="fold")
        return Group(row, line)


def fits_terminal() -> bool:
    """Return whether stdout is a terminal that can redraw lines and show Unicode characters."""
    dumb = os.environ.get("TERM", "dumb") in ("dumb", "unknown")
    return sys.stdout.isatty() and not dumb and sys.stdout.encoding.lower().startswith("utf")
