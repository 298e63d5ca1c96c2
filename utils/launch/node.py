"""The launcher of a node. It runs a script's ranks by `accelerate launch` and reports their end.

slurm/launch_node.sh runs this module once per node: python -m utils.launch.node SCRIPT ARGUMENTS
"""

from utils.launch.entry import end_silently

if __name__ == "__main__":
    end_silently()  # while the next lines import

import argparse
import atexit
import contextlib
import importlib.util
import logging
import os
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from utils.config.declarations import DEFAULT, SettingValue
from utils.config.errors import ConfigurationError, ExitCode, UnfitClusterError, UsedPortError
from utils.config.launch_settings import PREFIXES, block
from utils.config.strategy import AUTO, ONE_PROCESS, StrategyConfig, choose_config
from utils.host.faults import error_line
from utils.host.machine import host_name, memory_kills
from utils.host.redaction import write_error
from utils.host.run_lock import BY_USER
from utils.launch.caches import enter_node_directory, pack_compiled, unpack_compiled
from utils.launch.notify import send_message
from utils.launch.rendezvous import check_nodes, node_facts
from utils.launch.restart import Restarts
from utils.launch.script import FAILED, configure_logging, missing_package, write_failure_report
from utils.launch.signals import (
    CTRL_C,
    CTRL_C_CODE,
    INTERRUPTED,
    LAUNCHER_PID,
    SAVING,
    STOP,
    Stage,
    signal_state,
    stage_of_node,
)
from utils.launch.slurm import Allocation, read_allocation
from utils.launch.verdict import (
    NO_NOTES_TEXT,
    NOTES_DIR,
    RUN_STARTED,
    Verdict,
    leave_verdict,
    note_worker_ends,
    read_notes,
    read_verdict,
    wait_for_verdict,
)

logger = logging.getLogger("launch_node")

ROOT = Path(__file__).resolve().parents[2]
STOP_SIGNALS = (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT)
IN_JOB_SCRIPT = NOTES_DIR in os.environ  # whether a job script reads the verdict files
# Keys of an accelerate config for TPUs, mpirun, fp8 and Megatron-LM, which Stoker does not use.
UNUSED_KEYS = (
    *("downcast_bf16", "tpu_name", "tpu_env", "commands", "command_file", "mpirun_config"),
    *("fp8_config", "megatron_lm_config"),
)
# Seconds in which all nodes must join torchrun's rendezvous after check_nodes.
JOIN_TIMEOUT_S = 120
# Seconds from SIGTERM to SIGKILL for the other workers of a node after one of them failed.
SHUTDOWN_TIMEOUT_S = 5


class StopSignals:
    """The handler of SIGUSR1, SIGTERM and Ctrl-C. It writes STOP, a file that stops the workers.

    The file is in the node's directory. Some signals end the launcher instead:
    any signal  before the workers start
    SIGTERM     after a launcher wrote why the job ended, because srun then ends all nodes
    Ctrl-C      before and after training, at a second press, and always in a job script
    """

    def __init__(self) -> None:
        self.directory: Path | None = None
        self.started = self.asked = False
        for number in STOP_SIGNALS:
            # Shells start background jobs with Ctrl-C ignored.
            if number != signal.SIGINT or signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, self._handle)

    def _handle(self, number: int, _frame: object) -> None:
        by_user = number == signal.SIGINT
        if by_user and not signal_state.is_new_press(time.monotonic()):
            return
        # In a job SIGINT comes from scancel. After a stop, the job script would requeue the job.
        if by_user and (self.asked or self.stage is not Stage.TRAINING or IN_JOB_SCRIPT):
            self._interrupt()
        name = CTRL_C if by_user else signal.Signals(number).name
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
            # Do not use logging: the interrupted code may hold the lock of logging.
            line = f"launch_node on {host_name()}: {name}, asking the processes to stop"
            message = f"\n{SAVING}\n" if by_user else f"{line}\n"
            with contextlib.suppress(OSError):  # a log on a full disk
                os.write(sys.stdout.fileno(), message.encode())

    @property
    def stage(self) -> Stage:
        """The stage of the run, read from the file that the workers write."""
        return stage_of_node(self.directory) if self.directory else Stage.STARTING

    def _interrupt(self) -> NoReturn:
        if self.directory is not None and self.started:
            (self.directory / INTERRUPTED).touch()  # tells the workers that the user ended the run
            kill_workers(wait_s=SHUTDOWN_TIMEOUT_S)
        raise KeyboardInterrupt

    def clean_up(self) -> None:
        """Ignore further stop signals, kill the workers and delete the node's directory."""
        for number in STOP_SIGNALS:
            # Python removes its handlers at its end, and a signal would then kill it.
            signal.signal(number, signal.SIG_IGN)
        kill_workers()
        if self.directory is not None:
            shutil.rmtree(self.directory, ignore_errors=True)


