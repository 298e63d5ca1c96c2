"""The first and last steps of every script: logging, environment variables, errors, exit code."""

import atexit
import contextlib
import gc
import importlib.util
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path

from utils.config.errors import (
    Answer,
    ConfigurationError,
    ExitCode,
    OutOfMemoryError,
    UnfitClusterError,
)
from utils.host.atomic_files import cache_root
from utils.host.faults import error_line, lost_process, memory_error, storage_error
from utils.host.machine import global_rank, host_name, memory_kills
from utils.host.redaction import install_redaction, redact, write_error
from utils.host.run_lock import BY_USER, held_runs, note_error
from utils.launch.notify import send_message
from utils.launch.opening import opening_line, version_text
from utils.launch.signals import (
    CTRL_C,
    CTRL_C_CODE,
    NODE_DIR,
    end_with_launcher,
    is_launcher,
    raise_at_ctrl_c,
    stop_request,
)
from utils.launch.verdict import leave_note, runs_begun

logger = logging.getLogger(__name__)

TEARDOWN_LIMIT_S = 10.0
REPORT_LIMIT_S = 30.0
SPEAK_FIRST_S = 3.0
FAILED = 1  # exit code after an unexpected exception, the same as Python's
# Libraries whose INFO lines do not help in a training log.
_NOISY = (
    *("accelerate", "datasets", "deepspeed", "filelock", "fsspec", "httpx", "httpx2"),
    "huggingface_hub",
)

# (logger, words of the message) of log lines to hide, because users cannot act on these lines.
_HIDDEN_LINES = (
    # PEFT imports bitsandbytes, which then asks for a package that training never uses.
    ("bitsandbytes.backends.cpu.ops", "Failed to load CPU gemm_4bit"),
    # transformers imports torchao. Its C++ parts need another torch, and fp8 does not use them.
    ("torchao", "Failed to load"),
    ("torch.utils._pytree", "is an Enum subclass"),
    ("DeepSpeed", "to CPU."),  # on every machine without a GPU
    ("py.warnings", "`is_gradient_checkpointing` is deprecated"),  # by PEFT at every start
    ("py.warnings", "torch.distributed is disabled, unavailable or unin"),  # EMA, one process
    # At a resume, Stoker itself compares the settings with the recorded ones.
    ("transformers.trainer_utils", "do not match the ones in the `trainer_state.json`"),
)
_VARIABLES = {
    "HF_HUB_DISABLE_TELEMETRY": "1",  # otherwise TRL reports each trainer to the Hub
    "DO_NOT_TRACK": "1",
    # The tokenizers library can deadlock if data workers are forked after its use.
    "TOKENIZERS_PARALLELISM": "false",
    # By default oneDNN and torch each cache the code of a thousand shapes, 0.5 MB per shape.
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "128",
    "LRU_CACHE_CAPACITY": "1",
    # After this time torch ends a process with a blocked NCCL thread. HangWatch ends the process
    # earlier and logs the reason.
    "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "7200",
    # A log file keeps every redraw of a progress bar.
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
}


class LineFormatter(logging.Formatter):
    """Formatter of log lines: `12:34:56  message`.

    On ranks other than 0, host and rank precede the message. For levels other than INFO, the level
    precedes the message.
    """

    def formatMessage(self, record: logging.LogRecord) -> str:
        """Return the log line of a record, without its traceback."""
        level = "" if record.levelno == logging.INFO else f"{record.levelname}  "
        return f"{self.formatTime(record, '%H:%M:%S')}  {_rank_prefix()}{level}{record.message}"


def configure_logging(*, debug: bool = False) -> None:
    """Log to stdout with secrets masked: INFO and higher on rank 0, warnings on other ranks.

    Libraries log warnings on rank 0, and only errors on other ranks, where warnings would repeat.
    debug: also show Stoker's own lines of level DEBUG. A second call adds no second handler.
    """
    rank = global_rank()
    install_redaction()
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(LineFormatter())
    root = logging.getLogger()
    others = [each for each in root.handlers if not isinstance(each.formatter, LineFormatter)]
    root.handlers[:] = [*others, handler]
    root.setLevel(logging.INFO if rank == 0 else logging.WARNING)
    if debug and rank == 0:
        logging.getLogger("utils").setLevel(logging.DEBUG)
    library_level = logging.WARNING if rank == 0 else logging.ERROR
    for name in (*_NOISY, "py.warnings"):
        logging.getLogger(name).setLevel(library_level)
    # transformers reads this variable at its import, and has its own handler.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "warning" if rank == 0 else "error")
    logging.captureWarnings(True)
    # Leave out the source line, so that a warning is one line.
    warnings.formatwarning = lambda message, category, filename, lineno, *_: (
        f"{category.__name__}: {message} ({filename}:{lineno})"
    )


