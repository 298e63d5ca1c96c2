"""Starts a script as a user would: in two processes with an accelerate config, on a terminal."""

import contextlib
import os
import pty
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from forked_ranks import ROOT, STRATEGIES, Launched, Ranks, rank_environment

CONFIGS = ROOT / "accelerate_configs"

# Environment for each config's strategy on CPUs, see cpu_strategies/sitecustomize.py.
SHARDED = {"ACCELERATE_USE_CPU": "true", "STOKER_TEST_CPU_STRATEGY": "fsdp2"}
CPU_ENVIRONMENT = {
    "multi_gpu": {"ACCELERATE_USE_CPU": "true"},
    "cpu": {"ACCELERATE_USE_CPU": "true"},
    "fsdp2": SHARDED,
    "hsdp": SHARDED,
} | {
    f"zero{stage}": {"DS_ACCELERATOR": "cpu", "STOKER_TEST_CPU_STRATEGY": "deepspeed"}
    for stage in (1, 2, 3)
}


def free_port() -> int:
    """Return a port that was free a moment ago."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def wait_until(
    condition: Callable[[], object],
    what: str,
    details: Callable[[], str] = str,
    timeout_s: float = 1200,
) -> None:
    """Wait until `condition()` holds; raises TimeoutError with a description and details."""
    give_up_at = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > give_up_at:
            raise TimeoutError(f"{what} (waited {timeout_s:.0f} s)\n{details()}")
        time.sleep(0.05)


def processes_of(run: Path) -> list[Path]:
    """Return the launchers and ranks of a run, found in /proc by their command lines."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # the process may have ended
            if str(run).encode() in (process / "cmdline").read_bytes().split(b"\0"):
                found.append(process)
    return found


def quiet_environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment of a child: offline, one thread, no variables of an outer launcher."""
    launcher = ("ACCELERATE_", "FSDP_", "SLURM_")
    ranks = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(launcher) and name not in ranks
    }
    fixed = {
        "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1",
        "WANDB_MODE": "disabled", "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": os.pathsep.join([str(STRATEGIES), str(ROOT)]),
    }  # fmt: skip
    return inherited | fixed | dict(extra or {})


def run_processes(
    config: str,
    script: Path | str,
    args: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    *,
    processes: int = 2,
    cpu_environment: bool = True,
    timeout_s: float = 1800,
) -> Launched:
    """Run `script` under `accelerate launch` with accelerate_configs/<config>.yaml on CPUs.

    Stdout has the output of all processes. The ranks are forked, see forked_ranks.py.
    `cpu_environment=False` leaves out the changes that make the strategy possible on CPUs: it is
    then refused. Raises TimeoutError.
    """
    return start_processes(
        config, script, args, env, processes=processes, cpu_environment=cpu_environment
    ).wait(timeout_s)


def run_torchrun(
    config: str, script: Path | str, args: Sequence[str], env: Mapping[str, str] | None = None
) -> Launched:
    """Run two ranks as `run_processes` does, but let torchrun start them, as for a user."""
    launcher = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch"]
    done = subprocess.run(
        [*launcher, *launch_options(config, 2, free_port()), str(script), *args],
        env=quiet_environment(CPU_ENVIRONMENT[config] | dict(env or {})),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return Launched(done.returncode, done.stdout, ())


def start_processes(
    config: str,
    script: Path | str,
    args: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    *,
    processes: int = 2,
    cpu_environment: bool = True,
) -> Ranks:
    """Start forked ranks as `run_processes` does, without waiting for their end."""
    extra = (CPU_ENVIRONMENT[config] if cpu_environment else {}) | dict(env or {})
    port = free_port()
    options = launch_options(config, processes, port)
    environments = [
        rank_environment(options, quiet_environment(extra), rank, processes, port)
        for rank in range(processes)
    ]
    return Ranks(ROOT / script, args, environments)


def run_fork(
    script: Path | str, args: Sequence[str], env: Mapping[str, str], cwd: Path = ROOT
) -> Launched:
    """Run a script alone in a fork, without a launcher; stdout has its stdout and stderr."""
    return Ranks(ROOT / script, args, [env], cwd).wait(timeout_s=1800)


def press_ctrl_c(terminal: int) -> None:
    """Write Ctrl-C to a terminal, whose foreground process group gets SIGINT."""
    os.write(terminal, b"\x03")


def on_terminal(
    command: Sequence[object],
    environment: Mapping[str, str],
    *events: tuple[str, Callable[[int], object]],
) -> tuple[int, str]:
    """Run a command on a new terminal; return its exit code and its output.

    events: (text, action). When the text is shown, the action is called with the terminal. The text
    of the next event must be shown after that.
    """
    words = [str(word) for word in command]
    child, terminal = pty.fork()
    if not child:
        # A shell's background jobs ignore SIGINT, and their children inherit this.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.execvpe(words[0], words, {**environment, "PWD": str(ROOT)})
    written, seen, waiting = b"", 0, list(events)
    while True:
        try:
            written += os.read(terminal, 65536)
        except OSError:  # all processes of the terminal ended
            break
        shown = written.decode(errors="replace")
        if waiting and (place := shown.find(waiting[0][0], seen)) >= 0:
            seen = place + len(waiting[0][0])
            waiting.pop(0)[1](terminal)
    os.close(terminal)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), written.decode(errors="replace")


def launch_options(config: str, processes: int, port: int) -> list[str]:
    """Return the options of `accelerate launch` for a config and a number of processes."""
    return [
        "--config_file", str(CONFIGS / f"{config}.yaml"),
        "--num_processes", str(processes),
        "--main_process_port", str(port),
    ]  # fmt: skip
