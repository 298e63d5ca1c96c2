"""The values that status.py shows of a run and of its job in Slurm's queue (RunStatus)."""

import contextlib
import datetime
import os
import re
import shutil
import statistics
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from utils.checkpoints.files import CONFIG, PROVENANCE
from utils.checkpoints.record import RunRecord, is_run
from utils.config.errors import ConfigurationError, did_you_mean
from utils.host.journal_file import FILE_NAME, duration, printable
from utils.host.redaction import redact
from utils.launch.slurm import time_limit_s
from utils.launch.verdict import submitted_runs
from utils.observe.endings import (
    End,
    Job,
    advice,
    cause_in_words,
    end_of_run,
    evidence_in_words,
    pages_of_a_failure,
)
from utils.observe.history import History, Line, read_run, unix_s
from utils.observe.hours import Hours, hours_of, sum_in_words

STATES = ("running", "starting", "waiting", "failed", "stopped", "finished")
LINES = 5  # the speed is the median of this many training logs
SQUEUE_S = 5.0
UNKNOWN = "unknown"  # a user without a name
SHOWN_S = 7 * 24 * 3600  # how long status.py shows a job that ended before its run began
LAST_BYTES, LONGEST_LINE = 2**16, 500  # limits for reading a job's log and for its last line


@dataclass(frozen=True)
class RunStatus:
    """The status of a run. None means unknown.

    because          the evidence for `state`
    evaluations      {split: (loss, step)} of the newest evaluation of each split
    memory_left_gib  memory left on the fullest GPU
    slowest          the slowest rank, and the share of each step for which the others wait
    left_s           training time left, without waiting in the queue
    error            why the last start failed
    pages            files that describe this failure (hang.txt, out-of-memory-rankN.txt)
    damaged          unreadable files
    skipped_lines    number of damaged lines in metrics.jsonl
    refused          why the newest start failed its checks. `state` then ignores the newest start.
    owner            the user to whom the directory belongs
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
    hours: Hours = field(default_factory=lambda: Hours({}, "", 0.0))
    owner: str = ""


def runs_below(directory: Path) -> list[Path]:
    """Return the run directories in a folder and in its direct subfolders (such as sweeps).

    Raises ConfigurationError if the folder does not exist.
    """
    if not directory.is_dir():
        raise ConfigurationError(
            f"{directory}: no such folder{did_you_mean(directory)}; name a run, or a folder of "
            "runs: --all DIR"
        )
    found = sorted(directory.glob("*"))
    inner = [path for folder in found if not is_run(folder) for path in sorted(folder.glob("*"))]
    return [path for path in [*found, *inner] if is_run(path)]


def runs_of_folder(
    all_in: str | None, jobs: Mapping[str, Job]
) -> tuple[list[RunStatus], dict[str, str], list[Job]]:
    """Return ([status of each run in a folder], {run's path: name}, [Slurm jobs without a run]).

    all_in: the folder (None: runs/). The name of a run is its path relative to the folder. jobs:
    from `queued_jobs`. Raises ConfigurationError if the folder `all_in` does not exist.
    """
    folder = Path(all_in or "runs")
    none_yet = all_in is None and not folder.is_dir()  # no run yet: show waiting jobs
    runs = []
    for path in [] if none_yet else runs_below(folder):
        with contextlib.suppress(ConfigurationError):  # deleted meanwhile
            runs.append(read_status(path, jobs))
    names = {run.run: str(Path(run.run).relative_to(folder)) for run in runs}
    runs.sort(key=lambda run: (STATES.index(run.state), run.run))
    known = {run.job.id for run in runs if run.job}
    others = [job for job in jobs.values() if job.id not in known]
    if all_in is not None:  # leave out failed jobs of other folders
        below = f"{folder.resolve()}{os.sep}"
        others = [job for job in others if not job.log or str(job.output_dir).startswith(below)]
    return runs, names, others


def sums_of_hours(runs: Sequence[RunStatus], names: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return sums over all runs, each user's runs and each folder: [(name, hours and energy), ...].

    names: {path of a run: its path relative to the listed folder}
    """
    groups: dict[str, list[Hours]] = {"all runs": []}
    for run in runs:
        folder = Path(names[run.run]).parent
        own = ["all runs", f"user {run.owner}"] + [f"folder {folder}"] * (folder != Path())
        for name in own:
            groups.setdefault(name, []).append(run.hours)
    return [(printable(name), sum_in_words(hours)) for name, hours in groups.items()]


def queued_jobs(users: Sequence[str] = ()) -> dict[str, Job]:
    """Return {job id: job} of the jobs in Slurm's queue of this user and of `users`.

    users: the names of other users. Submitted jobs that ended before their run began are included.
    Return {} if squeue is missing or fails.
    """
    if shutil.which("squeue") is None:
        return {}
    whose = f"--user={','.join([*users, str(os.getuid())])}" if users else "--me"
    command = ["squeue", whose, "--noheader", "--format=%A|%i|%T|%r|%L|%S|%j"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SQUEUE_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return {}
    jobs, submitted = {}, submitted_runs()
    for row in (line.split("|", 6) for line in done.stdout.splitlines()):
        if row[6:]:
            id_, shown, state, reason, left, start, name = row
            started = None
            with contextlib.suppress(ValueError):  # N/A while it waits without a forecast
                started = datetime.datetime.fromisoformat(start).timestamp()
            shown, output_dir = shown.partition("_[")[0], submitted.get(id_, (None,))[0]
            jobs[id_] = Job(shown, state, reason, time_limit_s(left), name, started, output_dir)
    newest = sorted(submitted.keys() - jobs.keys(), key=lambda id_: (len(id_), id_), reverse=True)
    for id_ in newest:
        output_dir, log = submitted[id_]
        with contextlib.suppress(OSError):
            if last := _last_log_line(Path(log), Path(output_dir), id_):
                jobs[id_] = Job(id_, "FAILED", last, None, Path(log).name, None, output_dir, log)
    return jobs


def _last_log_line(log: Path, run: Path, job: str) -> str:
    """Return the last line of a job's log. Return "" if the log is old or the job's run began.

    run: the run directory of the job. job: the job's id.
    """
    if not log.is_file():
        return ""
    ended = log.stat().st_mtime
    if time.time() - ended > SHOWN_S or _run_began(run, job, ended):
        return ""
    with log.open("rb") as file:
        file.seek(max(log.stat().st_size - LAST_BYTES, 0))
        text = file.read().decode(errors="replace")
    lines = [line for line in re.split(r"[\r\n]", text) if line.strip()]
    return redact(lines[-1])[-LONGEST_LINE:] if lines else "without a word"


def _run_began(run: Path, job: str, ended: float) -> bool:
    """Return whether a job started its run, or whether the run was started after the job ended.

    run: the run directory. job: the job's id. ended: unix seconds.
    """
    starts = RunRecord(run, lenient=True).starts if is_run(run) else []
    slurm = [start.get("slurm") or {} for start in starts]
    ours = (job in (one.get("job_id"), one.get("array_job_id")) for one in slurm)
    return any(ours) or any((unix_s(start.get("time")) or 0) > ended for start in starts)


def read_status(directory: Path, jobs: Mapping[str, Job]) -> RunStatus:
    """Return the status of the run in a directory. Raises ConfigurationError if it has no run.

    jobs: from `queued_jobs`
    """
    own = str(directory.resolve())
    failed = next((job.failure for job in jobs.values() if job.log and job.output_dir == own), None)
    jobs = {id_: job for id_, job in jobs.items() if not job.log}
    if not is_run(directory):
        raise ConfigurationError(_why_no_run(directory, jobs, failed))
    run, now = read_run(directory, whole=False), time.time()
    start = run.starts[-1] if run.starts else None
    ids = [owner.job for owner in (start and start.owner, run.refused) if owner]
    ids += [start.job.get("job_id")] if start else []
    job = next((jobs[each] for each in ids if each and each in jobs), None)
    job = job or next((each for each in jobs.values() if each.output_dir == own), None)
    end = end_of_run(run, job)
    state = {"interrupted": "failed"}.get(end.word, end.word)
    last, recent = (run.trained[-1] if run.trained else {}), run.trained[-LINES:]
    first = [line for line in run.first_lines if "tokens_per_s" in line][:LINES]
    known = recent and first and first[-1]["step"] < recent[0]["step"]  # the lines do not overlap
    slowest = None
    if "slowest_rank" in last:
        name = f"rank {last['slowest_rank']} on {last.get('slowest_host')}"
        slowest = name, _median("slowest_cost", recent) or 0.0
    saved = run.checkpoints[0] if run.checkpoints else None
    return RunStatus(
        run=str(directory),
        state="running" if end is End.FINISHING else state,
        because=evidence_in_words(run, end, job),
        step=run.last_step,
        max_steps=run.max_steps,
        tokens=last.get("tokens_seen"),
        loss=last.get("loss"),
        evaluations={
            split: (found[-1].loss, found[-1].step) for split, found in run.evaluations().items()
        },
        tokens_per_s=_median("tokens_per_s", recent),
        tokens_per_s_at_start=_median("tokens_per_s", first) if known else None,
        mfu=_median("mfu", recent),
        memory_peak_gib=last.get("memory_peak_gib"),
        memory_left_gib=last.get("memory_headroom_gib", last.get("memory_free_gib")),
        slowest=slowest,
        left_s=run.time_left_s(),
        logged_ago_s=None if run.last_logged is None else max(now - run.last_logged, 0.0),
        saved_step=saved.step if saved else None,
        saved_ago_s=max(now - (unix_s(saved.time) or now), 0.0) if saved else None,
        saved_bytes=saved.size_bytes if saved else None,
        starts=len(run.record.starts),
        job=job,
        error=cause_in_words(run, end),
        pages=[str(directory / page.name) for page in pages_of_a_failure(run, end)],
        advice=advice(run, end, job),
        damaged=[f"{directory}/{text}" for text in run.damaged],
        skipped_lines=run.skipped_lines,
        refused=_refusal(run) or failed,
        hours=hours_of(run),
        owner=user_of(directory),
    )


def _why_no_run(directory: Path, jobs: Mapping[str, Job], failed: str | None) -> str:
    """Return a message that says why a directory is no run.

    failed: a message on the last job for this directory if that job failed, else None
    """
    own = str(directory.resolve())
    shown = {job.id: f"{job.id} ({job.name}, {job.state})" for job in jobs.values()}
    begins = next((job.id for job in jobs.values() if job.output_dir == own), None)
    if begins:
        return f"{directory}: job {shown[begins]} has not begun this run yet"
    waiting = ", ".join(shown.values()) or "none"
    why = f"none of {PROVENANCE}, {CONFIG} and {FILE_NAME} is there. Jobs of yours in the queue: "
    return f"{directory} is no run directory: {failed or f'{why}{waiting}.'}"


def user_of(directory: Path) -> str:
    """Return the name of the user who owns a directory, "unknown" if the user has no name."""
    with contextlib.suppress(OSError, KeyError):  # a user without a name, as in a container
        return directory.owner()
    return UNKNOWN


def _refusal(run: History) -> str | None:
    """Return a text with the error and age of the newest start if its checks failed, else None."""
    if run.refused is None:
        return None
    why = run.refused.error or "a start ended before training"
    return f"{why} ({duration(max(run.refused.age_s, 0.0))} ago)"


def _median(name: str, lines: Sequence[Line]) -> float | None:
    values = [line[name] for line in lines if name in line]
    return statistics.median(values) if values else None
