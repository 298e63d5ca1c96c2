"""The journal of a run: one JSON line per log event in metrics.jsonl, one readable line to the log.

The file is only ever appended to, also when a run resumes from a checkpoint that is older than its
last lines: each start first appends `{"event": "started"|"resumed", "step": N}`, which says that
lines of steps after N from above it were undone. `read_journal` applies that, so its series has no
duplicates and nothing is lost.
"""

import dataclasses
import json
import logging
import math
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerState
from typing_extensions import override

from utils.callbacks.metrics import MemoryMonitor
from utils.checkpoints.store import Checkpoints
from utils.support.run_lock import known_loss

FILE_NAME = "metrics.jsonl"
# JSON has no such numbers; as text they stay visible and turn back with float().
NOT_FINITE = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}

logger = logging.getLogger(__name__)


class Journal(TrainerCallback):
    """Writes every log event of rank 0; silent on other ranks.

    A line holds event (started, resumed, train, eval, save, and last stopped or summary), step,
    epoch, time (unix seconds), split for an evaluation, and the logged figures. `memory` has each
    rank's; `stopped` tells at the end whether the run ended early.
    """

    def __init__(
        self,
        checkpoints: Checkpoints,
        memory: MemoryMonitor | None = None,
        stopped: Callable[[], bool] = lambda: False,
    ):
        self.path = checkpoints.output_dir / FILE_NAME
        self.checkpoints, self.memory, self.stopped = checkpoints, memory, stopped
        self.saves_written = 0
        self.first_step: tuple[int, float] | None = None  # of this start, and when it ended

    @override
    def on_train_begin(self, args: Any, state: TrainerState, *_: Any, **kwargs: Any) -> None:
        """Note the start."""
        if not state.is_world_process_zero:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("ab+") as file:
            file.seek(max(file.tell() - 1, 0))
            if file.read(1) not in (b"\n", b""):
                file.write(b"\n")  # the process died within a line, which stays one of its own
        event = "resumed" if state.global_step else "started"
        self._write({"event": event, "step": state.global_step, "max_steps": state.max_steps})

    @override
    def on_step_end(self, args: Any, state: TrainerState, *_: Any, **kwargs: Any) -> None:
        """Begin to measure the pace once the first step, which compiles and allocates, is done."""
        if self.first_step is None:
            self.first_step = (state.global_step, time.monotonic())

    def _seconds_left(self, state: TrainerState) -> float | None:
        """Return the time that all steps will take, evaluations and saves between them included."""
        if self.first_step is None or state.global_step <= self.first_step[0]:
            return None
        step, since = self.first_step
        pace_s = (time.monotonic() - since) / (state.global_step - step)
        return pace_s * max(state.max_steps - state.global_step, 0)

    @override
    def on_log(
        self,
        args: Any,
        state: TrainerState,
        *_: Any,
        logs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Write one event; Trainer's keys tell its kind."""
        if not state.is_world_process_zero or not logs:
            return
        self.on_save(args, state)  # of what was written in the background meanwhile
        line: dict[str, Any] = {"event": "train", "step": state.global_step, **logs}
        losses = [key for key in logs if key.startswith("eval_") and key.endswith("_loss")]
        if losses:
            split = losses[0].removeprefix("eval_").removesuffix("loss").removesuffix("_")
            line |= {"event": "eval", "split": split or None}
        elif "train_runtime" in logs:
            # A summary comes once, of a run that is finished.
            line["event"] = "stopped" if self.stopped() else "summary"
        elif self.memory:
            line["memory_by_rank"] = self.memory.by_rank
        self._write(line)
        logger.info("%s", readable_line(line, state.max_steps, self._seconds_left(state)))

    @override
    def on_save(self, args: Any, state: TrainerState, *_: Any, **kwargs: Any) -> None:
        """Write what each new checkpoint took."""
        if state.is_world_process_zero:
            for save in self.checkpoints.saves[self.saves_written :]:
                self._write({"event": "save", **dataclasses.asdict(save)})
                self.saves_written += 1

    def _write(self, line: Mapping[str, Any]) -> None:
        """Append a line, unless another job owns the run directory by now (the lock logged it)."""
        if known_loss(self.path.parent) is not None:
            return
        text = json.dumps(valid_json({**line, "time": round(time.time(), 3)}), allow_nan=False)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(text + "\n")


def valid_json(value: Any) -> Any:
    """Turn what a log may hold into JSON: numbers of numpy and torch, NaN and infinities."""
    if isinstance(value, Mapping):
        return {str(key): valid_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [valid_json(item) for item in value]
    if hasattr(value, "item") and getattr(value, "size", None) is not None:
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return NOT_FINITE[str(value)]
    return value if isinstance(value, str | int | float | bool | None) else str(value)


def read_journal(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Read a journal as one series: undone lines, broken lines and repeated events left out.

    Non-finite figures are floats again. Of several events of one kind, split and step the last
    counts (an interrupted evaluation is done again, all of its splits).
    """
    numbers = {written: float(number) for number, written in NOT_FINITE.items()}
    events: dict[tuple[Any, ...], dict[str, Any]] = {}
    for text in Path(path).read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            line = json.loads(text)
            event, step = line["event"], line["step"]
        except (ValueError, KeyError, TypeError):
            continue  # cut off where a process died
        if event in ("started", "resumed"):
            done = step if event == "resumed" else -1
            events = {key: old for key, old in events.items() if old["step"] <= done}
            continue
        texts = {key: value for key, value in line.items() if isinstance(value, str)}
        line |= {key: numbers[value] for key, value in texts.items() if value in numbers}
        events[event, line.get("split"), step] = line
    return list(events.values())


# How the figures of a line are shown.
_FIGURES = {
    "loss": "loss {:.4f}",
    "perplexity": "perplexity {:.4g}",
    "learning_rate": "lr {:.2e}",
    "grad_norm": "grad {:.3f}",
    "tokens_per_s": "{:,.0f} tokens/s",
    "step_time_s": "{:.3g} s/step",
    "data_wait_s": "wait {:.2g} s",
    "memory_peak_gib": "peak {:.2f} GiB",
    "first_step_time_s": "first step {:.1f} s",
    "train_loss": "mean loss {:.4f}",
}


def readable_line(line: Mapping[str, Any], max_steps: int, seconds_left: float | None) -> str:
    """Format an event of the journal; figures that it does not hold are left out."""
    event, step, prefix, ending = line["event"], line["step"], "", None
    if event == "eval":
        named = ["eval", *([line["split"]] if line["split"] else [])]
        begin, prefix, ending = " ".join(named), "_".join(named) + "_", f"(step {step})"
    elif event in ("summary", "stopped"):
        ended = "stopped" if event == "stopped" else "finished"
        begin = f"{ended} at step {step} after {duration(line['train_runtime'])}"
    else:
        begin = f"step {step:>{len(str(max_steps))}}/{max_steps}"
        ending = None if seconds_left is None else f"eta {duration(seconds_left)}"
    figures = [
        text.format(line[prefix + key]) for key, text in _FIGURES.items() if prefix + key in line
    ]
    return "  ".join([begin, *figures, *([ending] if ending else [])])


def duration(seconds: float) -> str:
    """Format a duration in its two largest units: 41s, 4m31s, 3h05m, 2d04h.

    >>> duration(271), duration(11_100), duration(187_200)
    ('4m31s', '3h05m', '2d04h')
    """
    whole = round(seconds)
    for size, below, units in ((86400, 3600, "dh"), (3600, 60, "hm"), (60, 1, "ms")):
        if whole >= size:
            return f"{whole // size}{units[0]}{whole % size // below:02d}{units[1]}"
    return f"{whole}s"
