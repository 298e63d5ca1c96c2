"""Write one HTML page of a run: how it ended, its curves, where the hours went, what stands out.

    python report.py runs/my-run                  # writes runs/my-run/report.html
    python report.py runs/a runs/b                # compares them in report.html here
    python report.py runs/sweep --output sweep.html
    python report.py runs/my-run --png curves.png

RUN is the directory of a run (its output_dir): running, finished or damaged. RUN may also be a
folder of run directories, such as a sweep's output_dir. The page is one file that opens anywhere,
without a network. Each run writes its own page when it ends.
"""

import argparse
import gc
import sys
from collections.abc import Sequence
from pathlib import Path

from utils.launch.entry import start


def main(argv: Sequence[str] | None = None) -> int:
    """Write the report page, print its path and return the exit code."""
    from utils.host.journal_file import printable
    from utils.observe.page import FILE_NAME, run_directories, write_pages

    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("report.py", description=__doc__, formatter_class=form)
    add = parser.add_argument
    add("runs", nargs="+", type=Path, metavar="RUN", help="run directory, or a folder of them")
    add("--output", type=Path, metavar="FILE", help=f"default: RUN/{FILE_NAME}; of several, here")
    add("--png", type=Path, metavar="FILE", help="also a picture (.png, .pdf, .svg; matplotlib)")
    add("--compare", action="store_true", help="compare; a single RUN with the others beside it")
    options = parser.parse_args(argv)
    gc.disable()  # faster: the collector would visit a million parsed lines again and again
    paths = run_directories(options.runs, compare=options.compare)
    here = Path(FILE_NAME)
    if options.output is None and len(paths) > 1 and here.exists():
        sys.stderr.write(f"{here} is replaced; --output FILE.html keeps it\n")
    page = write_pages(paths, options.output, options.png)
    for path in filter(None, (page, options.png)):
        sys.stdout.write(f"{printable(str(path))}\n")
    return 0


if __name__ == "__main__":
    sys.exit(start(main, __doc__))
