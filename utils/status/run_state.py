"""The state of a run as its directory and Slurm's queue tell it; damaged files are named."""

import datetime
import shlex
import shutil
import statistics
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from utils.checkpoints.discovery import numbered_checkpoints
from utils.checkpoints.files import (
    CONFIG,
    FINAL,
    MANIFEST,
    PROVENANCE,
    DamagedCheckpointError,
    read_manifest,
)
from utils.checkpoints.record import damage, earlier_starts, is_run
from utils.config.errors import ConfigurationError, NotFiniteError
from utils.support.journal_file import (
    FILE_NAME,
    STARTS,
    as_series,
    duration,
    read_lines,
    skipped,
)  # fmt: skip
from utils.support.notes import verdict_of
from utils.support.run_lock import RunOwner, run_owners

STATES = ("running", "waiting", "failed", "stopped", "finished")
# Of a long journal: what holds the pace at the start, and the last lines with an evaluation.
HEAD_BYTES, TAIL_BYTES = 2**16, 2**21
LINES = 5  # whose median is the pace
SQUEUE_S = 5.0


@dataclass(frozen=True)
class Job:
    """A job in Slurm's queue; `left_s` until its time limit, None where it has none or waits."""

    id: str
    state: str
    reason: str
    left_s: float | None
    name: str


@dataclass
class RunStatus:
    """How a run is doing; None: not known. Ages and times left are in seconds.

    because: what tells the state. evaluations: of each split its newest loss and its step.
    tokens_per_s: now, and at the start of the run. left_s: of training, without waiting in the
    queue. memory_left_gib: of the GPU with the least. slowest: the rank that the others wait for,
    and the share of each step that this takes. error: why its last start ended. pages: what it
    wrote when memory ran out or it hung. advice: what to do next. damaged: files that could not be
    read. skipped_lines: damaged lines of the journal, of a long one those near its ends. refused:
    why the newest start was refused, where an earlier one tells the state.
    """

    run: str
    state: str = "failed"
    because: str = ""
    step: int | None = None
    max_steps: int | None = None
    tokens: int | None = None
    loss: float | None = None
    evaluations: dict[str, tuple[float, int]] = field(default_factory=dict)
    tokens_per_s: float | None = None
    tokens_per_s_at_start: float | None = None
    mfu: float | None = None
    memory_peak_gib: float | None = None
    memory_left_gib: float | None = None
    slowest: tuple[str, float] | None = None
    left_s: float | None = None
    logged_ago_s: float | None = None
    saved_step: int | None = None
    saved_ago_s: float | None = None
    saved_bytes: int | None = None
    starts: int = 0
    job: Job | None = None
    error: str | None = None
    pages: list[str] = field(default_factory=list)
    advice: str = ""
    damaged: list[str] = field(default_factory=list)
    skipped_lines: int = 0
    refused: str | None = None


def runs_below(directory: Path) -> list[Path]:
    """Return the runs in a folder, and in its folders (sweeps); ConfigurationError without it."""
    if not directory.is_dir():
        raise ConfigurationError(
            f"{directory}: no such folder; name a run, or a folder of runs: --all DIR"
        )
    found = sorted(directory.glob("*"))
    inner = [path for folder in found if not is_run(folder) for path in sorted(folder.glob("*"))]
    return [path for path in [*found, *inner] if is_run(path)]


