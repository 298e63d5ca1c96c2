"""The progress of this rank: the phase of the run, the step and the micro-batch."""

import time
from dataclasses import dataclass, field
from enum import StrEnum

import torch

from utils.host.run_lock import note_phase


class Phase(StrEnum):
    """A phase of a run. Its value is the text in status.py, the live view and hang.txt."""

    START = "starting"
    LOAD = "loading a checkpoint"
    FIRST_STEP = "in its first step"  # the first step of this process compiles and allocates
    TRAIN = "training"
    EVALUATE = "evaluating"
    SAVE = "saving"
    FINISH = "finishing"


@dataclass
class Progress:
    """The current phase, step and micro-batch of this rank. The trainer sets the fields.

    step    the current step while training, otherwise the last finished step
    since   the time at which the phase began, by time.monotonic()
    shape   (sequences, tokens) of the last micro-batch
    tokens  number of tokens in each sequence of the last micro-batch, without padding:
            (sequences,), on the CPU
    split   name of the held-out split that is evaluated. This rank evaluates `batches`
            micro-batches of the split, and has done `batches_done` of them.
    """

    phase: Phase = Phase.START
    step: int = 0
    since: float = field(default_factory=time.monotonic)
    shape: tuple[int, int] | None = None
    tokens: torch.Tensor | None = None
    split: str = ""
    batches_done: int = 0
    batches: int = 0
    first_step: int | None = None  # the first step that this process trains

    def begin(self, phase: Phase, step: int) -> None:
        """Set the current phase and step. status.py shows the phase after the next heartbeat."""
        self.phase, self.step, self.since, self.split = phase, step, time.monotonic(), ""
        note_phase(phase)

    def begin_step(self, step: int) -> None:
        """Set the phase of a training step: FIRST_STEP in this process's first step, else TRAIN."""
        if self.first_step is None:
            self.first_step = step
        self.begin(Phase.FIRST_STEP if step == self.first_step else Phase.TRAIN, step)

    def begin_batch(self, batch: dict[str, torch.Tensor]) -> None:
        """Store the shape and token counts of a micro-batch, which must still be on the CPU."""
        sequences, tokens = batch["input_ids"].shape
        self.shape = sequences, tokens
        self.tokens = batch["sequence_tokens"]

    def begin_split(self, split: str, batches: int) -> None:
        """Begin the evaluation of a held-out split, which has `batches` batches on this rank."""
        self.split, self.batches_done, self.batches = split, 0, batches
