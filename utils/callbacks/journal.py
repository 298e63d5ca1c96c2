"""Keeps the journal of a run: one JSON line per log event in a file, one readable line to the log.

`metrics.jsonl` is only ever appended to, also when a run resumes from a checkpoint that is older
than its last lines (a crash after the checkpoint): each start first appends
`{"event": "started"|"resumed", "step": N}`, which says that lines of steps after N from above it
were undone. `read_journal` applies that, so its series has no duplicates and nothing is lost.
"""

import dataclasses
import json
import logging
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from typing_extensions import override

from utils.callbacks.journal_lines import FILE_NAME, NOT_FINITE, TimeLeft, readable_line
from utils.callbacks.metrics import MetricCallback
from utils.checkpoints.store import Checkpoints
from utils.support.run_lock import known_loss

logger = logging.getLogger(__name__)


class Journal(TrainerCallback):
    """Writes every log event of rank 0; silent on other ranks.

    A line of the file holds event (started, resumed, train, eval, save, and last stopped or
    summary), step, epoch, time (unix seconds), split for an evaluation, and the logged figures. NaN
    and infinities are the strings "NaN", "Infinity" and "-Infinity", so that each line is valid
    JSON.
    `sources` add details that only the file gets, and remarks of their own to the log; `stopped`
    says at the end whether the run ended early; the saves are those of `checkpoints`.
    """

    def __init__(
        self,
        output_dir: str | os.PathLike[str],
        sources: Sequence[MetricCallback] = (),
        stopped: Callable[[], bool] = lambda: False,
        checkpoints: Checkpoints | None = None,
    ):
        self.path = Path(output_dir) / FILE_NAME
        self.sources = list(sources)
        self.stopped = stopped
        self.checkpoints = checkpoints
        self.saves_written = 0
        self.file: TextIO | None = None
        self.time_left = TimeLeft()

    @override
    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        """Open the file and note the start."""
        self.time_left = TimeLeft()
        if not state.is_world_process_zero:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        cut_off = _ends_within_a_line(self.path)
        self.file = self.path.open("a", encoding="utf-8")
        if cut_off:
            # The process died within a line: leave it to the reader as a line of its own.
            self.file.write("\n")
        event = "resumed" if state.global_step else "started"
        self._write({"event": event, "step": state.global_step, "max_steps": state.max_steps})

    @override
    def on_step_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        """Measure the pace."""
        self.time_left.begin_step(state.global_step)

    @override
    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        """Measure the pace."""
        self.time_left.end_step(state.global_step)

    @override
    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Write one event."""
        if not state.is_world_process_zero or not logs:
            return
        self._write_saves()
        event = event_of(logs)
        if event == "summary" and self.stopped():
            event = "stopped"  # a summary there is once, of a run that is finished
        line = {"event": event, "step": state.global_step} | dict(logs)
        if event == "eval":
            line["split"] = split_of(logs)
        if event == "train":
            for source in self.sources:
                line |= source.details()
        self._write(line)
        seconds_left = self.time_left.seconds(state.global_step, state.max_steps)
        logger.info("%s", readable_line(line, state.max_steps, seconds_left))
        if event == "train":
            for remark in filter(None, (source.report() for source in self.sources)):
                logger.info("%s", remark)

    @override
    def on_save(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        """Write what it took; what is still written in the background follows with a log."""
        if state.is_world_process_zero:
            self._write_saves()

    def _write_saves(self) -> None:
        for save in self.checkpoints.saves[self.saves_written :] if self.checkpoints else []:
            self._write({"event": "save", **dataclasses.asdict(save)})
            self.saves_written += 1

    @override
    def on_train_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        """Close the file."""
        if self.file is not None:
            self.file.close()
            self.file = None

    def _write(self, line: Mapping[str, Any]) -> None:
        """Append a line, unless the journal is another job's by now (the lock said so aloud)."""
        if known_loss(self.path.parent) is not None:
            return
        text = json.dumps(valid_json({**line, "time": round(time.time(), 3)}), allow_nan=False)
        if self.file is None:  # an evaluation outside of training
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a", encoding="utf-8") as file:
                file.write(text + "\n")
            return
        self.file.write(text + "\n")
        self.file.flush()


def event_of(logs: Mapping[str, Any]) -> str:
    """Tell a log's kind from its keys as Trainer names them: train, eval or summary."""
    if any(key.startswith("eval_") for key in logs):
        return "eval"
    return "summary" if "train_runtime" in logs else "train"


def split_of(logs: Mapping[str, Any]) -> str | None:
    """Return the split's name in `eval_NAME_loss`; None for an unnamed one."""
    key = next((key for key in logs if key.startswith("eval_") and key.endswith("_loss")), "")
    return key.removeprefix("eval_").removesuffix("loss").removesuffix("_") or None


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


def _ends_within_a_line(path: Path) -> bool:
    if not path.exists() or path.stat().st_size == 0:
        return False
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"