def queued_jobs() -> dict[str, Job]:
    """Return this user's jobs by their id; none where Slurm is absent or does not answer."""
    if shutil.which("squeue") is None:
        return {}
    command = ["squeue", "--me", "--noheader", "--format=%A|%T|%r|%L|%j"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SQUEUE_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return {}
    rows = (line.split("|", 4) for line in done.stdout.splitlines())
    return {
        row[0]: Job(row[0], row[1], row[2], _seconds(row[3]), row[4]) for row in rows if row[4:]
    }


def _seconds(text: str) -> float | None:
    """Read `1-02:03:04`, `03:04`; None for UNLIMITED, INVALID and the like."""
    days, _, clock = text.rpartition("-")
    parts = clock.split(":")
    if not all(part.isdecimal() for part in [*parts, days or "0"]):
        return None
    seconds = 0
    for part in parts:
        seconds = seconds * 60 + int(part)
    return float(int(days or 0) * 86400 + seconds)


def read_status(directory: Path, jobs: Mapping[str, Job]) -> RunStatus:
    """Return how the run in a directory is doing; ConfigurationError if there is none."""
    if not is_run(directory):
        waiting = [f"{job.id} ({job.name}, {job.state})" for job in jobs.values()]
        raise ConfigurationError(
            f"{directory} is no run directory: none of {PROVENANCE}, {CONFIG} and {FILE_NAME} is "
            f"there. Jobs of yours in the queue: {', '.join(waiting) or 'none'}."
        )
    status, now = RunStatus(str(directory)), time.time()
    starts = _starts(directory, status)
    status.starts = len(starts)
    lines = _read_progress(directory, status, now)
    _read_save(directory, status, now)
    slurm = (starts[-1].get("slurm") if starts else None) or {}
    owner, refused = _owners(directory, starts)
    ids = [one.job for one in (owner, refused) if one] + [slurm.get("job_id")]
    status.job = next((jobs[each] for each in ids if each in jobs), None)
    if refused:
        ago = duration(max(refused.age_s, 0.0))
        status.refused = f"{refused.error or 'a start ended before training'} ({ago} ago)"
    _judge(directory, status, owner, lines)
    if status.state == "failed":
        status.error = verdict_of(slurm) or (owner.error if owner else None) or status.because
        status.pages = _pages(directory, starts)
    status.advice = _advice(directory, status, starts)
    return status


def _starts(directory: Path, status: RunStatus) -> list[dict[str, Any]]:
    status.damaged += [f"{directory / name} {text}" for name, text in damage(directory).items()]
    try:
        return earlier_starts(directory / PROVENANCE)
    except ConfigurationError:  # `damage` has it
        return []


def _owners(
    directory: Path, starts: Sequence[Mapping[str, Any]]
) -> tuple[RunOwner | None, RunOwner | None]:
    """Return who ran last, and the newest start if it was refused.

    A refused start takes the lock, leaves it while it is starting, and is not in provenance.json.
    """
    refused, begun = None, _unix_s(starts[-1].get("time")) if starts else 0.0
    for owner in run_owners(directory):
        if not (owner.left and owner.phase == "starting" and begun < owner.since):
            return owner, refused
        refused = refused or owner
    return refused, None  # no other start is known


def _unix_s(time_: str | None) -> float:
    return datetime.datetime.fromisoformat(time_).timestamp() if time_ else 0.0


def _shown(error: Exception) -> str:
    return error.problems[0] if isinstance(error, ConfigurationError) else str(error)


def _read_progress(directory: Path, status: RunStatus, now: float) -> list[dict[str, Any]]:
    """Fill in what the journal tells; return its last lines, as they are."""
    head, lines = _read_ends(directory / FILE_NAME, status)
    known = [line["max_steps"] for line in [*head[:1], *lines] if "max_steps" in line]
    status.max_steps = known[-1] if known else None
    if lines:
        status.step = next((line["step"] for line in lines[::-1] if line["event"] != "save"), None)
        status.logged_ago_s = max(now - lines[-1]["time"], 0.0)
    series = as_series(lines)
    train = [line for line in series if line["event"] == "train"]
    for line in series:
        if line["event"] == "eval":
            name = line.get("split")
            loss = line.get(f"eval_{name}_loss" if name else "eval_loss")
            if loss is not None:
                status.evaluations[name or "eval"] = (loss, line["step"])
    if train:
        status.loss, status.tokens = train[-1].get("loss"), train[-1].get("tokens_seen")
        status.tokens_per_s = _median("tokens_per_s", train[-LINES:])
        status.mfu = _median("mfu", train[-LINES:])
        status.memory_peak_gib = train[-1].get("memory_peak_gib")
        left = train[-1].get("memory_headroom_gib", train[-1].get("memory_free_gib"))
        status.memory_left_gib = left
        if "slowest_rank" in train[-1]:
            rank = "rank {} on {}".format(*map(train[-1].get, ("slowest_rank", "slowest_host")))
            status.slowest = rank, _median("slowest_cost", train[-LINES:]) or 0.0
    first = [line for line in head if line["event"] == "train" and "tokens_per_s" in line]
    if train and first and first[:LINES][-1]["step"] < train[-LINES:][0]["step"]:  # not the same
        status.tokens_per_s_at_start = _median("tokens_per_s", first[:LINES])
    _estimate(status, lines, train)
    return lines


def _read_ends(path: Path, status: RunStatus) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the first and the last lines of a journal; note what is damaged."""
    try:
        size, tail = path.stat().st_size, TAIL_BYTES
        head, damaged_head = read_lines(path, first=HEAD_BYTES)
        lines, damaged = read_lines(path, last=tail)
        while not lines and tail < size:  # damaged lines may be as long as that
            tail *= 8
            lines, damaged = read_lines(path, last=tail)
    except FileNotFoundError:
        return [], []  # not one step yet
    except OSError as error:
        status.damaged.append(f"{path}: {error.strerror}")
        return [], []
    status.skipped_lines = damaged + (damaged_head if tail < size else 0)
    if status.skipped_lines:
        status.damaged.append(f"{path.parent}/{skipped(status.skipped_lines)}")
    return head, lines


def _median(name: str, lines: Sequence[Mapping[str, Any]]) -> float | None:
    values = [line[name] for line in lines if name in line]
    return statistics.median(values) if values else None


def _estimate(
    status: RunStatus, lines: Sequence[Mapping[str, Any]], train: Sequence[Mapping[str, Any]]
) -> None:
    """Work out the time left, by the clock: evaluations and saves of this start take theirs."""
    if status.max_steps is None or status.step is None:
        return
    first = max((i for i, line in enumerate(lines) if line["event"] in STARTS), default=-1)
    own = [line for line in lines[first + 1 :] if line["event"] == "train"]
    step_s = _median("step_time_s", train[-LINES:])
    if len(own) > 1 and own[-1]["step"] > own[0]["step"]:
        step_s = (own[-1]["time"] - own[0]["time"]) / (own[-1]["step"] - own[0]["step"])
    if step_s is not None:
        status.left_s = step_s * (status.max_steps - status.step)


def _read_save(directory: Path, status: RunStatus, now: float) -> None:
    """Find the newest committed checkpoint by its manifest alone."""
    for step, checkpoint in numbered_checkpoints(directory):
        if not (checkpoint / MANIFEST).exists():
            continue
        try:
            manifest = read_manifest(checkpoint)
            written = datetime.datetime.fromisoformat(manifest.time).timestamp()
        except (DamagedCheckpointError, ConfigurationError, OSError, ValueError) as error:
            status.damaged.append(f"{checkpoint}: {_shown(error)}")
            continue
        status.saved_step, status.saved_bytes = step, manifest.size_bytes
        status.saved_ago_s = max(now - written, 0.0)
        return


def _judge(
    directory: Path, status: RunStatus, owner: RunOwner | None, lines: Sequence[Mapping[str, Any]]
) -> None:
    """Tell the state by the owner's signs of life, the queue and the last event."""
    job, last = status.job, [line["event"] for line in lines if line["event"] != "save"][-1:]
    in_queue = job.state if job else ""
    if owner and owner.alive:
        doing = f", {owner.phase}" if owner.phase else ""
        status.state, status.because = "running", f"process {owner.pid} on {owner.host}{doing}"
    elif last == ["summary"] and (directory / FINAL).is_dir() and (not owner or owner.left):
        early = status.max_steps and status.step and status.step < status.max_steps
        ended = f"early stopping at step {status.step}; " if early else ""
        status.state, status.because = "finished", f"{ended}{directory / FINAL} holds the model"
    elif job and in_queue in ("PENDING", "REQUEUED", "REQUEUE_HOLD", "SPECIAL_EXIT"):
        status.state, status.because = "waiting", f"job {job.id} is in the queue: {job.reason}"
    elif last == ["stopped"] and (not owner or owner.left):
        saved = "with a checkpoint" if status.saved_step == status.step else "before a save"
        status.state, status.because = "stopped", f"at step {status.step} {saved}"
    elif job and in_queue == "RUNNING" and owner and not owner.left and not owner.gone:
        status.state = "running"
        status.because = f"no sign of life from {owner.host} for {duration(owner.age_s)}"
    elif owner and not owner.left:
        died = "is gone" if owner.gone else f"gave no sign of life for {duration(owner.age_s)}"
        status.because = f"process {owner.pid} on {owner.host} {died}: killed, or its node is down"
    else:
        known = owner is not None and owner.error  # shown on a line of its own
        missing = "" if known else " and left no reason in its directory"
        status.because = f"its last start ended early{missing}"


def _pages(directory: Path, starts: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the pages that the last start wrote as it failed."""
    since = _unix_s(starts[-1].get("time")) if starts else 0.0
    found = [*sorted(directory.glob("out-of-memory-rank*.txt")), directory / "hang.txt"]
    return [str(page) for page in found if page.exists() and page.stat().st_mtime >= since]


def _advice(directory: Path, status: RunStatus, starts: Sequence[Mapping[str, Any]]) -> str:
    where, job = shlex.quote(str(directory)), status.job
    if status.state == "running":
        if "no sign of life" in status.because and job:
            return f"if that lasts, scancel {job.id} and submit the same command again"
        return f"touch {where}/STOP stops it with a checkpoint, touch {where}/SAVE saves now"
    if status.state == "waiting" and job:
        return f"squeue --start --job={job.id} tells when it may start, scancel {job.id} ends it"
    if status.state == "finished":
        return f"python chat.py {where}"
    again = _command(starts[-1]) if starts else "the same command again"
    again = f"{'start again' if status.saved_step is None else 'resume'}: {again}"
    if any("out-of-memory" in page for page in status.pages):
        again = f"change what the page says helps most, then {again}"
    elif (status.error or "").startswith(NotFiniteError.kind):
        again = f"the same settings fail at the same step; change what the log says, then {again}"
    return again


def _command(start: Mapping[str, Any]) -> str:
    """Return the command of a start, as far as it is known."""
    words, slurm = shlex.join(start.get("argv") or ["..."]), start.get("slurm")
    launch = start.get("launch") or {}
    if slurm:
        nodes = int(slurm.get("nodes") or 1)
        options = f"--nodes={nodes} " if nodes > 1 else ""
        if launch.get("devices") not in (None, ["cpu"]):
            options += f"--gpus-per-node={int(launch.get('world_size') or 1) // nodes} "
        if slurm.get("partition"):
            options += f"--partition={shlex.quote(slurm['partition'])} "
        script = "multinode_job.sh" if nodes > 1 else "train_job.sh"
        return f"slurm/submit.sh {options}[OPTIONS] slurm/{script} {words}"
    if launch.get("launcher"):
        return f"{launch['launcher']} {words}"
    ranks = launch.get("world_size", 1)
    return f"python {words}" if ranks == 1 else f"accelerate launch [OPTIONS] {words}"
