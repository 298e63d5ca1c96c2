"""Lets torch build nothing but known classes from any file, whichever library loads it.

DeepSpeed and torch.distributed.checkpoint ask torch to unpickle without a guard
(weights_only=False); torch has a variable that overrules them. What it cannot reach, the metadata
of sharded checkpoints, utils/checkpoints/pickles.py reads first.
"""

import logging
import os

import torch

logger = logging.getLogger(__name__)

FORCE = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
FORBID = "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"


def guard_loading(strategy: str) -> None:
    """Overrule weights_only=False in this process, for good."""
    if os.environ.pop(FORBID, None):
        logger.warning("%s is ignored: files are loaded with weights_only=True alone", FORBID)
    os.environ[FORCE] = "1"
    if strategy.startswith("zero"):
        _know_the_state_of_deepspeed()


def _know_the_state_of_deepspeed() -> None:
    """Name the classes in DeepSpeed's checkpoints that hold values and do nothing."""
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    torch.serialization.add_safe_globals(
        [DynamicLossScaler, LossScaler, ZeroStageEnum, fragment_address]
    )
