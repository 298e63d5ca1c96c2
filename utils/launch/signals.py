"""Turns the signals that end jobs into a request to stop, which the training loop answers.

Who sends a SIGTERM decides what it means. Slurm means the job: slurm/launch_node.sh then leaves the
file STOP in the node's private directory (STOKER_NODE_DIR), and every process continues until its
checkpoint is written. The launcher means this process, because another one failed: no file
appears, and waiting would only hold the job up. Where a user starts the processes without
launch_node.sh there is no directory, and SIGTERM and SIGUSR1 are requests to stop.
"""

import logging
import os
import signal
import threading
import time
from pathlib import Path

logger = logging.getLogger(__name__)

NODE_DIR = "STOKER_NODE_DIR"
STOP = "STOP"
# How long the launcher, which gets the same signal, may take to leave its file.
FILE_WITHIN_S = 3.0
KILLED_BY_SIGTERM = 128 + signal.SIGTERM

_requested: str | None = None  # a signal handler can write nowhere else
_wakeup_pipe: tuple[int, int] | None = None


def install_stop_signals() -> None:
    """Let SIGTERM and SIGUSR1 ask for a stop instead of ending the process; SIGINT stays as it is.

    Only the main thread may call it. Forgets requests of an earlier run in the same process.
    """
    global _requested  # noqa: PLW0603 - see above
    _requested = None
    if os.environ.get(NODE_DIR):
        # Both ends of the same news: the launcher's file says it, the signal only repeats it.
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        _watch_for_sigterm()
        return
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, _request)
        signal.siginterrupt(number, False)


def stop_request() -> str | None:
    """Say what asked this process to stop; None while nothing did."""
    return _requested or _node_request()


def _request(number: int, _frame: object) -> None:
    global _requested  # noqa: PLW0603 - see above
    _requested = _requested or signal.Signals(number).name


def _node_request() -> str | None:
    """Return why the launcher asked this node's processes to stop; None while it did not."""
    directory = os.environ.get(NODE_DIR)
    if not directory:
        return None
    try:
        reason = (Path(directory) / STOP).read_text(encoding="utf-8", errors="replace").strip()
    except FileNotFoundError:
        return None
    return reason.splitlines()[0] if reason else "a signal to the job"


def _watch_for_sigterm() -> None:
    """Answer SIGTERM in a thread of its own.

    Python runs handlers in the main thread, between two of its own instructions: never while that
    is stuck in a collective whose peer is gone. The byte that the interpreter's C handler writes
    into the wakeup descriptor arrives at once.
    """
    global _wakeup_pipe  # noqa: PLW0603 - one thread serves all runs of a process
    if _wakeup_pipe is None:
        _wakeup_pipe = os.pipe()
        os.set_blocking(_wakeup_pipe[1], False)
        threading.Thread(
            target=_answer_signals, args=(_wakeup_pipe[0],), name="signals", daemon=True
        ).start()
    signal.set_wakeup_fd(_wakeup_pipe[1], warn_on_full_buffer=False)
    # A handler, though it does nothing: without one the interpreter does not see the signal.
    signal.signal(signal.SIGTERM, lambda *_: None)
    signal.siginterrupt(signal.SIGTERM, False)


def _answer_signals(pipe: int) -> None:
    """On SIGTERM: stay if the launcher leaves its file in time, else it is ending this process."""
    while True:
        numbers = os.read(pipe, 64)  # one byte a signal, of any kind that has a handler
        give_up_at = time.monotonic() + FILE_WITHIN_S
        while signal.SIGTERM in numbers and _node_request() is None:
            if time.monotonic() >= give_up_at:
                # The launcher logs why; the main thread may never come back.
                os._exit(KILLED_BY_SIGTERM)
            time.sleep(0.1)


def shield_loader_worker(_worker_id: int) -> None:
    """Keep a data loader's process alive when the whole job is signalled; its `worker_init_fn`.

    Slurm may signal every process of a job. A loader process that ends makes the loader raise, and
    the checkpoint that the signal asked for would never be written. SIGTERM from the training
    process, which owns this one, ends it as always.
    """
    signal.set_wakeup_fd(-1)  # inherited: it would speak for the training process
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    threading.Thread(target=_obey_the_parent, name="signals", daemon=True).start()


def _obey_the_parent() -> None:
    while True:
        sent = signal.sigwaitinfo({signal.SIGTERM})
        if sent.si_pid == os.getppid():
            os._exit(0)
