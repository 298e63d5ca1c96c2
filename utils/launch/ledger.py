"""The ledger of bad nodes: a file to which all jobs append a line of JSON for each fault of a node.

The environment variable STOKER_LEDGER names the file, and a group of users can share one. The
default is .stoker/nodes.jsonl in the repository; only Slurm jobs write to the default file. The job
scripts run two commands:

    python -m utils.launch.ledger note NOTES CODE DOWN VERDICT   after a failed srun: `note_faults`
    python -m utils.launch.ledger leave-out ASKED NODES          at a requeue: `plan_to_leave_out`
"""

import json
import os
import re
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from utils.config.errors import ExitCode
from utils.host.journal_file import LATEST, printable
from utils.launch.slurm import expand_hosts
from utils.launch.verdict import CONSEQUENCE, GPUS, Note, cause_order, read_notes

WEEK_S = 7 * 86400
_ROOT = Path(__file__).parents[2]
# sinfo's states of nodes that can run jobs. A state that ends in * marks a node without an answer.
_USABLE_STATE = re.compile(r"(idle|mix|alloc|comp|plnd)[~#%@^+-]*")
_HARDWARE_ERROR = re.compile(
    r"uncorrectable (ECC|NVLink)|GPU is lost|fallen off the bus|over nvlink or a hardware error",
    re.IGNORECASE,
)
# NCCL errors that this node caused. "remote process exited" follows from another rank's end.
_LOCAL_NCCL_ERROR = re.compile(r"NCCL error.*(unhandled (system|cuda) error|internal error)")
# The ranks that caused a hang, by the text of `hang_verdict`.
_HUNG_RANK = re.compile(r"(?m)^rank (\d+) on (\S+) (?:gave no sign of life|made no progress)")
# The nodes that failed a check of the launcher.
_REFUSED_NODE = re.compile(
    r"(?m)(?:^|\s)(\S+?):? (?:the job has \d+ GPUs on this node|there is no \S+ on PATH"
    r"|slurm/cluster\.env failed|.+ cannot start the launcher|does not see )"
)


@dataclass(frozen=True)
class Fault:
    """A fault of a node: one line of the ledger. `record_faults` sets `job` and `time`."""

    node: str
    kind: str  # hang, hardware (ECC), nccl, slow, refused (failed check), lost or mismatch
    cause: str
    gpu: str = ""  # the GPU's UUID, if known
    job: str = ""
    time: float = 0.0  # unix seconds


def ledger_path() -> Path:
    """Return the path of the ledger, the file with the faults of nodes. It may be missing."""
    return Path(os.environ.get("STOKER_LEDGER") or _ROOT / ".stoker" / "nodes.jsonl")


def record_faults(faults: Iterable[Fault]) -> str:
    """Append faults of this job's nodes to the ledger; return "", or an error message.

    Adds the job's id and the time. Outside of Slurm nothing is written, unless STOKER_LEDGER is
    set.
    """
    if not os.environ.keys() & {"SLURM_JOB_ID", "STOKER_LEDGER"}:
        return ""
    job = os.environ.get("SLURM_JOB_ID", "")
    if array := os.environ.get("SLURM_ARRAY_JOB_ID"):
        job = f"{array}_{os.environ.get('SLURM_ARRAY_TASK_ID')}"
    known = {"job": job, "time": round(time.time(), 3)}
    try:
        ledger_path().parent.mkdir(exist_ok=True)
        for fault in faults:
            cause = printable(" ".join(fault.cause.split()))[:300]
            line = json.dumps({**asdict(fault), **known, "cause": cause})
            with ledger_path().open("ab", buffering=0) as file:  # one write: other jobs append too
                file.write(f"\n{line}\n".encode())  # \n first: the last line may be unfinished
    except OSError as error:
        return f"the ledger of bad nodes cannot be written: {error}"
    return ""


def read_ledger() -> tuple[list[Fault], int]:
    """Return the ledger's faults, oldest first, and its number of damaged lines. Raises OSError."""
    faults, damaged = [], 0
    lines = ledger_path().read_bytes().splitlines() if ledger_path().exists() else []
    for line in filter(bytes.strip, lines):
        try:
            fault = Fault(**json.loads(line))
            texts = fault.node, fault.kind, fault.cause, fault.gpu, fault.job
            if not (all(text.isprintable() for text in texts) and 0 <= fault.time <= LATEST):
                raise ValueError
            faults.append(fault)
        except (ValueError, TypeError, AttributeError, RecursionError):
            damaged += 1
    return sorted(faults, key=lambda fault: fault.time), damaged


def number_from_environment(name: str, default: float) -> float:
    """Return an environment variable as a number; `default` if it is unset or not a number."""
    with suppress(KeyError, ValueError):
        return float(os.environ[name])
    return default


def bad_nodes(faults: Iterable[Fault]) -> Counter[str]:
    """Return {node: faults in the last week} of the nodes that a requeued job must not use.

    A node is bad if it has at least STOKER_LEAVE_OUT_AFTER (default 2) faults. Faults do not count
    if the same rank of a job has the same kind of fault on several nodes. Then the cause is in the
    job, for example a deadlock. Exceptions: faults of the kinds `hardware` and `lost` always count,
    and faults of the kind `mismatch` never count.
    """
    least, now = number_from_environment("STOKER_LEAVE_OUT_AFTER", 2), time.time()
    # A wrong clock may have written future times. One of the two nodes of a mismatch is healthy.
    faults = [fault for fault in faults if fault.kind != "mismatch"]
    recent = [fault for fault in faults if abs(now - fault.time) <= WEEK_S]
    nodes = defaultdict[tuple[str, str, str], set[str]](set)
    for fault in recent:
        nodes[_fault_key(fault)].add(fault.node)
    always_counted = "hardware", "lost"
    counts = Counter(
        fault.node
        for fault in recent
        if fault.kind in always_counted or len(nodes[_fault_key(fault)]) == 1
    )
    return Counter({node: count for node, count in counts.items() if count >= least > 0})