def configure_environment() -> None:
    """Set environment variables that libraries read at their import, unless the user set them.

    Call this before torch, huggingface_hub, transformers or datasets is imported. In a Slurm job
    HF_HUB_OFFLINE becomes 1, because nodes seldom have internet.
    """
    # Imports leave 700,000 permanent objects. A start takes a third less time if the garbage
    # collector does not traverse them a thousand times, nor at the end of the process.
    gc.set_threshold(10_000)
    atexit.register(gc.freeze)
    if sys.version_info < (3, 11, 10):
        # If a thread of torch holds Python's lock of threads during a fork, the data worker hangs
        # (github.com/python/cpython/issues/112275). _current_frames waits until the lock is free.
        os.register_at_fork(before=sys._current_frames)
    _stay_offline_in_jobs()
    for name, words in _HIDDEN_LINES:
        logging.getLogger(name).addFilter(partial(_lacks, words))
    for name, value in _VARIABLES.items():
        os.environ.setdefault(name, value)
    if "TORCH_NCCL_TRACE_BUFFER_SIZE" not in os.environ:  # the older name
        os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")  # hang.txt lists these collectives
    # torch's default is in /tmp, which is lost at the end of a job.
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache_root() / "compiled"))


def _lacks(words: str, record: logging.LogRecord) -> bool:
    return words not in record.getMessage()


def configure_hub() -> None:
    """Set only the environment variables of the Hub's libraries, for scripts that download.

    Progress bars are shown only on a terminal. HTTP requests are not logged.
    """
    _stay_offline_in_jobs()
    bars = "HF_HUB_DISABLE_PROGRESS_BARS", "HF_DATASETS_DISABLE_PROGRESS_BARS"
    for name in bars if not sys.stderr.isatty() else ():
        os.environ.setdefault(name, _VARIABLES[name])
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", _VARIABLES["HF_HUB_DISABLE_TELEMETRY"])
    for name in _NOISY:
        logging.getLogger(name).setLevel(logging.WARNING)


def _stay_offline_in_jobs() -> None:
    if "SLURM_JOB_ID" in os.environ and "HF_HUB_OFFLINE" not in os.environ:
        os.environ["HF_HUB_OFFLINE"] = "1"
        logger.info("Hugging Face Hub: offline (Slurm job); HF_HUB_OFFLINE=0 allows downloads")


def run_script(
    main: Callable[[], int | None], usage: str | None = None, announced: bool = False
) -> int:
    """Run a script's `main`, show its errors and return the exit code of the process.

    usage: text to show if the script has no arguments. The exit code is then ExitCode.REFUSED.
    announced: whether rank 0 writes `opening_line` before `main`, whose imports take some seconds.
    The argument `--version` prints versions.

    A ConfigurationError, a full disk and a missing package are shown without traceback. Rank 0
    shows all problems, and the first rank of each other node shows one line. Any other exception is
    shown with traceback, host and rank. The exit code is then 1. After each of these errors,
    `leave_note` writes a file for the launcher. Ctrl-C is shown in one line. Rank 0 prints the
    text of an Answer, such as that of `--print_config`. Any other SystemExit passes through.

    ExitCode.STOPPED means "stopped with a checkpoint". Under slurm/launch_node.sh the exit code is
    then 0, because torchrun kills the other ranks at any other code. The launcher learns of the
    stop from the file of `leave_note`.
    """
    end_with_launcher()
    raise_at_ctrl_c()
    exit_code: int | None = None  # None while main runs, and after errors that pass through
    final_steps: list[Callable[[], None]] = []  # reports and messages; only without a launcher

    def leave_at_once() -> None:
        """Write reports and send messages. If there are several ranks, then call os._exit.

        os._exit skips Python's teardown, in which process groups may wait for other ranks and a
        library's thread may abort the process. This atexit handler is registered before all others,
        so it runs last, after the run lock was released.
        """
        while final_steps:
            final_steps.pop(0)()
        if exit_code is not None and int(os.environ.get("WORLD_SIZE", "1")) > 1:
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(OSError):
                    stream.flush()
            os._exit(exit_code)

    atexit.register(leave_at_once)
    exit_code = _run_main(main, usage, announced)
    if NODE_DIR not in os.environ:  # otherwise the launcher or the job script reports
        errors = held_runs()
        texts = {0: "done", ExitCode.STOPPED: "stopped with a checkpoint"}
        if exit_code not in (*texts, CTRL_C_CODE):
            final_steps += [partial(write_failure_report, run) for run in errors]
        words = next(iter(errors.values()), "") or texts.get(exit_code, f"exit code {exit_code}")
        final_steps += [partial(send_message, run, exit_code, words) for run in runs_begun]
        runs_begun.clear()
    if exit_code:
        # Other exit handlers may hang, and threads that Python joins before it calls them.
        limit = threading.Timer(TEARDOWN_LIMIT_S, leave_at_once)
        limit.daemon = True
        limit.start()
    return exit_code


