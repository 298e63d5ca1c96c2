"""The start of every script, where Ctrl-C ends the script without a traceback.

The module is small, because Ctrl-C during its own import still shows a traceback.
"""

import signal
from collections.abc import Callable


def start(main: Callable[[], int | None], usage: str | None = None, announced: bool = False) -> int:
    """Run a script's `main` by utils.launch.script.run_script; return the process's exit code.

    usage, announced: see `run_script`. Ctrl-C shows no traceback, even during the imports.
    """
    end_silently()
    from utils.launch.script import run_script

    return run_script(main, usage, announced)


def end_silently() -> None:
    """Let Ctrl-C end this process without traceback; do nothing if the process ignores Ctrl-C."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