def _fault_key(fault: Fault) -> tuple[str, str, str]:
    """Return the fault's job, kind and first two words of the cause, such as "rank 3" of a hang."""
    return fault.job, fault.kind, " ".join(fault.cause.split()[:2])


def note_faults(
    hosts: Sequence[str], notes_dir: str, code: str, down: str, verdict: str
) -> list[str]:
    """Find the faults that ended a Slurm step, and write them into the ledger.

    Return lines for the job's log; [] without faults. hosts: the step's nodes. notes_dir: directory
    of the ranks' note files. code: exit code of the step. down: node list (such as n[1-2]) of the
    nodes that Slurm lost. verdict: why the step ended.
    """
    notes: list[Note] = []
    gpus: list[str] = []
    with suppress(OSError, ValueError, TypeError):  # a damaged file: use what was read
        notes = read_notes(Path(notes_dir))
        gpus = json.loads((Path(notes_dir) / GPUS).read_text(encoding="utf-8"))
    found = [Fault(host, "lost", f"down: {verdict}") for host in expand_hosts(down)]
    if not found and int(code) != ExitCode.OUT_OF_MEMORY:
        found = [*find_faults(verdict, notes, hosts, dict(enumerate(gpus)))]
    faults = {fault.node: fault for fault in found}.values()
    summary = ", ".join(f"{fault.node} ({fault.kind})" for fault in faults)
    return [record_faults(faults) or f"noted in {ledger_path()}: {summary}"] if faults else []


def find_faults(
    verdict: str, notes: Sequence[Note], hosts: Sequence[str], gpus: Mapping[int, str]
) -> Iterator[Fault]:
    """Yield the faults of nodes that ended a Slurm step.

    verdict: why the step ended. notes: how each rank ended. hosts: the step's nodes. gpus: {rank:
    UUID of the rank's GPU}.
    """
    failed = [note for note in notes if note.kind == "failed"]
    for note in failed:
        if _HARDWARE_ERROR.search(note.text):
            yield Fault(note.host, "hardware", note.text, gpus.get(note.rank, ""))
    local_errors = {note.host: note for note in failed if _LOCAL_NCCL_ERROR.search(note.text)}
    # A node without notes, or a rank that ended otherwise, may have caused the NCCL errors.
    all_consequences = all(cause_order(note) == CONSEQUENCE for note in notes)
    if len(local_errors) == 1 and all_consequences and {note.host for note in notes} == {*hosts}:
        yield from (Fault(host, "nccl", note.text) for host, note in local_errors.items())
    hung = {host: int(rank) for rank, host in _HUNG_RANK.findall(verdict)}
    if not verdict.startswith("All ") and (len(hosts) == 1 or hung.keys() < {*hosts}):
        yield from (Fault(host, "hang", verdict, gpus.get(rank, "")) for host, rank in hung.items())
    # If all nodes fail a check, the cause may be the user's variables (CUDA_VISIBLE_DEVICES=0).
    refused = {host for host in _REFUSED_NODE.findall(verdict) if host in hosts}
    one_gpu_missing = re.search(r"has (4 GPUs .+ sees 3|8 GPUs .+ sees 7)\.", verdict)
    if refused < {*hosts} or (len(hosts) == 1 and one_gpu_missing):
        yield from (Fault(host, "refused", verdict) for host in sorted(refused))


def plan_to_leave_out(own: Sequence[str], asked: str, nodes: str) -> list[str]:
    """Add bad nodes to the excluded nodes of a requeued job; return [ExcNodeList, log text].

    ExcNodeList is a node list for scontrol, or "" if no node is added. The log text is "" if there
    are no bad nodes to consider.

    own    the nodes that the job had
    asked  the job's excluded nodes, required nodes and reservation (squeue's %x|%n|%v)
    nodes  the nodes of the job's partition (sinfo's %N|%t|%c|%m|%G|%f)

    Enough nodes remain for the job's next start: at least as many fitting nodes as the job had. A
    node fits if it is up and has the cores, memory, GPUs and features of a node in `own`.
    """
    excluded, required, reservation = asked.replace("(null)", "").split("|")
    rows = {}
    for row in (line.strip() for line in nodes.splitlines() if "|" in line):
        name, state, *shape = row.split("|")
        rows[name] = _USABLE_STATE.fullmatch(state) is not None, shape
    shapes = [rows[name][1] for name in own if name in rows]
    by_user = {*expand_hosts(excluded)}
    fits = {name for name, (up, shape) in rows.items() if up and shape in shapes} - by_user
    spare = 0 if reservation else len(fits) - len(own)  # a reservation's nodes are unknown
    chosen, words = "", []
    for name, count in bad_nodes(read_ledger()[0]).most_common():
        if name not in rows or name in by_user:
            continue
        if name in expand_hosts(required) or (name in fits and spare < 1):
            words.append(f"cannot do without {name} ({count} faults in 7 days)")
        else:
            chosen += f",{name}"
            spare -= name in fits
            words.append(f"leaves out {name} ({count} faults in 7 days)")
    text = f"the next start {', '.join(words)}" if words else ""
    return [f"{excluded}{chosen}".strip(",") if chosen else "", text]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command `note` or `leave-out` (see the module's docstring) and print its result."""
    command, *words = sys.argv[1:] if argv is None else argv
    hosts = expand_hosts(os.environ.get("SLURM_JOB_NODELIST", ""))
    lines = note_faults(hosts, *words) if command == "note" else plan_to_leave_out(hosts, *words)
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