def write_failure_report(run: Path) -> None:
    """Run report.py for a failed run in a child process with a time limit. Raises nothing."""
    command = [sys.executable, str(Path(__file__).parents[2] / "report.py"), str(run)]
    # Without these variables report.py is not a rank, and writes no note for the launcher.
    rank_variables = ("STOKER_", "RANK", "WORLD_SIZE", "LOCAL_RANK")
    env = {name: value for name, value in os.environ.items() if not name.startswith(rank_variables)}
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(
            command, env=env, capture_output=True, text=True, timeout=REPORT_LIMIT_S, check=True
        )
        write_error(f"report: {done.stdout.strip()}\n")


def _run_main(main: Callable[[], int | None], usage: str | None, announced: bool) -> int:
    kills = memory_kills()
    try:
        code = _handle_arguments(usage, announced)
        code = (main() or 0) if code is None else code
    except Answer as answer:
        if global_rank() == 0:
            sys.stdout.write(redact(answer.text))
        return 0
    except ConfigurationError as error:  # each rank without memory writes out-of-memory-rankN.txt
        return _end_refused(error, of_this_rank=isinstance(error, OutOfMemoryError))
    except KeyboardInterrupt:
        return _end_interrupted()
    except Exception as error:
        # torch's handler would raise an error here when a data worker ends.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        refusal = (
            memory_error(error, killed=memory_kills() > kills)
            or storage_error(error)
            or lost_process(error)
            or missing_package(error)
        )
        return _end_refused(refusal, of_this_rank=True) if refusal else _end_failed(error)
    return _end_stopped() if code == ExitCode.STOPPED else code


def _handle_arguments(usage: str | None, announced: bool) -> int | None:
    script, words = Path(sys.argv[0]).name, sys.argv[1:]
    first_rank = global_rank() == 0
    if words == ["--version"]:
        sys.stdout.write(version_text() if first_rank else "")
        return ExitCode.DONE
    if usage and not words:
        write_error(f"{usage.strip()}\n\npython {script} --help shows the settings.\n" * first_rank)
        return ExitCode.REFUSED
    asks_for_help = {"-h", "--help"} & {*words}
    # launch_node.sh has written the line before it started the ranks.
    if announced and first_rank and not asks_for_help and NODE_DIR not in os.environ:
        write_error(f"{opening_line(script, words)}\n")
    return None


def _end_stopped() -> int:
    words = "stopped with a checkpoint"
    leave_note("stopped", ExitCode.STOPPED, words)
    if stop_request() == CTRL_C and global_rank() == 0:
        # Under torchrun, print this below the traceback.
        _show_error([], again=[f"{words}; the same command resumes"])
    return 0 if NODE_DIR in os.environ else ExitCode.STOPPED


def _end_interrupted(why: str = "") -> int:
    note_error(BY_USER)
    if global_rank() == 0:
        write_error(f"\n{BY_USER}{why}\n")
    atexit.register(logging.disable)  # runs first: torch's exit handlers would log
    return CTRL_C_CODE


