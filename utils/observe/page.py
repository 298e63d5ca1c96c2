"""The report (report.html) and the page of a folder: single HTML files that need no network."""

import contextlib
import json
import logging
import math
import os
import re
import shlex
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from rich.text import Text

from utils.checkpoints.files import PROVENANCE, REPORT, readable
from utils.checkpoints.record import is_run
from utils.config.errors import ConfigurationError
from utils.host.atomic_files import replace_text
from utils.host.journal_file import FILE_NAME as JOURNAL
from utils.host.journal_file import duration, format_count, printable, sampled_losses
from utils.host.redaction import redact
from utils.host.spikes import spikes_in
from utils.launch.ledger import Fault, read_ledger
from utils.observe import findings
from utils.observe.charts import charts_of, charts_of_several, draw_picture, starts_on_axes
from utils.observe.endings import advice, end_of_run, end_of_start, run_in_words, start_in_words
from utils.observe.history import History, read_run, unix_s
from utils.observe.hours import amount, hours_of
from utils.observe.run_state import (
    UNKNOWN,
    RunStatus,
    queued_jobs,
    runs_below,
    runs_of_folder,
    sums_of_hours,
    user_of,
)

FILE_NAME, FOLDER_PAGE = REPORT, "runs.html"
CURVE_POINTS = 60  # of the small loss curve of a run
PAGE_LIMITS = {"spikes": 30, "evaluations": 20, "documents": 200, "characters": 4000, "faults": 50}
_HERE = Path(__file__).parent
# Control characters, halves of surrogate pairs and noncharacters. Names and texts may contain them.
_NOT_IN_HTML = re.compile(
    "[^\t\n\r\x20-\x7e\xa0-\ud7ff\ue000-\ufdcf\ufdf0-\ufffd\U00010000-\U0010ffff]"
)

logger = logging.getLogger(__name__)


def run_directories(named: Sequence[Path], *, compare: bool) -> list[Path]:
    """Return run directories. Each path in `named` is a run, or a folder with runs directly inside.

    compare: if `named` is a single run, return all runs in its parent folder. Raises
    ConfigurationError if a path is no run and contains no run.
    """
    found: list[Path] = []
    problems = []
    alone = compare and len(named) == 1 and is_run(named[0])
    for path in [named[0].resolve().parent] if alone else named:
        inside = [path] if is_run(path) else list(filter(is_run, sorted(path.glob("*"))))
        found += inside
        if not inside:
            problems.append(
                f"{path} is no run and holds none: give a run's output_dir (it has {JOURNAL} and "
                f"{PROVENANCE}), or a folder of such directories."
            )
    if problems:
        raise ConfigurationError(problems)
    return list(dict.fromkeys(found))


def write_pages(paths: Sequence[Path], output: Path | None, picture: Path | None) -> Path:
    """Write the report of one run, or a comparison of several; return the path of the HTML file.

    output: the HTML file. None means report.html in the directory of the run, or in the working
    directory if there are several runs. picture: an image file that also gets the charts.
    Raises ConfigurationError if reading or writing fails.
    """
    runs = [read_run(path) for path in paths]
    for run in runs:
        if not run.starts:
            raise ConfigurationError(
                f"{run.path} holds no run: neither {JOURNAL} nor {PROVENANCE} can be read there. "
                "Give a run's output_dir, or a folder of such directories."
            )
    if output is None:
        output = (runs[0].path if len(runs) == 1 else Path()) / FILE_NAME
    if len(runs) == 1:
        facts = _facts_of_one(runs[0])
        charts = charts_of(runs[0], *(facts[key] for key in ("spikes", "memory", "stragglers")))
    else:
        facts, charts = _facts_of_several(runs, output), charts_of_several(runs)
    facts["charted"] = any(line["step"] for chart in charts for line in chart["lines"])
    marks = starts_on_axes(runs[0]) if len(runs) == 1 else []
    body = "one_run.html" if len(runs) == 1 else "several_runs.html"
    _write_html(output, body, facts, {"charts": charts, "marks": marks})
    if picture is not None:
        title = facts["title"] if len(charts) > 1 else ""
        draw_picture(charts, title, picture)
    return output


def write_at_the_end(output_dir: Path) -> None:
    """Write report.html when a run ends. An error is only logged, because the training is done."""
    try:
        write_pages([output_dir], None, None)
    except Exception as error:
        logger.warning("the report was not written (%r): python report.py %s", error, output_dir)


def log_next_step(output_dir: Path) -> None:
    """Log the command that the user needs next, such as chat.py, and the path of report.html."""
    try:
        run = read_run(output_dir, whole=False)
        page = f"; report: {output_dir / FILE_NAME}" if (output_dir / FILE_NAME).is_file() else ""
        logger.info("next: %s%s", advice(run, end_of_run(run), None), page)
    except Exception as error:  # an error here must not end the run
        logger.warning("%s: the run cannot be read (%r)", output_dir, error)


