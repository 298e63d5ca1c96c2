"""What a contestant is given and what it gives back, as JSON files between processes."""

import dataclasses
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

# When the process was started, in seconds since 1970, as the process that started it saw it.
STARTED_AT = "STOKER_BENCHMARK_STARTED_AT"


@dataclasses.dataclass(frozen=True)
class Job:
    """A short training run.

    `workload` is a directory of `workloads.py`. `tuned`: with the best settings that we found,
    not with those of the toolkit's documentation. Of `steps` optimizer steps the first
    `warmup_steps` are not timed. A step takes one micro-batch. `settings` are Stoker's alone.
    """

    workload: str
    scratch: str
    kind: str  # "pretrain" or "sft"
    precision: str  # "fp32" or "bf16" (mixed: fp32 weights)
    sequence_length: int
    micro_batch_size: int
    steps: int
    warmup_steps: int
    tuned: bool = True
    learning_rate: float = 1e-3
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def files(self) -> Path:
        """The workload's directory."""
        return Path(self.workload)


@dataclasses.dataclass
class Outcome:
    """What a run was measured to do.

    `window_s` and `window_tokens` are of the steps after the warm-up, real tokens only;
    `first_step_s` counts from the start of the process to the end of its first step. `notes` says
    which settings and kernels were in use.
    """

    window_s: float
    window_tokens: int
    step_s: list[float]
    losses: list[float]
    first_step_s: float
    peak_memory_bytes: int
    notes: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def tokens_per_second(self) -> float:
        """Real tokens a second."""
        return self.window_tokens / self.window_s


def run_contestant(train: Callable[[Job], Outcome]) -> None:
    """Train as the command line says: the body of each contestant's `__main__`."""
    job_file, outcome_file = map(Path, sys.argv[1:])
    outcome = train(Job(**json.loads(job_file.read_text())))
    outcome_file.write_text(json.dumps(dataclasses.asdict(outcome)))


def seconds_since_start() -> float:
    """Return the seconds since this process was started, its imports among them."""
    return time.time() - float(os.environ[STARTED_AT])
