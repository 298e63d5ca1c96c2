"""The content of a run directory as a `History`: typed, frozen values, without torch or numpy.

Any file may be missing, truncated or damaged. The other files are read, and the fields `damaged`
and `missing` list the faults. If a run resumes at step N, earlier log lines with a step > N are
marked as `lost`. Lost lines stay in `Start.lines`, so the report can show lost work.
`History.lines` has no lost lines.
"""

import contextlib
import datetime
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any, NamedTuple

from utils.checkpoints.discovery import numbered_checkpoints
from utils.checkpoints.files import (
    CONFIG,
    FINAL,
    MANIFEST,
    PROVENANCE,
    DamagedCheckpointError,
    Manifest,
    read_manifest,
)
from utils.checkpoints.record import RunRecord
from utils.config.errors import ConfigurationError
from utils.host.journal_file import FILE_NAME, STARTS, printable, read_lines, skipped_message
from utils.host.redaction import redact, redacted
from utils.host.run_lock import WATCH_S, RunOwner, run_owners
from utils.launch.verdict import causes_in_log, read_job_verdict

# status.py reads only the beginning (for the first speed) and the end of metrics.jsonl.
HEAD_BYTES, TAIL_BYTES = 2**16, 2**21
# Text files that a run writes for people: out of memory, a hang, a profile.
PAGES = ("out-of-memory-rank*.txt", "hang.txt", "profile/kernels.txt")
LONGEST_PAGE = 100_000  # characters
_ROOT = Path(__file__).parents[2]
Line = dict[str, Any]


@dataclass(frozen=True)
class Start:
    """A start: one execution of the training script in a run directory. Times are unix seconds.

    entry       the start's record in provenance.json, or {}. began: the time in this record.
    trained     time when training began; None if the start never trained
    done        the step from which the start resumed; -1 for a new run
    owner       the start's file in .lock. ended: time of the last heartbeat or log line.
    error       why the start ended, from the job's verdict.txt, from .lock or from the job's log
    by_slurm    why Slurm ended the job; "" if unknown
    lost_steps  number of steps that a later start repeated
    lines       log lines, each with `hours` (running time of all starts so far), `lost` (whether a
                later start repeated the step) and `at` (file offset in metrics.jsonl)
    """

    began: float
    entry: Mapping[str, Any]
    trained: float | None = None
    done: int = -1
    lines: tuple[Line, ...] = ()
    owner: RunOwner | None = None
    ended: float = 0.0
    error: str | None = None
    by_slurm: str = ""
    lost_steps: int = 0

    @property
    def last_event(self) -> str | None:
        """The last log line's event. Saves do not count: background saves are logged late."""
        return next((one["event"] for one in reversed(self.lines) if one["event"] != "save"), None)

    @property
    def last_step(self) -> int:
        """The last logged step. If nothing was logged, the step at which this start began."""
        return max((line["step"] for line in self.lines), default=max(self.done, 0))

    @property
    def job(self) -> Mapping[str, Any]:
        """The record of this start's Slurm job in provenance.json; {} outside of Slurm."""
        return self.entry.get("slurm") or {}


class Evaluation(NamedTuple):
    """The result of one evaluation of a split. `accuracy` may be unknown (None)."""

    step: int
    loss: float
    accuracy: float | None


@dataclass(frozen=True)
class Page:
    """A text file for people (see PAGES). beside: the files in a profile's folder; otherwise ()."""

    name: str
    text: str
    time: float
    beside: tuple[str, ...]


