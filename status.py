"""How are my runs? Read from their directories and Slurm's queue, of which nothing is changed.

    python status.py                       all runs below runs/, a line each
    python status.py runs/my-run           one run: progress, time left, speed, losses, what to do
    python status.py --all scratch/runs --watch 10
    python status.py runs/my-run --json    for scripts
    python status.py --all --sync          uploads what wandb recorded offline, from the login node

It works while a run waits, trains, or after it died, on a login node, within a second.
"""

import argparse
import sys
from functools import partial

from utils.launch.entry import start


def main(argv: list[str] | None = None) -> int:
    """Show one run, several, or all below a folder."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="*", metavar="RUN", help="directory of a run")
    parser.add_argument(
        "--all", nargs="?", const="runs", metavar="DIR", help="all runs below a folder (runs/)"
    )
    parser.add_argument(
        "--watch", nargs="?", type=float, const=5.0, metavar="SECONDS", help="redraw (every 5 s)"
    )
    parser.add_argument("--json", action="store_true", help="print a list of objects")
    parser.add_argument("--sync", action="store_true", help="upload what wandb recorded offline")
    given = parser.parse_args(argv)
    if given.runs and given.all is not None:
        parser.error("name runs, or a folder with --all")
    if given.sync and (given.json or given.watch is not None):
        parser.error("--sync uploads and ends: leave out --json and --watch")
    from utils.observe.status_lines import display, show_runs, sync_wandb

    if given.sync:
        return sync_wandb(given.runs, given.all)
    return display(partial(show_runs, given.runs, given.all, given.json), given.watch)


if __name__ == "__main__":
    sys.exit(start(main))