def main(argv: list[str] | None = None) -> int:
    """Launch this node's processes, report their end and return the exit code of the job."""
    signals = StopSignals()
    try:
        verdict = leave_or_print(run(sys.argv[1:] if argv is None else argv, signals))
        signals.asked = True  # nothing is left to save: Ctrl-C skips the report
        if not IN_JOB_SCRIPT and signals.directory is not None:
            with contextlib.suppress(KeyboardInterrupt):
                report(signals.directory, verdict)
        return verdict.exit_code
    finally:
        signals.clean_up()


def report(directory: Path, verdict: Verdict) -> None:
    """Send a message about a run's end; write a report if it failed. Job scripts do both."""
    for file in directory.rglob(RUN_STARTED):  # only rank 0 writes this file
        output_dir = Path(file.read_text(encoding="utf-8").strip())
        if verdict.exit_code not in (ExitCode.DONE, ExitCode.STOPPED, CTRL_C_CODE):
            write_failure_report(output_dir)
        send_message(output_dir, verdict.exit_code, verdict.text)


def run(command: list[str], signals: StopSignals) -> Verdict:
    """Run `command` (SCRIPT ARGUMENTS) on this node; return why it ended or could not start."""
    try:
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)  # until clean_up knows the directory
        directory = signals.directory = enter_node_directory()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        configure_logging()
        unpacked = unpack_compiled(directory / "compiled")
        arguments = prepare_launch(command)
        signals.started = True
        one_node = arguments.num_machines == 1
        restarts = Restarts(directory, by_launcher=one_node and not IN_JOB_SCRIPT)
        verdict = restarts.run(lambda: run_processes(arguments, signals), lambda: signals.asked)
        if os.environ.get("SLURM_NODEID", "0") == "0":
            pack_compiled(directory / "compiled", unpacked)
        return verdict
    except KeyboardInterrupt:
        atexit.register(logging.disable)  # runs first: torch's exit handlers would log
        return Verdict(f"{BY_USER}, {signals.stage.value}", CTRL_C_CODE)
    except Exception as error:
        refusal = error if isinstance(error, ConfigurationError) else missing_package(error)
        if refusal is None:  # srun will end the other nodes, and this verdict names the cause
            write_error(traceback.format_exc())
            return Verdict(f"the launcher on {host_name()} failed: {error_line(error)}", FAILED)
        return Verdict(f"{refusal.kind} on {host_name()}:\n{refusal}", refusal.exit_code)


def leave_or_print(verdict: Verdict) -> Verdict:
    """Write the verdict of a job that failed or stopped to a file; return the job's first verdict.

    Another node's launcher may have written it. Without a job script, print this first verdict.
    """
    if verdict.exit_code == ExitCode.DONE:
        return read_verdict() or verdict  # a stop at max_gpu_hours has written a verdict
    is_first = leave_verdict(verdict.text, verdict.exit_code)
    earlier = None if is_first else read_verdict()
    if not (IN_JOB_SCRIPT and (is_first or earlier)):
        write_error(f"{(earlier or verdict).text}\n")
    return earlier or verdict


