"""Memory of each rank by phase, and the rank that the others wait for."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from utils.host.journal_file import FILE_NAME, read_line
from utils.observe.columns import column, number, thinned
from utils.observe.history import History

PHASES = {"train": "training", "eval": "evaluation", "save": "saving"}
DEVICE, HOST = "memory_peak_gib", "host_rss_gib"
READ = 4000  # values that are read for a phase, lines times ranks; at least forty lines are read
SHOWN = 6  # ranks with their own line in the chart
Point = dict[str, Any]


def memory_by_rank(run: History) -> list[Point]:
    """Return the memory of each rank at some lines of each phase, the extremes included.

    A point has event, step, hours, rank (its name), key (the figure), gib, and `left`: the GiB that
    its device had left, None if unknown.
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
    """Read the memory of each rank from lines of the journal."""
    with (run.path / FILE_NAME).open("rb") as file:
        whole = [read_line(file.readline()) for line in lines if file.seek(line["at"]) >= 0]
    return [(line or {}).get("memory_by_rank", []) for line in whole]


def memory_table(points: Sequence[Point]) -> list[Point]:
    """Return each phase's point with the most memory, and the median of all ranks at its step."""
    rows = []
    for event, phase in PHASES.items():
        if own := [point for point in points if point["event"] == event]:
            top = max(own, key=lambda point: float(point["gib"]))
            then = sorted(point["gib"] for point in own if point["step"] == top["step"])
            rows.append(top | {"phase": phase, "median": then[len(then) // 2]})
    # No table for one rank in one phase: the figures and charts of the whole run show its memory.
    return rows if len({point["rank"] for point in points}) > 1 or len(rows) > 1 else []


def memory_series(points: Sequence[Point]) -> dict[str, list[Point]]:
    """Return the points of the fullest ranks in training, and of all ranks in each other phase."""
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
    """Return the name of the rank that the others waited for since the last line."""
    return f"rank {line['slowest_rank']} ({line.get('slowest_host')})"


def stragglers(run: History) -> list[dict[str, Any]]:
    """Return the ranks that the others waited for, with seconds and shares; costliest first.

    `slowest_cost` is the share of a step's time that the other ranks lose by waiting.
    """
    steps, times, shares = (
        np.nan_to_num(column(run.trained, key)) for key in ("step", "step_time_s", "slowest_cost")
    )
    seconds = times * np.diff(steps, prepend=0)
    lost = shares * seconds
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
