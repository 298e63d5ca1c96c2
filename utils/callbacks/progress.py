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
    FIRST_STEP = "in its first step"  # this start's first step, which compiles and allocates
    TRAIN = "training"
    EVALUATE = "evaluating"
    SAVE = "saving"
    FINISH = "finishing"


@dataclass
class Progress:
    """The phase of a run on this rank; the trainer writes it, pages and views read it.

    step    the current step in training, otherwise the last finished step
    since   when the phase began, by time.monotonic()
    shape   (sequences, tokens) of the last micro-batch
    tokens  the number of tokens without padding in each sequence of that micro-batch; on the host
    split   the held-out split being evaluated, with batches_done of its batches
    """

    phase: Phase = Phase.START
    step: int = 0
    since: float = field(default_factory=time.monotonic)
    shape: tuple[int, int] | None = None
    tokens: torch.Tensor | None = None
    split: str = ""
    batches_done: int = 0
    batches: int = 0
    first_step: int | None = None  # of this start

    def begin(self, phase: Phase, step: int) -> None:
        """Begin a phase. status.py reads it from the next heartbeat of the run lock."""
        self.phase, self.step, self.since, self.split = phase, step, time.monotonic(), ""
        note_phase(phase)

    def begin_step(self, step: int) -> None:
        """Begin a training step."""
        if self.first_step is None:
            self.first_step = step
        self.begin(Phase.FIRST_STEP if step == self.first_step else Phase.TRAIN, step)

    def begin_batch(self, batch: dict[str, torch.Tensor]) -> None:
        """Store the shape of a micro-batch, which is still on the host."""
        sequences, tokens = batch["input_ids"].shape
        self.shape = sequences, tokens
        self.tokens = batch["sequence_tokens"]

    def begin_split(self, split: str, batches: int) -> None:
        """Begin to evaluate a held-out split."""
        self.split, self.batches_done, self.batches = split, 0, batches
