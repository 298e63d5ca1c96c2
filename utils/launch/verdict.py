"""The reason why a job ended: a note file per rank, and one verdict (reason, exit code) per job.

The environment variable STOKER_NOTES_DIR names the directory of the files. slurm/training_job.sh
makes one directory for all nodes of a job. Without this script, slurm/launch_node.sh makes one per
node. Without the variable no file is written.
"""

import dataclasses
import json
import os
import re
import signal
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from utils.config.errors import ExitCode
from utils.host.machine import global_rank, host_name
from utils.host.redaction import redact, redacted, write_error
from utils.launch.signals import KILLED_BY_SIGTERM

NOTES_DIR = "STOKER_NOTES_DIR"
VERDICT = "verdict.txt"
EXIT_CODE_FILE = "exit_code"
RUN_STARTED = "run_started"
GPUS = "gpus.json"  # the UUID of the GPU of each rank
SUBMITTED = "submitted-"
_ROOT = Path(__file__).parents[2]
# Words of errors that follow from the end of another rank.
_LOST_PEER = re.compile(
    r"closed by (peer|remote)|reset by peer|broken pipe|remote process exited|remote error"
    r"|nccl|gloo|Dist(Backend|Network|Store)Error|failed to recv|recvValue|sendBytes"
    r"|connection (was )?(refused|aborted)|socket (timeout|closed)",
    re.IGNORECASE,
)
# Signals that can be the first cause. Other signals follow from another rank's end: torch aborts a
# process (SIGABRT) that lost its peers, and launchers end processes by SIGTERM.
_CAUSE_SIGNALS = ("SIGKILL", "SIGSEGV", "SIGBUS", "SIGILL", "SIGFPE")
# The line of slurm/training_job.sh before it starts the ranks again in the same job.
_RESTARTED = re.compile(r"(?m)  job \S+: (.*); restart \d+ of at most \d+ inside the job$")
# The line that slurm/job_setup.sh writes into a job's log before it requeues the job.
_REQUEUED = re.compile(r"  job (\S+): (.*); requeued, start (\d+) will resume$", re.MULTILINE)
# The line that slurmd writes when a job is cancelled. If Slurm cancels the job, the line has a
# reason. A STEP line without a reason also follows each failed rank (srun --kill-on-bad-exit).
_CANCELLED = re.compile(
    r"\*\*\* (?:JOB|STEP) .+ CANCELLED AT \S+ DUE TO ([A-Z ]*[A-Z])|\*\*\* JOB .+ CANCELLED AT"
)
CONSEQUENCE = 4  # the result of `cause_order` for a rank that ended because another rank had ended
# If a worker dies on another node, that node's torchrun ends the other workers within this time.
# Then that node's launcher writes the note with the cause.
WAIT_FOR_CAUSES_S = 8.0
OUT_OF_MEMORY = (
    ": the kernel killed a process of this job because the host's memory ran out. Ask for more "
    "(sbatch --mem), or use fewer data workers (--dataloader_num_workers)."
)
NO_NOTES_TEXT = "a process of the job ended without a word; see above"
_MOST_RANKS = 4  # ranks in a message

runs_begun: list[Path] = []  # output directories of the runs that this process started as rank 0


@dataclass(frozen=True)
class Note:
    """A rank's note: how and why the rank ended.

    kind     "stopped" (with a checkpoint), "refused", "failed", "hung" or "killed"
    text     one line: the first problem of a refused rank, the exception of a failed rank, the
             place in the code of a hung rank, or the signal that killed the rank
    time     unix time in seconds at which the note was written
    beats    number of Trainer events before a rank hung; None for other kinds
    waiting  whether a hung rank waits for other ranks
    """

    kind: str
    exit_code: int
    text: str
    rank: int
    host: str
    time: float
    beats: int | None = None
    waiting: bool = False


@dataclass(frozen=True)
class Verdict:
    """Why a job ended, as text. exit_code: an ExitCode, or the script's own exit code."""

    text: str
    exit_code: int


