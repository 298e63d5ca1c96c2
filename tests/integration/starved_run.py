"""`pretrain.py` that runs out of host memory: a real limit and a real failed allocation.

STOKER_TEST_STARVE is PHASE:RANK:STEP. train:0:3: rank 0 runs out while the third step computes.
eval:1:0 and save:0:3: the rank runs out in the evaluation or save after this many steps.
"""

import os
import resource
import sys

import psutil
import torch

import pretrain
from utils.launch.script import run_script

ROOM = 256 << 20  # bytes left for the out-of-memory page and its predictions
LARGE = 4 << 30


def starve() -> None:
    limit = psutil.Process().memory_info().vms + ROOM
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def main() -> int | None:
    from transformers import Trainer
    from transformers.models.llama import modeling_llama

    phase, rank, step = os.environ["STOKER_TEST_STARVE"].split(":")
    mine = os.environ.get("RANK", "0") == rank
    trainers: list[Trainer] = []
    initialize, forward, save = (
        Trainer.__init__, modeling_llama.LlamaMLP.forward, torch.save,
    )  # fmt: skip

    def remember(trainer, *args, **kwargs):
        initialize(trainer, *args, **kwargs)
        trainers.append(trainer)

    def is_due(now: str) -> bool:
        done = trainers[0].state.global_step + (now == "train") if trainers else -1
        starved = resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY
        return mine and now == phase and done == int(step) and not starved

    def run_out(layer, states):
        if is_due("train" if layer.training else "eval"):
            starve()
            widened = states.new_empty(LARGE // 4)
            states = states + widened[0]
        return forward(layer, states)

    def save_nothing(*args, **kwargs):
        if is_due("save"):
            starve()
            bytearray(LARGE)
        return save(*args, **kwargs)

    Trainer.__init__, modeling_llama.LlamaMLP.forward = remember, run_out
    torch.save = save_nothing
    return pretrain.main()


if __name__ == "__main__":
    sys.exit(run_script(main))
