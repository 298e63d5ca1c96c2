"""What a run directory tells: its starts, what each of them logged, and what was done again.

Any file may be missing, cut off or damaged: what there is is read, `missing` says what is not.
`read_journal` keeps of the same lines what counts; here the others stay, marked, for people want
to see what an interruption cost.
"""

import contextlib
import datetime
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np

from utils.checkpoints.discovery import numbered_checkpoints
from utils.checkpoints.files import CONFIG, FINAL, PROVENANCE, DamagedCheckpointError, read_manifest
from utils.checkpoints.record import damage, earlier_starts, first_settings
from utils.config.errors import ConfigurationError
from utils.support.journal_file import FILE_NAME, STARTS, printable, read_lines, skipped
from utils.support.notes import name_of_job, verdict_of
from utils.support.redaction import redact, redacted
from utils.support.run_lock import WATCH_S, RunOwner, run_owners

# Pages that a run writes for people when memory runs out, when it hangs, and of its profile.
PAGES = ("out-of-memory-rank*.txt", "hang.txt", "profile/kernels.txt")
LONGEST_PAGE = 100_000  # characters
# What slurm/job_setup.sh writes into a job's log before it puts the job back into the queue.
_REQUEUED = re.compile(r"  job (\S+): (.*); requeued, start (\d+) will resume$", re.MULTILINE)
_ROOT = Path(__file__).parents[2]


@dataclass
class Start:
    """A start of the run: its entry in provenance.json, and what it logged.

    Times are unix seconds. began: when it claimed the directory; trained: when training began
    (None: it never did), with `done` steps taken over (-1: a new run); ended: its last sign of
    life. `lines` carry `hours` (while starts ran, since the first one), `lost` (undone by a later
    start) and `at` (its offset in the file). `left` is what its lock says: True, it left in order;
    False, it was cut off.
    """

    began: float
    entry: Mapping[str, Any] = field(default_factory=dict)
    trained: float | None = None
    done: int = -1
    lines: list[dict[str, Any]] = field(default_factory=list)
    ended: float = 0.0
    left: bool | None = None
    error: str | None = None  # what its lock or its job's log says of its end
    lost_steps: int = 0  # that a later start did again

    @property
    def last_event(self) -> str | None:
        """The kind of its last line."""
        return self.lines[-1]["event"] if self.lines else None

    @property
    def last_step(self) -> int:
        """The last step that it logged or began at."""
        return max((line["step"] for line in self.lines), default=max(self.done, 0))

    @property
    def job(self) -> Mapping[str, Any]:
        """The facts of its Slurm job; empty outside of one."""
        return self.entry.get("slurm") or {}


@dataclass
class History:
    """A run as its directory tells it; `lines` are those that count, of all starts, in order."""

    path: Path
    starts: list[Start]
    lines: list[dict[str, Any]]
    settings: dict[str, Any]  # of the last start; those of a start alone are in its entry
    checkpoints: list[dict[str, Any]]  # step, size_bytes, tokens, time; newest first
    nonfinite: list[dict[str, Any]]  # the files nonfinite-step-N.json, with their mtime
    pages: list[dict[str, Any]]  # name, text, mtime and the names beside it of each of PAGES
    finished: bool  # final/ is there
    alive: bool  # the owner of the directory gives signs of life
    max_steps: int | None
    missing: list[str]
    columns: dict[str, np.ndarray] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The name of its directory."""
        return printable(self.path.resolve().name)

    @cached_property
    def trained(self) -> list[dict[str, Any]]:
        """The training logs that count."""
        return [line for line in self.lines if line["event"] == "train"]

    def column(self, key: str) -> np.ndarray:
        """Return a figure of each training log, read once; as `column`, not to be written to."""
        if key not in self.columns:
            self.columns[key] = column(self.trained, key)
        return self.columns[key]


def read_run(path: Path) -> History:
    """Read a run directory; raises ConfigurationError where nothing of a run is there."""
    missing = [f"{name} {text}" for name, text in damage(path).items()]
    lines = _read_lines(path / FILE_NAME, missing)
    entries = _read_entries(path / PROVENANCE, missing)
    if not lines and not entries:
        raise ConfigurationError(
            f"{path} holds no run: neither {FILE_NAME} nor {PROVENANCE} can be read there. Give a "
            "run's output_dir, or a folder of such directories."
        )
    owners = list(run_owners(path))
    starts = _starts(lines, entries)
    _end_starts(starts, owners)
    _mark_lost(starts)
    _count_hours(starts)
    _take_causes(path, starts)
    limits = [line["max_steps"] for line in lines if "max_steps" in line]
    return History(
        path=path,
        starts=starts,
        lines=_that_count(starts),
        settings=_read_settings(path, entries, missing),
        checkpoints=list(_read_checkpoints(path)),
        nonfinite=list(_read_nonfinite(path, missing)),
        pages=list(_read_pages(path, missing)),
        finished=(path / FINAL).is_dir(),
        alive=any(owner.alive for owner in owners[:1]),
        max_steps=limits[-1] if limits else None,
        missing=missing,
    )


def number(value: Any) -> float | None:
    """Return what a user's hook or a rank logged as a float; None where it is no number."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    return None