def notes_directory() -> Path | None:
    """Return the path in STOKER_NOTES_DIR; None if this environment variable is not set."""
    directory = os.environ.get(NOTES_DIR)
    return Path(directory) if directory else None


def leave_note(
    kind: str, exit_code: int, text: str, rank: int | None = None, **details: Any
) -> Note:
    """Write a note file on the end of a rank and return the note. A full disk raises nothing.

    kind, exit_code, text: see Note. rank: None means this rank. details: other fields of Note. If
    the rank already has a note file, this file is kept.
    """
    if rank is None:
        rank = global_rank()
    note = Note(kind, int(exit_code), text, rank, host_name(), time.time(), **details)
    leave_file(f"rank-{rank}.json", json.dumps(redacted(dataclasses.asdict(note))))
    return note


def read_notes(directory: Path | None = None) -> list[Note]:
    """Return the ranks' notes in a directory, earliest first. Raises OSError.

    directory: None means STOKER_NOTES_DIR, or no notes if this variable is not set.
    """
    directory = directory or notes_directory()
    files = directory.glob("rank-*.json") if directory else ()
    notes = [Note(**json.loads(file.read_text(encoding="utf-8"))) for file in files]
    return sorted(notes, key=lambda note: note.time)


def mark_run_started(output_dir: Path, gpus: Sequence[str] = ()) -> None:
    """Write the files that tell slurm/training_job.sh that all checks passed.

    gpus: the UUID of each rank's GPU
    """
    runs_begun.append(output_dir)
    leave_file(GPUS, json.dumps(gpus))
    leave_file(RUN_STARTED, f"{output_dir}\n")


def leave_verdict(text: str, exit_code: int) -> bool:
    """Write the job's verdict; return False if the job already has a verdict or writing fails.

    text: why the job ended
    """
    first = leave_file(VERDICT, redact(text.rstrip()) + "\n")
    return first and leave_file(EXIT_CODE_FILE, f"{int(exit_code)}\n")


def read_verdict() -> Verdict | None:
    """Return the job's verdict from STOKER_NOTES_DIR; None if no process has written a verdict."""
    if (directory := notes_directory()) is None:
        return None
    try:
        # Read the code first, because it is written last.
        code = int((directory / EXIT_CODE_FILE).read_text(encoding="utf-8"))
        return Verdict((directory / VERDICT).read_text(encoding="utf-8").rstrip(), code)
    except (OSError, ValueError):
        return None


def name_of_job(slurm: Mapping[str, Any]) -> str:
    """Return a job's id for Slurm's commands: 123, or 123_4 in an array.

    slurm: the description of the job in provenance.json
    """
    if slurm.get("array_job_id"):
        return f"{slurm['array_job_id']}_{slurm['array_task_id']}"
    return str(slurm.get("job_id"))


def read_job_verdict(slurm: Mapping[str, Any]) -> str | None:
    """Return why a job ended; None if unknown. A restarted job has a reason for each start.

    The text is in .stoker/job-ID.RESTARTS/verdict.txt. RESTARTS is the number of restarts by Slurm,
    followed by `.N` after N restarts inside the job. slurm: the description of one start of the job
    in provenance.json
    """
    again = int(slurm.get("restart_in_job") or 0)
    start = f"{slurm.get('restart_count') or 0}{f'.{again}' if again else ''}"
    return _read_job_file(f"job-{name_of_job(slurm)}.{start}/{VERDICT}")