def missing_package(error: BaseException) -> UnfitClusterError | None:
    """Return an UnfitClusterError if a missing or broken package caused `error`, else None."""
    name = error.name if isinstance(error, ImportError) else None
    package = (name or "utils").partition(".")[0]
    missing = isinstance(error, ModuleNotFoundError) and importlib.util.find_spec(package) is None
    broken = isinstance(error, ImportError) and str(error.path).endswith(".so")
    if package == "utils" or not (missing or broken):
        return None
    fault = f"has no {package}" if missing else f"cannot load {package} ({error})"
    return UnfitClusterError(
        f"{host_name()}: {sys.executable} {fault}: activate the environment that has "
        "Stoker's packages (`source .venv/bin/activate`, in jobs slurm/cluster.env), or install "
        "them: pip install -r requirements.lock"
    )


def _end_failed(error: Exception) -> int:
    if type(error).__module__.startswith(("torch._dynamo", "torch._inductor")):
        error.add_note("torch cannot compile this model: --compile false trains without, slower.")
    words = error_line(error)
    if stop_request() == CTRL_C:  # another rank may have ended before this one saved
        return _end_interrupted(f"; no checkpoint was saved: {words}")
    leave_note("failed", FAILED, words)
    note_error(words)
    # Mask before splitting: a secret may have several lines.
    lines = redact("".join(traceback.format_exception(error))).splitlines()
    _show_error([f"{_rank_prefix()}{line}" for line in lines], again=[f"{_rank_prefix()}{words}"])
    return FAILED


def _end_refused(error: ConfigurationError, of_this_rank: bool = False) -> int:
    """Show an error without traceback, write a note for the launcher, return the exit code.

    of_this_rank: True means that only this rank raised the error and shows it. False means that all
    ranks raised it: rank 0 shows all problems, and one rank of each other node shows one line.
    """
    for level, text in error.report:
        logger.log(level, "%s", text)
    problems = [redact(problem) for problem in error.problems]  # before they are split into lines
    first = problems[0].splitlines()[0]
    leave_note(
        error.ending, error.exit_code, first if error.kind in first else f"{error.kind}: {first}"
    )
    note_error(f"{error.kind}: {first}")
    if global_rank() == 0:
        items = ["\n    ".join(f"  - {problem}".splitlines()) for problem in problems]
        lines = [f"{error.kind}:", *items]
    elif of_this_rank or int(os.environ.get("LOCAL_RANK", "0")) == 0:
        lines = [f"{_rank_prefix()}{error.kind}: {problems[0] if of_this_rank else first}"]
    else:
        # The launcher ends all ranks after the first one: wait until rank 0 has shown the error.
        time.sleep(SPEAK_FIRST_S)
        return error.exit_code
    _show_error(lines, again=lines)
    return error.exit_code


def _show_error(lines: list[str], again: list[str]) -> None:
    """Write `lines` to stderr now, and `again` to stderr below the launcher's traceback.

    Under slurm/launch_node.sh, `again` is not written. torchrun prints the file
    TORCHELASTIC_ERROR_FILE last, so `again` is written to this file. Exception: torchrun does not
    print the file after Ctrl-C, and `accelerate launch` of one process never prints it. In these
    cases a shell waits for the launcher's end, at most 5 s, and prints `again`.
    """
    write_error("".join(f"{line}\n" for line in lines))
    if NODE_DIR in os.environ:  # slurm/launch_node.sh prints the cause last
        return
    text = redact("".join(f"{line}\n" for line in again))
    with contextlib.suppress(OSError):  # the lines were printed before
        file = os.environ.get("TORCHELASTIC_ERROR_FILE")
        if file and stop_request() != CTRL_C:
            details = {"message": text.rstrip(), "extraInfo": {"timestamp": int(time.time())}}
            Path(file).write_text(json.dumps({"message": details}), encoding="utf-8")
            return
        launcher = os.getppid()
        if is_launcher(launcher):
            # An ended process has an empty command line.
            waiting = 'grep -qs . "/proc/$1/cmdline" && [ "$tries" -lt 50 ]'
            script = f"tries=0; while {waiting}; do sleep 0.1; tries=$((tries+1)); done"
            command = ["sh", "-c", f'{script}; printf %s "$2" >&2', "sh", str(launcher), text]
            subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)


def _rank_prefix() -> str:
    return f"{host_name()} rank {global_rank()}  " if global_rank() else ""
