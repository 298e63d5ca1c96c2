"""What a run directory tells: its starts, what each of them logged, and what was done again.

Any file may be missing, cut off or damaged: what there is is read, `missing` says what is not.
`utils.callbacks.journal.read_journal` keeps of the same lines what counts; here the others stay,
marked, for people want to see what an interruption cost. It needs transformers, this does not.
"""

import datetime
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from utils.checkpoints.discovery import numbered_checkpoints
from utils.checkpoints.files import (
    CONFIG,
    FINAL,
    PROVENANCE,
    DamagedCheckpointError,
    earlier_starts,
    read_manifest,
)
from utils.config.errors import ConfigurationError
from utils.config.recipes import YamlError, load_file
from utils.support.redaction import redact
from utils.support.run_lock import FOLDER, WATCH_S

JOURNAL = "metrics.jsonl"
STARTS = ("started", "resumed")
NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
# The figures of each rank are most of a line, and nothing here reads them.
_BY_RANK = re.compile(r', "memory_by_rank": \[[^\]]*\]')
_CHUNK = 1000  # lines that are parsed in one call, twice as fast as one by one
# What slurm/job_setup.sh writes into a job's log before it puts the job back into the queue.
_REQUEUED = re.compile(r"  job (\d+): (.*); requeued, start (\d+) will resume$", re.MULTILINE)
_ROOT = Path(__file__).parents[2]


@dataclass
class Start:
    """A start of the run: its entry in provenance.json, and what it logged.

    Times are unix seconds. began: when it claimed the directory; trained: when training began
    (None: it never did), with `done` steps taken over (-1: a new run); ended: its last sign of
    life. `lines` carry `hours` (while starts ran, since the first one) and `lost` (undone by a
    later start). `left` is what its lock says: True, it left in order; False, it was cut off.
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
    finished: bool  # final/ is there
    alive: bool  # the owner of the directory gave a sign of life within the last minute
    max_steps: int | None
    read_at: float
    missing: list[str]

    @property
    def name(self) -> str:
        """The name of its directory."""
        return self.path.name

    def train_lines(self) -> list[dict[str, Any]]:
        """Return the training logs that count."""
        return [line for line in self.lines if line["event"] == "train"]


def read_run(path: Path, now: float) -> History:
    """Read a run directory; raises ConfigurationError where nothing of a run is there."""
    missing: list[str] = []
    lines = _read_lines(path / JOURNAL, missing)
    entries = _read_entries(path / PROVENANCE, missing)
    if not lines and not entries:
        raise ConfigurationError(
            f"{path} holds no run: neither {JOURNAL} nor {PROVENANCE} can be read there. Give a "
            "run's output_dir, or a folder of such directories."
        )
    owners = _read_owners(path / FOLDER)
    starts = _starts(lines, entries)
    _end_starts(starts, owners)
    _mark_lost(starts)
    _count_hours(starts)
    for job in {str(start.job["job_id"]) for start in starts if start.job.get("job_id")}:
        _take_causes(path, job, starts)
    limits = [line["max_steps"] for line in lines if "max_steps" in line]
    return History(
        path=path,
        starts=starts,
        lines=_that_count(starts),
        settings=_read_settings(path / CONFIG, entries, missing),
        checkpoints=list(_read_checkpoints(path)),
        nonfinite=list(_read_nonfinite(path, missing)),
        finished=(path / FINAL).is_dir(),
        alive=bool(owners) and not owners[-1]["left"] and now - owners[-1]["beat"] < 2 * WATCH_S,
        max_steps=limits[-1] if limits else None,
        read_at=now,
        missing=missing,
    )


def number(value: Any) -> float | None:
    """Return a figure of the journal as a float, NaN and infinities included; None: it is none."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    return NOT_FINITE.get(value) if isinstance(value, str) else None


def column(lines: Sequence[Mapping[str, Any]], key: str) -> np.ndarray:
    """Return a figure of each line as float64; NaN where a line has none."""
    values = [line.get(key) for line in lines]
    try:
        return np.array(values, dtype=float)  # it reads None, "NaN" and "Infinity" too
    except (TypeError, ValueError):
        return np.array([number(value) for value in values], dtype=float)


def redacted(value: Any) -> Any:
    """Return JSON with every known secret replaced."""
    if isinstance(value, str):
        return redact(value)
    if isinstance(value, Mapping):
        return {key: redacted(each) for key, each in value.items()}
    return [redacted(each) for each in value] if isinstance(value, list) else value


def _read_lines(path: Path, missing: list[str]) -> list[dict[str, Any]]:
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        missing.append(f"{path.name}: {error.strerror}; there are no figures of the training")
        return []
    # Not splitlines(), which breaks at characters that texts may hold.
    texts = [line for line in _BY_RANK.sub("", text).split("\n") if line.strip()]
    lines = [
        line
        for first in range(0, len(texts), _CHUNK)
        for line in _parsed(texts[first : first + _CHUNK])
        if isinstance(line, dict)
        and isinstance(line.get("event"), str)
        and isinstance(line.get("step"), int)
        and isinstance(line.get("time"), (int, float))
    ]
    if broken := len(texts) - len(lines):
        missing.append(f"{path.name}: {broken} of {len(texts):,} lines are cut off or damaged")
    return lines