def column(lines: Sequence[Mapping[str, Any]], key: str) -> np.ndarray:
    """Return a figure of each line as float64; NaN where a line has none."""
    try:
        values = list(map(itemgetter(key), lines))  # in half the time
    except KeyError:
        values = [line.get(key) for line in lines]
    try:
        return np.array(values, dtype=float)
    except (TypeError, ValueError):  # of a user's hook
        return np.array([number(value) for value in values], dtype=float)


def thinned(values: np.ndarray, points: int) -> np.ndarray:
    """Return the indices, in order, of `points` values at most: the extremes of equal parts."""
    if len(values) <= points:
        return np.arange(len(values))
    size = -(-len(values) * 2 // points)
    parts = np.full((-(-len(values) // size), size), np.nan)
    parts.flat[: len(values)] = values
    first, missing = np.arange(len(parts)) * size, np.isnan(parts)
    lowest = first + np.where(missing, np.inf, parts).argmin(axis=1)
    highest = first + np.where(missing, -np.inf, parts).argmax(axis=1)
    return np.unique(np.concatenate([[0, len(values) - 1], lowest, highest]))


def _read_lines(path: Path, missing: list[str]) -> list[dict[str, Any]]:
    try:
        lines, damaged = read_lines(path, ranks=False)
    except OSError as error:
        missing.append(f"{path.name}: {error.strerror}; there are no figures of the training")
        return []
    if damaged:
        missing.append(skipped(damaged))
    return lines


def _read_entries(path: Path, missing: list[str]) -> list[dict[str, Any]]:
    try:
        entries: list[dict[str, Any]] = redacted(earlier_starts(path))
        if not entries:
            missing.append(f"{path.name}: not there; hosts, jobs and versions are not known")
        return [entry for entry in entries if entry.get("time")]
    except ConfigurationError:  # `damage` has it
        return []


def _seconds(text: Any) -> float | None:
    """Return an ISO time as unix seconds; None where it is none."""
    try:
        return datetime.datetime.fromisoformat(text).timestamp()
    except (TypeError, ValueError):
        return None


def _starts(lines: list[dict[str, Any]], entries: list[dict[str, Any]]) -> list[Start]:
    """Put the lines to the starts that wrote them: the last one that began before the line."""
    starts = [Start(_seconds(entry["time"]) or 0.0, entry) for entry in entries]
    current: Start | None = None
    for line in lines:
        if line["event"] in STARTS or current is None:
            # Times in provenance.json are whole seconds.
            open_ones = [
                each for each in starts if each.trained is None and each.began <= line["time"] + 1
            ]
            if not open_ones:
                open_ones = [Start(line["time"])]
                starts.append(open_ones[0])
            current = open_ones[-1]
            current.trained = line["time"]
            current.done = line["step"] if line["event"] == "resumed" else -1
        if line["event"] not in STARTS:
            current.lines.append(line)
    return sorted(starts, key=lambda start: start.began)


def _end_starts(starts: list[Start], owners: list[RunOwner]) -> None:
    """Say when each start ended, by its last line and by its lock, which beats until the end."""
    for index, start in enumerate(starts):
        known = [start.began, start.trained or 0.0, *(line["time"] for line in start.lines[-1:])]
        after = [later.began for later in starts[index + 1 :]]
        mine = [one for one in owners if abs(one.since - start.began) < 60]
        if mine:
            own = min(mine, key=lambda one: abs(one.since - start.began))
            start.left, start.error = own.left, own.error and redact(own.error)
            # A copied directory has the times of the copy.
            if not after or own.beat < after[0]:
                plausible = known[-1] + 2 * WATCH_S
                known.append(own.beat if own.beat < plausible else 0.0)
        start.ended = max(known)


def _mark_lost(starts: list[Start]) -> None:
    """Mark what later starts undid: the lines of steps after the one they resumed at."""
    floor = math.inf
    for start in reversed(starts):
        for line in start.lines:
            line["lost"] = line["step"] > floor
        if any(line["lost"] for line in start.lines):
            start.lost_steps = start.last_step - max(int(floor), 0)
        if start.trained is not None:
            floor = min(floor, start.done)


def _count_hours(starts: list[Start]) -> None:
    """Count, in each line, the hours that starts ran for until then."""
    before = 0.0
    for start in starts:
        for line in start.lines:
            line["hours"] = (before + line["time"] - start.began) / 3600
        before += start.ended - start.began


def _that_count(starts: list[Start]) -> list[dict[str, Any]]:
    """Return the lines that count, of several of one kind, split and step the last."""
    kept: dict[tuple[Any, ...], dict[str, Any]] = {}
    for start in starts:
        lines = [line for line in start.lines if not line["lost"]]
        kept |= {(line["event"], line.get("split"), line["step"]): line for line in lines}
    return list(kept.values())


def _take_causes(path: Path, starts: list[Start]) -> None:
    """Read how starts of Slurm jobs ended, from the jobs' verdicts and, where found, their logs."""
    read = cache(_text)
    for start in (one for one in starts if one.job.get("job_id")):
        # That of --output, in these folders alone: a stranger's run may name any other.
        name = Path(f"{start.job.get('job_name')}-{start.job['job_id']}.log").name
        texts = (read(folder / name) for folder in (path, path.parent, Path.cwd(), _ROOT))
        # Start 2 is the one with a restart count of 1, and resumes what the one before left.
        after = name_of_job(start.job), int(start.job.get("restart_count") or 0) + 2
        lines = _REQUEUED.finditer(next(filter(None, texts), ""))
        causes = [at[2] for at in lines if (at[1], int(at[3])) == after]
        if start.error is None and (cause := verdict_of(start.job) or "".join(causes[-1:])):
            start.error = redact(cause)


def _text(path: Path) -> str:
    with contextlib.suppress(OSError, ValueError):  # another user's, or a name that cannot be
        return path.read_text("utf-8", "replace")
    return ""


def _read_settings(path: Path, entries: list[dict[str, Any]], missing: list[str]) -> dict[str, Any]:
    """Return the settings in force: those of the first start with all accepted changes since."""
    settings: dict[str, Any] = {}
    try:
        settings = redacted(first_settings(path))
    except ConfigurationError:  # `damage` has it
        missing.append(f"{CONFIG}: the settings are not known")
    for entry in entries:
        settings |= entry.get("changed") or {}
    return settings


def _read_checkpoints(path: Path) -> Iterator[dict[str, Any]]:
    for step, directory in numbered_checkpoints(path):
        try:
            manifest = read_manifest(directory)
        except (DamagedCheckpointError, ConfigurationError, OSError):
            continue  # not committed: no checkpoint
        yield {
            "step": step, "size_bytes": manifest.size_bytes, "tokens": manifest.tokens,
            "time": manifest.time,
        }  # fmt: skip


def _read_nonfinite(path: Path, missing: list[str]) -> Iterator[dict[str, Any]]:
    for file in sorted(path.glob("nonfinite-step-*.json")):
        try:
            content = redacted(json.loads(file.read_text(encoding="utf-8")))
            yield _checked_nonfinite(content) | {"file": file.name, "time": file.stat().st_mtime}
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            missing.append(f"{file.name}: cannot be read ({error})")


def _checked_nonfinite(content: dict[str, Any]) -> dict[str, Any]:
    """Return what a page shows of a step that was not finite; raises what other content raises."""
    return {
        "step": int(content["step"]),
        "losses": [one | {"micro_batch": int(one["micro_batch"])} for one in content["losses"]],
        "gradient_norm": content["gradient_norm"],
        "weights": [str(name) for name in content["weights"]],
        "documents_of": content["documents_of"],
        "documents": [dict(row.items()) for row in content["documents"]],
    }


def _read_pages(path: Path, missing: list[str]) -> Iterator[dict[str, Any]]:
    for file in (file for pattern in PAGES for file in sorted(path.glob(pattern))):
        if file.is_symlink() or not file.is_file():
            continue  # of a stranger's run: the page would show another folder's file
        try:
            with file.open(encoding="utf-8", errors="replace") as opened:
                text = opened.read(LONGEST_PAGE)
            name, time = str(file.relative_to(path)), file.stat().st_mtime
            beside = sorted(each.name for each in file.parent.iterdir()) if "/" in name else []
            yield {"name": name, "text": text, "time": time, "beside": beside}
        except OSError as error:
            missing.append(f"{file.name}: cannot be read ({error.strerror})")
