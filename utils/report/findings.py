"""What a person wants to know of a run: how it ended, where its hours went, what stands out."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from utils.report.history import History, Start, column, number
from utils.support.journal_file import duration

SPIKE_SCORE = 8.0  # robust standard deviations over the logs before
WINDOW, BLOCK, SHORTEST = 64, 16, 16  # logs that a loss is compared with; how often anew
# Of one run alone, wherever runs are compared.
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


@dataclass(frozen=True)
class Ending:
    """How a start or a run ended: a word for a mark, a sentence, and what to do next."""

    kind: str  # finished, running, stopped, failed, interrupted
    text: str
    then: str = ""


@dataclass
class Spike:
    """A loss far above those before it: from step to step, its peak, and what came with it."""

    step: int
    last_step: int
    loss: float
    before: float  # median of the logs before
    score: float
    grad_norm: float | None


def start_ending(run: History, start: Start) -> Ending:
    """Say how a start ended, as far as journal, lock and job tell."""
    last = start is run.starts[-1]
    until = math.inf if last else run.starts[run.starts.index(start) + 1].began
    spoilt = [one for one in run.nonfinite if start.began <= one["time"] < until]
    at = f"at step {start.last_step:,}" if start.trained is not None else "before training"
    known = {
        "summary": Ending("finished", f"finished {at}"),
        "stopped": Ending("stopped", f"stopped {at} with a checkpoint: a signal, a limit or STOP"),
    }
    rules = (
        (start.last_event in known, lambda: known[str(start.last_event)]),
        (last and run.alive and not start.error, lambda: Ending("running", f"running, {at}")),
        (spoilt, lambda: Ending("failed", "step {step} was not finite".format(**spoilt[-1]))),
        (start.error and start.left, lambda: Ending("failed", str(start.error))),
        (start.error, lambda: Ending("interrupted", str(start.error))),
        (
            start.left and start.trained is None and run.finished,
            lambda: Ending("finished", "nothing was left to do"),
        ),
        (start.left, lambda: Ending("failed", "ended with an error, which its log shows")),
    )
    cut_off = Ending("interrupted", "no last word: it was killed, or its node was lost")
    return next((ending() for holds, ending in rules if holds), cut_off)


def run_ending(run: History) -> Ending:
    """Say how the run stands, and what to do next."""
    ending, step, of = start_ending(run, run.starts[-1]), last_step(run), run.max_steps
    where = f"step {step:,}" + (f" of {of:,}" if of else "")
    if run.finished and ending.kind in ("finished", "running"):
        return Ending("finished", f"Finished at {where}.", "The model is in final/.")
    if ending.kind == "finished":
        return Ending("stopped", f"Trained to {where}, but final/ is not there.", resume(run))
    if ending.kind == "running":
        return Ending("running", f"Running: {where}.", remaining(run))
    if ending.kind == "stopped":
        return Ending("stopped", f"Stopped at {where}.", resume(run))
    word = "Failed" if ending.kind == "failed" else "Interrupted"
    return Ending(ending.kind, f"{word} at {where}: {ending.text}.", resume(run))


def resume(run: History) -> str:
    """Say where the same command resumes, and that it is no use after a step that is not finite."""
    then = "There is no committed checkpoint: the same command starts from the beginning"
    if run.checkpoints:
        then = f"The same command resumes it from checkpoint-{run.checkpoints[0]['step']}"
    if any(one["time"] >= run.starts[-1].began for one in run.nonfinite):
        then += ", and fails at the same step again if data and settings stay as they are"
    return f"{then}."


def remaining(run: History) -> str:
    """Say how long the steps to come take, at the pace of the last log."""
    pace = run.trained[-1].get("step_time_s") if run.trained else None
    if not pace or not run.max_steps:
        return ""
    return f"About {duration(pace * (run.max_steps - last_step(run)))} of steps remain."


def last_step(run: History) -> int:
    """Return the last step that counts."""
    begun = [max(start.done, 0) for start in run.starts if start.trained is not None]
    return max([line["step"] for line in run.lines] or begun[-1:] or [0])


def where_the_hours_went(run: History) -> dict[str, float]:
    """Return seconds by the keys of HOURS; they add up to the time from first sign to last sign.

    Work that a later start did again counts as lost, with the time to the death of its process.
    """
    spent = dict.fromkeys((key for key, _ in HOURS), 0.0)
    for index, start in enumerate(run.starts):
        before = _before(start, run.starts[index - 1].ended if index else None)
        for key, seconds in before.items():
            spent[key] += seconds
        known = _seconds_of(start)
        if start.trained is not None:
            known["startup"] = start.trained - start.began
            if start_ending(run, start).kind in ("interrupted", "failed"):
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
    """Return the seconds between the last start, if there was one, and this one.

    All of them are "between" where provenance.json does not have the times of the job.
    """
    submitted, began = (number(start.job.get(f"{key}_time")) for key in ("submit", "start"))
    since = min(submitted or start.began, start.began) if since is None else since
    if began is None:
        return {"between": max(0.0, start.began - since)}
    cuts = np.clip([since, submitted or since, began, start.began], since, start.began)
    seconds = np.diff(np.maximum.accumulate(cuts)).tolist()
    return dict(zip(("between", "queue", "startup"), seconds, strict=True))


def _seconds_of(start: Start) -> dict[str, float]:
    """Return what one start's lines say of its time."""
    trained = [line for line in start.lines if line["event"] == "train"]
    first, step_time, wait, lost = (
        np.nan_to_num(column(trained, key))
        for key in ("first_step_time_s", "step_time_s", "data_wait_s", "lost")
    )
    # The figures of a step are those of all steps since the last log, but for the very first.
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
    """Return where the loss stands out of the WINDOW logs before it, in robust deviations.

    Logs that follow each other are one spike. A loss that is not finite is one, of any score.
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
        # The median deviation of a normal distribution is 0.67 standard deviations. At least a
        # thousandth of the loss: equal losses leave none.
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
    """Return the settings that are not defaults, with their source, as the first start noted."""
    first = next((start.entry for start in run.starts if "given" in start.entry), None)
    given: Mapping[str, str] = first["given"] if first else {}
    return [
        {"name": name, "value": run.settings.get(name), "source": source}
        for name, source in given.items()
        if name in run.settings
    ]


def settings_that_differ(runs: Sequence[History]) -> list[tuple[str, list[Any]]]:
    """Return the settings and facts that are not the same in all runs, with each run's."""
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
    """Return the figures of the run that tables show; those that are not known are None."""
    last = run.trained[-1] if run.trained else {}

    def over_all(key: str, reduce: Callable[[Any], Any], logs: int = 0) -> float | None:
        values = run.column(key)[-logs:]
        values = values[np.isfinite(values)]
        return float(reduce(values)) if len(values) else None

    return {
        "step": last_step(run),
        "loss": last.get("loss"),
        "mean_loss": over_all("loss", np.mean, 10),
        "tokens": last.get("tokens_seen"),
        "tokens_per_s": over_all("tokens_per_s", np.median),
        "ran_s": sum(start.ended - start.began for start in run.starts),
        "device_peak_gib": over_all("memory_peak_gib", np.max),
        "host_peak_gib": over_all("host_peak_rss_gib", np.max),
        "evals": evaluations(run),
    }


def evaluations(run: History) -> dict[str, dict[str, Any]]:
    """Return, of each split, the last and the lowest loss with their steps, the last accuracy."""
    found: dict[str, list[tuple[int, float]]] = {}
    right: dict[str, float | None] = {}
    for line in (line for line in run.lines if line["event"] == "eval"):
        split = line.get("split") or "eval"
        before = f"eval_{split}" if line.get("split") else "eval"
        if (loss := line.get(f"{before}_loss")) is not None:
            found.setdefault(split, []).append((line["step"], loss))
            right[split] = line.get(f"{before}_accuracy")
    return {
        split: {
            "last": points[-1], "best": min(points, key=lambda point: point[1]),
            "accuracy": right[split],
        }
        for split, points in found.items()
    }  # fmt: skip
