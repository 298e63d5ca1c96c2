"""`pretrain.py` with trouble in one rank while it fetches a batch: STOKER_TEST_TROUBLE=KIND:RANK:N.

sleep, stop (SIGSTOP), kill, raise and part (the rank calls a collective that the other ranks do not
call) happen at the Nth batch of that rank. full: the disk is full during a save. slow: the rank is
late with N batches, then slow in N forward passes, then as fast as the others.
"""

import errno
import os
import signal
import sys
import time

import pretrain
from utils.launch.script import run_script

KIND, RANK, COUNT = os.environ["STOKER_TEST_TROUBLE"].split(":")
DELAY_S = 0.8  # delay of a slow rank


def sleep_a_while() -> None:
    time.sleep(600)


def part() -> None:
    import torch

    torch.distributed.broadcast(torch.zeros(7), src=0)


def fail() -> None:
    raise RuntimeError("the batch is spoilt")


def trouble_batches() -> None:
    from utils.data.loader import PackedDataset

    get, batches = PackedDataset.__getitems__, 0

    def get_or_not(self, rows):
        nonlocal batches
        batches += 1
        if batches == int(COUNT):
            if KIND == "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            if KIND == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            {"sleep": sleep_a_while, "part": part}.get(KIND, fail)()
        return get(self, rows)

    PackedDataset.__getitems__ = get_or_not


def be_slow() -> None:
    from transformers.models.llama import modeling_llama

    from utils.data.loader import PackedDataset

    get, forward, batches = PackedDataset.__getitems__, modeling_llama.LlamaModel.forward, 0

    def get_late(self, rows):
        nonlocal batches
        batches += 1
        time.sleep(DELAY_S if batches <= int(COUNT) else 0)
        return get(self, rows)

    def forward_slowly(self, *args, **kwargs):
        time.sleep(DELAY_S if int(COUNT) < batches <= 2 * int(COUNT) else 0)
        return forward(self, *args, **kwargs)

    PackedDataset.__getitems__ = get_late
    modeling_llama.LlamaModel.forward = forward_slowly


def trouble_saves() -> None:
    from transformers import Trainer

    def save(self, *args, **kwargs):
        output_dir = self.args.output_dir
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), f"{output_dir}/checkpoint-3/x")

    Trainer._save_optimizer_and_scheduler = save


def main() -> int | None:
    from utils.callbacks import watchdog

    # On a busy machine a rank needs longer than usual to write its part of hang.txt.
    watchdog.OTHERS_LIMIT_S, watchdog.LAST_WORDS_LIMIT_S = 10.0, 600.0
    if os.environ.get("RANK", "0") == RANK:
        {"full": trouble_saves, "slow": be_slow}.get(KIND, trouble_batches)()
    return pretrain.main()


sys.exit(run_script(main))
