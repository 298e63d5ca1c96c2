"""Works with a sweep file from the command line; slurm/sweep_job.sh and people call it.

    python -m utils.jobs.sweep points FILE           number, name and state of every point
    python -m utils.jobs.sweep point FILE INDEX      a point's script and arguments, NUL-terminated
    python -m utils.jobs.sweep ended FILE INDEX CODE note how a point's job ended, renew the table
    python -m utils.jobs.sweep table FILE            renew the table of results and print it

The table goes to results.md and results.csv in the sweep's output_dir.
"""

import sys
from collections.abc import Sequence

from utils.cluster.script import run_script
from utils.config.errors import ConfigurationError
from utils.jobs.sweep_file import Sweep, read_sweep
from utils.jobs.sweep_results import note_ending, results_of, write_results

_WORDS = {"points": 1, "point": 2, "ended": 3, "table": 1}


def main(argv: Sequence[str] | None = None) -> int:
    """Do what the first word says."""
    words = list(sys.argv[1:] if argv is None else argv)
    command = words[0] if words else ""
    if _WORDS.get(command) != len(words) - 1:
        raise ConfigurationError(
            "usage: python -m utils.jobs.sweep points FILE | point FILE INDEX | "
            "ended FILE INDEX EXIT_CODE | table FILE"
        )
    sweep = read_sweep(words[1])
    if command == "points":
        _print_points(sweep)
    elif command == "table":
        print(write_results(sweep))  # noqa: T201 - this command's output
    elif command == "ended":
        note_ending(sweep, sweep.point(_number(words[2])), _number(words[3]))
        write_results(sweep)
    else:
        arguments = sweep.arguments(sweep.point(_number(words[2])))
        sys.stdout.write("".join(f"{word}\0" for word in arguments))
    return 0


def unfinished(sweep: Sweep) -> list[int]:
    """Return the numbers of the points that are left to run."""
    return sorted(result.point.index for result in results_of(sweep) if not result.finished)


def _print_points(sweep: Sweep) -> None:
    for result in sorted(results_of(sweep), key=lambda result: result.point.index):
        print(f"{result.point.index}\t{result.point.name}\t{result.state}")  # noqa: T201


def _number(text: str) -> int:
    if not text.isdecimal():
        raise ConfigurationError(f"{text!r} is no number")
    return int(text)


if __name__ == "__main__":
    sys.exit(run_script(main))
