"""The output of status.py (lines, a table, JSON), and `--sync`: upload of offline wandb runs."""

import dataclasses
import os
import shlex
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from utils.checkpoints.files import readable
from utils.config.errors import ConfigurationError
from utils.host.journal_file import duration, format_count, printable, strict_json
from utils.host.redaction import load_env_file, redact
from utils.host.spikes import next_commands, spikes_in
from utils.launch.ledger import bad_nodes, ledger_path, read_ledger
from utils.observe.endings import Job
from utils.observe.history import read_run
from utils.observe.hours import PROCESS_HOURS, amount
from utils.observe.run_state import (
    STATES,
    RunStatus,
    queued_jobs,
    read_status,
    runs_below,
    runs_of_folder,
    sums_of_hours,
)

COLOURS = dict(zip(STATES, ("green", "green", "yellow", "red", "cyan", "blue"), strict=True))
LINE_WIDTH = 160  # columns of output into a file or a pipe
CUT_OFF = "incomplete record"  # wandb's message contains this if the end of a file is missing


def show_runs(
    directories: Sequence[str], all_in: str | None, as_json: bool
) -> str | RenderableType:
    """Return the status of runs, as JSON text or for the terminal.

    directories: runs to show as lines. Without them, the runs in the folder `all_in` (None: runs/)
    are shown as a table.
    """
    jobs = queued_jobs()
    if directories and all_in is None:
        runs = [read_status(Path(directory), jobs) for directory in directories]
        if as_json:
            return strict_json([dataclasses.asdict(run) for run in runs], indent=1)
        return Group(*map(_status_lines, runs))
    runs, names, others = runs_of_folder(all_in, jobs)
    if as_json:
        return strict_json([dataclasses.asdict(run) for run in runs], indent=1)
    if not runs and not others:
        folder = all_in or "runs"
        return Group(Text(f"no runs in {folder}/, and no jobs of yours in Slurm's queue"))
    table = _table(runs, names, others)
    sums = sums_of_hours(runs, names) if any(run.hours.total for run in runs) else []
    table.caption = Text("\n".join(f"{name:<16} {text}" for name, text in sums))
    return table


def show_nodes(as_json: bool) -> str | RenderableType:
    """Return the ledger of bad nodes: JSON text, or a table with the latest fault first.

    Raises ConfigurationError if the ledger cannot be read.
    """
    try:
        faults, damaged = read_ledger()
    except OSError as error:
        raise ConfigurationError(f"{ledger_path()} cannot be read: {error.strerror}") from error
    if as_json:
        return strict_json([dataclasses.asdict(fault) for fault in faults], indent=1)
    table = Table(
        "node", "faults", "left out", "last", "jobs", "GPU", "last cause",
        box=None, pad_edge=False, show_edge=False, header_style="dim",
    )  # fmt: skip
    bad = bad_nodes(faults)
    for node in dict.fromkeys(fault.node for fault in reversed(faults)):
        own = [fault for fault in faults if fault.node == node]
        kinds = Counter(fault.kind for fault in own)
        last = time.strftime("%F %R", time.localtime(own[-1].time))
        jobs = " ".join(dict.fromkeys(fault.job for fault in own))
        gpus = " ".join(dict.fromkeys(fault.gpu for fault in own if fault.gpu))
        counts = ", ".join(f"{kind} {count}" for kind, count in kinds.items())
        cells = node, counts, "yes" if node in bad else "no", last, jobs, gpus, own[-1].cause
        table.add_row(*map(Text, cells))
    return Group(Text(f"{ledger_path()}: {len(faults)} faults, {damaged} damaged lines"), table)


def show_spikes(run: Path, as_json: bool) -> str:
    """Return a run's spikes of loss and gradient norm: JSON, or text with the next commands."""
    history = read_run(run)
    found = [*spikes_in(history.trained, "grad_norm"), *spikes_in(history.trained)]
    if as_json:
        return strict_json([{**vars(spike), "steps": spike.steps} for spike in found], indent=1)
    where, saved = shlex.quote(str(run)), [manifest.step for manifest in history.checkpoints]
    lines = [f"{spike}\n  python status.py {where} --step {spike.all_steps}" for spike in found]
    if not found:
        return f"{run}: no spikes in {len(history.trained):,} logs"
    return "\n".join([*lines, f"step {found[-1].steps}:", next_commands(run, found[-1], saved)])


