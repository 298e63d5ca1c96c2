"""On a terminal, a view below the log's lines, which stay as they are: progress, losses, now."""

import atexit
import contextlib
import logging
import math
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text
from transformers import TrainerCallback
from typing_extensions import override

from utils.callbacks.journal import readable_line
from utils.support.journal_file import duration

LEVELS = "▁▂▃▄▅▆▇█"


class LiveView(TrainerCallback):
    """Draws what the last log and event said, in rich's thread: it computes and waits for nothing.

    `splits` are what is evaluated, in order; `limit_s` is Journal's. `disable_tqdm` turns it off.
    It stays until `close`, or the process ends.
    """

    def __init__(self, splits: Sequence[str], limit_s: Callable[[], float | None]):
        self.splits, self.limit_s, self.live = splits, limit_s, contextlib.ExitStack()
        self.figures: dict[str, Any] = {}
        self.losses: deque[float] = deque(maxlen=24)  # in the sparkline
        self.split = self.batches = 0
        self.trained = False
        self._now("first step")

    @override
    def on_train_begin(self, args: Any, state: Any, *_: Any, **kwargs: Any) -> None:
        if args.disable_tqdm or args.process_index or not fits_terminal():
            return
        self.state = state
        for logs in state.log_history:  # of the starts before
            self.on_log(logs=logs)
        # Soft: the terminal wraps log lines, not rich.
        console, before = Console(highlight=False, soft_wrap=True), sys.stdout
        self.live.enter_context(Live(  # redraws take a millisecond or two of a CPU core
            console=console, get_renderable=self._drawn, refresh_per_second=2, transient=True,
            redirect_stderr=sys.stderr.isatty(),
        ))  # fmt: skip
        console.show_cursor(True)  # a process that is killed could not bring it back
        for handler in logging.root.handlers:
            if isinstance(handler, logging.StreamHandler) and handler.stream is before:
                handler.setStream(sys.stdout)  # which is rich's now
                self.live.callback(handler.setStream, before)
        atexit.register(self.live.close)  # after an error or Ctrl-C

    @override
    def on_train_end(self, *_: Any, **__: Any) -> None:
        self.trained = True
        self._now("finishing")

    def close(self) -> None:
        """Give the terminal back."""
        self.live.close()

    def _now(self, what: str) -> None:
        self.now, self.since, self.batches = what, time.monotonic(), 0

    @override
    def on_step_begin(self, *_: Any, **__: Any) -> None:
        if self.figures:  # the first step compiles
            self._now("training")

    @override
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if control.should_evaluate or control.should_save:
            self._now("evaluating" if control.should_evaluate else "saving")
        elif self.trained:  # after the last evaluation
            self._now("finishing")

    on_evaluate = on_step_end

    @override
    def on_prediction_step(self, *_: Any, eval_dataloader: Any = None, **__: Any) -> None:
        self.batches, name = self.batches + 1, self.splits[self.split % len(self.splits)]
        self.now = f"evaluating {name} {self.batches}/{len(eval_dataloader)}"
        if self.batches == len(eval_dataloader):
            self.split, self.batches = self.split + 1, 0

    @override
    def on_log(self, *_: Any, logs: Mapping[str, Any] | None = None, **__: Any) -> None:
        if logs and "loss" in logs:
            self.figures = dict(logs)
            self.losses += [logs["loss"]] if math.isfinite(logs["loss"]) else []

    def _drawn(self) -> Group:
        step, steps, s = self.state.global_step, self.state.max_steps, time.monotonic() - self.since
        now = f"{self.now}, for {duration(s)}" if s > 5 else self.now
        values = list(self.losses)  # a log may come meanwhile
        low = min(values, default=0.0)
        scale = (len(LEVELS) - 1) / ((max(values, default=low) - low) or 1.0)
        losses = "".join(LEVELS[round((value - low) * scale)] for value in values)
        row = Table.grid(padding=(0, 1))
        row.add_row(f"{step / max(steps, 1):4.0%}", ProgressBar(steps, step, 20), losses, Text(now))
        event = {**self.figures, "event": "train", "step": step, "max_steps": steps}
        line = Text(readable_line(event, self.limit_s()), no_wrap=False, overflow="fold")
        return Group(row, line)


def fits_terminal() -> bool:
    """Whether stdout is a terminal that can redraw lines and show LEVELS."""
    dumb = os.environ.get("TERM", "dumb") in ("dumb", "unknown")
    return sys.stdout.isatty() and not dumb and sys.stdout.encoding.lower().startswith("utf")
