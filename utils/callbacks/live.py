"""A live display on a terminal, below the log lines: progress, losses and the current phase."""

import atexit
import contextlib
import logging
import math
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text
from transformers import TrainerCallback
from typing_extensions import override

from utils.callbacks.journal import readable_line
from utils.callbacks.progress import Phase, Progress
from utils.host.journal_file import duration

LEVELS = "▁▂▃▄▅▆▇█"
LONG_S = 5.0  # a phase that takes longer shows its time


class LiveView(TrainerCallback):
    """Draws the progress and the last training log in a thread of rich, until `close`.

    Drawing waits for no device and no rank. `limit_s` returns the seconds until the job's time
    limit, or None. `disable_tqdm` turns the display off.
    """

    def __init__(self, progress: Progress, limit_s: Callable[[], float | None]):
        self.progress, self.limit_s, self.live = progress, limit_s, contextlib.ExitStack()
        self.figures: dict[str, Any] = {}
        self.losses: deque[float] = deque(maxlen=24)  # in the sparkline

    @override
    def on_train_begin(self, args: Any, state: Any, *_: Any, **kwargs: Any) -> None:
        if args.disable_tqdm or args.process_index or not fits_terminal():
            return
        self.state = state
        for logs in state.log_history:  # of a resumed run
            self.on_log(logs=logs)
        # With soft_wrap the terminal wraps log lines, and rich does not.
        console, before = Console(highlight=False, soft_wrap=True), sys.stdout
        self.live.enter_context(Live(  # redraws take a millisecond or two of a CPU core
            console=console, get_renderable=self._drawn, refresh_per_second=2, transient=True,
            redirect_stderr=sys.stderr.isatty(),
        ))  # fmt: skip
        console.show_cursor(True)  # a killed process could not make the cursor visible again
        for handler in logging.root.handlers:
            if isinstance(handler, logging.StreamHandler) and handler.stream is before:
                handler.setStream(sys.stdout)  # now rich's stream
                self.live.callback(handler.setStream, before)
        atexit.register(self.live.close)  # after an error or Ctrl-C

    def close(self) -> None:
        """Remove the display and restore stdout for the log."""
        self.live.close()

    @override
    def on_log(self, *_: Any, logs: Mapping[str, Any] | None = None, **__: Any) -> None:
        if logs and "loss" in logs:
            self.figures = dict(logs)
            self.losses += [logs["loss"]] if math.isfinite(logs["loss"]) else []

    def _drawn(self) -> Group:
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
        line = Text(readable_line(event, self.limit_s()), no_wrap=False, overflow="fold")
        return Group(row, line)


def fits_terminal() -> bool:
    """Return whether stdout is a terminal that can redraw lines and show Unicode bars."""
    dumb = os.environ.get("TERM", "dumb") in ("dumb", "unknown")
    return sys.stdout.isatty() and not dumb and sys.stdout.encoding.lower().startswith("utf")