def _parsed(texts: list[str]) -> Iterator[Any]:
    try:
        yield from json.loads(f"[{','.join(texts)}]")
        return
    except ValueError:
        pass
    for text in texts:
        try:
            yield json.loads(text)
        except ValueError:  # cut off where a process died
            continue


def _read_entries(path: Path, missing: list[str]) -> list[dict[str, Any]]:
    try:
        entries: list[dict[str, Any]] = redacted(earlier_starts(path))
        if not path.is_file():
            missing.append(f"{path.name}: not there; hosts, jobs and versions are not known")
        return [entry for entry in entries if _seconds(entry.get("time")) is not None]
    except (ConfigurationError, OSError, AttributeError) as error:
        missing.append(f"{path.name}: cannot be read ({str(error).removeprefix('- ')})")
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


def _read_owners(folder: Path) -> list[dict[str, Any]]:
    """Return who had the directory, the latest last: since, last beat (unix seconds), left."""
    owners = []
    for path in folder.glob("owner-*"):
        try:
            content = json.loads(path.read_bytes())
            since = _seconds(content["owner"]["since"])
            error = content.get("error")
            owners.append(
                {
                    "number": int(path.name.removeprefix("owner-")), "since": since,
                    "beat": path.stat().st_mtime, "left": content["left"],
                    "error": redact(error) if isinstance(error, str) else None,
                }
            )  # fmt: skip
        except (OSError, ValueError, LookupError, TypeError):
            continue
    return sorted((one for one in owners if one["since"]), key=lambda one: one["number"])


def _end_starts(starts: list[Start], owners: list[dict[str, Any]]) -> None:
    """Say when each start ended, by its last line and by its lock, which beats until the end."""
    for index, start in enumerate(starts):
        known = [start.began, start.trained or 0.0, *(line["time"] for line in start.lines[-1:])]
        after = [later.began for later in starts[index + 1 :]]
        mine = [one for one in owners if abs(one["since"] - start.began) < 60]
        if mine:
            own = min(mine, key=lambda one: abs(one["since"] - start.began))
            start.left, start.error = own["left"], own["error"]
            # A copied directory has the times of the copy.
            if not after or own["beat"] < after[0]:
                plausible = known[-1] + 2 * WATCH_S
                known.append(own["beat"] if own["beat"] < plausible else 0.0)
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
    kept = {}
    for start in starts:
        for line in start.lines:
            if not line["lost"]:
                kept[line["event"], line.get("split"), line["step"]] = line
    return list(kept.values())


def _take_causes(path: Path, job: str, starts: list[Start]) -> None:
    """Read how each start of a Slurm job ended from the job's log, where it is found."""
    own = [start for start in starts if str(start.job.get("job_id")) == job]
    name = f"{own[0].job.get('job_name')}-{job}.log"  # of --output in slurm/*_job.sh
    found = (folder / name for folder in (path, path.parent, Path.cwd(), _ROOT))
    log = next((file for file in found if file.is_file()), None)
    text = log.read_text(encoding="utf-8", errors="replace") if log else ""
    # Start 2 is the one with a restart count of 1, and resumes what the one before left.
    causes = {int(at[3]) - 2: at[2] for at in _REQUEUED.finditer(text) if at[1] == job}
    for start in own:
        count = int(start.job.get("restart_count") or 0)
        verdict = _ROOT / ".stoker" / f"job-{job}.{count}" / "verdict.txt"
        if count not in causes and verdict.is_file():
            causes[count] = verdict.read_text(encoding="utf-8", errors="replace").strip()
        if start.error is None and count in causes:
            start.error = redact(causes[count])


def _read_settings(path: Path, entries: list[dict[str, Any]], missing: list[str]) -> dict[str, Any]:
    """Return the settings in force: those of the first start with all accepted changes since."""
    settings: dict[str, Any] = {}
    try:
        settings = {name: redacted(value) for name, (value, _) in load_file(path).items()}
    except (YamlError, OSError) as error:
        missing.append(f"{path.name}: cannot be read ({error}); the settings are not known")
    for entry in entries:
        settings |= entry.get("changed") or {}
    return settings


def _read_checkpoints(path: Path) -> Iterator[dict[str, Any]]:
    for step, directory in numbered_checkpoints(path):
        try:
            manifest = read_manifest(directory)
        except (DamagedCheckpointError, OSError):
            continue  # not committed: no checkpoint
        yield {
            "step": step, "size_bytes": manifest.size_bytes, "tokens": manifest.tokens,
            "time": manifest.time,
        }  # fmt: skip


def _read_nonfinite(path: Path, missing: list[str]) -> Iterator[dict[str, Any]]:
    for file in sorted(path.glob("nonfinite-step-*.json")):
        try:
            content = redacted(json.loads(file.read_text(encoding="utf-8")))
            yield {"file": file.name, "time": file.stat().st_mtime, **content}
        except (OSError, ValueError, TypeError) as error:
            missing.append(f"{file.name}: cannot be read ({error})")
