"""The state of a run or of one start of its script, and texts that explain it to the user."""

import math
import re
import shlex
import time
from dataclasses import dataclass
from enum import Enum

from utils.checkpoints.files import FINAL
from utils.config.errors import SpikeError
from utils.host.journal_file import duration
from utils.host.run_lock import BY_USER
from utils.observe.history import History, Page, Start

RUNNING = "RUNNING", "CONFIGURING"
IN_QUEUE = ("PENDING", "REQUEUED", "REQUEUE_HOLD", "SPECIAL_EXIT")


@dataclass(frozen=True)
class Job:
    """A job in Slurm's queue, or a job that ended before its run began.

    id          for scancel: 123_4 in an array, 123 for all waiting tasks of the array
    reason      Slurm's reason for the state. If the job ended, the last line of its log.
    left_s      seconds until the time limit; None if the job waits or has no limit
    started     when the job started, in unix seconds; None if the job waits
    output_dir  the run directory, which slurm/submit.sh recorded
    log         the log file of a job that ended before its run began (state FAILED), else ""
    """

    id: str
    state: str
    reason: str
    left_s: float | None
    name: str
    started: float | None = None
    output_dir: str | None = None
    log: str = ""

    @property
    def failure(self) -> str:
        """A message for a job that ended before its run began, with the reason and the log file."""
        reason = self.reason.removeprefix("- ").rstrip(".")
        return f"job {self.id} ended before its run began: {reason}; log: {self.log}"


class End(Enum):
    """The state of a run or of one start of its script: a word for the user, and the evidence."""

    ALIVE = "running", "its lock has a recent heartbeat"
    SILENT = "running", "its lock has no recent heartbeat, but Slurm runs its job"
    QUEUED = "waiting", "its job is in Slurm's queue"
    STARTING = "starting", "its job started after the last heartbeat"
    FINISHED = "finished", "its summary is logged and final/ exists"
    FINISHING = "finished", "as FINISHED, and its lock has a recent heartbeat"
    NOTHING_LEFT = "finished", "it released its lock before training, and final/ exists"
    NO_MODEL = "stopped", "its summary is logged, but final/ does not exist"
    STOPPED = "stopped", "a stop is logged"
    NOT_FINITE = "failed", "it wrote a file nonfinite-step-N.json"
    BY_USER = "stopped", "it released its lock when its user pressed Ctrl-C"
    ERROR = "failed", "it released its lock with an error"
    UNEXPLAINED = "failed", "it released its lock without an error"
    GONE = "interrupted", "it did not release its lock, and its process is dead"
    LOST = "interrupted", "it did not release its lock, and the lock has no recent heartbeat"
    UNKNOWN = "interrupted", "it has no lock"

    @property
    def word(self) -> str:
        """The state's word: running, starting, waiting, finished, stopped, failed, interrupted."""
        return self.value[0]


def end_of_start(run: History, start: Start, job: Job | None = None) -> End:
    """Return the state of a start. Its log lines, lock file and Slurm job are the evidence.

    job: the run's job in Slurm's queue, None if unknown
    """
    owner, last, event = start.owner, start is run.starts[-1], start.last_event
    left = owner is None or owner.left
    alive = last and owner is not None and owner.alive
    summary, in_queue = event == "summary", job is not None and job.state in IN_QUEUE
    gone = owner is not None and owner.gone
    silent = job is not None and job.state == "RUNNING" and not left and not gone
    began = job.started if job is not None and job.state in RUNNING else None
    starting = last and began is not None and (owner is None or began > owner.beat)
    rules = (
        (alive and summary and run.has_final, End.FINISHING),
        (alive, End.ALIVE),
        (summary and (not last or (left and run.has_final)), End.FINISHED),
        (in_queue, End.QUEUED),
        (starting, End.STARTING),
        (summary and left and not start.error, End.NO_MODEL),
        (event == "stopped" and (left or not last), End.STOPPED),
        (silent, End.SILENT),
        (steps_not_finite(run, start), End.NOT_FINITE),
        (owner is None, End.UNKNOWN),
        (not left, End.GONE if gone else End.LOST),
        (start.error == BY_USER, End.BY_USER),
        (start.error, End.ERROR),
        (start.trained is None and run.has_final, End.NOTHING_LEFT),
    )
    return next((end for holds, end in rules if holds), End.UNEXPLAINED)


def end_of_run(run: History, job: Job | None = None) -> End:
    """Return the state of a run: the state of its last start. job: as in `end_of_start`."""
    return end_of_start(run, run.starts[-1], job) if run.starts else End.UNKNOWN


