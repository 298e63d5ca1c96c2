"""How are my runs? Read from their directories and Slurm's queue, of which nothing is changed.

    python status.py                       all runs below runs/, a line each
    python status.py runs/my-run           one run: progress, time left, speed, losses, what to do
    python status.py --all scratch/runs --watch 10
    python status.py runs/my-run --json    for scripts
    python status.py --all --html          all runs as a page, runs/runs.html
    python status.py --nodes               nodes with faults, for the administrators
    python status.py --all --sync          uploads what wandb recorded offline, from the login node
    python status.py --space               sizes, purge, quota, and what can be deleted without loss
    python status.py --keep runs/my-run    a verified copy of its results in STOKER_ARCHIVE

It works while a run waits, trains, or after it died, on a login node, within a second.
"""

import argparse
import sys
from functools import partial
from pathlib import Path

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
    parser.add_argument(
        "--html", nargs="?", const="", metavar="FILE", help="write a page of --all (DIR/runs.html)"
    )
    parser.add_argument("--sync", action="store_true", help="upload what wandb recorded offline")
    parser.add_argument("--space", nargs="?", const=".", metavar="DIR", help="sizes, purge, quota")
    parser.add_argument("--keep", metavar="RUN", help="copy its results to STOKER_ARCHIVE")
    parser.add_argument("--nodes", action="store_true", help="the faults of nodes, of all jobs")
    given = parser.parse_args(argv)
    if given.runs and given.all is not None:
        parser.error("name runs, or a folder with --all")
    if given.sync and (given.json or given.watch is not None):
        parser.error("--sync uploads and ends: leave out --json and --watch")
    if given.html is not None and (given.runs or given.json or given.sync):
        parser.error("--html writes a page of a folder: give --all DIR, and no run, --json, --sync")
    others = given.runs or given.all or given.json or given.sync or given.watch
    if (others or given.html is not None) and (given.space or given.keep):
        parser.error("--space and --keep go with no other option")
    from utils.observe.space import keep_run, show_space
    from utils.observe.status_lines import display, say, show_nodes, show_runs, sync_wandb

    if given.keep:
        keep_run(Path(given.keep), say)
        return 0
    if given.space:
        say(show_space(Path(given.space)))
        return 0
    if given.sync:
        return sync_wandb(given.runs, given.all)
    if given.html is not None:
        from utils.observe.page import write_folder_page

        file = Path(given.html) if given.html else None
        return display(partial(write_folder_page, given.all, file, given.watch), given.watch)
    if given.nodes:
        return display(partial(show_nodes, given.json), given.watch)
    return display(partial(show_runs, given.runs, given.all, given.json), given.watch)


if __name__ == "__main__":
    sys.exit(start(main))
