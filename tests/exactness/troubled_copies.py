"""`pretrain.py` with trouble in a background copy: STOKER_TEST_COPY=KIND:RANK:STEP.

After RANK has copied a part of the checkpoint of STEP, KIND happens: kill (the rank is killed),
worker (its data workers are killed, and it goes on once it has noticed that), full (its disk is
full) or none. STOKER_TEST_MEMORY is the staging directory. In the usual staging
directory another run on this host would remove the leftovers of a killed run.
"""

import errno
import multiprocessing
import os
import shutil
import signal
import sys
import threading
from pathlib import Path

import pretrain
from utils.checkpoints import store
from utils.launch.script import run_script

kind, rank, step = os.environ["STOKER_TEST_COPY"].split(":")
copyfile = shutil.copyfile
waiting = threading.Event()
finish = store.Checkpoints.finish


def noticed(checkpoints):
    """Note that training has ended and waits for the copy."""
    if checkpoints.writing and isinstance(sys.exception(), RuntimeError):
        waiting.set()
    finish(checkpoints)


def troubled(source, target):
    copyfile(source, target)
    if f"checkpoint-{step}" in Path(target).parts:
        if kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if kind == "worker":
            for worker in multiprocessing.active_children():
                worker.kill()
            assert waiting.wait(600), "training goes on without its workers"
            return
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(target))


if __name__ == "__main__":
    store.MEMORY = Path(os.environ["STOKER_TEST_MEMORY"])
    if os.environ["RANK"] == rank and kind != "none":
        shutil.copyfile = troubled
        store.Checkpoints.finish = noticed
    sys.exit(run_script(pretrain.main))
