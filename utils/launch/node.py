"""The launcher of a node: starts a script's processes by `accelerate launch` and reports their end.

slurm/launch_node.sh runs it, once per node: python -m utils.launch.node SCRIPT ARGUMENTS
"""

import argparse
import contextlib
import logging
import os
import shutil
import signal
import subprocess
import sys
import traceback
from pathlib import Path

from utils.config.errors import ConfigurationError, ExitCode, UnfitClusterError
from utils.host.machine import host_name, memory_kills
from utils.host.notes import NOTES_DIR, RUN_STARTED, last_line, leave_verdict, read_notes
from utils.host.redaction import write_error
from utils.launch.accelerate_command import ignored_settings, launch_arguments, plan_launch
from utils.launch.caches import enter_node_directory, pack_compiled, unpack_compiled
from utils.launch.notify import tell
from utils.launch.rendezvous import check_nodes, node_facts
from utils.launch.script import FAILED, configure_logging, missing_package, write_report
from utils.launch.signals import LAUNCHER, STOP
from utils.launch.slurm import Allocation
from utils.launch.verdict import (
    SILENT,
    Verdict,
    note_worker_ends,
    read_verdict,
    wait_for_verdict,
)

logger = logging.getLogger("launch_node")

ROOT = Path(__file__).resolve().parents[2]
STOPPING = (signal.SIGUSR1, signal.SIGTERM)
ALONE = NOTES_DIR not in os.environ  # no job script reads the verdict


class StopSignals:
    """The handler of USR1 and TERM: writes the file STOP, which the workers watch.

    The file is in the node's directory. Before the workers are `started`, both signals end the
    launcher at once. So does TERM once the job has a verdict, because srun sends it then.
    """

    def __init__(self) -> None:
        self.directory: Path | None = None
        self.started = self.asked = False
        for number in STOPPING:
            signal.signal(number, self._handle)

    def _handle(self, number: int, _frame: object) -> None:
        name = signal.Signals(number).name
        verdict = read_verdict() if number == signal.SIGTERM else None
        if verdict is None and not self.started:
            text = f"{name} on {host_name()} before the processes were started"
            verdict = leave_or_print(Verdict(text, ExitCode.STOPPED))
        if verdict is not None:
            self.clean_up()
            os._exit(verdict.exit_code)
        if self.directory is not None and not self.asked:
            self.asked = True
            (self.directory / STOP).write_text(f"{name} to the job\n", encoding="utf-8")
            # Do not use logging: the signal may have interrupted it while it holds its lock.
            line = f"launch_node on {host_name()}: {name}, asking the processes to stop\n"
            with contextlib.suppress(OSError):  # a log on a full disk
                os.write(sys.stdout.fileno(), line.encode())

    def clean_up(self) -> None:
        """Kill the workers and delete the node's directory, while stop signals are ignored."""
        for number in STOPPING:
            # Python removes its own handlers at its end, and a signal would then kill it.
            signal.signal(number, signal.SIG_IGN)
        kill_workers()
        if self.directory is not None:
            shutil.rmtree(self.directory, ignore_errors=True)


def main(argv: list[str] | None = None) -> int:
    """Launch the processes; return the job's exit code as far as this node knows it."""
    signals = StopSignals()
    try:
        verdict = prepare_and_launch(sys.argv[1:] if argv is None else argv, signals)
        verdict = leave_or_print(verdict)
        failed = verdict.exit_code not in (ExitCode.DONE, ExitCode.STOPPED)
        if ALONE and signals.directory is not None:
            # Only the node of rank 0 has this note. In a job, the job script reports instead.
            for note in signals.directory.rglob(RUN_STARTED):
                run = Path(note.read_text(encoding="utf-8").strip())
                if failed:
                    write_report(run)
                tell(run, verdict.exit_code, verdict.text)
        return verdict.exit_code
    finally:
        signals.clean_up()


def prepare_and_launch(command: list[str], signals: StopSignals) -> Verdict:
    """Launch the processes in a private directory; return the verdict on their end or refusal."""
    try:
        signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)  # until clean_up knows the directory
        directory = signals.directory = enter_node_directory()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)
        configure_logging()
        known = unpack_compiled(directory / "compiled")
        verdict = launch(command, signals)
        kill_workers()
        if os.environ.get("SLURM_NODEID", "0") == "0":
            pack_compiled(directory / "compiled", known)
        return verdict
    except KeyboardInterrupt:
        return Verdict(f"interrupted on {host_name()}", 128 + signal.SIGINT)
    except Exception as error:
        refusal = error if isinstance(error, ConfigurationError) else missing_package(error)
        if refusal is None:  # srun will end the other nodes: this verdict names the cause
            write_error(traceback.format_exc())
            return Verdict(f"the launcher on {host_name()} failed: {last_line(error)}", FAILED)
        return Verdict(f"{refusal.kind} on {host_name()}:\n{refusal}", refusal.exit_code)