def display(look: Callable[[], str | RenderableType], watch_s: float | None) -> int:
    """Call `look` and print its result; return exit code 0.

    watch_s: the seconds until the next repetition. Ctrl-C ends the repetitions. None means no
    repetition. JSON text is never repeated.
    """
    first = look()
    console = Console(width=None if sys.stdout.isatty() else LINE_WIDTH, highlight=False)
    if watch_s is None or isinstance(first, str):
        sys.stdout.write(f"{first}\n") if isinstance(first, str) else console.print(
            first, soft_wrap=isinstance(first, Group)
        )
        return 0
    try:
        with Live(first, console=console, screen=console.is_terminal, auto_refresh=False) as live:
            while True:
                time.sleep(watch_s)
                live.update(look(), refresh=True)
                sys.stdout.flush()  # a pipe needs it
    except KeyboardInterrupt:
        return 0


def _status_lines(run: RunStatus) -> Text:
    head = Text.assemble(
        (printable(run.run), "bold"), "  ", (run.state, COLOURS[run.state]),
        f"  {printable(run.because)}",
    )  # fmt: skip
    lines = {
        "progress": _progress(run),
        "left": _time_left(run),
        "speed": "", "slowest": "", "memory": "", "loss": "",
        "saved": "no checkpoint yet",
        "hours": str(run.hours),
        "job": f"start {run.starts}" if run.starts > 1 else "",
        "error": run.error, "page": ", ".join(run.pages), "refused": run.refused,
        "damaged": "\n".join(run.damaged), "next": run.advice,
    }  # fmt: skip
    if run.tokens_per_s:
        mfu = f", MFU {run.mfu:.1%}" if run.mfu else ""
        then = run.tokens_per_s_at_start
        before = f" (at the start {then:,.0f})" if then else ""
        lines["speed"] = f"{run.tokens_per_s:,.0f} tokens/s{mfu}{before}"
    if run.slowest and run.slowest[1] > 0.01:
        name, cost = run.slowest
        lines["slowest"] = f"{name}: the other ranks wait for it {cost:.1%} of each step"
    memory = [("{:.1f} GiB at its peak", run.memory_peak_gib), ("{:.1f} left", run.memory_left_gib)]
    lines["memory"] = ", ".join(text.format(gib) for text, gib in memory if gib is not None)
    losses = [] if run.loss is None else [f"{run.loss:.4f}"]
    for name, (loss, step) in run.evaluations.items():
        losses.append(f"{name} {loss:.4f} (step {step:,})")
    lines["loss"] = ", ".join(losses)
    if run.saved_step is not None:
        size, ago = readable(run.saved_bytes or 0), duration(run.saved_ago_s or 0)
        lines["saved"] = f"checkpoint-{run.saved_step}, {ago} ago, {size}"
    if run.job is not None:
        lines["job"] = f"{run.job.id} ({run.job.name}): {run.job.state}, start {run.starts}"
    for name, text in lines.items():
        if text:
            shown = "\n".join(map(printable, text.splitlines()))
            colour = "red" if name == "error" else ""
            head.append_text(Text.assemble("\n", (f"  {name:<10}", "dim"), (shown, colour)))
    return head


def _progress(run: RunStatus) -> str:
    if run.step is None:
        return "not one step is logged yet"
    share = f" of {run.max_steps:,} ({run.step / run.max_steps:.1%})" if run.max_steps else ""
    tokens = f", {format_count(run.tokens)} tokens" if run.tokens else ""
    ago = f", logged {duration(run.logged_ago_s)} ago" if run.logged_ago_s is not None else ""
    return f"step {run.step:,}{share}{tokens}{ago}"


def _time_left(run: RunStatus) -> str:
    if run.left_s is None or run.state == "finished":
        return ""
    text = f"{duration(run.left_s)} at the pace so far"
    limit = run.job.left_s if run.job and run.state == "running" else None
    if limit is None:
        return text
    enough = run.left_s < limit
    ends = "enough" if enough else "it stops with a checkpoint before that, and is queued again"
    return f"{text}; the job's time limit ends in {duration(limit)}: {ends}"


