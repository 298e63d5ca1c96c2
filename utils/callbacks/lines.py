"""Formats a log event as one aligned line for people."""

from collections.abc import Mapping
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