@dataclass(frozen=True)
class History:
    """The content of a run directory.

    refused: the lock file of the newest start, if this start failed its checks and an earlier start
    passed them. lines: the lines of metrics.jsonl that no later start repeated. first_lines: the
    beginning of metrics.jsonl. checkpoints: manifests of committed checkpoints, newest first.
    nonfinite: contents of the files nonfinite-step-N.json.
    """

    path: Path
    record: RunRecord
    starts: tuple[Start, ...]
    refused: RunOwner | None
    lines: tuple[Line, ...]
    first_lines: Sequence[Line]
    skipped_lines: int
    max_steps: int | None
    checkpoints: tuple[Manifest, ...]
    has_final: bool
    nonfinite: tuple[dict[str, Any], ...]
    pages: tuple[Page, ...]
    damaged: tuple[str, ...]
    missing: tuple[str, ...]

    @property
    def name(self) -> str:
        """The name of the run directory."""
        return printable(self.path.resolve().name)

    @cached_property
    def trained(self) -> list[Line]:
        """The training log lines, without steps that a later start of the run did again."""
        return [line for line in self.lines if line["event"] == "train"]

    @cached_property
    def entry(self) -> Mapping[str, Any]:
        """The newest entry of a start in provenance.json; {} if no start has an entry."""
        return next((start.entry for start in reversed(self.starts) if start.entry), {})

    @cached_property
    def settings(self) -> dict[str, Any]:
        """The settings of the last start: the first start's settings with all later changes."""
        settings: dict[str, Any] = redacted(self.record.settings)
        for start in self.starts:
            settings |= start.entry.get("changed") or {}
        return settings

    @cached_property
    def last_trained(self) -> Start | None:
        """The last start that began to train, or None."""
        return next((start for start in reversed(self.starts) if start.trained is not None), None)

    @property
    def last_step(self) -> int | None:
        """The last logged step of the last start that began to train, or None."""
        return self.last_trained.last_step if self.last_trained else None

    @property
    def last_logged(self) -> float | None:
        """The time of the last log line in unix seconds; None without log lines."""
        times = [start.lines[-1]["time"] if start.lines else start.trained for start in self.starts]
        return max((time for time in times if time is not None), default=None)

    def evaluations(self) -> dict[str, list[Evaluation]]:
        """Return {split: its evaluations as logged}. A split without a name is called "eval"."""
        found: dict[str, list[Evaluation]] = {}
        for line in (line for line in self.lines if line["event"] == "eval"):
            prefix = f"eval_{line['split']}" if line.get("split") else "eval"
            if (loss := line.get(f"{prefix}_loss")) is not None:
                evaluation = Evaluation(line["step"], loss, line.get(f"{prefix}_accuracy"))
                found.setdefault(line.get("split") or "eval", []).append(evaluation)
        return found

    def time_left_s(self) -> float | None:
        """Return the seconds until `max_steps` at the last start's pace; None if unknown."""
        if self.max_steps is None or self.last_step is None or not self.last_trained:
            return None
        own = [line for line in self.last_trained.lines if line["event"] == "train"]
        pace = self.trained[-1].get("step_time_s") if self.trained else None
        if len(own) > 1 and own[-1]["step"] > own[0]["step"]:
            pace = (own[-1]["time"] - own[0]["time"]) / (own[-1]["step"] - own[0]["step"])
        return None if pace is None else pace * (self.max_steps - self.last_step)


def read_run(path: Path, *, whole: bool = True) -> History:
    """Read a run directory. Missing and damaged files raise no error: `History` lists them.

    whole: False saves time. Only the beginning and end of a long metrics.jsonl are read, only the
    newest checkpoint's manifest, and no job log.
    """
    record = RunRecord(path, lenient=True)
    damaged = [f"{name} {text}" for name, text in record.damage.items()]
    missing = [f"{CONFIG}: the settings are not known"] if record.config is None else []
    first, lines, skipped_lines = _read_journal(path / FILE_NAME, whole, damaged, missing)
    if not record.starts and PROVENANCE not in record.damage:
        missing.append(f"{PROVENANCE}: not there; hosts, jobs and versions are not known")
    entries: list[dict[str, Any]] = redacted([each for each in record.starts if each.get("time")])
    owners, refused = _read_owners(path, entries)
    read_log = cache(_read_text) if whole else lambda _: ""
    grouped = _group_by_start(lines, entries)
    starts = [_add_cause(path, one, read_log) for one in _add_ends(grouped, owners)]
    # For each event, split and step, the last line that no later start repeated.
    counted: dict[tuple[Any, ...], Line] = {}
    for start in starts:
        for line in (line for line in start.lines if not line["lost"]):
            counted[line["event"], line.get("split"), line["step"]] = line
    limits = [line["max_steps"] for line in [*first[:1], *lines] if "max_steps" in line]
    return History(
        path=path,
        record=record,
        starts=tuple(starts),
        refused=refused,
        lines=tuple(counted.values()),
        first_lines=first,
        skipped_lines=skipped_lines,
        max_steps=limits[-1] if limits else None,
        checkpoints=tuple(_read_checkpoints(path, whole, damaged)),
        has_final=(path / FINAL).is_dir(),
        nonfinite=tuple(_read_nonfinite(path, damaged)),
        pages=tuple(_read_pages(path, damaged)),
        damaged=tuple(damaged),
        missing=tuple(missing),
    )


