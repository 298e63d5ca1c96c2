"""Times, losses and tokens of training steps, taken alike from every contestant."""

import resource
import time
from typing import Any

import torch

from benchmarks.job import Job, Outcome, seconds_since_start
from benchmarks.workloads import PAD_TOKEN_ID


class StepRecorder:
    """Records a run step by step; waits for the device only where the timed window begins and ends.

    Losses and token counts stay on the device until `outcome`.
    """

    def __init__(self, job: Job):
        self.job = job
        self.ends: list[float] = []
        self.losses: list[torch.Tensor] = []
        self.tokens: list[torch.Tensor] = []
        self.first_step_s = 0.0

    def saw_batch(self, input_ids: torch.Tensor) -> None:
        """Count the real tokens of a step's batch."""
        self.tokens.append(input_ids.ne(PAD_TOKEN_ID).sum())

    def saw_loss(self, loss: torch.Tensor) -> None:
        """Keep a step's loss."""
        self.losses.append(loss.detach())

    def ended_step(self) -> None:
        """Take the time; called when the optimizer has stepped."""
        if len(self.ends) in (0, self.job.warmup_steps - 1, self.job.steps - 1):
            _wait_for_device()
        self.ends.append(time.perf_counter())
        if len(self.ends) == 1:
            self.first_step_s = seconds_since_start()

    def outcome(self, **notes: Any) -> Outcome:
        """Sum up; to be called when the run has ended."""
        warm = self.job.warmup_steps
        assert len(self.ends) == len(self.losses) == len(self.tokens) == self.job.steps
        return Outcome(
            window_s=self.ends[-1] - self.ends[warm - 1],
            window_tokens=sum(int(tokens) for tokens in self.tokens[warm:]),
            step_s=[
                after - before for before, after in zip(self.ends, self.ends[1:], strict=False)
            ],
            losses=[float(loss) for loss in self.losses],
            first_step_s=self.first_step_s,
            peak_memory_bytes=peak_memory_bytes(),
            notes=notes,
        )


def watch_trainer(recorder: StepRecorder) -> None:
    """Let every transformers Trainer of this process, TRL's and ours too, tell the recorder."""
    from transformers import Trainer
    from transformers.trainer_callback import CallbackHandler

    training_step, on_step_end = Trainer.training_step, CallbackHandler.on_step_end

    def watched_training_step(self: Any, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        recorder.saw_batch(inputs["input_ids"])
        loss = training_step(self, model, inputs, *args, **kwargs)
        recorder.saw_loss(loss)
        return loss

    def watched_on_step_end(self: Any, *args: Any, **kwargs: Any) -> Any:
        control = on_step_end(self, *args, **kwargs)
        recorder.ended_step()
        return control

    replaced: Any = Trainer
    replaced.training_step = watched_training_step
    replaced = CallbackHandler
    replaced.on_step_end = watched_on_step_end


def peak_memory_bytes() -> int:
    """Return the most memory in use: allocated on the GPU if there is one, else resident."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _wait_for_device() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