def steps_not_finite(run: History, start: Start) -> list[int]:
    """Return the steps at which a start had a NaN or infinite loss or gradient.

    A file nonfinite-step-N.json records such a step. Files that were written before this start or
    during a later start do not count.
    """
    later = [other.began for other in run.starts if other.began > start.began]
    until = min(later, default=math.inf)
    return [one["step"] for one in run.nonfinite if start.began <= one["time"] < until]


def pages_of_a_failure(run: History, end: End) -> list[Page]:
    """Return the text files that explain the last start's failure (hang, out of memory), or []."""
    if end.word not in ("failed", "interrupted"):
        return []
    since = run.starts[-1].began if run.starts else 0.0
    return [page for page in run.pages if page.time >= since and "/" not in page.name]


def start_in_words(run: History, start: Start) -> str:
    """Return a text about how a start ended. The report's table of starts shows this text."""
    end = end_of_start(run, start)
    at = f"at step {start.last_step:,}" if start.trained is not None else "before training"
    if end is End.NOT_FINITE:
        return f"step {steps_not_finite(run, start)[-1]} was not finite"
    return (
        {
            End.ALIVE: f"running, {at}",
            End.FINISHED: f"finished {at}",
            End.FINISHING: f"finished {at}",
            End.NOTHING_LEFT: "nothing was left to do",
            End.NO_MODEL: f"trained to the end, but {FINAL}/ is not there",
            End.STOPPED: f"stopped {at} with a checkpoint: {_why_stopped(start)}",
            End.BY_USER: f"{BY_USER} {at}, without a checkpoint of this step",
            End.UNEXPLAINED: "ended with an error, which its log shows",
        }.get(end)
        or start.error
        or "no last word: it was killed, or its node was lost"
    )


def _why_stopped(start: Start) -> str:
    reason = next((line["reason"] for line in start.lines[::-1] if "reason" in line), None)
    if start.by_slurm:
        return start.by_slurm
    if reason and reason.startswith("SIG") and start.job:
        return f"{reason}, from Slurm (before its time limit, or a preemption) or scancel"
    return reason or "a signal, a limit or STOP"


def run_in_words(run: History) -> tuple[str, str]:
    """Return two texts for the report: the state of a run with its reason, and what to do next."""
    end = end_of_run(run)
    if end is End.FINISHING:  # the run itself writes the report
        end = End.FINISHED
    where = f"step {run.last_step or 0:,}" + (f" of {run.max_steps:,}" if run.max_steps else "")
    why = evidence_in_words(run, end, None)
    if end.word in ("failed", "interrupted"):
        why = start_in_words(run, run.starts[-1])
    left = run.time_left_s() if end is End.ALIVE else None
    remain = f"About {duration(left)} remain. " if left else ""
    return f"{end.word.capitalize()} at {where}: {why}.", f"{remain}Next: {advice(run, end, None)}"


def evidence_in_words(run: History, end: End, job: Job | None) -> str:
    """Return the evidence for a run's state `end`, as a text for the user."""
    owner, step = (run.starts[-1].owner if run.starts else None), run.last_step
    if end in (End.QUEUED, End.STARTING) and job:
        ago = duration(max(time.time() - (job.started or 0.0), 0.0))
        how = f"is in the queue: {job.reason}" if end is End.QUEUED else f"started {ago} ago"
        return f"job {job.id} {how}"
    if end is End.NO_MODEL:
        return f"trained to step {step}, but {FINAL}/ is not there"
    if end.word == "finished" and end is not End.FINISHING:
        early = run.max_steps and step and step < run.max_steps
        ended = f"early stopping at step {step}; " if early else ""
        return f"{ended}{FINAL}/ holds the model"
    if end in (End.STOPPED, End.BY_USER):
        how = f"{BY_USER} " if end is End.BY_USER else ""
        saved = run.checkpoints and run.checkpoints[0].step == step
        why = "" if end is End.BY_USER else f": {_why_stopped(run.starts[-1])}"
        return f"{how}at step {step} {'with a checkpoint' if saved else 'before a save'}{why}"
    if owner and not owner.left:
        process, silent = f"process {owner.pid} on {owner.host}", duration(owner.age_s)
        doing = f", {owner.phase}" if owner.phase else ""
        runs = job is not None and job.state == "RUNNING"
        again = "; its job still runs and may start the ranks again" if runs else ""
        return {
            End.SILENT: f"no heartbeat from {owner.host} for {silent}",
            End.GONE: f"{process} is gone: killed, or its node is down{again}",
            End.LOST: f"{process} sent no heartbeat for {silent}: killed, or its node is down",
        }.get(end, f"{process}{doing}")
    known = end is End.NOT_FINITE or (run.starts and run.starts[-1].error)
    return "its last start ended early" + ("" if known else " and left no reason in its directory")


