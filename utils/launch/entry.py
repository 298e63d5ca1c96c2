"""The start of every script. Ctrl-C ends the script without a traceback, even during imports.

This module imports little, because Ctrl-C during its own import still shows a traceback.
"""

import signal
from collections.abc import Callable


def start(main: Callable[[], int | None], usage: str | None = None, announced: bool = False) -> int:
    """Run a script's `main` and return the exit code of the process.

    usage, announced: see utils.launch.script.run_script
    """
    end_silently()
    from utils.launch.script import run_script

    return run_script(main, usage, announced)


def end_silently() -> None:
    """Let Ctrl-C end this process without a traceback, unless the process ignores Ctrl-C."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
