"""The input and the result of a baseline, as JSON files between processes."""

import contextlib
import dataclasses
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.recording.precision import PRECISIONS, Precision

# When the process was started, in seconds since 1970, as the process that started it saw it.
STARTED_AT = "STOKER_BENCHMARK_STARTED_AT"
CANNOT_RUN = 69  # EX_UNAVAILABLE of sysexits.h; the last line of output says why


@dataclasses.dataclass(frozen=True)
class Job:
    """A short training run.

    `workload` is a directory of `make_workload`. `tuned`: use the best settings that we found
    instead of the toolkit's documented ones; the baseline itself interprets `variant`. The first
    `warmup_steps` of `steps` optimizer steps are not timed. A step has one micro-batch. With
    `trace` there are two extra steps. The first one records the kernels, because the last step of a
    run does extra work.
    """

    workload: str
    scratch: str
    kind: str  # "pretrain" or "sft"
    precision: str  # a key of PRECISIONS
    sequence_length: int
    micro_batch_size: int
    steps: int
    warmup_steps: int
    tuned: bool = True
    learning_rate: float = 1e-3
    lora_rank: int = 0  # above 0: adapters on all linear layers but the last, alpha the same
    trace: bool = False
    variant: str = ""

    @property
    def numbers(self) -> Precision:
        """The numbers behind the name of its precision."""
        return PRECISIONS[self.precision]

    @property
    def all_steps(self) -> int:
        """The optimizer steps to take."""
        return self.steps + 2 * self.trace

    @property
    def files(self) -> Path:
        """The workload's directory."""
        return Path(self.workload)


@dataclasses.dataclass
class Outcome:
    """The measurements of a run.

    `window_s` and `window_tokens` cover the steps after the warm-up and count real tokens only;
    `window_loss_tokens` are the loss tokens among them; `first_step_s` counts from the start of the
    process to the end of its first step. A fine-tuning run's first batch held the workload's
    `first_documents`. `notes` says which settings and kernels were in use.
    """

    window_s: float
    window_tokens: int
    step_s: list[float]
    losses: list[float]
    first_step_s: float
    peak_memory_bytes: int
    reserved_memory_bytes: int = 0
    window_loss_tokens: int = 0
    first_documents: list[int] = dataclasses.field(default_factory=list)
    notes: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def tokens_per_second(self) -> float:
        """Real tokens a second."""
        return self.window_tokens / self.window_s


class CannotRunError(Exception):
    """A baseline cannot run here: something is not installed or does not fit."""


def run_baseline(train: Callable[[Job], Outcome]) -> None:
    """Train as the command line says: the body of each baseline's `__main__`."""
    job_file, outcome_file = map(Path, sys.argv[1:])
    with saying_why_not():
        outcome = train(Job(**json.loads(job_file.read_text())))
    outcome_file.write_text(json.dumps(dataclasses.asdict(outcome)))


@contextlib.contextmanager
def saying_why_not() -> Iterator[None]:
    """End the process with CANNOT_RUN and the reason where its work cannot be done here."""
    try:
        yield
    except CannotRunError as error:
        print(error)  # noqa: T201 - read by the process that started this one
        sys.exit(CANNOT_RUN)
    except RuntimeError as error:
        import torch  # not before: when it is imported is the baseline's affair

        if not isinstance(error, torch.OutOfMemoryError):
            raise
        print(". ".join(str(error).split(". ")[:2]))  # noqa: T201 - what follows is advice
        sys.exit(CANNOT_RUN)


def seconds_since_start() -> float:
    """Return the seconds since this process was started, its imports among them."""
    return time.time() - float(os.environ[STARTED_AT])
