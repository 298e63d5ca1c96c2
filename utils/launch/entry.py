"""The first import of every script. It is small, because Ctrl-C may come while Python imports."""

import signal
from collections.abc import Callable


def start(main: Callable[[], int | None], usage: str | None = None, announced: bool = False) -> int:
    """Call utils.launch.script.run_script; during its import Ctrl-C shows no traceback."""
    end_silently()
    from utils.launch.script import run_script

    return run_script(main, usage, announced)


def end_silently() -> None:
    """Let Ctrl-C end this process without a traceback, unless this process ignores Ctrl-C."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