def leave_or_print(verdict: Verdict) -> Verdict:
    """Write the verdict for the job script, or print it without a job; return the job's verdict.

    The first verdict of a job counts. This may be an earlier one, which another node left.
    """
    if verdict.exit_code == ExitCode.DONE:
        return verdict
    left = leave_verdict(verdict.text, verdict.exit_code)
    earlier = None if left else read_verdict()
    if ALONE or not (left or earlier):
        write_error(f"{(earlier or verdict).text}\n")
    return earlier or verdict


def launch(command: list[str], signals: StopSignals) -> Verdict:
    """Check all nodes and run the processes; return the verdict. Raises ConfigurationError."""
    if not command or not Path(command[0]).is_file():
        raise ConfigurationError(
            f"{command[0] if command else 'nothing'} is no file in {Path.cwd()}: name a Python "
            "script: slurm/launch_node.sh SCRIPT ARGUMENTS ..."
        )
    import torch

    devices = torch.cuda.device_count()
    allocation, config = plan_launch(command[1:], os.environ, devices)
    os.environ |= process_environment(allocation)
    code = sorted([*ROOT.glob("*.py"), *(ROOT / "utils").rglob("*.py")])
    files = [*(file.relative_to(ROOT) for file in code), config.path, Path(command[0])]
    check_nodes(allocation, node_facts(allocation, files, devices))
    if allocation.node == 0:
        hosts = allocation.hosts
        logger.info(
            "launch: %d process(es), %s, on each of %d node(s) (%s): %s, by %s",
            allocation.processes,
            "CPU only" if allocation.gpus is None else "a GPU each",
            len(hosts), ", ".join(hosts[:8]) + ", ..." * (len(hosts) > 8), config.path,
            config.chosen_by,
        )  # fmt: skip
        if ignored := ignored_settings(config):
            logger.warning("%s: without effect here: %s", config.path, ", ".join(ignored))
    arguments = launch_arguments(config, allocation, command)
    signals.started = True
    return run_processes(arguments, signals)


def process_environment(allocation: Allocation) -> dict[str, str]:
    """Return the environment of this node's processes: OMP threads, and CPU mode without GPUs."""
    added = {LAUNCHER: str(os.getpid())}
    if not os.environ.get("OMP_NUM_THREADS"):
        # Share the cores that Slurm gave, or all cores, equally.
        given = os.environ.get("SLURM_CPUS_PER_TASK") or os.environ.get("SLURM_CPUS_ON_NODE")
        cores = int(given or len(os.sched_getaffinity(0)))
        added["OMP_NUM_THREADS"] = str(max(cores // allocation.processes, 1))
    if allocation.gpus is None and os.environ.get("DS_ACCELERATOR") != "cpu":
        added["ACCELERATE_USE_CPU"] = "true"
    return added


def run_processes(arguments: argparse.Namespace, signals: StopSignals) -> Verdict:
    """Run the processes of this node to their end; return the cause of the job's end."""
    from accelerate.commands.launch import launch_command
    from torch.distributed import DistError
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous.api import RendezvousError

    failed: dict[int, int] | None = None
    lost = SILENT
    kills = memory_kills()
    logging.disable(logging.ERROR)  # torchrun's own messages would hide the cause
    try:
        launch_command(arguments)
    except ChildFailedError as error:
        failed = {rank: failure.exitcode for rank, failure in error.failures.items()}
    except subprocess.CalledProcessError as error:
        failed = {0: error.returncode}
    except SignalException as error:
        raise KeyboardInterrupt from error
    except (RendezvousError, DistError, ConnectionError, ValueError, ImportError) as error:
        reason = error.__cause__ or error
        unfit = isinstance(error, ValueError | ImportError) or "EADDRINUSE" in str(reason)
        if unfit or arguments.num_machines == 1:
            raise UnfitClusterError(f"{host_name()}: accelerate launch: {reason}") from error
        # All nodes were at the rendezvous, so a launcher has ended since.
        failed, lost = {}, f"{host_name()} lost the launcher of another node: {last_line(reason)}"
    finally:
        logging.disable(logging.NOTSET)
    if failed is not None:
        note_worker_ends(failed, signals.asked, memory_ran_out=memory_kills() > kills)
        return wait_for_verdict(arguments.num_machines > 1, lost)
    stopped = [note for note in read_notes(os.environ[NOTES_DIR]) if note.kind == "stopped"]
    return Verdict(stopped[0].text, ExitCode.STOPPED) if stopped else Verdict("done", ExitCode.DONE)


def kill_workers() -> None:
    """Kill all child processes."""
    with contextlib.suppress(ModuleNotFoundError):  # no psutil: no process was started either
        import psutil

        for child in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()


if __name__ == "__main__":
    sys.exit(main())
