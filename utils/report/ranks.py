"""What the ranks of a run tell: the memory of each by phase, and which one the others wait for."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from utils.report.history import FILE_NAME, History, column, number, thinned
from utils.support.journal_file import read_line

PHASES = {"train": "training", "eval": "evaluation", "save": "saving"}
DEVICE, HOST = "memory_peak_gib", "host_rss_gib"
READ = 4000  # ranks, over all lines of a phase that are read; forty lines at least
SHOWN = 6  # ranks that have a line of their own
Point = dict[str, Any]


def memory_by_rank(run: History) -> list[Point]:
    """Return the memory of each rank at lines of each phase, those with the extremes among them.

    A point has event, step, hours, rank (its name), key (what was measured), gib, and `left`: what
    its device had left, None where that is not known.
    """
    key = DEVICE if any(DEVICE in line for line in run.trained[-1:]) else HOST
    points: list[Point] = []
    for event in PHASES if run.trained else ():
        lines = [line for line in run.lines if line["event"] == event]
        count = max(40, READ // len(_ranks_of(run, run.trained[:1])[0] or "1"))
        lines = [lines[index] for index in thinned(column(lines, key), count).tolist()]
        for line, ranks in zip(lines, _ranks_of(run, lines), strict=True):
            for one in ranks:
                gib, left = number(one.get(key)), number(one.get("memory_headroom_gib"))
                name = f"rank {one.get('rank')} ({one.get('host')})"
                place = {"event": event, "step": line["step"], "hours": line["hours"]}
                points.append({**place, "rank": name, "key": key, "gib": gib, "left": left})
    return [point for point in points if point["gib"] is not None]


def _ranks_of(run: History, lines: Sequence[Mapping[str, Any]]) -> list[list[dict[str, Any]]]:
    """Read lines of the journal once more, for what each rank had."""
    with (run.path / FILE_NAME).open("rb") as file:
        whole = [read_line(file.readline()) for line in lines if file.seek(line["at"]) >= 0]
    return [(line or {}).get("memory_by_rank", []) for line in whole]


def memory_table(points: Sequence[Point]) -> list[Point]:
    """Return of each phase the point with the most memory, and the median of the ranks then."""
    rows = []
    for event, phase in PHASES.items():
        if own := [point for point in points if point["event"] == event]:
            top = max(own, key=lambda point: float(point["gib"]))
            then = sorted(point["gib"] for point in own if point["step"] == top["step"])
            rows.append(top | {"phase": phase, "median": then[len(then) // 2]})
    # One rank in training alone: that is in the figures and charts of the whole run.
    return rows if len({point["rank"] for point in points}) > 1 or len(rows) > 1 else []


def memory_series(points: Sequence[Point]) -> dict[str, list[Point]]:
    """Return the points of the fullest ranks in training, and those of all ranks by other phase."""
    by_name: dict[str, list[Point]] = {}
    for point in points if memory_table(points) else ():
        train = point["event"] == "train"
        name = point["rank"] if train else f"{PHASES[point['event']]}, each rank"
        by_name.setdefault(name, []).append(point)
    highest = {name: max(point["gib"] for point in own) for name, own in by_name.items()}
    ranks = [name for name, own in by_name.items() if own[0]["event"] == "train"]
    fullest = sorted(ranks, key=lambda name: -highest[name])[:SHOWN]
    return {name: by_name[name] for name in by_name if name in fullest or name not in ranks}


def slowest(line: Mapping[str, Any]) -> str:
    """Name the rank that others waited for since the line before."""
    return f"rank {line['slowest_rank']} ({line.get('slowest_host')})"


def stragglers(run: History) -> list[dict[str, Any]]:
    """Return the ranks that others waited for, the costliest first: seconds, logs, shares of all.

    `slowest_cost` is the share of a step's time that the other ranks lose by waiting.
    """
    steps = np.diff(run.column("step"), prepend=0)
    seconds = np.nan_to_num(run.column("step_time_s")) * steps
    lost = np.nan_to_num(run.column("slowest_cost")) * seconds
    costs: dict[str, list[float]] = {}
    for line, cost in zip(run.trained, lost.tolist(), strict=True):
        if "slowest_rank" in line:
            costs.setdefault(slowest(line), []).append(cost)
    whole, logs = float(seconds.sum()) or 1.0, sum(map(len, costs.values()))
    rows = [
        {"name": name, "seconds": sum(own), "share": sum(own) / whole, "logs": len(own) / logs}
        for name, own in costs.items()
    ]
    return sorted(rows, key=lambda row: -float(row["seconds"]))
