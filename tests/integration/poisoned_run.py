"""`pretrain.py` on data with one document that spoils the loss or gradient of its micro-batch.

STOKER_TEST_POISON is nan, inf_loss (the gradient stays finite) or inf_gradient (the loss stays
finite). Only that document has token 0.
"""

import math
import os
import sys

import torch

import pretrain
from utils.launch.script import run_script

POISON = 0


def spoilt(loss: torch.Tensor, kind: str) -> torch.Tensor:
    if kind == "nan":
        return loss * math.nan
    if kind == "inf_loss":
        return loss + math.inf
    assert kind == "inf_gradient"
    loss = loss * 1.0
    loss.register_hook(lambda gradient: gradient * math.inf)
    return loss


def compute_loss_poisoned(real, kind):
    def compute_loss(trainer, model, inputs, *args, **kwargs):
        found = (inputs["input_ids"] == POISON).any()
        result = real(trainer, model, inputs, *args, **kwargs)
        if not found:
            return result
        if isinstance(result, tuple):
            return spoilt(result[0], kind), *result[1:]
        return spoilt(result, kind)

    return compute_loss


def main() -> int | None:
    from transformers import Trainer

    kind = os.environ["STOKER_TEST_POISON"]
    Trainer.compute_loss = compute_loss_poisoned(Trainer.compute_loss, kind)
    return pretrain.main()


if __name__ == "__main__":
    sys.exit(run_script(main))
