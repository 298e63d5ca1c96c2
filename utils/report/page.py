"""The page itself: what page.html and page.js show, in one file that needs no network."""

import argparse
import json
import logging
import math
import os
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from utils.checkpoints.files import PROVENANCE, readable
from utils.checkpoints.record import is_run
from utils.config.errors import ConfigurationError
from utils.report import findings, ranks
from utils.report.charts import charts_of, charts_of_several, draw_picture, starts_on_axes
from utils.report.history import History, read_run
from utils.support.files import replace_text
from utils.support.journal_file import FILE_NAME as JOURNAL
from utils.support.journal_file import counted, duration
from utils.support.redaction import redact

FILE_NAME = "report.html"
SHOWN = {"spikes": 30, "evaluations": 20, "documents": 200, "characters": 4000}
_HERE = Path(__file__).parent
# Control characters, halves of surrogate pairs and noncharacters: names and texts may hold them.
_NOT_IN_HTML = re.compile(
    "[^\t\n\r\x20-\x7e\xa0-\ud7ff\ue000-\ufdcf\ufdf0-\ufffd\U00010000-\U0010ffff]"
)

logger = logging.getLogger(__name__)


def parse_arguments(argv: Sequence[str] | None, description: str | None) -> argparse.Namespace:
    """Read the command line."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("report.py", description=description, formatter_class=form)
    add = parser.add_argument
    add("runs", nargs="+", type=Path, metavar="RUN", help="run directory, or a folder of them")
    add("--output", type=Path, metavar="FILE", help=f"default: RUN/{FILE_NAME}; of several, here")
    add("--png", type=Path, metavar="FILE", help="also a picture (.png, .pdf, .svg; matplotlib)")
    add("--compare", action="store_true", help="compare; a single RUN with the others beside it")
    return parser.parse_args(argv)


def run_directories(given: argparse.Namespace) -> list[Path]:
    """Return the run directories that the command line names: folders stand for what they hold.

    Raises ConfigurationError with everything that is no run.
    """
    found: list[Path] = []
    problems = []
    alone = given.compare and len(given.runs) == 1 and is_run(given.runs[0])
    for path in [given.runs[0].resolve().parent] if alone else given.runs:
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
    """Write the page of one run, or of several that are compared; return where it is.

    Raises ConfigurationError where a run cannot be read or a file cannot be written.
    """
    runs = [read_run(path) for path in paths]
    if output is None:
        output = (runs[0].path if len(runs) == 1 else Path()) / FILE_NAME
    if len(runs) == 1:
        facts = _facts_of_one(runs[0])
        charts = charts_of(runs[0], *(facts[key] for key in ("spikes", "memory", "stragglers")))
    else:
        facts, charts = _facts_of_several(runs, output), charts_of_several(runs)
    facts["charted"] = any(line["step"] for chart in charts for line in chart["lines"])
    marks = starts_on_axes(runs[0]) if len(runs) == 1 else []
    try:
        replace_text(output, _rendered(facts, {"charts": charts, "marks": marks}))
    except OSError as error:
        raise ConfigurationError(f"{output} cannot be written: {error.strerror}") from error
    if picture is not None:
        title = facts["title"] if len(charts) > 1 else ""
        draw_picture(charts, title, picture, facts.get("starts", ()))
    return output


def write_at_the_end(output_dir: Path) -> None:
    """Write the page of a run that ends here; a failure is a log line: the run is done."""
    try:
        logger.info("report: %s", write_pages([output_dir], None, None))
    except Exception as error:
        logger.warning("the report was not written (%r): python report.py %s", error, output_dir)


def _rendered(facts: dict[str, Any], data: dict[str, Any]) -> str:
    """Fill the template in; every text is escaped, and none can end the script with the data."""
    from jinja2 import Environment, FileSystemLoader

    environment = Environment(
        loader=FileSystemLoader(_HERE), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {
        "figure": figure, "count": counted, "clock": clock, "duration": duration,
        "size": readable,
        "json": lambda value: json.dumps(value, ensure_ascii=False, default=str),
    }  # fmt: skip
    text = json.dumps(data, allow_nan=False, separators=(",", ":"), ensure_ascii=False)
    script = (_HERE / "page.js").read_text(encoding="utf-8")
    page = environment.get_template("page.html")
    whole = page.render(data=text.replace("<", "\\u003c"), script=script, **facts)
    return _NOT_IN_HTML.sub("\ufffd", whole)


def _facts_of_one(run: History) -> dict[str, Any]:
    """Return what the page of one run says in words and tables."""
    memory = ranks.memory_by_rank(run)
    seconds = findings.where_the_hours_went(run)
    whole = sum(seconds.values()) or 1.0
    samples = [line for line in run.lines if line["event"] == "samples"]
    last = next((start.entry for start in reversed(run.starts) if start.entry), {})
    return {
        "title": run.name, "now": time.time(), "run": run, "entry": last,
        "ending": findings.run_ending(run), "figures": findings.figures(run),
        "starts": _start_rows(run),
        "hours": [
            {"name": name, "key": key, "seconds": seconds[key], "share": seconds[key] / whole}
            for key, name in findings.HOURS
            if seconds[key] >= 0.5
        ],
        "memory": memory, "fullest": ranks.memory_table(memory),
        "headroom": sorted((one for one in memory if one["left"]), key=lambda one: one["left"])[:1],
        "stragglers": ranks.stragglers(run), "spikes": findings.spikes(run.trained),
        "samples": [_sample_row(line) for line in reversed(samples[-SHOWN["evaluations"] :])],
        "samples_left_out": max(0, len(samples) - SHOWN["evaluations"]),
        "settings": findings.set_settings(run), "shown": SHOWN,
    }  # fmt: skip


def _sample_row(line: dict[str, Any]) -> dict[str, Any]:
    """Return an evaluation's samples as pairs of texts."""
    rows = line.get("samples", ())
    texts = [[redact(str(row.get(key, ""))) for key in ("prompt", "completion")] for row in rows]
    most = SHOWN["characters"]
    return {
        "step": line["step"],
        "rows": [[each[:most] + "..." * (len(each) > most) for each in row] for row in texts],
    }


