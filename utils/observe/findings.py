"""Findings about a run: where its hours went, loss spikes, settings that differ."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from utils.observe.columns import column, number
from utils.observe.endings import end_of_start
from utils.observe.history import History, Start

SPIKE_SCORE = 8.0  # robust standard deviations above the previous logs
# Logs in the window before a loss; logs that are judged at once; finite logs that a window needs.
WINDOW, BLOCK, SHORTEST = 64, 16, 16
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


@dataclass
class Spike:
    """Consecutive logs with a loss far above earlier ones; loss and grad_norm are the peak's."""

    step: int
    last_step: int
    loss: float
    before: float  # median of the previous logs
    score: float
    grad_norm: float | None


def where_the_hours_went(run: History) -> dict[str, float]:
    """Return the seconds for each key of HOURS. Their sum is the time until the last sign of life.

    Work that a later start repeated counts as lost. So does the time between the last log of a
    failed or interrupted start and its end.
    """
    spent = dict.fromkeys((key for key, _ in HOURS), 0.0)
    for index, start in enumerate(run.starts):
        before = _before(start, run.starts[index - 1].ended if index else None)
        for key, seconds in before.items():
            spent[key] += seconds
        known = _seconds_of(start)
        if start.trained is not None:
            known["startup"] = start.trained - start.began
            if end_of_start(run, start).word in ("interrupted", "failed"):
                known["lost"] += start.ended - max(
                    [start.trained, *(line["time"] for line in start.lines)]
                )
        else:
            known["startup"] = start.ended - start.began
        for key, seconds in known.items():
            spent[key] += seconds
        spent["other"] += max(0.0, start.ended - start.began - sum(known.values()))
    return spent


def _before(start: Start, since: float | None) -> dict[str, float]:
    """Return the seconds between the previous start, or the job's submission, and this start.

    The keys are from HOURS. All seconds are "between" if provenance.json lacks the job's times.
    """
    submitted, began = (number(start.job.get(f"{key}_time")) for key in ("submit", "start"))
    since = min(submitted or start.began, start.began) if since is None else since
    if began is None:
        return {"between": max(0.0, start.began - since)}
    cuts = np.clip([since, submitted or since, began, start.began], since, start.began)
    seconds = np.diff(np.maximum.accumulate(cuts)).tolist()
    return dict(zip(("between", "queue", "startup"), seconds, strict=True))


def _seconds_of(start: Start) -> dict[str, float]:
    """Return the seconds, by use, that the log lines of a start account for."""
    trained = [line for line in start.lines if line["event"] == "train"]
    first, step_time, wait, lost = (
        np.nan_to_num(column(trained, key))
        for key in ("first_step_time_s", "step_time_s", "data_wait_s", "lost")
    )
    # A log has the mean over all steps since the last log, without the very first step.
    steps = np.diff(column(trained, "step"), prepend=max(start.done, 0)) - (first > 0)
    found = [("first", first, lost), ("wait", wait * steps, lost)]
    found.append(("compute", (step_time - wait) * steps, lost))
    for event, ending in (("eval", "_runtime"), ("save", "stall_s")):
        lines = [line for line in start.lines if line["event"] == event]
        seconds = [sum(line[key] for key in line if key.endswith(ending)) for line in lines]
        found.append((event, np.array(seconds), column(lines, "lost")))
    spent = {key: float(np.sum(times * (1 - undone))) for key, times, undone in found}
    return spent | {"lost": sum(float(np.sum(times * undone)) for _, times, undone in found)}


def spikes(lines: Sequence[Mapping[str, Any]]) -> list[Spike]:
    """Return losses that are far above the previous WINDOW logs, in robust deviations.

    Consecutive logs are one spike. A loss that is not finite always counts.
    """
    kept = [line for line in lines if line.get("loss") is not None]
    losses = column(kept, "loss")
    found: list[Spike] = []
    previous = -2  # the index of the last log that belongs to a spike
    for first in range(0, len(losses), BLOCK):
        window = losses[max(0, first - WINDOW) : first]
        window = window[np.isfinite(window)]
        if len(window) < SHORTEST:
            continue
        middle = float(np.sort(window)[len(window) // 2])  # np.median takes ten times as long
        # The median deviation of a normal distribution is 0.67 standard deviations. For equal
        # losses it is zero, so the spread is at least a thousandth of the loss.
        away = float(np.sort(np.abs(window - middle))[len(window) // 2])
        spread = max(1.4826 * away, 1e-3 * abs(middle), 1e-9)
        scores = (losses[first : first + BLOCK] - middle) / spread
        for index in (np.flatnonzero(~(scores < SPIKE_SCORE)) + first).tolist():
            line, loss = kept[index], float(losses[index])
            score = float((loss - middle) / spread)
            begin = line["step"]
            if index == previous + 1:
                before, previous = found.pop(), index
                begin = before.step
                if loss <= before.loss:
                    found.append(replace(before, last_step=line["step"]))
                    continue
            norm, previous = line.get("grad_norm"), index
            found.append(Spike(begin, line["step"], loss, middle, score, norm))
    return found


def set_settings(run: History) -> list[dict[str, Any]]:
    """Return the settings that are not defaults, with the source that the first start recorded."""
    first = next((start.entry for start in run.starts if "given" in start.entry), None)
    given: Mapping[str, str] = first["given"] if first else {}
    return [
        {"name": name, "value": run.settings.get(name), "source": source}
        for name, source in given.items()
        if name in run.settings
    ]


def settings_that_differ(runs: Sequence[History]) -> list[tuple[str, list[Any]]]:
    """Return the settings and facts that differ between the runs, with the value of each run."""
    facts = [_facts(run) | run.settings for run in runs]
    names = dict.fromkeys(name for each in facts for name in each if name not in OWN_SETTINGS)
    rows = [(name, [each.get(name) for each in facts]) for name in names]
    return [(name, values) for name, values in rows if any(one != values[0] for one in values)]


def _facts(run: History) -> dict[str, Any]:
    entry = next((start.entry for start in reversed(run.starts) if start.entry), {})
    launch, git = entry.get("launch") or {}, entry.get("git") or {}
    versions = {f"version of {name}": at for name, at in (entry.get("versions") or {}).items()}
    return {
        "script": entry.get("script"), "code": git.get("commit"),
        "processes": launch.get("world_size"), "strategy": launch.get("strategy"),
        "devices": sorted(set(launch.get("devices") or [])), **versions,
    }  # fmt: skip


def figures(run: History) -> dict[str, Any]:
    """Return the figures of a run for the tables; None if a figure is not known."""
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