def prepare_launch(command: list[str]) -> argparse.Namespace:
    """Choose the accelerate config, check all nodes, and return `accelerate launch`'s arguments.

    command: SCRIPT ARGUMENTS. Also sets the workers' environment. Raises ConfigurationError.
    """
    if not command or not Path(command[0]).is_file():
        raise ConfigurationError(
            f"{command[0] if command else 'nothing'} is no file in {Path.cwd()}: name a Python "
            "script: slurm/launch_node.sh SCRIPT ARGUMENTS ..."
        )
    if os.environ.get("SLURM_NODEID", "0") == "0":
        from utils.launch.opening import opening_line

        write_error(f"{opening_line(command[0], command[1:])}\n")
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
    return launch_arguments(config, allocation, command)


def plan_launch(
    arguments: Sequence[str], environment: Mapping[str, str], devices: int
) -> tuple[Allocation, StrategyConfig]:
    """Return (nodes and processes of the job, accelerate config) for a script's `arguments`.

    devices: the number of GPUs that torch sees. Raises ConfigurationError.
    """
    strategy = given_strategy(arguments)
    allocation = read_allocation(environment, devices, strategy.value)
    on_cpu = allocation.gpus is None
    config = choose_config(environment, strategy, allocation.world_size, on_cpu=on_cpu)
    check_config(config, allocation)
    return allocation, config


def check_config(config: StrategyConfig, allocation: Allocation) -> None:
    """Raise ConfigurationError if the accelerate config cannot start the job's processes."""
    if config.kind in ONE_PROCESS and allocation.world_size > 1:
        raise ConfigurationError(
            f"{config.chosen_by}: distributed_type {config.kind or 'NO'} starts one process, but "
            f"the job has {allocation.world_size} ({len(allocation.hosts)} node(s) of "
            f"{allocation.processes}): use strategy multi_gpu (without GPUs cpu), or ask for one "
            "GPU."
        )
    if config.kind == "DEEPSPEED" and importlib.util.find_spec("deepspeed") is None:
        raise ConfigurationError(
            f"{config.chosen_by}: DeepSpeed is not installed: pip install deepspeed, or use fsdp2."
        )


def given_strategy(arguments: Sequence[str]) -> SettingValue:
    """Return the strategy that a script's arguments or recipes set, or AUTO if none is set.

    Wrong arguments are ignored here, because the script reports them.
    """
    from utils.launch.opening import early_settings

    given = early_settings(arguments).get("strategy", DEFAULT)
    is_named = given.value and isinstance(given.value, str)
    return given if is_named else SettingValue(AUTO, DEFAULT.source)


