"""Analyses for the report: time spent, slow ranks, memory of ranks, differences of settings."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from utils.host.journal_file import FILE_NAME, read_line
from utils.observe.endings import end_of_start
from utils.observe.history import History, Line, Start

# Settings that differ in every run.
OWN_SETTINGS = ("output_dir", "run_name", "accept_changes", "dry_run")
HOURS = (
    ("compute", "Training steps"),
    ("wait", "Waiting for data"),
    ("first", "First steps (compilation, warm-up)"),
    ("eval", "Evaluation"),
    ("save", "Saving"),
    ("startup", "Starting up"),
    ("lost", "Lost to interruptions"),
    ("queue", "Waiting in Slurm's queue"),
    ("between", "Between starts"),
    ("other", "Everything else"),
)
PHASE_NAMES = {"train": "training", "eval": "evaluation", "save": "saving"}
DEVICE, HOST = "memory_peak_gib", "host_rss_gib"
MEMORY_VALUES = 4000  # approximate number of memory values (lines x ranks) to read per phase
Point = dict[str, Any]


def logged_number(value: Any) -> float | None:
    """Return a logged number as a float; None if a user's hook logged another type."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    return None


def column(lines: Sequence[Line], key: str) -> np.ndarray:
    """Return the values of `key` in log lines as a float64 array; a missing value is NaN."""
    values = [line.get(key) for line in lines]
    try:
        return np.array(values, dtype=float)
    except (TypeError, ValueError):  # a user's hook logged another type
        return np.array([logged_number(value) for value in values], dtype=float)


