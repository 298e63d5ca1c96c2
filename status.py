"""Show how runs are doing, from their directories and Slurm's queue. Runs are not changed.

    python status.py                       all runs below runs/, a line each
    python status.py runs/my-run           one run: progress, time left, speed, losses, what to do
    python status.py --all scratch/runs --watch 10
    python status.py runs/my-run --json    as JSON
    python status.py --all --html          all runs as a page, runs/runs.html
    python status.py --nodes               nodes with faults, for the administrators
    python status.py --all --sync          uploads what wandb recorded offline, from the login node
    python status.py --space               sizes, purge, quota, and what can be deleted without loss
    python status.py --keep runs/my-run    a verified copy of its results in STOKER_ARCHIVE
    python status.py runs/my-run --spikes  the steps at which the loss was far above the usual
    python status.py runs/my-run --step 61 the documents of this step, their losses and texts

Works on a login node while a run waits or trains, and after a run died. The status takes less than
a second. Only --step takes longer: it loads the data and the checkpoint before the step.
"""

import argparse
import signal
import sys
from functools import partial
from pathlib import Path

from utils.launch.entry import start


def parsed(argv: list[str] | None) -> argparse.Namespace:
    """Return the parsed options. Exit with an error message for options that exclude each other."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    add = parser.add_argument
    add("runs", nargs="*", metavar="RUN", help="directory of a run")
    add("--all", nargs="?", const="runs", metavar="DIR", help="all runs below a folder (runs/)")
    add("--watch", nargs="?", type=float, const=5.0, metavar="SECONDS", help="redraw (every 5 s)")
    add("--json", action="store_true", help="print a list of objects")
    page = "write a page of --all (DIR/runs.html)"
    add("--html", nargs="?", const="", metavar="FILE", help=page)
    add("--sync", action="store_true", help="upload what wandb recorded offline")
    add("--space", nargs="?", const=".", metavar="DIR", help="sizes, purge, quota")
    add("--keep", metavar="RUN", help="copy its results to STOKER_ARCHIVE")
    add("--nodes", action="store_true", help="the faults of nodes, of all jobs")
    add("--spikes", action="store_true", help="list spikes of loss and gradient norm")
    add("--step", metavar="N", help="the documents of step N, or of steps A-B")
    add("--no_loss", action="store_true", help="--step without a checkpoint")
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
    of_runs = given.runs or given.all or given.sync or given.html is not None
    if given.nodes and (of_runs or given.space or given.keep):
        parser.error("--nodes shows the faults of all jobs: it takes only --json and --watch")
    if (given.step or given.spikes) and (len(given.runs) != 1 or given.watch is not None):
        parser.error("--step and --spikes are of one RUN, and not with --watch")
    return given


def main(argv: list[str] | None = None) -> int:
    """Show the status of one run, of several, or of all below a folder; return the exit code."""
    given = parsed(argv)
    from utils.observe import status_lines as lines
    from utils.observe.space import keep_run, show_space

    if given.keep:
        keep_run(Path(given.keep), lines.say)
        return 0
    if given.space:
        lines.say(show_space(Path(given.space)))
        return 0
    if given.step or given.spikes:
        lines.read_status(run := Path(given.runs[0]), {})  # raises if the folder is no run
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends the output
        if given.step:
            from utils.launch.script import configure_environment

            configure_environment()  # before the libraries below read it
            from utils.run.documents import show_step

            lines.say(show_step(run, given.step, given.json, not given.no_loss))
        else:
            lines.say(lines.show_spikes(run, given.json))
        return 0
    if given.sync:
        return lines.sync_wandb(given.runs, given.all)
    if given.html is not None:
        from utils.observe.page import write_folder_page

        file = Path(given.html) if given.html else None
        return lines.display(partial(write_folder_page, given.all, file, given.watch), given.watch)
    look = partial(lines.show_runs, given.runs, given.all, given.json)
    if given.nodes:
        look = partial(lines.show_nodes, given.json)
    return lines.display(look, given.watch)


if __name__ == "__main__":
    sys.exit(start(main))
