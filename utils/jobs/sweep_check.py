"""Dry-runs all points of a sweep in one process, which imports the libraries once."""

import contextlib
import io
import os
import runpy
import sys
from collections.abc import Callable

from utils.cluster.script import run_script
from utils.config.errors import ConfigurationError
from utils.jobs.sweep_file import Point, Sweep, read_sweep


def main() -> int:
    """Check the sweep that the first argument names."""
    check_points(read_sweep(sys.argv[1]), lambda line: print(line, flush=True))  # noqa: T201
    return 0


def check_points(sweep: Sweep, say: Callable[[str], None]) -> None:
    """Dry-run the points; the first one's lines are shown, of the others only new warnings.

    The environment says what launch they are for, as for a dry run of the script. Raises
    ConfigurationError with the faults of all points, those that all have in common once.
    """
    main = runpy.run_path(sweep.script, run_name="a_sweeps_script")["main"]
    faults: dict[str, list[Point]] = {}
    warned: set[str] = set()
    for point in sweep.points:
        output = io.StringIO()
        try:
            _dry_run(main, sweep.arguments(point)[1:], output)
        except ConfigurationError as error:
            for problem in error.problems:
                faults.setdefault(problem, []).append(point)
        lines = output.getvalue().splitlines()
        if point.index > 0:
            lines = [line for line in lines if _warning(line) and _warning(line) not in warned]
        warned.update(_warning(line) for line in lines)
        for line in [f"point {point.index}: {point.name}", *lines]:
            say(line)
    if faults:
        raise ConfigurationError(
            [f"{_whose(points, sweep)}: {problem}" for problem, points in faults.items()]
        )


def _dry_run(main: Callable[[list[str]], object], argv: list[str], output: io.StringIO) -> None:
    before = dict(os.environ)
    try:
        with contextlib.redirect_stdout(output):
            main([*argv, "--dry_run"])
    finally:  # TrainingArguments writes some settings into it
        os.environ.clear()
        os.environ.update(before)


def _warning(line: str) -> str:
    """Return the text of a warning in a log line, without its time; "" for other lines."""
    return line.partition("  WARNING  ")[2]


def _whose(points: list[Point], sweep: Sweep) -> str:
    if len(points) == len(sweep.points):
        return "every point"
    shown = [f"{point.index} ({point.name})" for point in points[:3]]
    more = f" and {len(points) - 3} more" if len(points) > 3 else ""
    return f"point{'s' if len(points) > 1 else ''} {', '.join(shown)}{more}"


if __name__ == "__main__":
    sys.exit(run_script(main))
