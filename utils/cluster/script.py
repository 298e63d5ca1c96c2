"""Runs a script's main and sees to its ending: what is shown, which note stays, which exit code."""

import atexit
import contextlib
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

from utils.cluster.host import host_name
from utils.cluster.notes import leave_note
from utils.cluster.packages import REQUIRED, missing_required, without_packages
from utils.cluster.signals import NODE_DIR
from utils.cluster.storage_faults import storage_error
from utils.cluster.tokens import redact
from utils.cluster.traces import last_line
from utils.config.errors import ConfigurationError, ExitCode, UnfitClusterError

TEARDOWN_LIMIT_S = 10.0
SPEAK_FIRST_S = 3.0
COMPILER = ("torch._dynamo", "torch._inductor")
UNCOMPILED = "torch could not compile what this run trains: --compile false trains without, slower."
FAILED = 1  # an exception nobody foresaw, as Python itself ends


def run_script(main: Callable[[], int | None]) -> int:
    """Run a script's main and return the exit code of the process.

    A ConfigurationError, or a full disk in whatever words, is shown without traceback. Rank 0
    shows all of it; the first rank of another node shows one line, because a fault of that node
    alone (a file system that is not mounted) would be seen nowhere else. Any other exception is
    shown with its traceback, host and rank in front on ranks other than 0, and becomes 1; one of
    torch's compiler, which a GPU uses unasked, says what to do. Secrets are redacted. Each ending
    but a good one leaves a note for the launcher. SystemExit and KeyboardInterrupt pass through.

    A stop with a checkpoint (ExitCode.STOPPED) is a success to torchrun, which would kill the other
    ranks otherwise: under slurm/launch_node.sh, which reads the notes, it becomes 0.
    """
    ending: int | None = None  # until main has returned or raised what is answered for here

    def leave_at_once() -> None:
        """Skip the teardown of one rank of several; all that is to be kept is written.

        Process groups may wait there for ranks that wait for this one, and a library's thread that
        meets the end of the interpreter aborts the process: a rank that has finished would have
        failed. Registered before any library is imported, this is the last of all exit handlers.
        """
        if ending is not None and int(os.environ.get("WORLD_SIZE", "1")) > 1:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(ending)

    atexit.register(leave_at_once)
    ending = _run(main)
    if ending and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        # What comes before that handler can be stuck too: threads to join, other exit handlers.
        limit = threading.Timer(TEARDOWN_LIMIT_S, leave_at_once)
        limit.daemon = True
        limit.start()
    return ending


def _run(main: Callable[[], int | None]) -> int:
    try:
        code = main() or 0
    except ConfigurationError as error:
        return _refuse(error)
    except SystemExit as left:
        if left.code:
            status = left.code if isinstance(left.code, int) else FAILED
            leave_note("failed", status, redact(f"SystemExit: {left.code}"))
        raise
    except Exception as error:
        full = storage_error(error)
        if full is not None:
            return _refuse(full, of_this_rank=True)
        return _fail(error)
    if code == ExitCode.STOPPED:
        leave_note("stopped", code, "stopped with a checkpoint")
        return 0 if NODE_DIR in os.environ else code
    if code:
        leave_note("failed", code, f"main returned {code}")
    return code


def _fail(error: Exception) -> int:
    """Show an exception that nobody foresaw, with its traceback; a missing package without."""
    missing = getattr(error, "name", None) if isinstance(error, ModuleNotFoundError) else None
    if missing is not None and missing.partition(".")[0] in REQUIRED:
        return _refuse(UnfitClusterError(without_packages(missing_required() or missing)))
    if type(error).__module__.startswith(COMPILER):
        error.add_note(UNCOMPILED)
    _show_traceback(error, sys.stderr)
    leave_note("failed", FAILED, redact(last_line(error)))
    return FAILED


def _refuse(error: ConfigurationError, of_this_rank: bool = False) -> int:
    """Show an error that all ranks raise, or that came up in this rank; return its exit code."""
    first = redact(error.problems[0].splitlines()[0])
    leave_note(error.ending, error.exit_code, first)
    _tell_torchrun(error)
    if _rank() == 0:
        _show_problems(error, sys.stderr)
    elif of_this_rank or int(os.environ.get("LOCAL_RANK", "0")) == 0:
        sys.stderr.write(f"{host_name()} rank {_rank()}  {error.kind}: {first}\n")
    else:
        # The launcher ends all ranks when the first is gone: not before rank 0 has said why.
        time.sleep(SPEAK_FIRST_S)
    sys.stderr.flush()
    return error.exit_code


def _tell_torchrun(error: ConfigurationError) -> None:
    """Leave the problems where torchrun looks for a worker's last words.

    Its own account of the end, forty lines of its insides, is written by its process and cannot be
    kept from here (slurm/launch_node.sh leaves it out): so that its last lines say the cause, and
    not where to read how to find one. The file's form: torch.distributed.elastic's ErrorHandler.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    lines = [f"{error.kind}:", *(f"  - {redact(problem)}" for problem in error.problems)]
    text = "\n".join(lines)
    extra = {"py_callstack": text, "timestamp": str(int(time.time()))}
    with contextlib.suppress(OSError), Path(path).open("x", encoding="utf-8") as file:
        json.dump({"message": {"message": text, "extraInfo": extra}}, file)


def _show_problems(error: ConfigurationError, stream: TextIO) -> None:
    count = len(error.problems)
    # What is wrong with a machine says which one; settings and data are wrong on all of them.
    anywhere = error.exit_code in (ExitCode.REFUSED, ExitCode.NOT_FINITE)
    place = "" if anywhere else f" on {host_name()}"
    title = f"{error.kind}{place} ({count} problem{'s' if count != 1 else ''}):"
    if stream.isatty() and "NO_COLOR" not in os.environ:
        title = f"\033[1;31m{title}\033[0m"
    lines = ["\n    ".join(redact(problem).splitlines()) for problem in error.problems]
    stream.write("\n".join([title, *(f"  - {line}" for line in lines)]) + "\n")


def _show_traceback(error: Exception, stream: TextIO) -> None:
    """Write the traceback at once: ranks that fail together do not mix their lines."""
    lines = redact("".join(traceback.format_exception(error))).splitlines()
    origin = f"{host_name()} rank {_rank()}  " if _rank() else ""
    stream.write("".join(f"{origin}{line}\n" for line in lines))
    stream.flush()


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))
