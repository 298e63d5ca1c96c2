"""One start of a script in a process of a fork server, which has imported everything already.

What a test needs to count calls of the kernel exactly is changed here: files are hashed in
the main thread, and the lock's heartbeat is slow. It changes no content of any file.
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

import pretrain
import utils.checkpoints.files
import utils.runs.preflight
from utils.checkpoints import discovery as rotation
from utils.checkpoints import staging
from utils.launch.script import run_script
from utils.support import run_lock

HOST_WATCH_S = 3.0  # thirty beats, for a heartbeat may wait for a core

torch.set_num_threads(1)
# Once, for all children.
for name in PRELOADED:
    with contextlib.suppress(ImportError):
        importlib.import_module(name)


class InOneThread(concurrent.futures.Executor):
    """Does the work where it is submitted."""

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
    """Wait for `go`, then run a program to its end and leave with its exit code.

    `step_delay_s` among the options makes its steps long, `die_at` kills it when a step begins.
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
    # As the interpreter ends; a child of multiprocessing leaves this out.
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
    """pretrain.py.

    `staged_within`: what is written in the background is staged in the run directory's folder of
    that name, always the same. `quota_bytes` is all that fits into the run directory. `host` is the
    name of the machine that it takes itself to be on.
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
        rotation.free_bytes = lambda _: options["quota_bytes"] - rotation.taken_bytes(run)
    return run_script(lambda: pretrain.main(argv))


def pretend_host(name: str) -> None:
    """Be on another machine, as far as locks can tell, with a heartbeat that others see."""
    os.environ["SLURMD_NODENAME"] = name
    own, readlink = Path("/proc/self/ns/pid"), Path.readlink
    Path.readlink = lambda path: Path(f"pid:[{name}]") if path == own else readlink(path)
    run_lock.BEAT_S, run_lock.WATCH_S = 0.1, HOST_WATCH_S


def name_probes_alike() -> None:
    """Give files that are there for a moment one name in every start.

    Two starts at once would take each other's for their own.
    """
    utils.runs.preflight.secrets = types.SimpleNamespace(token_hex=lambda _: "same")


def stage_within(memory: Path) -> None:
    """Stage checkpoints here, under one name."""

    def make_directory(prefix: str, dir: Path) -> str:
        directory = Path(dir) / f"{staging.PREFIX}here"
        directory.mkdir()
        return str(directory)

    staging.MEMORY = memory
    staging.tempfile = types.SimpleNamespace(mkdtemp=make_directory)


def stock(argv: list[str], options: dict) -> int:
    """Plain Trainer, as its documentation has it: resume from get_last_checkpoint, save the end.

    ARGV are the workspace and the run directory.
    """
    workspace, run = map(Path, argv)
    settings = {name: options[name] for name in ("max_steps", "save_steps")}
    trainer = stock_trainer.make_trainer(workspace, run, save_total_limit=2, **settings)
    trainer.train(resume_from_checkpoint=get_last_checkpoint(run) if run.is_dir() else None)
    trainer.save_model(str(run / "final"))
    return 0


PROGRAMS = {"stoker": stoker, "stock": stock}