def write_folder_page(all_in: str | None, output: Path | None, refresh_s: float | None) -> Text:
    """Write an HTML page on all runs in a folder; return a line with the page's path.

    all_in: the folder (None: runs/). output: the page (None: runs.html in the folder). refresh_s:
    seconds after which the browser reloads the page (None: never). Raises ConfigurationError.
    """
    folder = Path(all_in or "runs")
    users = sorted({user_of(path) for path in runs_below(folder)} - {UNKNOWN})
    runs, names, jobs = runs_of_folder(str(folder), queued_jobs(users))
    below = f"{folder.resolve()}{os.sep}"
    jobs = [job for job in jobs if str(job.output_dir).startswith(below)]
    output = output or folder / FOLDER_PAGE
    if inside := next(filter(is_run, output.resolve().parents), None):
        raise ConfigurationError(f"--html {output} is inside the run {inside}: name another FILE.")
    rows = []
    for run in runs:
        page, curve = Path(run.run) / FILE_NAME, _small_curve(run)
        rows.append(
            {"run": run, "name": names[run.run], "curve": curve, "link": _link(page, output)}
        )
    faults: list[Fault] = []
    with contextlib.suppress(OSError):  # status.py --nodes shows the error
        faults = read_ledger()[0][-PAGE_LIMITS["faults"] :]
    job_states = [
        "failed" if job.log else "waiting" if job.state == "PENDING" else "starting" for job in jobs
    ]
    facts = {
        "title": f"Runs in {folder.resolve()}", "now": time.time(), "rows": rows,
        "jobs": [*zip(job_states, jobs, strict=True)],
        "counts": Counter([*(run.state for run in runs), *job_states]),
        "sums": sums_of_hours(runs, names),
        "refresh_s": refresh_s, "charted": False, "points": CURVE_POINTS, "below": below,
        "faults": faults[::-1],
    }  # fmt: skip
    _write_html(output, "folder.html", facts, {"charts": [], "marks": []})
    return Text(f"{printable(str(output))}: {len(runs)} runs, {clock(time.time())}")


def _small_curve(run: RunStatus) -> str:
    """Return the run's losses as the points of an SVG polyline, 100 wide and 26 high.

    Return "" if fewer than two finite losses are logged.
    """
    points = sampled_losses(Path(run.run) / JOURNAL, CURVE_POINTS)
    if run.step is not None and run.loss is not None:
        points = [(step, loss) for step, loss in points if step < run.step] + [(run.step, run.loss)]
    points = [(step, loss) for step, loss in points if math.isfinite(loss)]
    if len(points) < 2:
        return ""
    steps, losses = zip(*points, strict=True)
    low, height, width = min(losses), max(losses) - min(losses) or 1.0, steps[-1] - steps[0]
    return " ".join(
        f"{100 * (step - steps[0]) / width:.1f},{26 - 24 * (loss - low) / height:.1f}"
        for step, loss in points
    )


def _link(page: Path, output: Path) -> str | None:
    """Return a link from the page `output` to the report `page`; None if the report is missing."""
    if not page.is_file():
        return None
    return quote(os.fsencode(os.path.relpath(page.resolve(), output.resolve().parent)))


def _write_html(output: Path, body: str, facts: dict[str, Any], data: dict[str, Any]) -> None:
    try:
        replace_text(output, _render({"body": body, **facts}, data))
    except OSError as error:
        raise ConfigurationError(f"{output} cannot be written: {error.strerror}") from error


