"""Signals as requests to stop. After a request, the training loop saves a checkpoint and ends.

SIGTERM, SIGUSR1 and the first Ctrl-C (SIGINT) are requests. A second Ctrl-C ends the process at
once. Exception: before and after training, the first Ctrl-C already ends the process at once,
because nothing can be saved.

slurm/launch_node.sh gives a node a private directory (STOKER_NODE_DIR). Then the node's launcher
gets the signals and writes the file STOP into the directory. Every process continues until its
checkpoint is written. At the second Ctrl-C the launcher writes the file INTERRUPTED and sends
SIGTERM. A SIGTERM without these files comes from torchrun, because another process failed, and ends
the process at once.
"""

import contextlib
import math
import os
import signal
import threading
import time
from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from utils.host.machine import global_rank, set_death_signal
from utils.host.redaction import write_error
from utils.host.run_lock import BY_USER, held_runs, leave_run_lock, note_error

NODE_DIR = "STOKER_NODE_DIR"
STOP, INTERRUPTED, STAGE = "STOP", "INTERRUPTED", "STAGE"  # files in NODE_DIR
CTRL_C = "Ctrl-C"
CTRL_C_CODE = 128 + signal.SIGINT  # exit code of a process that Ctrl-C ended
SAVING = f"{CTRL_C}: saving a checkpoint after this step; press Ctrl-C again to quit without"
LAUNCHER_PID = "STOKER_LAUNCHER"  # the process id of utils/launch/node.py
# Programs and modules in the command lines of launchers other than launch_node.sh.
_LAUNCHERS = (
    "accelerate", "accelerate.commands.accelerate_cli", "accelerate.commands.launch",
    "torchrun", "torch.distributed.run", "torch.distributed.launch", "deepspeed.launcher.launch",
)  # fmt: skip
SAME_PRESS_S = 0.3  # SIGINTs with shorter gaps are one press of Ctrl-C
# After a SIGTERM of Slurm, the launcher writes the file STOP within this time.
FILE_WITHIN_S = 3.0
KILLED_BY_SIGTERM = 128 + signal.SIGTERM


class Stage(Enum):
    """The stage of a run: before, in or after training.

    The value is a text for messages about an interruption in this stage.
    """

    STARTING = "before the first step of this start; earlier checkpoints stay as they are"
    TRAINING = "without a save; the same command resumes from the newest checkpoint"
    FINISHING = "after training; the same command finishes the run"


@dataclass
class SignalState:
    """The stage of this process's run, and the request to stop.

    requested   the name of the signal that requested the stop, such as "SIGTERM", or None
    pressed_at  the time of the last SIGINT, by time.monotonic()
    pipe        (reading end, writing end) of the pipe to which Python writes each signal's number
    """

    stage: Stage = Stage.STARTING
    requested: str | None = None
    pressed_at: float = -math.inf
    pipe: tuple[int, int] | None = None

    def is_new_press(self, now: float) -> bool:
        """Return whether a SIGINT at time `now` is from a new press of Ctrl-C; store the time.

        A terminal, a launcher and the command `timeout` may each send a SIGINT for one press.
        """
        before, self.pressed_at = self.pressed_at, now
        return now - before > SAME_PRESS_S


signal_state = SignalState()  # signals belong to the process


def raise_at_ctrl_c() -> None:
    """Let the first Ctrl-C raise KeyboardInterrupt, and the second end this process at once.

    Nothing changes if this process ignores Ctrl-C.
    """

    def handle_ctrl_c(*_: object) -> None:
        if not signal_state.is_new_press(time.monotonic()):
            return
        if signal_state.requested == CTRL_C:
            os._exit(CTRL_C_CODE)
        signal_state.requested = CTRL_C
        raise KeyboardInterrupt

    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:  # a shell's background job ignores it
        signal.signal(signal.SIGINT, handle_ctrl_c)


def install_stop_signals() -> None:
    """Turn SIGTERM, SIGUSR1 and Ctrl-C into requests to stop; forget earlier requests.

    Only the main thread may call this function. A separate thread reads the signals from a pipe
    (signal.set_wakeup_fd), because Python runs handlers only in the main thread, which may be
    blocked in a collective.
    """
    signal_state.requested = None
    enter_stage(Stage.STARTING)
    if signal_state.pipe is None:
        signal_state.pipe = os.pipe()
        os.set_blocking(signal_state.pipe[1], False)
        ready = threading.Event()
        threading.Thread(
            target=_read_signals, args=(signal_state.pipe[0], ready), name="signals", daemon=True
        ).start()
        ready.wait()
        set_death_signal(0)  # the new thread has asked for the signal itself
    signal.set_wakeup_fd(signal_state.pipe[1], warn_on_full_buffer=False)
    numbers = [signal.SIGTERM, signal.SIGUSR1]
    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
        numbers.append(signal.SIGINT)
    for number in numbers:
        # Only signals with a handler are written to the pipe; an empty handler is enough.
        signal.signal(number, lambda *_: None)
        signal.siginterrupt(number, False)
    if os.environ.get(NODE_DIR):  # the launcher writes these requests into files
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def enter_stage(stage: Stage) -> None:
    """Store the stage of the run in this process, and in a file for the launcher of this node."""
    signal_state.stage = stage
    directory = os.environ.get(NODE_DIR)
    if directory and os.environ.get("LOCAL_RANK", "0") == "0":
        with contextlib.suppress(OSError):  # a full disk must not end the run
            (Path(directory) / STAGE).write_text(stage.name, encoding="utf-8")


def stage_of_node(directory: Path) -> Stage:
    """Return the stage of the run from the file that ranks write into a node's private directory.

    If the file is missing, return STARTING.
    """
    try:
        return Stage[(directory / STAGE).read_text(encoding="utf-8")]
    except (OSError, KeyError):  # the file is missing, or is just being written
        return Stage.STARTING


