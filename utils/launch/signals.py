"""SIGTERM and SIGUSR1 as requests to stop: the training loop then saves a checkpoint and ends.

Under slurm/launch_node.sh, the meaning of SIGTERM depends on the sender. If Slurm sends SIGTERM to
the job, the launcher writes a file STOP into the node's private directory (STOKER_NODE_DIR), and
processes continue until the checkpoint is written. If torchrun sends SIGTERM because another
process failed, there is no file STOP, and the process ends at once. Without launch_node.sh both
signals are always requests to stop.
"""

import ctypes
import os
import signal
import threading
import time
from pathlib import Path

NODE_DIR = "STOKER_NODE_DIR"
STOP = "STOP"
LAUNCHER = "STOKER_LAUNCHER"  # the process id of utils/launch/node.py
# Programs and modules in the command lines of launchers other than launch_node.sh.
_LAUNCHERS = (
    "accelerate", "accelerate.commands.accelerate_cli", "accelerate.commands.launch",
    "torchrun", "torch.distributed.run", "torch.distributed.launch", "deepspeed.launcher.launch",
)  # fmt: skip
_PR_SET_PDEATHSIG = 1  # <sys/prctl.h>
# After a SIGTERM of Slurm, the launcher writes the file STOP within this time.
FILE_WITHIN_S = 3.0
KILLED_BY_SIGTERM = 128 + signal.SIGTERM

_requested: str | None = None
_wakeup_pipe: tuple[int, int] | None = None


def install_stop_signals() -> None:
    """Turn SIGTERM and SIGUSR1 into requests to stop, and clear earlier requests.

    Only the main thread may call this function. A separate thread reads the signals from a pipe
    (signal.set_wakeup_fd), because Python runs handlers only in the main thread, which may be
    blocked in a collective.
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
        # Only signals with a handler are written to the pipe; an empty handler is enough.
        signal.signal(number, lambda *_: None)
        signal.siginterrupt(number, False)
    if os.environ.get(NODE_DIR):
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # the launcher writes the file STOP


def end_with_launcher() -> None:
    """Let the kernel kill this rank when its launcher dies, if there is a launcher.

    A rank without launcher would continue and hold the run lock, so the run could not resume.
    """
    parent, launcher = os.getppid(), int(os.environ.get(LAUNCHER, "0"))
    if parent == launcher or is_launcher(parent):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        orphaned = os.getppid() != parent  # the launcher died before the call of prctl
    elif launcher:
        orphaned = not _command_line(launcher)  # the parent is a script of the user
    else:
        # torchrun started this rank and has died, perhaps since the first getppid().
        orphaned = "TORCHELASTIC_RUN_ID" in os.environ and (parent == 1 or os.getppid() != parent)
    if orphaned:
        os.kill(os.getpid(), signal.SIGKILL)


def is_launcher(process: int) -> bool:
    """Return whether the process id is `accelerate launch`, torchrun or DeepSpeed's launcher."""
    return any(Path(word).name in _LAUNCHERS for word in _command_line(process))


def _command_line(process: int) -> list[str]:
    """Return the words of a process's command line; [] if the process has ended."""
    try:
        line = Path(f"/proc/{process}/cmdline").read_bytes()
    except OSError:
        return []
    return os.fsdecode(line).split("\0")[:-1]


def stop_request() -> str | None:
    """Return the source of a request to stop, such as the signal; None if there is no request."""
    return _requested or _node_request()


def _node_request() -> str | None:
    directory = os.environ.get(NODE_DIR)
    if not directory:
        return None
    try:
        return (Path(directory) / STOP).read_text().strip() or "a signal to the job"
    except FileNotFoundError:
        return None


def _answer_signals(pipe: int) -> None:
    """Store requests to stop. End the process after a SIGTERM without the file STOP."""
    global _requested  # noqa: PLW0603 - see above
    while True:
        numbers = os.read(pipe, 64)  # one byte per signal that has a handler
        if not os.environ.get(NODE_DIR):
            asked = [number for number in numbers if number in (signal.SIGTERM, signal.SIGUSR1)]
            _requested = _requested or (signal.Signals(asked[0]).name if asked else None)
            continue
        give_up_at = time.monotonic() + FILE_WITHIN_S
        while signal.SIGTERM in numbers and _node_request() is None:
            if time.monotonic() >= give_up_at:
                # End without the main thread, which may block forever. The launcher logs why.
                os._exit(KILLED_BY_SIGTERM)
            time.sleep(0.1)


def shield_loader_worker(_worker_id: int) -> None:
    """Make a data worker ignore Slurm's signals; a `worker_init_fn`.

    If a worker ended, the loader would raise before the requested checkpoint is written. A SIGTERM
    from the training process still ends the worker.
    """
    signal.set_wakeup_fd(-1)  # inherited from the training process
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    threading.Thread(target=_obey_the_parent, name="signals", daemon=True).start()


def _obey_the_parent() -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != os.getppid():
        continue
    os._exit(0)