def thinned(values: np.ndarray, points: int) -> np.ndarray:
    """Return about `points` ascending indices into `values` that keep the highs and lows.

    `values` are divided into equal parts. Each part gives the indices of its lowest and highest
    value. The first and last index are included.
    """
    if len(values) <= points:
        return np.arange(len(values))
    size = -(-len(values) * 2 // points)
    parts = np.full((-(-len(values) // size), size), np.nan)
    parts.flat[: len(values)] = values
    first, missing = np.arange(len(parts)) * size, np.isnan(parts)
    lowest = first + np.where(missing, np.inf, parts).argmin(axis=1)
    highest = first + np.where(missing, -np.inf, parts).argmax(axis=1)
    return np.unique(np.concatenate([[0, len(values) - 1], lowest, highest]))


def seconds_by_use(run: History) -> dict[str, float]:
    """Return how long a run spent on each use of its time, {use: seconds}. HOURS has the uses.

    A start is one execution of the script. The seconds add up to the time until the last start
    ended. Work that a later start repeated counts as "lost". The time from the last log line of a
    failed or interrupted start to its end also counts as "lost".
    """
    spent = dict.fromkeys((key for key, _ in HOURS), 0.0)
    since = None
    for start in run.starts:
        known = _seconds_of_start(start)
        known["startup"] = (start.trained or start.ended) - start.began
        if start.trained and end_of_start(run, start).word in ("interrupted", "failed"):
            times = [start.trained, *(line["time"] for line in start.lines)]
            known["lost"] += start.ended - max(times)
        known["other"] = max(0.0, start.ended - start.began - sum(known.values()))
        for seconds in (known, _seconds_before(start, since)):
            for key, value in seconds.items():
                spent[key] += value
        since = start.ended
    return spent


def _seconds_before(start: Start, since: float | None) -> dict[str, float]:
    """Return how the time between the previous start and this start was spent, {use: seconds}.

    since: when the previous start ended. None means the first start. In this case the time begins
    with the submission of the job. The uses are "between", "queue" and "startup". If
    provenance.json has no start time of the job, all seconds are "between".
    """
    submitted, began = (logged_number(start.job.get(f"{key}_time")) for key in ("submit", "start"))
    since = min(submitted or start.began, start.began) if since is None else since
    if began is None:
        return {"between": max(0.0, start.began - since)}
    cuts = np.clip([since, submitted or since, began, start.began], since, start.began)
    seconds = np.diff(np.maximum.accumulate(cuts)).tolist()
    return dict(zip(("between", "queue", "startup"), seconds, strict=True))


def _seconds_of_start(start: Start) -> dict[str, float]:
    """Return how a start spent its time, {use: seconds}, according to its log lines."""
    trained = [line for line in start.lines if line["event"] == "train"]
    first, step_time, wait, lost = (
        np.nan_to_num(column(trained, key))
        for key in ("first_step_time_s", "step_time_s", "data_wait_s", "lost")
    )
    # A log line has means over all steps since the last log line, except the start's first step.
    steps = np.diff(column(trained, "step"), prepend=max(start.done, 0)) - (first > 0)
    found = [("first", first, lost), ("wait", wait * steps, lost)]
    found.append(("compute", (step_time - wait) * steps, lost))
    for event, ending in (("eval", "_runtime"), ("save", "stall_s")):
        lines = [line for line in start.lines if line["event"] == event]
        seconds = [sum(line[key] for key in line if key.endswith(ending)) for line in lines]
        found.append((event, np.array(seconds), column(lines, "lost")))
    spent = {key: float(np.sum(times * (1 - undone))) for key, times, undone in found}
    return spent | {"lost": sum(float(np.sum(times * undone)) for _, times, undone in found)}


def memory_by_rank(run: History) -> list[Point]:
    """Return the memory that each rank used, as a list of points for a chart.

    Only a sample of the log lines is read, including the lowest and highest values. A point has
    event, step, hours, rank (a text), key (DEVICE or HOST memory), gib, and left (GiB that were
    free on the device, None if unknown).
    """
    key = DEVICE if any(DEVICE in line for line in run.trained[-1:]) else HOST
    points: list[Point] = []
    for event in PHASE_NAMES if run.trained else ():
        lines = [line for line in run.lines if line["event"] == event]
        count = max(40, MEMORY_VALUES // len(_read_memory_by_rank(run, run.trained[:1])[0] or "1"))
        lines = [lines[index] for index in thinned(column(lines, key), count).tolist()]
        for line, ranks in zip(lines, _read_memory_by_rank(run, lines), strict=True):
            for one in ranks:
                gib, left = (
                    logged_number(one.get(key)),
                    logged_number(one.get("memory_headroom_gib")),
                )
                name = f"rank {one.get('rank')} ({one.get('host')})"
                place = {"event": event, "step": line["step"], "hours": line["hours"]}
                points.append({**place, "rank": name, "key": key, "gib": gib, "left": left})
    return [point for point in points if point["gib"] is not None]


def _read_memory_by_rank(run: History, lines: Sequence[Line]) -> list[list[dict[str, Any]]]:
    """Read the field `memory_by_rank` of `lines` from metrics.jsonl. `read_run` leaves it out."""
    with (run.path / FILE_NAME).open("rb") as file:
        whole = [read_line(file.readline()) for line in lines if file.seek(line["at"]) >= 0]
    return [(line or {}).get("memory_by_rank", []) for line in whole]


def memory_table(points: Sequence[Point]) -> list[Point]:
    """Return a row for each phase (training, evaluation, saving): the point with the most memory.

    points: from `memory_by_rank`. A row also has the median over ranks at the same step. Return []
    if `points` have only one rank and one phase.
    """
    rows = []
    for event, phase in PHASE_NAMES.items():
        if own := [point for point in points if point["event"] == event]:
            top = max(own, key=lambda point: float(point["gib"]))
            then = sorted(point["gib"] for point in own if point["step"] == top["step"])
            rows.append(top | {"phase": phase, "median": then[len(then) // 2]})
    # One rank in one phase needs no table: the page shows its memory among the run's numbers.
    return rows if len({point["rank"] for point in points}) > 1 or len(rows) > 1 else []


def slowest(line: Line) -> str:
    """Return the slowest rank's name in a training log line, such as `rank 3 (node-2)`."""
    return f"rank {line['slowest_rank']} ({line.get('slowest_host')})"


def stragglers(run: History) -> list[dict[str, Any]]:
    """Return a row for each rank that other ranks waited for; the longest wait comes first.

    seconds: how long the other ranks waited for this rank. share: `seconds` as a share of the time
    of all steps. logs: the share of logs that name this rank as the slowest.
    """
    steps, times, shares = (
        np.nan_to_num(column(run.trained, key)) for key in ("step", "step_time_s", "slowest_cost")
    )
    seconds = times * np.diff(steps, prepend=0)
    costs: dict[str, list[float]] = {}
    for line, cost in zip(run.trained, (shares * seconds).tolist(), strict=True):
        if "slowest_rank" in line:
            costs.setdefault(slowest(line), []).append(cost)
    whole, logs = float(seconds.sum()) or 1.0, sum(map(len, costs.values()))
    rows = [
        {"name": name, "seconds": sum(own), "share": sum(own) / whole, "logs": len(own) / logs}
        for name, own in costs.items()
    ]
    return sorted(rows, key=lambda row: -float(row["seconds"]))


def settings_that_differ(runs: Sequence[History]) -> list[tuple[str, list[Any]]]:
    """Return (name, [value in each run]) of each setting, version or launch option that differs."""
    facts = []
    for run in runs:
        launch, git = run.entry.get("launch") or {}, run.entry.get("git") or {}
        versions = (run.entry.get("versions") or {}).items()
        known = {
            "script": run.entry.get("script"), "code": git.get("commit"),
            "processes": launch.get("world_size"), "strategy": launch.get("strategy"),
            "devices": sorted(set(launch.get("devices") or [])),
            **{f"version of {name}": version for name, version in versions},
        }  # fmt: skip
        facts.append(known | run.settings)
    names = dict.fromkeys(name for each in facts for name in each if name not in OWN_SETTINGS)
    rows = [(name, [each.get(name) for each in facts]) for name in names]
    return [(name, values) for name, values in rows if any(one != values[0] for one in values)]


def figures(run: History) -> dict[str, Any]:
    """Return {name: number} for the report's tables on a run; None for an unknown number."""
    last = run.trained[-1] if run.trained else {}

    def over_all(key: str, reduce: Callable[[Any], Any], logs: int = 0) -> float | None:
        values = column(run.trained, key)[-logs:]
        values = values[np.isfinite(values)]
        return float(reduce(values)) if len(values) else None

    return {
        "step": run.last_step or 0,
        "loss": last.get("loss"),
        "mean_loss": over_all("loss", np.mean, 10),
        "tokens": last.get("tokens_seen"),
        "tokens_per_s": over_all("tokens_per_s", np.median),
        "ran_s": sum(start.ended - start.began for start in run.starts),
        "device_peak_gib": over_all("memory_peak_gib", np.max),
        "host_peak_gib": over_all("host_peak_rss_gib", np.max),
        "evaluations": run.evaluations(),
    }