def _render(facts: dict[str, Any], data: dict[str, Any]) -> str:
    """Return the page as HTML.

    facts: variables of the templates. data: JSON values for page.js. Each "<" in `data` is escaped,
    so no text can end the script element.
    """
    from jinja2 import Environment, FileSystemLoader

    environment = Environment(
        loader=FileSystemLoader(_HERE), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {
        "figure": figure, "count": format_count, "clock": clock, "duration": duration,
        "size": readable, "shortened": _shorten, "unix_s": unix_s, "exp": _perplexity,
        "printable": lambda text: printable(str(text)), "amount": amount,
        "command": lambda words: shlex.join(map(str, words)),
        "json": lambda value: json.dumps(value, ensure_ascii=False, default=str),
    }  # fmt: skip
    text = json.dumps(data, allow_nan=False, separators=(",", ":"), ensure_ascii=False)
    script = (_HERE / "page.js").read_text(encoding="utf-8")
    page = environment.get_template("page.html")
    whole = page.render(data=text.replace("<", "\\u003c"), script=script, **facts)
    return _NOT_IN_HTML.sub("\ufffd", whole)


def _facts_of_one(run: History) -> dict[str, Any]:
    """Return {name: value} of the template variables for the report on one run."""
    memory = findings.memory_by_rank(run)
    seconds = findings.seconds_by_use(run)
    samples = [line for line in run.lines if line["event"] == "samples"]
    given = (start.entry["given"] for start in run.starts if start.entry.get("given"))
    return {
        "title": run.name, "now": time.time(), "run": run, "shown": PAGE_LIMITS,
        "given": next(given, {}), "headline": _headline(run),
        "end": end_of_run(run), "ending": run_in_words(run),
        "figures": findings.figures(run), "starts": _start_rows(run),
        "names_of_hours": findings.HOURS, "seconds": seconds, "hours": hours_of(run),
        "whole_s": sum(seconds.values()) or 1.0,
        "memory": memory, "fullest": findings.memory_table(memory),
        "stragglers": findings.stragglers(run), "spikes": spikes_in(run.trained),
        "samples": samples[::-1],
    }  # fmt: skip


def _headline(run: History) -> dict[str, str]:
    """Return {name: text} on a run: model, data, learning rate, batch, GPUs and hosts."""
    settings, launch = run.settings, run.entry.get("launch") or {}
    data = settings.get("train_data") or ()
    model = str(settings.get("model_name_or_path") or settings.get("model_config") or "")
    if model and settings.get("use_peft"):
        model += f", LoRA of rank {settings.get('lora_r')}"
    rate = findings.logged_number(settings.get("learning_rate"))
    sequences, length = (
        findings.logged_number(settings.get(key))
        for key in ("global_batch_size", "sequence_length")
    )
    batch = ""
    if sequences and length:
        tokens = f"{sequences:,.0f} x {length:,.0f} tokens"
        batch = f"{tokens} = {sequences * length:,.0f} a step"
        batch += ", fewer at first" if settings.get("batch_warmup") else ""
    ranks, devices = launch.get("world_size"), launch.get("devices") or []
    kinds = ", ".join(dict.fromkeys(map(str, devices))) or "unknown device"
    where = f"{kinds} ({launch.get('strategy')})"
    return {
        "model": model,
        "data": ", ".join(map(str, data)) if isinstance(data, (list, tuple)) else str(data),
        "learning rate": f"{rate:g}, {settings.get('lr_scheduler_type', 'linear')}" if rate else "",
        "batch": batch,
        "processes" if "cpu" in devices else "GPUs": f"{ranks} x {where}" if ranks else "",
        "hosts": ", ".join(map(str, launch.get("hosts") or [])),
    }


def _perplexity(loss: float) -> float:
    return math.inf if loss >= 690 else math.exp(loss)


def _shorten(text: Any) -> str:
    """Return the first characters of a sample's text, with known secrets masked."""
    shown, most = redact(str(text)), PAGE_LIMITS["characters"]
    return shown[:most] + "..." * (len(shown) > most)


def _start_rows(run: History) -> list[dict[str, Any]]:
    """Return the rows of the report's table of starts. A row places the start on a time bar.

    left, width: begin and length in percent of the bar. useful: the percentage of `width` whose
    work was not lost to a failure or an interruption.
    """
    begin, end = run.starts[0].began, max(start.ended for start in run.starts)
    whole = max(end - begin, 1e-9)
    rows = []
    for start in run.starts:
        state, until = end_of_start(run, start), start.ended
        if state.word in ("interrupted", "failed"):
            kept = [line["time"] for line in start.lines if not line["lost"]]
            until = max([start.trained or start.began, *kept])
        rows.append(
            {
                "start": start, "end": state, "ending": start_in_words(run, start),
                "left": 100 * (start.began - begin) / whole,
                "width": 100 * (start.ended - start.began) / whole,
                "useful": 100 * (until - start.began) / max(start.ended - start.began, 1e-9),
            }
        )  # fmt: skip
    return rows


def _facts_of_several(runs: Sequence[History], output: Path) -> dict[str, Any]:
    rows: list[dict[str, Any]] = []
    for index, run in enumerate(runs):
        link = _link(run.path / FILE_NAME, output)
        rows.append(
            {
                "run": run, "link": link, "colour": index % 10,
                "end": end_of_run(run), "ending": run_in_words(run),
                "figures": findings.figures(run),
            }
        )  # fmt: skip
    splits = dict.fromkeys(split for row in rows for split in row["figures"]["evaluations"])
    return {
        "title": f"{len(rows)} runs", "rows": rows, "splits": list(splits),
        "differ": findings.settings_that_differ(runs),
    }  # fmt: skip


def figure(value: float | None, digits: int = 4) -> str:
    """Format a number with `digits` significant digits; None as "-"."""
    if value is None or not math.isfinite(value):
        return "-" if value is None else str(value)
    return f"{value:.{digits}g}" if abs(value) < 10**digits else f"{value:,.0f}"


def clock(seconds: float | None) -> str:
    """Format unix seconds as local date, time and time zone; None as "-"."""
    return "-" if not seconds else time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(seconds))
