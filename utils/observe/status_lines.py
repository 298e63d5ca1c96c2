"""The state of runs as lines, a table or JSON, shown once or repeatedly."""

import dataclasses
import itertools
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from utils.checkpoints.files import readable
from utils.host.journal_file import counted, duration, printable, strict_json
from utils.observe.endings import Job
from utils.observe.run_state import STATES, RunStatus, queued_jobs, read_status, runs_below

COLOURS = dict(zip(STATES, ("green", "yellow", "red", "cyan", "blue"), strict=True))
WIDTH = 160  # columns of output into a file or a pipe


def show_runs(
    directories: Sequence[str], all_in: str | None, as_json: bool
) -> str | RenderableType:
    """Look at the runs once; return JSON, lines or a table. Raises ConfigurationError."""
    jobs = queued_jobs()
    if directories and all_in is None:
        runs = [read_status(Path(directory), jobs) for directory in directories]
        if as_json:
            return _json(runs)
        return Group(*itertools.chain.from_iterable(map(_lines, runs)))
    folder = Path(all_in or "runs")
    none_yet = all_in is None and not folder.is_dir()  # show waiting jobs
    runs = [read_status(path, jobs) for path in ([] if none_yet else runs_below(folder))]
    names = {run.run: str(Path(run.run).relative_to(folder)) for run in runs}
    runs.sort(key=lambda run: (STATES.index(run.state), run.run))
    if as_json:
        return _json(runs)
    known = {run.job.id for run in runs if run.job}
    others = [job for job in jobs.values() if job.id not in known]
    if not runs and not others:
        return Group(Text(f"no runs in {folder}/, and no jobs of yours in Slurm's queue"))
    return _table(runs, names, others)


def display(look: Callable[[], str | RenderableType], watch_s: float | None) -> int:
    """Print the output of `look`; with `watch_s`, repeat this every so many seconds till Ctrl-C."""
    first = look()
    console = Console(width=None if sys.stdout.isatty() else WIDTH, highlight=False)
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


def _json(runs: Sequence[RunStatus]) -> str:
    return strict_json([dataclasses.asdict(run) for run in runs], indent=1)


def _lines(run: RunStatus) -> list[Text]:
    head = Text.assemble(
        (printable(run.run), "bold"), "  ", (run.state, COLOURS[run.state]),
        f"  {printable(run.because)}",
    )  # fmt: skip
    lines = {
        "progress": _progress(run), "left": _time_left(run), "speed": _speed(run),
        "slowest": _slowest(run), "memory": _memory(run), "loss": _losses(run),
        "saved": _saved(run), "job": _job(run), "error": run.error, "page": ", ".join(run.pages),
        "refused": run.refused or "", "damaged": "\n".join(map(printable, run.damaged)),
        "next": run.advice,
    }  # fmt: skip
    shown = [
        Text.assemble((f"  {name:<10}", "dim"), (_shown(text), "red" if name == "error" else ""))
        for name, text in lines.items()
        if text
    ]
    return [head, *shown]


def _shown(text: str) -> str:
    return "\n".join(map(printable, text.splitlines()))


def _progress(run: RunStatus) -> str:
    if run.step is None:
        return "not one step is logged yet"
    share = f" of {run.max_steps:,} ({run.step / run.max_steps:.1%})" if run.max_steps else ""
    tokens = f", {counted(run.tokens)} tokens" if run.tokens else ""
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


def _speed(run: RunStatus) -> str:
    now, then = run.tokens_per_s, run.tokens_per_s_at_start
    if not now:
        return ""
    mfu = f", MFU {run.mfu:.1%}" if run.mfu else ""
    return f"{now:,.0f} tokens/s{mfu}" + (f" (at the start {then:,.0f})" if then else "")


def _slowest(run: RunStatus) -> str:
    name, cost = run.slowest or ("", 0.0)
    return f"{name}: the other ranks wait for it {cost:.1%} of each step" if cost > 0.01 else ""


def _memory(run: RunStatus) -> str:
    parts = [("{:.1f} GiB at its peak", run.memory_peak_gib), ("{:.1f} left", run.memory_left_gib)]
    return ", ".join(text.format(gib) for text, gib in parts if gib is not None)


def _losses(run: RunStatus) -> str:
    parts = [] if run.loss is None else [f"{run.loss:.4f}"]
    parts += [
        f"{name} {loss:.4f} (step {step:,})" for name, (loss, step) in run.evaluations.items()
    ]
    return ", ".join(parts)


def _saved(run: RunStatus) -> str:
    if run.saved_step is None or run.saved_ago_s is None:
        return "no checkpoint yet"
    size = readable(run.saved_bytes or 0)
    return f"checkpoint-{run.saved_step}, {duration(run.saved_ago_s)} ago, {size}"


def _job(run: RunStatus) -> str:
    starts = f"start {run.starts}" if run.starts else ""
    if run.job is None:
        return starts if run.starts > 1 else ""
    return f"{run.job.id} ({run.job.name}): {run.job.state}, {starts}"


def _table(runs: Sequence[RunStatus], names: Mapping[str, str], others: Sequence[Job]) -> Table:
    table = Table(box=None, pad_edge=False, show_edge=False, header_style="dim")
    for name in ("run", "state", "step", "%", "loss", "eval", "tokens/s", "left", "saved", "job"):
        numeric = name in ("step", "%", "loss", "eval", "tokens/s", "left", "saved")
        table.add_column(name, justify="right" if numeric else "left", no_wrap=True)
    table.add_column("what", ratio=1, overflow="fold")
    for run in runs:
        named = len(run.evaluations) > 1
        losses = [
            f"{name} {loss:.4f}" if named else f"{loss:.4f}"
            for name, (loss, _) in run.evaluations.items()
        ]
        saved = "" if run.saved_ago_s is None else duration(run.saved_ago_s)
        table.add_row(
            Text(printable(names[run.run])), Text(run.state, COLOURS[run.state]),
            "" if run.step is None else f"{run.step:,}",
            f"{100 * run.step / run.max_steps:.0f}" if run.step and run.max_steps else "",
            "" if run.loss is None else f"{run.loss:.4f}",
            losses[0] if losses else "",
            f"{run.tokens_per_s:,.0f}" if run.tokens_per_s else "",
            "" if run.left_s is None or run.state == "finished" else duration(run.left_s),
            saved, run.job.id if run.job else "",
            Text(printable((run.error or run.because).splitlines()[0])),
        )  # fmt: skip
    for job in others:
        what = f"job {job.name}: {job.state.lower()}, {job.reason}; no run of it is here yet"
        table.add_row("", Text("waiting" if job.state == "PENDING" else "job", "yellow"),
                      *[""] * 7, job.id, Text(what))  # fmt: skip
    return table
