"""One start of a script in a process from a fork server that has already imported everything.

To make system calls countable, files are hashed in the main thread and the lock's heartbeat is
slow. This changes no content of any file.
"""

import atexit
import concurrent.futures
import contextlib
import importlib
import os
import signal
import sys
import time
import traceback
import types
from multiprocessing.connection import Connection
from pathlib import Path

import stock_trainer
import torch
from forked_ranks import PRELOADED, apply_changes
from transformers.trainer_callback import CallbackHandler
from transformers.trainer_utils import get_last_checkpoint
from transformers.utils.logging import disable_progress_bar

import prepare_data
import pretrain
import utils.checkpoints.files
import utils.run.preflight
from utils.checkpoints import discovery as rotation
from utils.checkpoints import store
from utils.host import atomic_files, run_lock
from utils.launch.script import run_script
from utils.prepare import work_plan

HOST_WATCH_S = 3.0  # thirty heartbeats, because one may wait for a core

torch.set_num_threads(1)
# As in a job, where run_script does it before the imports. How often a bar writes depends on time.
disable_progress_bar()
# Imported once, before the children are forked.
for name in PRELOADED:
    with contextlib.suppress(ImportError):
        importlib.import_module(name)


class InOneThread(concurrent.futures.Executor):
    """An executor that runs its work in the submitting thread."""

    def __init__(self, *_args):
        pass

    def submit(self, function, /, *args, **kwargs):
        done = concurrent.futures.Future()
        try:
            done.set_result(function(*args, **kwargs))
        except Exception as error:
            done.set_exception(error)
        return done


def child(go: Connection, output: str, program: str, argv: list[str], options: dict) -> None:
    """Wait for `go`, then run a program to its end and exit with its exit code.

    The option `step_delay_s` makes steps long. `die_at` kills the process at the begin of a step.
    """
    descriptor = os.open(output, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    sys.stdout = os.fdopen(1, "w", buffering=1)
    sys.stderr = os.fdopen(2, "w", buffering=1)
    os.environ.update(options.get("env", {}))
    go.send("ready")
    go.recv()
    apply_changes()
    disturb_steps(options)
    code = 1
    try:
        code = PROGRAMS[program](argv, options)
    except BaseException:
        traceback.print_exc()
    # End as the interpreter does. A child of multiprocessing would skip these functions.
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(code)


def disturb_steps(options: dict) -> None:
    begin = CallbackHandler.on_step_begin

    def disturbed(handler, args, state, control):
        time.sleep(options.get("step_delay_s", 0))
        if state.global_step == options.get("die_at"):
            os.kill(os.getpid(), signal.SIGKILL)
        return begin(handler, args, state, control)

    CallbackHandler.on_step_begin = disturbed


def stoker(argv: list[str], options: dict) -> int:
    """Run pretrain.py.

    `staged_within`: background saves are staged in this folder of the run directory. `quota_bytes`
    is the capacity of the run directory. `host` is a pretended name of the machine.
    """
    run_lock.BEAT_S, run_lock.WATCH_S, run_lock.LOOK_S = 3600.0, 0.3, 0.02
    if "host" in options:
        pretend_host(options["host"])
    else:
        name_probes_alike()
    if options.get("one_thread", True):
        utils.checkpoints.files.concurrent.futures.ThreadPoolExecutor = InOneThread
    run = Path(argv[argv.index("--output_dir") + 1])
    if "staged_within" in options:
        stage_within(run / options["staged_within"])
    if "quota_bytes" in options:
        rotation.free_disk_bytes = lambda _: options["quota_bytes"] - rotation.taken_bytes(run)
    return run_script(lambda: pretrain.main(argv))


def pretend_host(name: str) -> None:
    """Make the run lock, with its heartbeat, look as if it was taken on another machine."""
    os.environ["SLURMD_NODENAME"] = name
    own, readlink = Path("/proc/self/ns/pid"), Path.readlink
    Path.readlink = lambda path: Path(f"pid:[{name}]") if path == own else readlink(path)
    run_lock.BEAT_S, run_lock.WATCH_S = 0.1, HOST_WATCH_S


def name_probes_alike() -> None:
    """Give temporary files the same names in every start.

    Two starts at the same time would then overwrite each other's files.
    """
    utils.run.preflight.secrets = types.SimpleNamespace(token_hex=lambda _: "same")


def stage_within(memory: Path) -> None:
    """Stage background checkpoints in this folder under a fixed name."""

    def make_directory(prefix: str, dir: Path) -> str:
        directory = Path(dir) / f"{store.STAGED_PREFIX}here"
        directory.mkdir()
        return str(directory)

    store.MEMORY = memory
    atomic_files.tempfile = types.SimpleNamespace(mkdtemp=make_directory)


def stock(argv: list[str], options: dict) -> int:
    """Run plain Trainer as documented: resume from get_last_checkpoint, save the final model.

    ARGV are the workspace and the run directory.
    """
    workspace, run = map(Path, argv)
    settings = {name: options[name] for name in ("max_steps", "save_steps")}
    trainer = stock_trainer.make_trainer(workspace, run, save_total_limit=2, **settings)
    trainer.train(resume_from_checkpoint=get_last_checkpoint(run) if run.is_dir() else None)
    trainer.save_model(str(run / "final"))
    return 0


def prepare(argv: list[str], _options: dict) -> int:
    """Run prepare_data.py in one process, with work units of few documents."""
    work_plan.SMALLEST_UNIT_BYTES = 2000
    return run_script(lambda: prepare_data.main(argv))


PROGRAMS = {"stoker": stoker, "stock": stock, "prepare": prepare}
