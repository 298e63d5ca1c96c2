"""`pretrain.py` with trouble in one rank while it fetches a batch: STOKER_TEST_TROUBLE=KIND:RANK:N.

sleep, stop (SIGSTOP), kill and raise come at the Nth batch of that rank; full is a disk without
room, met while saving.
"""

import errno
import os
import signal
import sys
import time

import pretrain
from utils.launch.script import run_script

KIND, RANK, COUNT = os.environ["STOKER_TEST_TROUBLE"].split(":")


def sleep_a_while() -> None:
    time.sleep(600)


def fail() -> None:
    raise RuntimeError("the batch is spoilt")


def trouble_batches() -> None:
    from utils.data.loader import PackedDataset

    get, batches = PackedDataset.__getitems__, 0

    def get_or_not(self, rows):
        nonlocal batches
        batches += 1
        if batches == int(COUNT):
            sys.stdout.write(f"trouble {time.time()}\n")  # in one write: ranks print at once
            sys.stdout.flush()
            if KIND == "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            if KIND == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            sleep_a_while() if KIND == "sleep" else fail()
        return get(self, rows)

    PackedDataset.__getitems__ = get_or_not


def trouble_saves() -> None:
    from transformers import Trainer

    def save(self, *args, **kwargs):
        output_dir = self.args.output_dir
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), f"{output_dir}/checkpoint-3/x")

    Trainer._save_optimizer_and_scheduler = save


def main() -> int | None:
    if os.environ.get("RANK", "0") == RANK:
        trouble_saves() if KIND == "full" else trouble_batches()
    return pretrain.main()


sys.exit(run_script(main))
