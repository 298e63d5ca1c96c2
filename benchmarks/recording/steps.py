"""Times, losses and tokens of training steps, taken alike from every baseline."""

import resource
import sys
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from benchmarks.hardware.device import gpu_state
from benchmarks.recording.first_batch import document_numbers, pieces
from benchmarks.recording.job import Job, Outcome, seconds_since_start
from benchmarks.recording.trace import KernelTrace
from benchmarks.workloads.workload import PAD_TOKEN_ID

IGNORED_LABEL = -100


class StepRecorder:
    """Records a run step by step; waits for the device only where the timed window begins and ends.

    Losses and token counts stay on the device until `outcome`. On a GPU single steps are timed by
    events on its stream.
    """

    def __init__(self, job: Job):
        self.job = job
        self.ends: list[float] = []
        self.step_s: list[float] = []  # of each step but the first
        self.events: list[torch.cuda.Event] = []
        self.losses: list[torch.Tensor] = []
        self.tokens: list[torch.Tensor] = []
        self.loss_tokens: list[torch.Tensor] = []
        self.first_step_s = 0.0
        self.graphs_after_warmup = 0
        self.first_documents: list[np.ndarray] = []
        self.trace = KernelTrace() if job.trace else None
        self.seen: dict[str, Any] = {}

    def saw_batch(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> None:
        """Count the real tokens of a step's batch, and the loss tokens.

        `labels` are not shifted; None: each token but a row's first is a loss token.
        """
        self.tokens.append(input_ids.ne(PAD_TOKEN_ID).sum())
        targets = (input_ids if labels is None else labels)[:, 1:]
        ignored = PAD_TOKEN_ID if labels is None else IGNORED_LABEL
        self.loss_tokens.append(targets.ne(ignored).sum())

    def saw_chats(self, inputs: Mapping[str, Any]) -> None:
        """Keep the documents of a fine-tuning run's first batch."""
        if self.job.kind == "sft" and not self.first_documents:
            self.first_documents = pieces(inputs)

    def saw_loss(self, loss: torch.Tensor) -> None:
        """Keep a step's loss."""
        self.losses.append(loss.detach())

    def ended_step(self) -> None:
        """Take the time; called when the optimizer has stepped."""
        if torch.cuda.is_available():
            self.events.append(torch.cuda.Event(enable_timing=True))
            self.events[-1].record()
        place = len(self.ends)
        if place in (0, self.job.warmup_steps - 1, self.job.steps - 1):
            wait_for_device()
        self.ends.append(time.perf_counter())
        if place:
            self.step_s.append(self.ends[-1] - self.ends[-2])
        if place == 0:
            self.first_step_s = seconds_since_start()
        if place == self.job.warmup_steps - 1:
            self.graphs_after_warmup = compiled_graphs()
        if place == self.job.steps - 1:
            self._window_ended()
        if place == self.job.steps and self.trace:
            wait_for_device()
            self.seen |= self.trace.stop()

    def _window_ended(self) -> None:
        """Note what the timed steps left, before the step that is traced."""
        self.seen["compiled_in_window"] = compiled_graphs() - self.graphs_after_warmup
        self.seen["memory"] = (peak_memory_bytes(), reserved_memory_bytes())
        if state := gpu_state():
            self.seen["gpu"] = state
        if self.trace:
            self.trace.start()

    def outcome(self, **notes: Any) -> Outcome:
        """Sum up; to be called when the run has ended."""
        warm, end = self.job.warmup_steps, self.job.steps
        timed = slice(warm - 1, end - 1)
        assert len(self.ends) == len(self.losses) == len(self.tokens) == self.job.all_steps
        allocated, reserved = self.seen.pop("memory")
        documents = self.job.files / "documents"
        return Outcome(
            window_s=sum(self.step_s[timed]),
            window_tokens=sum(int(tokens) for tokens in self.tokens[warm:end]),
            window_loss_tokens=sum(int(tokens) for tokens in self.loss_tokens[warm:end]),
            step_s=self._step_seconds()[: end - 1],
            losses=[float(loss) for loss in self.losses[:end]],
            first_documents=document_numbers(self.first_documents, documents),
            first_step_s=self.first_step_s,
            peak_memory_bytes=allocated,
            reserved_memory_bytes=reserved,
            notes=notes | self.seen,
        )

    def _step_seconds(self) -> list[float]:
        """Return the seconds of each step but the first."""
        if self.events:
            pairs = zip(self.events, self.events[1:], strict=False)
            return [before.elapsed_time(after) / 1000 for before, after in pairs]
        return self.step_s


def watch_trainer(recorder: StepRecorder) -> None:
    """Let every transformers Trainer of this process, TRL's and ours too, tell the recorder."""
    from transformers import Trainer
    from transformers.trainer_callback import CallbackHandler

    training_step, on_step_end = Trainer.training_step, CallbackHandler.on_step_end

    def labels_of(inputs: Any) -> torch.Tensor:
        if "labels" in inputs:
            return inputs["labels"]
        return torch.where(inputs["loss_mask"], inputs["input_ids"], IGNORED_LABEL)  # Stoker's

    def watched_training_step(self: Any, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        recorder.saw_batch(inputs["input_ids"], labels_of(inputs))
        recorder.saw_chats(inputs)
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


def reserved_memory_bytes() -> int:
    """Return the most that torch's allocator held on the GPU; 0 without one."""
    return torch.cuda.max_memory_reserved() if torch.cuda.is_available() else 0


def compiled_graphs() -> int:
    """Return how many graphs torch has compiled in this process so far."""
    # Not imported for this: it takes a second, which would be of the timed ones.
    dynamo: Any = sys.modules.get("torch._dynamo.utils")
    return int(dynamo.counters["stats"]["unique_graphs"]) if dynamo else 0


def wait_for_device() -> None:
    """Wait until the GPU, if there is one, has done what it was given."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
