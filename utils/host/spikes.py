"""Detection of loss spikes for `on_spike: stop`, `status.py RUN --spikes` and the report.

A logged value is a spike if it is not finite, or more than 8 (DEVIATIONS) deviations above the
median of the previous 64 (WINDOW) values. The first 16 (SHORTEST) values are never spikes. The rule
compares logarithms, because losses of small batches and gradient norms have a long tail, and their
logarithms do not. A deviation is 1.4826 times the median distance from the median, an estimate of
the standard deviation. A smaller deviation than 0.01 (LEAST), about 1 %, is replaced by 0.01.
"""

import math
import shlex
from collections import deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

WINDOW, SHORTEST = 64, 16  # logged values
DEVIATIONS, LEAST = 8.0, 0.01
LONGEST = 20  # steps in a command that shows documents
SMALLEST = 1e-9  # replaces 0, the loss of a step without loss tokens


@dataclass(frozen=True)
class Spike:
    """A spike: one or several consecutive log lines with a value far above the earlier values.

    step, last_step: the steps of the first and the last of these lines. begin: the first line's
    value is a mean over the steps from `begin` to `step`. value: the highest value. before: the
    median of the earlier values. score: the number of deviations between `before` and `value`.
    """

    name: str  # loss or grad_norm
    begin: int
    step: int
    last_step: int
    value: float
    before: float
    score: float
    grad_norm: float | None

    @property
    def steps(self) -> str:
        """The steps of the spike's first log line as text for `status.py --step`: 61, or 51-60."""
        return str(self.step) if self.begin == self.step else f"{self.begin}-{self.step}"

    @property
    def all_steps(self) -> str:
        """The steps of all log lines of the spike, as text for `status.py --step`.

        For a spike of more than 20 (LONGEST) steps, the text has the steps of the first log line.
        """
        last = self.last_step if self.last_step < self.begin + LONGEST else self.step
        return str(last) if self.begin == last else f"{self.begin}-{last}"

    def __str__(self) -> str:
        last = "" if self.last_step == self.step else f" (high until step {self.last_step})"
        return (
            f"step {self.steps}: {self.name} {self.value:.4g}, usually {self.before:.4g}{last}: "
            f"{self.score:.1f} deviations above the median of {WINDOW} logs, {DEVIATIONS:g} allowed"
        )


def spikes_in(lines: Iterable[Mapping[str, Any]], name: str = "loss") -> list[Spike]:
    """Return the spikes in training logs. Consecutive log lines above the limit are one spike.

    name: the logged value, "loss" or "grad_norm"
    """
    found: list[Spike] = []
    window = deque[float](maxlen=WINDOW)
    end, follows = 0, False  # the previous log's step, and whether that log is a spike
    for line in lines:
        value, step, begin = line.get(name), line["step"], end + 1
        if not isinstance(value, int | float):
            continue
        before, score = _median_and_score(value, window)
        if score > DEVIATIONS:
            spike = Spike(name, begin, step, step, value, before, score, line.get("grad_norm"))
            if follows:
                first = found.pop()
                higher = first if value <= first.value else spike  # NaN counts as higher
                spike = replace(higher, begin=first.begin, step=first.step, last_step=step)
            found.append(spike)
        end, follows = step, score > DEVIATIONS
        if math.isfinite(value):
            window.append(value)
    return found


def _median_and_score(value: float, window: Collection[float]) -> tuple[float, float]:
    """Return the median of `window`, and how many deviations `value` is above this median.

    window: the earlier values. If there are fewer than SHORTEST values, return (NaN, 0).
    """
    if len(window) < SHORTEST:
        return math.nan, 0.0
    before = median(window)
    if not math.isfinite(value):
        return before, math.inf
    above = math.log(max(value, SMALLEST) / before) if before > 0 else 0.0
    if above <= DEVIATIONS * LEAST:  # true for most values, so the second median is seldom needed
        return before, 0.0
    distance = median(abs(math.log(max(each, SMALLEST) / before)) for each in window)
    return before, above / max(1.4826 * distance, LEAST)


def next_commands(run: Path, spike: Spike, saved: Collection[int]) -> str:
    """Return a text with two commands: show a spike's documents, and resume without some of them.

    saved: the steps of the run's checkpoints
    """
    command = f"python status.py {shlex.quote(str(run))} --step {spike.all_steps}"
    before = max((step for step in saved if step < spike.begin), default=0)
    newest = max(saved, default=0)
    flags = " --accept_changes skip_documents" if before else ""
    if 0 < before < newest:
        flags += f" --resume_from_checkpoint {shlex.quote(f'{run}/checkpoint-{before}')}"
    if not before or before < newest:
        flags += f" --output_dir {shlex.quote(f'{run}-skip')}"
    return (
        f"its documents: {command}\n"
        f"those that stand out, such as the first 4: {command} --json | head -n 4 >>skip.jsonl\n"
        f"without them: the same training command with --skip_documents skip.jsonl{flags}"
    )
