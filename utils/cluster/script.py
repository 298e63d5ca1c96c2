"""Runs a script's main and shows the user's mistakes: no traceback, exit code 2."""

import os
import socket
import sys
from collections.abc import Callable
from typing import TextIO

from utils.config.errors import ConfigurationError

REFUSED_EXIT_CODE = 2


def run_script(main: Callable[[], int | None]) -> int:
    """Run a script's main and return the exit code of the process.

    A ConfigurationError is shown without traceback and becomes exit code 2. Rank 0 shows all of
    it; the first rank of another node shows one line, because a fault of that node alone (a file
    system that is not mounted) would be seen nowhere else. Other exceptions pass through.
    """
    try:
        return main() or 0
    except ConfigurationError as error:
        if int(os.environ.get("RANK", "0")) == 0:
            _show_problems(error, sys.stderr)
        elif int(os.environ.get("LOCAL_RANK", "0")) == 0:
            first = error.problems[0].splitlines()[0]
            sys.stderr.write(f"configuration error on {socket.gethostname()}: {first}\n")
        sys.stderr.flush()
        return REFUSED_EXIT_CODE


def _show_problems(error: ConfigurationError, stream: TextIO) -> None:
    count = len(error.problems)
    title = f"configuration error ({count} problem{'s' if count != 1 else ''}):"
    if stream.isatty() and "NO_COLOR" not in os.environ:
        title = f"\033[1;31m{title}\033[0m"
    lines = ["\n    ".join(problem.splitlines()) for problem in error.problems]
    stream.write("\n".join([title, *(f"  - {line}" for line in lines)]) + "\n")
