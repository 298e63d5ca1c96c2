"""The journal of a run: one JSON line per log event in metrics.jsonl, one readable line to the log.

utils/support/journal_file.py says how the file is read.
"""

import dataclasses
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

from transformers import TrainerCallback, TrainerState
from typing_extensions import override

from utils.callbacks.metrics import MemoryMonitor
from utils.checkpoints.store import Checkpoints
from utils.support.journal_file import FILE_NAME, duration, read_journal, strict_json
from utils.support.run_lock import known_loss

__all__ = ["Journal", "read_journal", "readable_line"]

logger = logging.getLogger(__name__)


class Journal(TrainerCallback):
    """Writes every log event of rank 0, as docs/metrics.md says; silent on other ranks.

    `memory` has each rank's; `stopped` tells at the end whether the run ended early.
    """

    def __init__(
        self, checkpoints: Checkpoints, memory: MemoryMonitor, stopped: Callable[[], bool]
    ):
        self.path = checkpoints.output_dir / FILE_NAME
        self.checkpoints, self.memory, self.stopped = checkpoints, memory, stopped
        self.saves_written = 0

    @override
    def on_train_begin(self, args: Any, state: TrainerState, *_: Any, **kwargs: Any) -> None:
        """Note the start."""
        if not state.is_world_process_zero:
            return
        with self.path.open("ab+") as file:
            file.seek(max(file.tell() - 1, 0))
            if file.read(1) not in (b"\n", b""):
                file.write(b"\n")  # the process died within a line, which stays one of its own
        event = "resumed" if state.global_step else "started"
        self._write({"event": event, "step": state.global_step, "max_steps": state.max_steps})

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
        else:
            line["memory_by_rank"] = self.memory.by_rank
        self._write(line)
        logger.info("%s", readable_line(line, state.max_steps))

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
        text = strict_json({**line, "time": round(time.time(), 3)})
        with self.path.open("a", encoding="utf-8") as file:
            file.write(text + "\n")


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


def readable_line(line: Mapping[str, Any], max_steps: int) -> str:
    """Format an event of the journal; figures that it does not hold are left out.

    `eta` is the time that the steps to come take, without evaluations and saves.
    """
    event, step, prefix, ending = line["event"], line["step"], "", None
    if event == "eval":
        named = ["eval", *([line["split"]] if line["split"] else [])]
        begin, prefix, ending = " ".join(named), "_".join(named) + "_", f"(step {step})"
    elif event in ("summary", "stopped"):
        ended = "stopped" if event == "stopped" else "finished"
        begin = f"{ended} at step {step} after {duration(line['train_runtime'])}"
    else:
        begin = f"step {step:>{len(str(max_steps))}}/{max_steps}"
        if "step_time_s" in line:
            ending = f"eta {duration(line['step_time_s'] * (max_steps - step))}"
    figures = [
        text.format(line[prefix + key]) for key, text in _FIGURES.items() if prefix + key in line
    ]
    return "  ".join([begin, *figures, *([ending] if ending else [])])