def causes_in_log(log: str, slurm: Mapping[str, Any]) -> tuple[str, str]:
    """Return the reasons for a job's end that its log shows: (job script's reason, Slurm's reason).

    A reason is "" if the log does not show it. log: the text of the log. If the job was restarted,
    the log covers all starts. slurm: the description of one start of the job in provenance.json
    """
    # Starts count from 1 and restarts from 0. The last line of a start names the next start.
    name, number = name_of_job(slurm), int(slurm.get("restart_count") or 0) + 1
    ends = [at[2] for at in _REQUEUED.finditer(log) if (at[1], at[3]) == (name, str(number + 1))]
    start_log = log.partition(f"job {name}, start {number}: ")[2]
    start_log = start_log.partition(f"start {number + 1}")[0]  # the next start, or its requeue
    # The log before the first restart inside the job, the reason of that restart, and so on.
    rounds = _RESTARTED.split(start_log)[2 * int(slurm.get("restart_in_job") or 0) :]
    if len(rounds) > 1:
        return rounds[1], ""
    cancelled, by_slurm = _CANCELLED.search("".join(rounds)), ""
    if cancelled is not None:
        by_slurm = f"ended by Slurm: {cancelled[1].lower()}" if cancelled[1] else "ended by scancel"
    return "".join(ends[-1:]), by_slurm


def note_submitted(job: str, output_dir: Path, log: str) -> None:
    """Write the paths of a job's run and log to .stoker/submitted-JOB. Raises OSError."""
    (_ROOT / ".stoker").mkdir(exist_ok=True)
    (_ROOT / ".stoker" / f"{SUBMITTED}{job}").write_text(f"{output_dir.resolve()}\n{log}\n")


def submitted_runs() -> dict[str, tuple[str, str]]:
    """Return {job id: (run directory, log file or "")} of the jobs that `note_submitted` wrote."""
    found = {}
    for path in sorted((_ROOT / ".stoker").glob(f"{SUBMITTED}*")):
        run, log, *_ = [*(_read_job_file(path.name) or "").splitlines(), "", ""]
        found[path.name.removeprefix(SUBMITTED)] = run, log
    return found


def _read_job_file(name: str) -> str | None:
    try:
        text = (_ROOT / ".stoker" / name).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    return text.strip() or None


def leave_file(name: str, text: str) -> bool:
    """Create a file in STOKER_NOTES_DIR atomically; return whether it was created.

    An existing file is kept. If writing fails, the text is written to stderr.
    """
    directory = notes_directory()
    if directory is None:
        return False
    draft = directory / f".{name}.{host_name()}.{os.getpid()}"
    try:
        draft.write_text(text, encoding="utf-8")
        try:
            os.link(draft, directory / name)  # fails if the file exists, so the first file stays
        finally:
            draft.unlink()
    except FileExistsError:
        return False
    except OSError as error:
        write_error(f"{draft} cannot be written ({error.strerror}); it would say: {text}\n")
        return False
    return True


def note_worker_ends(
    exit_codes: Mapping[int, int], asked_to_stop: bool, memory_ran_out: bool
) -> None:
    """Write a note for each rank that failed or stopped and has no note file.

    exit_codes: {rank: exit code}; a negative code is a signal, as in subprocess. asked_to_stop: if
    True, a rank killed by SIGTERM or SIGUSR1 counts as stopped. memory_ran_out: whether the kernel
    killed a process of this job for lack of memory.
    """
    names = {-one.value: one.name for one in signal.Signals}
    for rank, code in exit_codes.items():
        name = names.get(code, f"signal {-code}")
        if code == ExitCode.STOPPED:
            leave_note("stopped", ExitCode.STOPPED, "stopped", rank)
        elif asked_to_stop and name in ("SIGUSR1", "SIGTERM"):
            leave_note("stopped", ExitCode.STOPPED, f"stopped by {name} before it could save", rank)
        elif code < 0:
            out_of_memory = memory_ran_out and name == "SIGKILL"
            note_code = ExitCode.OUT_OF_MEMORY if out_of_memory else ExitCode.LOST_RANK
            leave_note("killed", note_code, name + OUT_OF_MEMORY * out_of_memory, rank)
        elif code:
            leave_note("failed", code, f"exit code {code}; what it printed is above", rank)


