"""The state and the figures of every point of a sweep, as a table for people and one for programs.

A run that is refused writes nothing into its directory, so how a point's job ended is kept beside
the run directories, in OUTPUT_DIR/.points/.
"""

import csv
import io
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from utils.callbacks.journal_file import FILE_NAME, read_journal
from utils.cluster.whole_files import replace_text
from utils.config.errors import ExitCode
from utils.jobs.sweep_file import Point, Sweep, flag_text

ENDINGS = ".points"
RESULTS = "results"
_FINAL = "final"  # whole or absent, see utils/runs/export.py
_GOES_ON = (ExitCode.STOPPED, ExitCode.LOST_RANK)


@dataclass(frozen=True)
class Result:
    """What became of a point. `figures` are the last ones by metric name, `best` of the metric."""

    point: Point
    state: str
    finished: bool
    step: int | None = None
    figures: Mapping[str, float] = field(default_factory=dict)
    best: float | None = None
    best_step: int | None = None


def note_ending(sweep: Sweep, point: Point, exit_code: int) -> None:
    """Keep how the job of a point ended, for the table."""
    job = os.environ.get("SLURM_ARRAY_JOB_ID") or os.environ.get("SLURM_JOB_ID")
    ending = {"exit_code": exit_code, "job": job}
    _replace(sweep.output_dir / ENDINGS / f"{point.name}.json", json.dumps(ending) + "\n")


def results_of(sweep: Sweep) -> list[Result]:
    """Return every point's result, the best first; points without the metric keep their order."""
    metric = sorting_metric(sweep)
    results = [_result(sweep, point, metric) for point in sweep.points]
    sign = -1 if metric and "accuracy" in metric else 1

    def place(result: Result) -> tuple[bool, float, int]:
        known = result.best is not None
        return not known, sign * (result.best or 0.0), result.point.index

    return sorted(results, key=place)


def sorting_metric(sweep: Sweep) -> str | None:
    """Return the sweep's metric, else the first evaluation loss that any point logged."""
    if sweep.metric:
        return sweep.metric
    for point in sweep.points:
        for line in _journal(sweep, point):
            if line["event"] == "eval":
                return next((key for key in line if key.endswith("_loss")), None)
    return None


def _journal(sweep: Sweep, point: Point) -> list[dict[str, Any]]:
    path = sweep.run_directory(point) / FILE_NAME
    return read_journal(path) if path.is_file() else []


def _result(sweep: Sweep, point: Point, metric: str | None) -> Result:
    lines = _journal(sweep, point)
    step = max((line["step"] for line in lines), default=None)
    figures: dict[str, float] = {}
    for line in sorted(lines, key=lambda line: line["step"]):
        for key, value in line.items():
            of_split = key.startswith("eval_") and key.endswith(("_loss", "_perplexity"))
            counts = of_split or key in ("loss", metric)
            if counts and isinstance(value, int | float):
                figures[key] = value
    measured = [
        (line[metric], line["step"])
        for line in lines
        if metric in line and isinstance(line[metric], int | float) and math.isfinite(line[metric])
    ]
    choose = max if metric and "accuracy" in metric else min
    best, best_step = choose(measured, default=(None, None))
    state, finished = _state(sweep, point, step)
    return Result(point, state, finished, step, figures, best, best_step)


def _state(sweep: Sweep, point: Point, step: int | None) -> tuple[str, bool]:
    directory = sweep.run_directory(point)
    if (directory / _FINAL).is_dir():
        return "finished", True
    at = "" if step is None else f" at step {step}"
    ending = _ending(sweep, point)
    if ending is not None and ending["exit_code"] in _GOES_ON:
        return f"stopped{at}", False
    if ending is not None and ending["exit_code"] != ExitCode.DONE:
        return f"failed{at} (exit {ending['exit_code']}, job {ending['job']})", False
    if (directory / "config.yaml").exists():
        return f"running or stopped{at}", False
    return "not started", False


def _ending(sweep: Sweep, point: Point) -> dict[str, Any] | None:
    """Return how the last job of a point ended; None before, and while a later one is running."""
    record = sweep.output_dir / ENDINGS / f"{point.name}.json"
    # Each start that gets as far as its directory writes this file.
    started = sweep.run_directory(point) / "provenance.json"
    try:
        if started.exists() and started.stat().st_mtime > record.stat().st_mtime:
            return None
        content: dict[str, Any] = json.loads(record.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return None
    return content


def write_results(sweep: Sweep) -> str:
    """Write results.md and results.csv into the sweep's directory; return the table as text."""
    results, metric = results_of(sweep), sorting_metric(sweep)
    table = _table(results, metric)
    done = sum(result.finished for result in results)
    order = f"sorted by the best {metric}" if metric else "in the order of the points"
    title = f"# {sweep.file}: {done} of {len(results)} points finished, {order}"
    _replace(sweep.output_dir / f"{RESULTS}.md", f"{title}\n\n{table}\n")
    _replace(sweep.output_dir / f"{RESULTS}.csv", _csv(results, metric))
    return f"{title}\n\n{table}"


def _table(results: Sequence[Result], metric: str | None) -> str:
    """Write an aligned Markdown table."""
    names = _figure_names(results)
    heads = [_head(name) for name in names]
    rows = [
        ["point", "name", "state", "step", *heads, *([f"best {_head(metric)}"] if metric else [])]
    ]
    for result in results:
        cells = [str(result.point.index), result.point.name, result.state]
        cells.append("" if result.step is None else str(result.step))
        cells += [_shown(result.figures.get(name), name) for name in names]
        if metric:
            best = _shown(result.best, metric)
            cells.append(f"{best} (step {result.best_step})" if best else "")
        rows.append(cells)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |"
        for row in rows
    ]
    rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
    return "\n".join([lines[0], rule, *lines[1:]])


def _figure_names(results: Sequence[Result]) -> list[str]:
    """Return the figures of all points, the training loss first, splits in the order they came."""
    names = dict.fromkeys(name for result in results for name in result.figures)
    return sorted(names, key=lambda name: name != "loss")


def _head(name: str) -> str:
    """Write a figure's name for people: eval_modules_loss is "modules loss".

    >>> _head("loss"), _head("eval_modules_perplexity")
    ('train loss', 'modules perplexity')
    """
    return "train loss" if name == "loss" else name.removeprefix("eval_").replace("_", " ")


def _shown(value: float | None, name: str) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if name.endswith("_perplexity") else f"{value:.4f}"


def _csv(results: Sequence[Result], metric: str | None) -> str:
    names = _figure_names(results)
    settings = list(dict.fromkeys(name for result in results for name in result.point.settings))
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(
        ["point", "name", *settings, "state", "step", *names, f"best_{metric}", "best_step"]
    )
    for result in results:
        own = result.point.settings
        writer.writerow(
            [
                result.point.index,
                result.point.name,
                *(_setting(own[name]) if name in own else "" for name in settings),
                result.state,
                result.step,
                *(result.figures.get(name) for name in names),
                result.best,
                result.best_step,
            ]
        )
    return text.getvalue()


def _setting(value: Any) -> str:
    return " ".join(map(flag_text, value)) if isinstance(value, list) else flag_text(value)


def _replace(path: Path, text: str) -> None:
    """Write a file in one step: several tasks of the array may do so at a time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_text(path, text)
