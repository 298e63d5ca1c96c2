"""What the user may set of training: the libraries' settings, with other defaults."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

from transformers import TrainingArguments
from trl import SFTConfig

from utils.config.batch import alone
from utils.config.checks import missing_devices
from utils.config.declarations import SettingValues
from utils.config.errors import (
    REFUSED_FINE_TUNING_SETTINGS,
    REFUSED_TRAINING_SETTINGS,
    UnfitClusterError,
)
from utils.config.precision import decided_precision

# What is computed again in the backward pass instead of kept; true is full, false none.
CHECKPOINTING = ("none", "selective", "full", "auto")


@dataclass
class _ChangedDefaults:
    """The defaults of TrainingArguments that do not suit a run nobody watches, each with why."""

    # The filter hides NaN and waits for the device twice in every micro-batch.
    logging_nan_inf_filter: bool = field(
        default=False, metadata={"help": "leave NaN and infinite losses out of the logged mean"}
    )
    # 500 steps may be a night; TRL's 10 for both scripts.
    logging_steps: float = field(
        default=10,
        metadata={"help": "optimizer steps between two logs; below 1 a share of all steps"},
    )
    # With several nodes the same line would be logged once per node.
    log_on_each_node: bool = field(
        default=False, metadata={"help": "log on the first rank of every node, not of all nodes"}
    )
    # Optimizer states of a long run fill a quota; the best checkpoint is always kept.
    save_total_limit: int | None = field(
        default=3, metadata={"help": "newest checkpoints to keep; null: all"}
    )
    # Looking for unused parameters walks the graph at every step, and dense models have none.
    ddp_find_unused_parameters: bool | None = field(
        default=False,
        metadata={"help": "let DDP look for parameters without gradient (conditional layers)"},
    )
    # Some CPUs multiply bf16 several times as fast; on others it is slower, and on a GPU it is the
    # user's decision. SFTConfig would turn it on wherever it is not said.
    bf16: bool | None = field(
        default=None,
        metadata={
            "help": "bfloat16 mixed precision instead of float32; null: on where a CPU with AMX or "
            "AVX512-BF16 trains weights in float32, off elsewhere"
        },
    )
    # transformers knows full alone. What the plan makes of "auto" is a boolean again for Trainer.
    activation_checkpointing: bool | str | None = field(
        default=None,
        metadata={
            "help": "what the backward pass computes again to save memory: none (the default), "
            "selective (norms, activation functions and casts; products and attention are kept), "
            "full (whole layers), or auto: as little of it as the device's memory allows",
            "choices": (*CHECKPOINTING, True, False),
            "nargs": "?",
            "const": True,
        },
    )
    # Batches have no columns besides the model's inputs.
    remove_unused_columns: bool = False
    # Evaluation only sums losses: logits of a 128k vocabulary must not be gathered.
    prediction_loss_only: bool = True

    def _name_checkpointing(self) -> None:
        """Turn the two words that transformers has as booleans into them."""
        known = {"none": False, "full": True}
        if isinstance(self.activation_checkpointing, str):
            word = self.activation_checkpointing
            self.activation_checkpointing = known.get(word, word)

    def _settle(self, device_type: str) -> None:
        if device_type == "cpu":
            self.dataloader_pin_memory = False  # nothing to copy to; torch would only warn


@dataclass
class PretrainConfig(_ChangedDefaults, TrainingArguments):  # type: ignore[misc] # a wider type
    """transformers' TrainingArguments with the defaults above."""

    _argument_group_name = "training (transformers.TrainingArguments)"
    refused_settings: ClassVar[Mapping[str, str]] = REFUSED_TRAINING_SETTINGS

    def __post_init__(self) -> None:
        self._name_checkpointing()
        TrainingArguments.__post_init__(self)
        self._settle(self.device.type)


@dataclass
class FineTuneConfig(_ChangedDefaults, SFTConfig):  # type: ignore[misc] # a wider type
    """TRL's SFTConfig with the defaults above, for data that is tokenized and packed already."""

    _argument_group_name = "training (trl.SFTConfig)"
    refused_settings: ClassVar[Mapping[str, str]] = REFUSED_FINE_TUNING_SETTINGS

    # TRL trades 20 % of the speed for memory unasked. Deprecated alias of activation_checkpointing.
    gradient_checkpointing: bool | None = field(  # type: ignore[assignment] # as transformers has it
        default=None, metadata={"help": "deprecated alias of activation_checkpointing"}
    )
    # TRL would truncate silently at 1024 tokens and run map and filter over the packed rows.
    max_length: int | None = None
    dataset_kwargs: dict[str, Any] | str | None = field(
        default_factory=lambda: {"skip_prepare_dataset": True}
    )

    def __post_init__(self) -> None:
        self._name_checkpointing()
        SFTConfig.__post_init__(self)
        self._settle(self.device.type)


TrainingClass = TypeVar("TrainingClass", PretrainConfig, FineTuneConfig)


def training_arguments(training_class: type[TrainingClass], values: SettingValues) -> TrainingClass:
    """Build them; a dry run on a machine without accelerator is built for the CPU.

    That is how a recipe for bf16 on GPUs is checked on a login node. Raises UnfitClusterError
    for a process without a device, before building it takes that device.
    """
    import torch

    if values["dry_run"]:
        elsewhere = not torch.accelerator.is_available()
        with decided_precision(), alone():  # no process of the WORLD_SIZE it plans for is there
            return values.build(
                training_class, **({"use_cpu": True, "tf32": None} if elsewhere else {})
            )
    if torch.cuda.is_available() and not values["use_cpu"]:
        problem = missing_devices(os.environ, torch.cuda.device_count())
        if problem:
            raise UnfitClusterError(problem)
    with decided_precision():
        return values.build(training_class)