def end_with_launcher() -> None:
    """Let the kernel kill this rank when its launcher dies.

    If the launcher is dead already, kill this rank now. Without a launcher nothing happens. A rank
    that outlives its launcher would continue and hold the run lock, so the run could not resume.
    """
    parent, launcher = os.getppid(), int(os.environ.get(LAUNCHER_PID, "0"))
    if _is_own_launcher(parent):
        set_death_signal(signal.SIGKILL)
        orphaned = os.getppid() != parent  # the launcher died before the call of prctl
    elif launcher:
        orphaned = not _command_line(launcher)  # the parent is a script of the user
    else:
        # If torchrun started this rank and has died or is dying, its command line is empty.
        dead = parent == 1 or os.getppid() != parent or not _command_line(parent)
        orphaned = "TORCHELASTIC_RUN_ID" in os.environ and dead
    if orphaned:
        os.kill(os.getpid(), signal.SIGKILL)


def _is_own_launcher(parent: int) -> bool:
    return parent == int(os.environ.get(LAUNCHER_PID, "0")) or is_launcher(parent)


def is_launcher(process: int) -> bool:
    """Return whether a process is `accelerate launch`, torchrun or DeepSpeed's launcher.

    process: the process id
    """
    return any(Path(word).name in _LAUNCHERS for word in _command_line(process))


def _command_line(process: int) -> list[str]:
    try:
        line = Path(f"/proc/{process}/cmdline").read_bytes()
    except OSError:
        return []
    return os.fsdecode(line).split("\0")[:-1]


def stop_request() -> str | None:
    """Return what requested a stop, such as "SIGTERM"; None if there is no request."""
    return signal_state.requested or _launcher_request()


def _launcher_request() -> str | None:
    directory = os.environ.get(NODE_DIR)
    if not directory:
        return None
    try:
        return (Path(directory) / STOP).read_text().strip() or "a signal to the job"
    except FileNotFoundError:
        return None


def _read_signals(pipe: int, ready: threading.Event) -> None:
    end_with_launcher()  # sets the kernel's signal for this thread; the launcher may be dead
    ready.set()
    while True:
        numbers = {*os.read(pipe, 64)}  # one byte per signal that has a handler
        if os.environ.get(NODE_DIR):
            if signal.SIGTERM in numbers:
                _wait_for_launcher_file()
        else:
            _handle_signals(numbers, time.monotonic())


def _handle_signals(numbers: Collection[int], now: float) -> None:
    """Request a stop, or end this process at a Ctrl-C. Not used under slurm/launch_node.sh.

    numbers: the signals that came. now: the time at which they came, by time.monotonic().
    """
    # At the second Ctrl-C torchrun sends SIGTERM.
    by_torchrun = signal_state.requested == CTRL_C and signal.SIGTERM in numbers
    if signal.SIGINT in numbers or by_torchrun:
        if not signal_state.is_new_press(now):
            return
        if signal_state.requested or signal_state.stage is not Stage.TRAINING:
            _end_interrupted()
        _announce_save()
        signal_state.requested = CTRL_C
    elif requests := {signal.SIGTERM, signal.SIGUSR1}.intersection(numbers):  # not torch's SIGCHLD
        signal_state.requested = signal_state.requested or signal.Signals(min(requests)).name


def _wait_for_launcher_file() -> None:
    """Wait until the launcher writes the file STOP. After 3 s (FILE_WITHIN_S), end this process.

    Called after a SIGTERM under slurm/launch_node.sh. At a second Ctrl-C the launcher writes the
    file INTERRUPTED instead. This file also ends the process.
    """
    interrupted = Path(os.environ[NODE_DIR]) / INTERRUPTED
    give_up_at = time.monotonic() + FILE_WITHIN_S
    while not interrupted.exists() and _launcher_request() is None:
        if time.monotonic() >= give_up_at:
            # Do not wait for the main thread, which may hang. The launcher logs the reason.
            os._exit(KILLED_BY_SIGTERM)
        time.sleep(0.1)
    if interrupted.exists():
        _end_interrupted()


def _announce_save() -> None:
    """Write on rank 0 that the run saves a checkpoint, and how long the launcher waits for this."""
    text = SAVING
    if "TORCHELASTIC_RUN_ID" in os.environ:
        text += " (torchrun waits 30 s for the save; slurm/launch_node.sh waits until it is done)"
    elif is_launcher(os.getppid()):
        # `accelerate launch` of one process ends in a quarter of a second. This process stays.
        set_death_signal(0)
        text = f"{CTRL_C}: process {os.getpid()} saves a checkpoint after this step and then ends"
    if global_rank() == 0:
        write_error(f"\n{text}\n")


def _end_interrupted() -> None:
    """End this process at once; write into its run locks that the user interrupted the run."""
    note_error(BY_USER)
    for run in held_runs():
        leave_run_lock(run)
    if global_rank() == 0 and not os.environ.get(NODE_DIR):  # otherwise the launcher writes this
        write_error(f"\n{BY_USER}, {signal_state.stage.value}\n")
    os._exit(CTRL_C_CODE)


def shield_loader_worker(_worker_id: int) -> None:
    """Let a data worker ignore Ctrl-C and signals to the whole job. A `worker_init_fn`.

    If a worker ended, the loader would raise before the requested checkpoint is written. A SIGTERM
    from the training process still ends the worker.
    """
    signal.set_wakeup_fd(-1)  # inherited from the training process
    for number in (signal.SIGUSR1, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    threading.Thread(target=_end_at_sigterm_of_parent, name="signals", daemon=True).start()


def _end_at_sigterm_of_parent() -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != os.getppid():
        continue
    os._exit(0)