def cause_in_words(run: History, end: End) -> str | None:
    """Return a text on why a run failed or was interrupted; None for any other state `end`."""
    if end.word not in ("failed", "interrupted"):
        return None
    if run.starts and run.starts[-1].error:
        return run.starts[-1].error
    if end is End.NOT_FINITE:
        return start_in_words(run, run.starts[-1])
    return evidence_in_words(run, end, None)


def advice(run: History, end: End, job: Job | None) -> str:
    """Return a text that tells the user what to do next, with the command.

    end: the state of the run. job: as in `end_of_start`.
    """
    where = shlex.quote(str(run.path))
    if end is End.SILENT and job:
        return f"if that lasts, scancel {job.id} and submit the same command again"
    if end in (End.ALIVE, End.FINISHING):
        return f"touch {where}/STOP stops it with a checkpoint, touch {where}/SAVE saves now"
    if end is End.QUEUED and job:
        starts = f"squeue --start --job={job.id} tells when it may start"
        if job.reason.startswith("JobHeld"):
            starts = f"scontrol release {job.id} lets it start"
        return f"{starts}, scancel {job.id} ends it"
    if end is End.STARTING and job:
        return f"wait for its first step, or scancel {job.id}"
    if end.word == "finished":
        return f"python chat.py {where}; upload: python -m utils.publish.hub {where} OWNER/NAME"
    how, command = "resume" if run.checkpoints else "start again", _start_command(run)
    if end is End.STOPPED and _why_stopped(run.starts[-1]).startswith("max_gpu_hours"):
        how = "resume with a larger --max_gpu_hours"
        if "sweep_job.sh" not in command:  # a sweep's settings are in its file
            command, *note = re.sub(r" --max_gpu_hours[= ]\S+", "", command).partition(" (with ")
            command += f" --max_gpu_hours HOURS{''.join(note)}"
    return f"{_changes_before_start(run, end)}{how}: {command}"


def _changes_before_start(run: History, end: End) -> str:
    """Return the part of `advice` that says what to change before the next start, or ""."""
    error = (run.starts[-1].error or "") if run.starts else ""
    if any(page.name.startswith("out-of-memory") for page in pages_of_a_failure(run, end)):
        return "change what the page says helps most, then "
    if end is End.NOT_FINITE:
        return "the same settings fail at the same step; change what the log says, then "
    if nodes := re.search(r"computes wrong\. .*(--exclude=\S+)\. ", error):
        return f"with {nodes[1]}, and no --nodelist, "
    if f"{SpikeError.kind}: " in error:
        where = shlex.quote(str(run.path))
        return f"see python status.py {where} --spikes; skip documents, or with --on_spike none "
    return ""


def _start_command(run: History) -> str:
    """Return the command line of the run's last start, from provenance.json.

    For a Slurm job, this is the user's call of slurm/submit.sh.
    """
    if not run.entry:
        return "the same command again"
    words, slurm = shlex.join(run.entry.get("argv") or ["..."]), run.entry.get("slurm")
    launch = run.entry.get("launch") or {}
    ranks, nodes = int(launch.get("world_size") or 1), len(launch.get("hosts") or [""])
    launcher, variables = launch.get("launcher"), ""
    if launch.get("devices") == ["cpu"] and (slurm or ranks > nodes):
        variables = f"ACCELERATE_USE_CPU=true STOKER_PROCESSES_PER_NODE={ranks // nodes} "
    if slurm:
        script = "multinode_job.sh" if int(slurm.get("nodes") or 1) > 1 else "train_job.sh"
        other = f"{variables}slurm/submit.sh slurm/{script} {words} (with your options of sbatch)"
        return (slurm.get("command") or other).strip()
    strategy = launch.get("strategy") or "multi_gpu"
    config = "cpu" if launch.get("devices") == ["cpu"] else strategy.replace("ddp", "multi_gpu")
    options = f"--config_file accelerate_configs/{config}.yaml --num_processes {ranks}"
    default = "python" if ranks == 1 else f"accelerate launch {options}"
    return f"{variables}{launcher} {words}" if launcher else f"{default} {words}"