def wait_for_verdict(several_nodes: bool, silent: str = NO_NOTES_TEXT) -> Verdict:
    """Return the job's verdict after processes of this node failed.

    several_nodes: if True, wait up to WAIT_FOR_CAUSES_S seconds for a note that names a cause.
    silent: the verdict's text if there are no notes.
    """
    deadline = time.monotonic() + (WAIT_FOR_CAUSES_S if several_nodes else 0.0)
    while True:
        if verdict := read_verdict():
            return verdict
        notes = read_notes()
        if any(cause_order(note) != CONSEQUENCE for note in notes) or time.monotonic() > deadline:
            return likeliest_cause(notes, silent)
        time.sleep(0.1)


def likeliest_cause(notes: Iterable[Note], silent: str = NO_NOTES_TEXT) -> Verdict:
    """Return the verdict that follows from the ranks' notes: the likeliest cause of the job's end.

    If several causes are equally likely, the earliest counts. silent: the verdict's text if there
    are no notes.
    """
    ordered = sorted(notes, key=lambda note: (cause_order(note), note.time))
    if not ordered:
        return Verdict(silent, ExitCode.LOST_RANK)
    cause = ordered[0]
    if cause.kind == "stopped":
        return Verdict(cause.text, cause.exit_code)
    how, code = _end_words(cause), cause.exit_code
    if cause.kind == "failed" and cause_order(cause) == CONSEQUENCE:
        how, code = "lost another rank, which left no word:", ExitCode.LOST_RANK
    return Verdict(f"rank {cause.rank} on {cause.host} {how} {cause.text}", code)


def _end_words(note: Note) -> str:
    """Return the words before a note's text, such as "failed:" in "rank 1 on n2 failed: ..."."""
    return {"refused": "ended:", "killed": "was killed by"}.get(note.kind, f"{note.kind}:")


def cause_order(note: Note) -> int:
    """Return a sort key of a note; the lowest key marks the likeliest cause of the job's end."""
    if note.exit_code == ExitCode.OUT_OF_MEMORY:
        return 0  # even if the text looks like a consequence
    failed, killed = note.kind == "failed", note.kind == "killed"
    lost_peer = note.exit_code == KILLED_BY_SIGTERM or _LOST_PEER.search(note.text)
    if (failed and lost_peer) or (killed and not note.text.startswith(_CAUSE_SIGNALS)):
        return CONSEQUENCE
    return {"killed": 0, "hung": 1, "refused": 2, "failed": 2}.get(note.kind, CONSEQUENCE + 1)


def hang_verdict(notes: Sequence[Note], hosts: Sequence[str]) -> str:
    """Return a text that names the ranks that caused a hang. The other ranks wait for these ranks.

    notes: one note of each rank that ended or reported its hang. hosts: the host of each rank. If
    ranks ended, the text names the first of them. Otherwise the text names the ranks without a
    note, which are frozen or gone. If every rank reported a hang, the text names the ranks with the
    fewest Trainer events (`Note.beats`). If only some of these ranks wait for other ranks, the text
    leaves out the waiting ranks.
    """
    if ended := [note for note in notes if note.kind != "hung"]:
        first = ended[0]
        at_fault = [f"rank {first.rank} on {first.host} {_end_words(first)} {first.text}"]
    elif silent := sorted(set(range(len(hosts))) - {note.rank for note in notes}):
        why = "stopped, on a frozen host, gone, or in a call that never returns to Python"
        at_fault = [f"rank {rank} on {hosts[rank]} gave no sign of life ({why})" for rank in silent]
    else:
        fewest = min(note.beats or 0 for note in notes)
        behind = [note for note in notes if (note.beats or 0) == fewest]
        behind = [note for note in behind if not note.waiting] or behind
        at_fault = [f"rank {note.rank} on {note.host} {note.text}" for note in behind]
    shown = at_fault[:_MOST_RANKS] + ["..."] * (len(at_fault) > _MOST_RANKS)
    if len(at_fault) == len(hosts) > 1:
        why = "the network between them, or storage that all of them read."
        return "\n".join([f"All {len(hosts)} ranks hang, none behind the others: {why}", *shown])
    waited = "; the other ranks waited for it." if len(hosts) > 1 else "."
    return "\n".join(shown) + waited