def process_environment(allocation: Allocation) -> dict[str, str]:
    """Return the workers' variables: the launcher's pid, OMP threads, and CPU mode without GPUs."""
    variables = {LAUNCHER_PID: str(os.getpid())}
    if not os.environ.get("OMP_NUM_THREADS"):
        # Share the cores that Slurm gave, or all cores, equally.
        cpus = os.environ.get("SLURM_CPUS_PER_TASK") or os.environ.get("SLURM_CPUS_ON_NODE")
        cores = int(cpus or len(os.sched_getaffinity(0)))
        variables["OMP_NUM_THREADS"] = str(max(cores // allocation.processes, 1))
    if allocation.gpus is None and os.environ.get("DS_ACCELERATOR") != "cpu":
        variables["ACCELERATE_USE_CPU"] = "true"
    return variables


def ignored_settings(config: StrategyConfig) -> list[str]:
    """Return the keys in an accelerate config that neither Stoker nor accelerate uses."""
    from accelerate.commands.launch import launch_command_parser

    read = {action.dest for action in launch_command_parser()._actions}
    ignored = [name for name in UNUSED_KEYS if config.content.get(name) not in (None, "no", False)]
    for name in PREFIXES:
        ignored += [f"{name}: {key}" for key in block(config.content, name) if key not in read]
    return ignored


def launch_arguments(
    config: StrategyConfig, allocation: Allocation, command: Sequence[str]
) -> argparse.Namespace:
    """Return `accelerate launch`'s arguments that run `command` (SCRIPT ARGUMENTS) on this node."""
    from accelerate.commands.launch import launch_command_parser

    options = [
        "--config_file", str(config.path),
        "--num_processes", str(allocation.world_size),
        "--num_machines", str(len(allocation.hosts)),
        "--machine_rank", str(allocation.node),
        "--main_process_ip", allocation.address,
        "--main_process_port", str(allocation.port),
    ]  # fmt: skip
    if len(allocation.hosts) > 1:
        meeting = f"is_host={int(allocation.node == 0)},join_timeout={JOIN_TIMEOUT_S}"
        options += ["--rdzv_backend", "c10d", "--rdzv_conf", meeting]
        if config.kind == "DEEPSPEED":
            # Slurm starts one launcher per node. DeepSpeed's default would start them by ssh.
            options += ["--deepspeed_multinode_launcher", "standard"]
    by_torchrun = config.kind not in ONE_PROCESS
    if not by_torchrun and allocation.gpus is None:
        options += ["--cpu"]  # otherwise accelerate sets ACCELERATE_USE_CPU=False for the script
    script, *script_args = command
    args = launch_command_parser().parse_args([*options, script])
    if by_torchrun:
        # torchrun replaces ${local_rank} in arguments, and $$ by $.
        script_args = [argument.replace("$", "$$") for argument in script_args]
    args.training_script, args.training_script_args = script, script_args
    # torchrun ends the workers at these signals. The launcher itself handles the stop signals. A
    # closed terminal sends SIGHUP, which nohup ignores.
    ignores_sighup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    args.signals_to_handle = "SIGQUIT" if ignores_sighup else "SIGQUIT,SIGHUP"
    args.shutdown_timeout = SHUTDOWN_TIMEOUT_S
    return args


def run_processes(arguments: argparse.Namespace, signals: StopSignals) -> Verdict:
    """Run this node's processes, wait for their end and return why the job ended."""
    from accelerate.commands.launch import launch_command
    from torch.distributed import DistError
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous.api import RendezvousError

    exit_codes: dict[int, int] | None = None
    silent_text = NO_NOTES_TEXT
    kills_before = memory_kills()
    logging.disable(logging.ERROR)  # torchrun's own messages would hide the cause
    try:
        launch_command(argparse.Namespace(**vars(arguments)))  # accelerate changes this copy
    except ChildFailedError as error:
        exit_codes = {rank: failure.exitcode for rank, failure in error.failures.items()}
    except subprocess.CalledProcessError as error:
        exit_codes = {0: error.returncode}
    except SignalException as error:
        return Verdict(f"interrupted on {host_name()} by {error.sigval.name}", CTRL_C_CODE)
    except (RendezvousError, DistError, ConnectionError, ValueError, ImportError) as error:
        reason = error.__cause__ or error
        unfit = isinstance(error, ValueError | ImportError) or "EADDRINUSE" in str(reason)
        if unfit or arguments.num_machines == 1:
            kind = UsedPortError if "EADDRINUSE" in str(reason) else UnfitClusterError
            raise kind(f"{host_name()}: accelerate launch: {reason}") from error
        # check_nodes reached all nodes before, so the launcher of another node has ended.
        exit_codes = {}
        silent_text = f"{host_name()} lost the launcher of another node: {error_line(reason)}"
    finally:
        kill_workers()
        logging.disable(logging.NOTSET)
    if exit_codes is not None:
        note_worker_ends(exit_codes, signals.asked, memory_ran_out=memory_kills() > kills_before)
        return wait_for_verdict(arguments.num_machines > 1, silent_text)
    stopped = [note for note in read_notes() if note.kind == "stopped"]
    return Verdict(stopped[0].text, ExitCode.STOPPED) if stopped else Verdict("done", ExitCode.DONE)


def kill_workers(*, wait_s: float = 0) -> None:
    """Kill this process's descendants. If `wait_s` > 0, first send SIGTERM to ranks and wait."""
    with contextlib.suppress(ModuleNotFoundError):  # without psutil no process was started
        import psutil

        ranks, descendants = (psutil.Process().children(recursive=each) for each in (False, True))
        for rank in ranks if wait_s else ():
            with contextlib.suppress(psutil.NoSuchProcess):
                rank.terminate()
        psutil.wait_procs(ranks, timeout=wait_s)
        for child in descendants:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()


if __name__ == "__main__":
    sys.exit(main())