def unix_s(text: Any) -> float | None:
    """Return unix seconds of a time in ISO format; None for any other value."""
    try:
        return datetime.datetime.fromisoformat(text).timestamp()
    except (TypeError, ValueError):
        return None


def _read_journal(
    path: Path, whole: bool, damaged: list[str], missing: list[str]
) -> tuple[list[Line], list[Line], int]:
    """Return (first lines, last lines or all lines if `whole`, number of damaged lines)."""
    try:
        size, tail = path.stat().st_size, TAIL_BYTES
        lines, count = read_lines(path, last=None if whole else tail, ranks=False)
        while not whole and not lines and tail < size:  # a damaged line may be that long
            tail *= 8
            lines, count = read_lines(path, last=tail, ranks=False)
        first = lines
        if not whole and tail < size:
            first, count_first = read_lines(path, first=HEAD_BYTES, ranks=False)
            count += count_first
    except FileNotFoundError:
        missing.append(f"{path.name}: not there; there are no figures of the training")
        return [], [], 0
    except OSError as error:
        damaged.append(f"{path.name}: {error.strerror}")
        return [], [], 0
    if count:
        damaged.append(skipped_message(count))
    return first, lines, count


def _read_owners(
    path: Path, entries: Sequence[Mapping[str, Any]]
) -> tuple[list[RunOwner], RunOwner | None]:
    """Return the lock files of the accepted starts (newest first), and of a refused newest start.

    The second value may be None. A refused start failed its checks: it released its lock in the
    phase "starting" and is not in provenance.json. Only refused starts: ([the newest], None).
    """
    begun = (unix_s(entries[-1]["time"]) or 0.0) if entries else 0.0
    owners = list(run_owners(path))
    refused = [one for one in owners if one.left and one.phase == "starting" and begun < one.since]
    others = [one for one in owners if one not in refused]
    if not others:
        return refused[:1], None
    newest = next((one for one in refused if one.number > others[0].number), None)
    return others, newest


def _group_by_start(lines: Sequence[Line], entries: Sequence[Mapping[str, Any]]) -> list[Start]:
    """Return the starts, each with its log lines. A line `started` or `resumed` begins a start."""
    starts = [Start(unix_s(entry["time"]) or 0.0, entry) for entry in entries]
    current = -1
    own: dict[int, list[Line]] = {}
    for line in lines:
        if line["event"] in STARTS or current < 0:
            # Find the latest start before this line that has no lines yet, preferably at its step.
            latest = line["time"] + 1  # times in provenance.json are whole seconds
            waiting = [place for place, start in enumerate(starts) if start.trained is None]
            fits = [place for place in waiting if starts[place].began <= latest]
            done = line["step"] if line["event"] == "resumed" else -1
            if line["event"] in STARTS:
                known = {place: starts[place].entry.get("resumed_from") or "" for place in fits}
                at = f"checkpoint-{done}" if done >= 0 else ""
                fits = [place for place in fits if Path(known[place]).name == at] or fits
            if not fits:
                starts.append(Start(line["time"], {}))
            current = fits[-1] if fits else len(starts) - 1
            starts[current] = replace(starts[current], trained=line["time"], done=done)
        if line["event"] not in STARTS:
            own.setdefault(current, []).append(line)
    starts = [replace(start, lines=tuple(own.get(at, ()))) for at, start in enumerate(starts)]
    return sorted(starts, key=lambda start: start.began)