def _start_rows(run: History) -> list[dict[str, Any]]:
    """Return what the time bar and the table say of each start; places are percentages."""
    begin, end = run.starts[0].began, max(start.ended for start in run.starts)
    whole = max(end - begin, 1e-9)
    rows = []
    for start in run.starts:
        useful = [line["time"] for line in start.lines if not line["lost"]]
        ending = findings.start_ending(run, start)
        until = start.ended if ending.kind not in ("interrupted", "failed") else max(
            [start.trained or start.began, *useful]
        )  # fmt: skip
        rows.append(
            {
                "start": start, "ending": ending,
                "left": 100 * (start.began - begin) / whole,
                "width": 100 * (start.ended - start.began) / whole,
                "useful": 100 * (until - start.began) / max(start.ended - start.began, 1e-9),
            }
        )  # fmt: skip
    return rows


def _facts_of_several(runs: Sequence[History], output: Path) -> dict[str, Any]:
    """Return what the page of several runs says in tables."""
    rows: list[dict[str, Any]] = []
    for index, run in enumerate(runs):
        page = run.path / FILE_NAME
        link = None
        if page.is_file():
            link = quote(os.fsencode(os.path.relpath(page.resolve(), output.resolve().parent)))
        rows.append(
            {
                "run": run, "link": link, "colour": index % 10,
                "ending": findings.run_ending(run), "figures": findings.figures(run),
            }
        )  # fmt: skip
    splits = dict.fromkeys(split for row in rows for split in row["figures"]["evals"])
    return {
        "title": f"{len(runs)} runs", "rows": rows, "splits": list(splits),
        "differ": findings.settings_that_differ(runs),
    }  # fmt: skip


def figure(value: float | None, digits: int = 4) -> str:
    """Format a figure with so many digits; what is not known is a dash."""
    if value is None or not math.isfinite(value):
        return "-" if value is None else str(value)
    return f"{value:.{digits}g}" if abs(value) < 10**digits else f"{value:,.0f}"


def clock(seconds: float | None) -> str:
    """Format unix seconds as local time, to the second."""
    return "-" if not seconds else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
