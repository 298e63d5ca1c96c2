"""Turns the signals that end jobs into a request to stop, which the training loop answers.

Who sends a SIGTERM decides what it means. Slurm means the job: slurm/launch_node.sh then leaves the
file STOP in the node's private directory (STOKER_NODE_DIR), and every process continues until its
checkpoint is written. The launcher means this process, because another one failed: no file
appears, and waiting would only hold the job up. Where a user starts the processes without
launch_node.sh there is no directory, and SIGTERM and SIGUSR1 are requests to stop.
"""

import ctypes
import os
import signal
import threading
import time
from pathlib import Path

NODE_DIR = "STOKER_NODE_DIR"
STOP = "STOP"
LAUNCHER = "STOKER_LAUNCHER"  # the process id of slurm/launch_node.sh's launcher
# Programs and modules that start ranks without launch_node.sh, as their command lines name them.
_LAUNCHERS = (
    *("accelerate", "torchrun", "accelerate.commands.launch", "torch.distributed.run"),
    *(
        "accelerate.commands.accelerate_cli",
        "torch.distributed.launch",
        "deepspeed.launcher.launch",
    ),
)
_PR_SET_PDEATHSIG = 1  # <sys/prctl.h>
# How long the launcher, which gets the same signal, may take to leave its file.
FILE_WITHIN_S = 3.0
KILLED_BY_SIGTERM = 128 + signal.SIGTERM

_requested: str | None = None
_wakeup_pipe: tuple[int, int] | None = None


def install_stop_signals() -> None:
    """Let SIGTERM and SIGUSR1 ask for a stop instead of ending the process; SIGINT stays as it is.

    Only the main thread may call it. Forgets requests of an earlier run in the same process. A
    thread answers: Python runs handlers in the main thread, never while that is stuck in a
    collective, but the interpreter's C handler writes into the wakeup descriptor at once.
    """
    global _requested, _wakeup_pipe  # noqa: PLW0603 - one thread serves all runs of a process
    _requested = None
    if _wakeup_pipe is None:
        _wakeup_pipe = os.pipe()
        os.set_blocking(_wakeup_pipe[1], False)
        threading.Thread(
            target=_answer_signals, args=(_wakeup_pipe[0],), name="signals", daemon=True
        ).start()
    signal.set_wakeup_fd(_wakeup_pipe[1], warn_on_full_buffer=False)
    for number in (signal.SIGTERM, signal.SIGUSR1):
        # A handler, though it does nothing: without one the interpreter does not see the signal.
        signal.signal(number, lambda *_: None)
        signal.siginterrupt(number, False)
    if os.environ.get(NODE_DIR):
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # it only repeats what the file says


def end_with_launcher() -> None:
    """Let the kernel kill this rank when its launcher dies; nothing without a launcher.

    A rank without a launcher would train on: nobody sees its end, and no new start gets its run.
    """
    parent, launcher = os.getppid(), int(os.environ.get(LAUNCHER, "0"))
    if parent == launcher or is_launcher(parent):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        orphaned = os.getppid() != parent  # the launcher died before that call
    elif launcher:
        orphaned = not _command_line(launcher)  # else a script of the user's is between
    else:
        orphaned = parent == 1 and "TORCHELASTIC_RUN_ID" in os.environ
    if orphaned:
        os.kill(os.getpid(), signal.SIGKILL)


def is_launcher(process: int) -> bool:
    """Whether a process is `accelerate launch` or torchrun."""
    return any(Path(word).name in _LAUNCHERS for word in _command_line(process))


def _command_line(process: int) -> list[str]:
    """Return the words of a process's command line; none once the process has ended."""
    try:
        line = Path(f"/proc/{process}/cmdline").read_bytes()
    except OSError:
        return []
    return os.fsdecode(line).split("\0")[:-1]


def stop_request() -> str | None:
    """Say what asked this process to stop; None while nothing did."""
    return _requested or _node_request()


def _node_request() -> str | None:
    """Return why the launcher asked this node's processes to stop; None while it did not."""
    directory = os.environ.get(NODE_DIR)
    if not directory:
        return None
    try:
        return (Path(directory) / STOP).read_text().strip() or "a signal to the job"
    except FileNotFoundError:
        return None


def _answer_signals(pipe: int) -> None:
    """Note a request; of a SIGTERM under the launcher find out whether it is one."""
    global _requested  # noqa: PLW0603 - see above
    while True:
        numbers = os.read(pipe, 64)  # one byte a signal, of any kind that has a handler
        if not os.environ.get(NODE_DIR):
            asked = [number for number in numbers if number in (signal.SIGTERM, signal.SIGUSR1)]
            _requested = _requested or (signal.Signals(asked[0]).name if asked else None)
            continue
        give_up_at = time.monotonic() + FILE_WITHIN_S
        while signal.SIGTERM in numbers and _node_request() is None:
            if time.monotonic() >= give_up_at:
                # The launcher logs why; the main thread may never come back.
                os._exit(KILLED_BY_SIGTERM)
            time.sleep(0.1)


def shield_loader_worker(_worker_id: int) -> None:
    """Keep a data loader's process alive when the whole job is signalled; its `worker_init_fn`.

    One that ends makes the loader raise before the checkpoint that the signal asked for. SIGTERM
    from the training process, which owns this one, ends it as always.
    """
    signal.set_wakeup_fd(-1)  # inherited: it would speak for the training process
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    threading.Thread(target=_obey_the_parent, name="signals", daemon=True).start()


def _obey_the_parent() -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != os.getppid():
        continue
    os._exit(0)
