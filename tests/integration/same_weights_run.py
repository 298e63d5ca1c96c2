"""Runs pretrain.py, and says whether all ranks ended with the same weights to the bit."""

import hashlib
import sys

import torch

import pretrain
from utils.runs import finish
from utils.support.collectives import gathered

finish_run = finish.finish_run


def with_digests(trainer, save_dtype):
    weights = [parameter.detach().flatten() for parameter in trainer.model.parameters()]
    content = torch.cat(weights).view(torch.uint8).numpy().tobytes()
    digests = gathered(hashlib.sha256(content).hexdigest())
    if trainer.is_world_process_zero():
        print(f"{len(set(digests))} different weights on {len(digests)} ranks")
    return finish_run(trainer, save_dtype)


if __name__ == "__main__":
    finish.finish_run = with_digests
    sys.exit(pretrain.main(sys.argv[1:]))
