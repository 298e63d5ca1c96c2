"""Write one HTML page of a run: how it ended, its curves, where the hours went, what stands out.

    python report.py runs/my-run                  # writes runs/my-run/report.html
    python report.py runs/a runs/b                # compares them in report.html here
    python report.py runs/sweep --output sweep.html
    python report.py runs/my-run --png curves.png

RUN is the directory of a run (its output_dir), running, finished or damaged, or a folder of them,
such as a sweep's. The page is one file: it opens anywhere, without a network. A run writes its own
when it ends.
"""

import gc
import sys
from collections.abc import Sequence

from utils.launch.script import run_script
from utils.support.journal_file import printable


def main(argv: Sequence[str] | None = None) -> int:
    """Write the page that the command line asks for, and say where it is."""
    from utils.report.page import parse_arguments, run_directories, write_pages

    gc.disable()  # it would walk through a million parsed lines again and again
    given = parse_arguments(argv, __doc__)
    page = write_pages(run_directories(given), given.output, given.png)
    for path in filter(None, (page, given.png)):
        sys.stdout.write(f"{printable(str(path))}\n")
    return 0


if __name__ == "__main__":
    sys.exit(run_script(main))
