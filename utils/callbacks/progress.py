"""The progress of this rank: its phase, step and micro-batch."""

import time
from dataclasses import dataclass, field
from enum import StrEnum

import torch

from utils.host.run_lock import note_phase


class Phase(StrEnum):
    """A part of a run, in the words of status.py, the live view and hang.txt."""

    START = "starting"
    LOAD = "loading a checkpoint"
    FIRST_STEP = "in its first step"  # of this process; it compiles and allocates
    TRAIN = "training"
    EVALUATE = "evaluating"
    SAVE = "saving"
    FINISH = "finishing"


@dataclass
class Progress:
    """The current phase of this rank; the trainer sets the fields.

    step    the current step while training, otherwise the last finished step
    since   the time at which the phase began, by time.monotonic()
    shape   (sequences, tokens) of the last micro-batch
    tokens  tokens without padding of each sequence of the last micro-batch, (sequences,) on the CPU
    split   the held-out split that is being evaluated; `batches_done` of its `batches` are done
    """

    phase: Phase = Phase.START
    step: int = 0
    since: float = field(default_factory=time.monotonic)
    shape: tuple[int, int] | None = None
    tokens: torch.Tensor | None = None
    split: str = ""
    batches_done: int = 0
    batches: int = 0
    first_step: int | None = None  # of this process

    def begin(self, phase: Phase, step: int) -> None:
        """Begin a phase. The next heartbeat of the run lock tells status.py the phase."""
        self.phase, self.step, self.since, self.split = phase, step, time.monotonic(), ""
        note_phase(phase)

    def begin_step(self, step: int) -> None:
        """Begin a training step."""
        if self.first_step is None:
            self.first_step = step
        self.begin(Phase.FIRST_STEP if step == self.first_step else Phase.TRAIN, step)

    def begin_batch(self, batch: dict[str, torch.Tensor]) -> None:
        """Store the shape and token counts of a micro-batch, while the batch is on the CPU."""
        sequences, tokens = batch["input_ids"].shape
        self.shape = sequences, tokens
        self.tokens = batch["sequence_tokens"]

    def begin_split(self, split: str, batches: int) -> None:
        """Begin to evaluate a held-out split."""
        self.split, self.batches_done, self.batches = split, 0, batches
