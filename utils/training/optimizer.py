"""The optimizer of a run, and the optimizer state of an earlier run (--init_optimizer)."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback, TrainerState, TrainingArguments
from typing_extensions import override

from utils.config.arguments import MUON
from utils.config.errors import ConfigurationError
from utils.model.stages import OPTIMIZER
from utils.plan.rehearsal import muon_options
from utils.plan.run_plan import RunPlan
from utils.training.low_precision_adam import FIRST_SCALES, LowPrecisionAdamW
from utils.training.muon import make_muon

logger = logging.getLogger(__name__)


def optimizer_of(
    training: TrainingArguments, plan: RunPlan, decaying: Callable[[Any], list[str]]
) -> tuple[Any, dict[str, Any]] | None:
    """Return Trainer's `optimizer_cls_and_kwargs` for an own optimizer, or None for Trainer's.

    `decaying` returns the names of the weights that decay. On a GPU LowPrecisionAdamW's step is
    compiled if the layers are compiled. On a CPU it is never compiled, because the uncompiled step
    works on chunks that stay in the cache.
    """
    settings: dict[str, Any] = {
        "lr": training.learning_rate,
        "betas": (training.adam_beta1, training.adam_beta2),
        "eps": training.adam_epsilon,
    }
    if training.optim == MUON:
        # Trainer calls the first value without arguments, and the result with the model.
        return lambda: make_muon, settings | {
            "decaying": decaying,
            "weight_decay": training.weight_decay,
            "options": muon_options(training.optim_args),
            "in_bf16": training.mixed_precision == "bf16",
        }
    if plan.optimizer_states is None:
        return None
    return LowPrecisionAdamW, settings | {
        "seed": training.seed,
        "compiled": plan.compiled and training.device.type == "cuda",
        **vars(plan.optimizer_states),
    }


class InheritedOptimizer(TrainerCallback):
    """The moments and step counts of an earlier run's optimizer, loaded before the first step.

    Its schedule is not loaded. `directory` is a checkpoint, and its optimizer.pt is safe to
    unpickle.
    """

    def __init__(self, directory: Path):
        self.path = directory / OPTIMIZER

    @override
    def on_train_begin(self, args: Any, state: TrainerState, *_: Any, **kwargs: Any) -> None:
        optimizer = kwargs["optimizer"]
        saved = torch.load(self.path, map_location="cpu", weights_only=True)
        fresh = optimizer.state_dict()
        if problem := _misfit(saved, fresh, optimizer):
            raise ConfigurationError(f"init_optimizer: {self.path}: {problem}")
        optimizer.load_state_dict({**fresh, "state": saved["state"]})
        line = "optimizer: the state of %d tensors from %s, under this run's own schedule"
        logger.info(line, len(saved["state"]), self.path)


def _misfit(saved: dict[str, Any], fresh: dict[str, Any], optimizer: Any) -> str | None:
    groups = [each["param_groups"] for each in (saved, fresh)]
    keys, own_keys = (set(each[0]) - {"initial_lr"} for each in groups)
    if other := ", ".join(sorted(keys ^ own_keys)):
        return f"it is of another kind of optimizer (they differ in {other}): set the same optim."
    sizes, own_sizes = ([len(group["params"]) for group in each] for each in groups)
    if sizes != own_sizes:
        return f"it is of groups of {sizes} tensors, this run trains groups of {own_sizes}."
    torchs_own = not isinstance(getattr(optimizer, "optimizer", optimizer), LowPrecisionAdamW)
    if torchs_own and any(FIRST_SCALES in values for values in saved["state"].values()):
        return "it keeps Adam's moments in 8 bits: set optim_states, which reads them."
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for index, parameter in enumerate(parameters):
        own = tuple(parameter.shape)
        for key, value in saved["state"].get(index, {}).items():
            found = tuple(getattr(value, "shape", ()))
            if len(found) == len(own) and found != own:
                return f"{key} of tensor {index} is {found}, not {own}: the architectures differ."
    return None
