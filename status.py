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


def parse_options(argv: list[str] | None) -> argparse.Namespace:
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
    options = parser.parse_args(argv)
    if options.runs and options.all is not None:
        parser.error("name runs, or a folder with --all")
    if options.sync and (options.json or options.watch is not None):
        parser.error("--sync uploads and ends: leave out --json and --watch")
    if options.html is not None and (options.runs or options.json or options.sync):
        parser.error("--html writes a page of a folder: give --all DIR, and no run, --json, --sync")
    others = options.runs or options.all or options.json or options.sync or options.watch
    if (others or options.html is not None) and (options.space or options.keep):
        parser.error("--space and --keep go with no other option")
    of_runs = options.runs or options.all or options.sync or options.html is not None
    if options.nodes and (of_runs or options.space or options.keep):
        parser.error("--nodes shows the faults of all jobs: it takes only --json and --watch")
    if (options.step or options.spikes) and (len(options.runs) != 1 or options.watch is not None):
        parser.error("--step and --spikes are of one RUN, and not with --watch")
    return options


def main(argv: list[str] | None = None) -> int:
    """Show the status of one run, of several, or of all below a folder; return the exit code."""
    options = parse_options(argv)
    from utils.observe import status_lines as lines
    from utils.observe.space import keep_run, show_space

    if options.keep:
        keep_run(Path(options.keep), lines.print_line)
        return 0
    if options.space:
        lines.print_line(show_space(Path(options.space)))
        return 0
    if options.step or options.spikes:
        lines.read_status(run := Path(options.runs[0]), {})  # raises if the folder is no run
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends the output
        if options.step:
            from utils.launch.script import configure_environment

            configure_environment()  # before the libraries below read it
            from utils.run.documents import show_step

            lines.print_line(show_step(run, options.step, options.json, not options.no_loss))
        else:
            lines.print_line(lines.show_spikes(run, options.json))
        return 0
    if options.sync:
        return lines.sync_wandb(options.runs, options.all)
    if options.html is not None:
        from utils.observe.page import write_folder_page

        file = Path(options.html) if options.html else None
        write = partial(write_folder_page, options.all, file, options.watch)
        return lines.display(write, options.watch)
    look = partial(lines.show_runs, options.runs, options.all, options.json)
    if options.nodes:
        look = partial(lines.show_nodes, options.json)
    return lines.display(look, options.watch)


if __name__ == "__main__":
    sys.exit(start(main))
