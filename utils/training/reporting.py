"""The callbacks of a run, in the order in which they act."""

import sys

from transformers import TrainerCallback

from utils.callbacks.journal import Journal
from utils.callbacks.memory import MemoryMonitor
from utils.callbacks.position import DataPosition
from utils.callbacks.progress import reporting_callbacks
from utils.callbacks.throughput import Throughput
from utils.training.runs import Run


def run_callbacks(run: Run) -> list[TrainerCallback]:
    """Return the callbacks of both scripts; progress bars only where a person looks on."""
    measured = [Throughput(), MemoryMonitor()]
    return [
        DataPosition(),
        *measured,
        Journal(run.output_dir, measured),
        *reporting_callbacks(is_terminal=sys.stdout.isatty()),
    ]
