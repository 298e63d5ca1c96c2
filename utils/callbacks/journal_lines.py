"""Formats a log event as one aligned line for people."""

import json
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any


def readable_line(line: Mapping[str, Any], max_steps: int, seconds_left: float | None) -> str:
    """Format an event of the journal; figures that it does not hold are left out."""
    if line["event"] == "eval":
        return _evaluation(line)
    if line["event"] in ("summary", "stopped"):
        return _summary(line)
    width = len(str(max_steps))
    parts = [f"step {line['step']:>{width}}/{max_steps}", *_figures(line)]
    if seconds_left is not None:
        parts.append(f"eta {duration(seconds_left)}")
    return "  ".join(parts)


def _figures(line: Mapping[str, Any]) -> list[str]:
    formats = {
        "loss": lambda value: f"loss {number(value, '.4f')}",
        "learning_rate": lambda value: f"lr {number(value, '.2e')}",
        "grad_norm": lambda value: f"grad {number(value, '.3f')}",
        "mean_token_accuracy": lambda value: f"accuracy {number(value, '.3f')}",
        "tokens_per_s": lambda value: f"{quantity(value):>6} tok/s",
        "step_time_s": lambda value: f"{number(value, '.3g')} s/step",
        "data_wait_s": lambda value: f"wait {number(value, '.2g')} s",
        "first_step_time_s": lambda value: f"first step {number(value, '.1f')} s",
    }
    return [shown(line[key]) for key, shown in formats.items() if key in line]


def _evaluation(line: Mapping[str, Any]) -> str:
    split = line.get("split")
    prefix = f"eval_{split}_" if split else "eval_"
    parts = [f"eval {split}" if split else "eval"]
    for name, spec in (("loss", ".4f"), ("perplexity", ".4g"), ("mean_token_accuracy", ".3f")):
        if prefix + name in line:
            parts.append(f"{name.removeprefix('mean_token_')} {number(line[prefix + name], spec)}")
    return "  ".join([*parts, f"(step {line['step']})"])


def _summary(line: Mapping[str, Any]) -> str:
    ended = "stopped" if line["event"] == "stopped" else "finished"
    parts = [f"{ended} at step {line['step']} after {duration(line['train_runtime'])}"]
    if "train_loss" in line:
        parts.append(f"mean loss {number(line['train_loss'], '.4f')}")
    return "  ".join(parts)


def number(value: Any, spec: str) -> str:
    """Format a number; text (a loss that is not a number, say) stays as it is."""
    return format(value, spec) if isinstance(value, int | float) else str(value)


def quantity(value: float) -> str:
    """Format a large count in three digits: 941, 12.4k, 1.21M.

    >>> quantity(12_400), quantity(999.6), quantity(1_210_000)
    ('12.4k', '1.00k', '1.21M')
    """
    for scale, unit in ((1, ""), (1e3, "k"), (1e6, "M"), (1e9, "G")):
        scaled = value / scale
        if scaled < 999.5 or unit == "G":
            break
    digits = 0 if not unit or scaled >= 99.95 else 1 if scaled >= 9.995 else 2
    return f"{scaled:.{digits}f}{unit}"


def duration(seconds: float) -> str:
    """Format a duration in its two largest units: 41s, 4m31s, 3h05m, 2d04h.

    >>> duration(271), duration(11_100), duration(187_200)
    ('4m31s', '3h05m', '2d04h')
    """
    whole = round(seconds)
    for size, below, units in ((86400, 3600, "dh"), (3600, 60, "hm"), (60, 1, "ms")):
        if whole >= size:
            return f"{whole // size}{units[0]}{whole % size // below:02d}{units[1]}"
    return f"{whole}s"


# Reads the journal of a run, without any library: a table of many runs is made of it.

FILE_NAME = "metrics.jsonl"
# JSON has no such numbers; as text they stay visible and turn back with float().
NOT_FINITE = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}


def read_journal(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Read a journal as one series: undone lines, broken lines and repeated events left out.

    Non-finite figures are floats again. Of several events of one kind, split and step the last
    counts (an evaluation that was broken off is done again, all of its splits).
    """
    events: dict[tuple[Any, ...], dict[str, Any]] = {}
    for text in Path(path).read_text(encoding="utf-8", errors="replace").splitlines():
        line = _parse_line(text)
        if line is None:
            continue
        if line["event"] in ("started", "resumed"):
            kept = line["step"] if line["event"] == "resumed" else -1
            events = {key: old for key, old in events.items() if old["step"] <= kept}
            continue
        events[line["event"], line.get("split"), line["step"]] = line
    return list(events.values())


def _parse_line(text: str) -> dict[str, Any] | None:
    try:
        line = json.loads(text)
    except ValueError:
        return None
    if not isinstance(line, dict) or "event" not in line or "step" not in line:
        return None
    numbers = {written: float(number) for number, written in NOT_FINITE.items()}
    return {
        key: numbers.get(value, value) if isinstance(value, str) else value
        for key, value in line.items()
    }


# How long the rest of a run will take, by the pace of its present start.


class TimeLeft:
    """Knows the pace of the steps of one start, evaluations and saves between them included.

    What comes before the first step (an evaluation, say) happens once and counts for no step; as
    soon as there is a second step the first one, which compiles and allocates, counts no more.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.since: tuple[int, float] | None = None  # steps done, and when
        self.first_end: tuple[int, float] | None = None

    def begin_step(self, steps_done: int) -> None:
        """Note when the first step begins."""
        if self.since is None:
            self.since = (steps_done, self.clock())

    def end_step(self, steps_done: int) -> None:
        """Note the first step's end once a second one has ended."""
        if self.first_end is None:
            self.first_end = (steps_done, self.clock())
        else:
            self.since = self.first_end

    def seconds(self, steps_done: int, steps: int) -> float | None:
        """Return the seconds until all steps are done; None before the first one is."""
        if self.since is None or steps_done <= self.since[0]:
            return None
        pace_s = (self.clock() - self.since[1]) / (steps_done - self.since[0])
        return pace_s * max(steps - steps_done, 0)