def _table(runs: Sequence[RunStatus], names: Mapping[str, str], others: Sequence[Job]) -> Table:
    table = Table(
        box=None, pad_edge=False, show_edge=False, header_style="dim", caption_justify="left"
    )
    for name in ("run", "state", "step", "%", "loss", "eval", "tokens/s", "left", "saved",
                 "GPU h", "job"):  # fmt: skip
        numeric = name not in ("run", "state", "job")
        table.add_column(name, justify="right" if numeric else "left", no_wrap=True)
    table.add_column("what", ratio=1, overflow="fold")
    for run in runs:
        losses = [f"{name} {loss:.4f}" for name, (loss, _) in run.evaluations.items()]
        if len(losses) == 1:
            losses = [losses[0].rpartition(" ")[2]]
        left = None if run.state == "finished" else run.left_s
        hours = amount(run.hours.total)
        table.add_row(
            Text(printable(names[run.run])), Text(run.state, COLOURS[run.state]),
            "" if run.step is None else f"{run.step:,}",
            f"{100 * run.step / run.max_steps:.0f}" if run.step and run.max_steps else "",
            "" if run.loss is None else f"{run.loss:.4f}",
            losses[0] if losses else "",
            f"{run.tokens_per_s:,.0f}" if run.tokens_per_s else "",
            "" if left is None else duration(left),
            "" if run.saved_ago_s is None else duration(run.saved_ago_s),
            "" if hours == "0" else hours + "*" * (run.hours.unit == PROCESS_HOURS),
            run.job.id if run.job else "",
            Text(printable((run.error or run.because).splitlines()[0])),
        )  # fmt: skip
    for job in others:
        reason = f", {job.reason}" if job.reason != "None" else ""
        where = f"; its run will be {job.output_dir}" if job.output_dir else ""
        what = f"job {job.name}: {job.state.lower()}{reason}{where}"
        word = "waiting" if job.state == "PENDING" else "job"
        if job.log:
            word, what = "failed", f"{job.output_dir}: {job.failure}"
        table.add_row("", Text(word, COLOURS.get(word, "yellow")),
                      *[""] * 8, job.id, Text(printable(what)))  # fmt: skip
    return table


def sync_wandb(directories: Sequence[str], all_in: str | None) -> int:
    """Upload wandb's offline files that are not uploaded yet; return exit code 0.

    directories, all_in: as in `show_runs`. Each execution of the script writes one file. The newest
    file of a running run is left for later, because wandb accepts a file only once. If an execution
    was killed, its file lacks the end. The complete records are uploaded, and the file is marked as
    uploaded. Without the mark, `wandb sync` would upload the file again at each call and never
    reach later files. The API key is WANDB_API_KEY (from the environment or `.env`) or the key of
    `wandb login`. Raises ConfigurationError if an upload fails.
    """
    runs = [Path(each) for each in directories] or runs_below(Path(all_in or "runs"))
    load_env_file()
    uploaded, failed, records = 0, [], 0
    for run in runs:
        found = [*run.glob("wandb/offline-run-*/run-*.wandb")]
        records += len(found)
        files = sorted(file for file in found if not _upload_marker(file).exists())  # newest last
        if files and read_status(run, {}).state == "running":
            print_line(f"{run} is running; to follow it: wandb beta sync --live {files.pop()}")
        for file in files:
            if _upload(file):
                uploaded += 1
            else:
                failed.append(str(file))
    if failed:
        raise ConfigurationError(
            f"wandb did not take {', '.join(failed)}, as it says above. It needs WANDB_API_KEY in "
            "the environment or .env, or `wandb login`, and a server in reach."
        )
    none = "no offline records in RUN/wandb; the setting report_to: wandb makes them"
    print_line(f"wandb: {f'{uploaded} uploaded, nothing left' if records else none}")
    return 0


def _upload_marker(file: Path) -> Path:
    return file.with_name(f"{file.name}.synced")


def _upload(file: Path) -> bool:
    words = [sys.executable, "-m", "wandb", "sync", str(file)]
    online = {**os.environ, "WANDB_MODE": "online"}  # WANDB_MODE is "offline" in jobs
    cut_off = False
    with subprocess.Popen(
        words, env=online, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        for line in process.stdout or ():
            print_line(line.rstrip())
            cut_off = cut_off or CUT_OFF in line
    if cut_off:
        print_line("wandb: this start was killed while it recorded; what is complete is uploaded")
        _upload_marker(file).touch()
    return _upload_marker(file).exists()


def print_line(text: str) -> None:
    """Print a line at once, with secrets masked."""
    sys.stdout.write(f"{redact(text)}\n")
    sys.stdout.flush()