def _add_ends(starts: list[Start], owners: Sequence[RunOwner]) -> Iterator[Start]:
    """Yield each start with its `owner`, `ended` and `lost_steps`; mark its lost log lines.

    Also yield a start that acquired the run lock but died before it wrote to provenance.json.
    """
    if owners and all(start.began + 1 < owners[0].since for start in starts):
        starts = [*starts, Start(owners[0].since, {})]
    before, ran_s = -math.inf, 0.0
    for index, start in enumerate(starts):
        later = starts[index + 1 :]
        # The clocks of a job's nodes may differ. A start in a shell has no job to compare.
        own = [one for one in owners if start.job and one.belongs_to(start.job)]
        in_time = [one for one in owners if before < one.since <= start.began + 1]
        owner = next(iter(own if len(own) == 1 else in_time), None)
        known = [start.began, start.trained or 0.0, *(line["time"] for line in start.lines[-1:])]
        if owner and owner.spent:
            known.append(owner.since + sum(owner.spent.values()))
        # The lock file's time is the last heartbeat, or in a copied directory the time of the copy.
        latest = min([known[-1] + 2 * WATCH_S, *(one.began for one in later)])
        if owner and owner.beat < latest:
            known.append(owner.beat)
        resumed_at = min((one.done for one in later if one.trained is not None), default=math.inf)
        for line in start.lines:
            line["lost"] = line["step"] > resumed_at
            line["hours"] = (ran_s + line["time"] - start.began) / 3600
        undone = any(line["lost"] for line in start.lines)
        lost_steps = start.last_step - max(int(resumed_at), 0) if undone else 0
        yield replace(start, owner=owner, ended=max(known), lost_steps=lost_steps)
        before, ran_s = start.began, ran_s + max(known) - start.began


def _add_cause(path: Path, start: Start, read: Callable[[Path], str]) -> Start:
    """Return the start with `error` and `by_slurm`, from verdict.txt, .lock and the job's log."""
    cause, by_slurm = start.owner.error if start.owner else None, ""
    if start.job.get("job_id"):
        # The log is named by --output. Read only these folders: a foreign run may name any path.
        file = Path(f"{start.job.get('job_name')}-{start.job['job_id']}.log").name
        texts = (read(folder / file) for folder in (path, path.parent, Path.cwd(), _ROOT))
        logged, by_slurm = causes_in_log(next(filter(None, texts), ""), start.job)
        cause = read_job_verdict(start.job) or cause or logged
        cause = "; ".join(filter(None, (cause, by_slurm)))
    return replace(start, error=redact(cause) if cause else None, by_slurm=by_slurm)


def _read_text(path: Path) -> str:
    with contextlib.suppress(OSError, ValueError):  # another user's file, or an impossible name
        return path.read_text("utf-8", "replace")
    return ""


def _read_checkpoints(path: Path, whole: bool, damaged: list[str]) -> Iterator[Manifest]:
    for _, directory in numbered_checkpoints(path):
        try:
            if (directory / MANIFEST).exists():
                yield read_manifest(directory)
                if not whole:
                    return
        except (DamagedCheckpointError, ConfigurationError, OSError) as error:
            shown = error.problems[0] if isinstance(error, ConfigurationError) else error
            damaged.append(f"{directory.name}: {shown}")


def _read_nonfinite(path: Path, damaged: list[str]) -> Iterator[dict[str, Any]]:
    for file in sorted(path.glob("nonfinite-step-*.json")):
        try:
            content = redacted(json.loads(file.read_text(encoding="utf-8")))
            yield {
                "file": file.name, "time": file.stat().st_mtime,
                "step": int(content["step"]),
                "losses": [
                    one | {"micro_batch": int(one["micro_batch"])} for one in content["losses"]
                ],
                "gradient_norm": content["gradient_norm"],
                "weights": [str(name) for name in content["weights"]],
                "documents_of": content["documents_of"],
                "documents": [dict(row.items()) for row in content["documents"]],
            }  # fmt: skip
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            damaged.append(f"{file.name}: cannot be read ({error})")


def _read_pages(path: Path, damaged: list[str]) -> Iterator[Page]:
    for file in (file for pattern in PAGES for file in sorted(path.glob(pattern))):
        if file.is_symlink() or not file.is_file():
            continue  # a link of a foreign run could show any file on the report page
        try:
            with file.open(encoding="utf-8", errors="replace") as opened:
                text = opened.read(LONGEST_PAGE)
            name, time = str(file.relative_to(path)), file.stat().st_mtime
            beside = sorted(each.name for each in file.parent.iterdir()) if "/" in name else []
            yield Page(name, text, time, tuple(beside))
        except OSError as error:
            damaged.append(f"{file.name}: cannot be read ({error.strerror})")
