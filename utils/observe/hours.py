"""GPU-hours of a run by use, the end of the budget `max_gpu_hours`, and the energy of the GPUs.

The seconds of each phase come from the files in .lock, so metrics.jsonl is not read. The number of
GPUs is the number of ranks. The hours of a run on CPUs are process-hours.
"""

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import dropwhile
from pathlib import Path

from utils.host.phase_times import HUNG, SAVING
from utils.host.run_lock import WATCH_S
from utils.observe.endings import End, end_of_start
from utils.observe.history import History, Start, read_run

# The uses of GPU-hours, each with its phases. A test compares them with callbacks.progress.Phase.
PHASES_BY_PART: dict[str, tuple[str, ...]] = {
    "training": ("training",),
    "evaluation": ("evaluating",),
    "saves": (SAVING,),
    "starts": ("starting", "loading a checkpoint", "in its first step"),
    "lost": (),
    "hangs": (HUNG,),
    "between restarts": (),
    "other": ("finishing",),
}
REDONE = "training", "evaluation", "saves"  # a later start repeats these after a failure
GPU_HOURS, PROCESS_HOURS = "GPU-hours", "process-hours"
LARGEST = 10**7  # a larger number of ranks is a damaged value
CO2 = "STOKER_CO2_G_PER_KWH"


@dataclass(frozen=True)
class Hours:
    """The GPU-hours of a run: the hours of each start of the script, times the start's ranks.

    parts: GPU-hours by use, such as {"saves": 1.5}. PHASES_BY_PART has all uses. unit: "GPU-hours",
    or on CPUs "process-hours". kwh: energy in training, 0 if unknown.
    """

    parts: dict[str, float]
    unit: str
    kwh: float

    @property
    def total(self) -> float:
        """The sum of the GPU-hours over all uses."""
        return sum(self.parts.values())

    def __str__(self) -> str:
        shown = {name: amount(hours) for name, hours in self.parts.items()}
        split = ", ".join(f"{name} {text}" for name, text in shown.items() if text != "0")
        return f"{sum_in_words([self])}{': ' * bool(split)}{split}"


def hours_of(run: History) -> Hours:
    """Return the GPU-hours that a run used.

    If the run began from a checkpoint of another run, the other run's starts are not counted. These
    starts come first in provenance.json and have no file in .lock.
    """
    parts = dict.fromkeys(PHASES_BY_PART, 0.0)
    before, ranks = None, 1
    own = list(dropwhile(lambda start: start.owner is None, run.starts))
    for start in own or run.starts:
        ranks = _rank_count(start) or ranks
        for name, seconds in _seconds_by_use(run, start, before).items():
            parts[name] += seconds * ranks / 3600
        before = start
    kwh = sum(start.owner.kwh or 0.0 for start in own if start.owner)
    devices = (run.entry.get("launch") or {}).get("devices")
    unit = PROCESS_HOURS if devices == ["cpu"] else GPU_HOURS
    return Hours(parts, unit, kwh)


def _rank_count(start: Start) -> int:
    ranks = int((start.entry.get("launch") or {}).get("world_size") or 0)
    return ranks if 0 < ranks < LARGEST else 0


def _seconds_by_use(run: History, start: Start, before: Start | None) -> dict[str, float]:
    """Return for how long a start held its GPUs, by use: {use: seconds}.

    PHASES_BY_PART has all uses. before: the previous start, or None.
    """
    spent = start.owner.spent if start.owner else {}
    saved = start.owner.saved if start.owner else {}
    began = start.owner.since if start.owner else start.began
    parts = _sum_by_use(spent)
    rest = max(start.ended - began - sum(spent.values()), 0.0)
    if spent:
        rest = min(rest, 2 * WATCH_S)  # since the last heartbeat; more if a clock was wrong
    elif start.trained:  # the lock file of an older Stoker
        parts["starts"] = min(max(start.trained - began, 0.0), rest)
        rest -= parts["starts"]
    end = end_of_start(run, start)
    if end.word in ("failed", "interrupted") or end is End.BY_USER:
        kept = _sum_by_use(saved)
        parts["lost"] = rest + sum(max(parts[name] - kept[name], 0.0) for name in REDONE)
        parts |= {name: min(parts[name], kept[name]) for name in REDONE}
    else:
        parts["other"] += rest
    name, seconds = _time_before_start(start, began, before)
    parts[name] += seconds
    return parts


def _sum_by_use(spent: Mapping[str, float]) -> dict[str, float]:
    return {
        name: sum(spent.get(phase, 0.0) for phase in phases)
        for name, phases in PHASES_BY_PART.items()
    }


def _time_before_start(start: Start, began: float, before: Start | None) -> tuple[str, float]:
    """Return (use, seconds) of the time for which the job held its GPUs before a start began.

    The use is "starts" or "between restarts". before: the previous start, or None. Without Stoker's
    job scripts, the seconds are 0, because the job may have run other commands before.
    """
    restarts = start.job.get("restart_in_job")
    if restarts is None:
        return "starts", 0.0
    if int(restarts) and before is not None:
        return "between restarts", max(began - before.ended, 0.0)
    job_began = start.job.get("start_time")
    since = job_began if isinstance(job_began, int | float) else began
    return "starts", max(began - max(since, before.ended if before else 0.0), 0.0)


def end_of_budget(output_dir: Path, max_gpu_hours: float | None) -> float | None:
    """Return the unix time at which the run will have used `max_gpu_hours`.

    None means no limit, or a run without a start.
    """
    run = read_run(output_dir, whole=False)
    if max_gpu_hours is None or not run.starts:
        return None
    left_h = max_gpu_hours - hours_of(run).total
    return time.time() + 3600 * left_h / (_rank_count(run.starts[-1]) or 1)


def amount(number: float) -> str:
    """Format hours or kWh: three significant digits, whole numbers from 1,000 on, 0 below 0.001.

    >>> amount(0.0123), amount(123.4), amount(12_345.6), amount(0.0001)
    ('0.0123', '123', '12,346', '0')
    """
    if number < 0.001:
        return "0"
    return f"{number:.3g}" if number < 1000 else f"{number:,.0f}"


def sum_in_words(several: Sequence[Hours]) -> str:
    """Return a text with the total hours and energy of several runs; "none" if both are 0.

    If STOKER_CO2_G_PER_KWH is set, the text also has the mass of CO2.
    """
    texts = []
    for unit in (GPU_HOURS, PROCESS_HOURS):
        if total := sum(hours.total for hours in several if hours.unit == unit):
            texts.append(f"{amount(total)} {unit}")
    if kwh := sum(hours.kwh for hours in several):
        texts.append(f"{amount(kwh)} kWh")
        if given := os.environ.get(CO2):
            try:
                texts.append(f"{amount(float(given) * kwh / 1000)} kg CO2")
            except ValueError:
                texts.append(f"{CO2}={given!r} is no number")
    return ", ".join(texts) or "none"
