"""Which of Trainer's own reporters a run keeps: a progress bar on a terminal, else none."""

from typing import Any

from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import PrinterCallback, ProgressCallback
from typing_extensions import override


class TerminalProgress(ProgressCallback):
    """Trainer's progress bars without its log lines: the journal writes those."""

    @override
    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Print nothing."""


def reporting_callbacks(is_terminal: bool) -> list[TrainerCallback]:
    """Return what stands beside the journal: bars on a terminal, nothing in a file."""
    return [TerminalProgress()] if is_terminal else []


def remove_default_reporting(trainer: Trainer) -> None:
    """Take Trainer's own printer and bar away, whichever it added; ours stay."""
    for callback in list(trainer.callback_handler.callbacks):
        # By exact type: TerminalProgress is a ProgressCallback too.
        if type(callback) in (PrinterCallback, ProgressCallback):
            trainer.remove_callback(callback)
