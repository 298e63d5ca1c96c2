"""What the user may set of training: the libraries' settings, with other defaults."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

from accelerate.utils.environment import str_to_bool
from transformers import TrainingArguments
from trl import SFTConfig

from utils.config.declarations import SettingValues, setting
from utils.config.errors import UnfitClusterError
from utils.config.precision import without_launch
from utils.config.unknown_names import REFUSED_FINE_TUNING_SETTINGS, REFUSED_TRAINING_SETTINGS


@dataclass
class _ChangedDefaults:
    """The defaults of TrainingArguments that do not suit a run nobody watches, each with why."""

    # The filter hides NaN and waits for the device twice in every micro-batch.
    logging_nan_inf_filter: bool = setting(
        False, "leave NaN and infinite losses out of the logged mean"
    )
    # 500 steps may be a night; TRL's 10 for both scripts.
    logging_steps: float = setting(
        10, "optimizer steps between two logs; below 1 a share of all steps"
    )
    # With several nodes the same line would be logged once per node.
    log_on_each_node: bool = setting(False, "log on the first rank of every node, not of all nodes")
    # Optimizer states of a long run fill a quota; the best checkpoint is always kept.
    save_total_limit: int | None = setting(3, "newest checkpoints to keep; null: all")
    # Looking for unused parameters walks the graph at every step, and dense models have none.
    ddp_find_unused_parameters: bool | None = setting(
        False, "let DDP look for parameters without gradient (conditional layers)"
    )
    # Some CPUs multiply bf16 several times as fast; on others it is slower, and on a GPU it is the
    # user's decision. SFTConfig would turn it on wherever it is not set.
    bf16: bool | None = setting(
        None,
        "bfloat16 mixed precision instead of float32; null: on where a CPU with AMX or AVX512-BF16 "
        "trains weights in float32, off elsewhere",
    )
    # transformers knows full alone. What the plan makes of "auto" is a boolean again for Trainer.
    activation_checkpointing: bool | str | None = setting(
        None,
        "what the backward pass computes again to save memory: none (the default), selective "
        "(norms, activation functions and casts; products and attention are kept), full (whole "
        "layers), or auto: as little of it as the device's memory allows",
        choices=("none", "selective", "full", "auto", True, False),
    )
    # Batches have no columns besides the model's inputs.
    remove_unused_columns: bool = False
    # Evaluation only sums losses: logits of a 128k vocabulary must not be gathered.
    prediction_loss_only: bool = True

    def __post_init__(self) -> None:
        as_boolean = {"none": False, "full": True}  # as transformers writes these two
        if isinstance(self.activation_checkpointing, str):
            word = self.activation_checkpointing
            self.activation_checkpointing = as_boolean.get(word, word)
        super().__post_init__()  # type: ignore[misc] # the libraries' class comes after this one
        if self.device.type == "cpu":  # type: ignore[attr-defined]
            self.dataloader_pin_memory = False  # nothing to copy to; torch would only warn


@dataclass
class PretrainConfig(_ChangedDefaults, TrainingArguments):  # type: ignore[misc] # a wider type
    """transformers' TrainingArguments with the defaults above."""

    _argument_group_name = "training (transformers.TrainingArguments)"
    refused_settings: ClassVar[Mapping[str, str]] = REFUSED_TRAINING_SETTINGS


@dataclass
class FineTuneConfig(_ChangedDefaults, SFTConfig):  # type: ignore[misc] # a wider type
    """TRL's SFTConfig with the defaults above, for data that is tokenized and packed already."""

    _argument_group_name = "training (trl.SFTConfig)"
    refused_settings: ClassVar[Mapping[str, str]] = REFUSED_FINE_TUNING_SETTINGS

    # TRL would turn it on, which costs 20 % of the speed.
    gradient_checkpointing: bool | None = setting(  # type: ignore[assignment] # as transformers'
        None, "deprecated: use activation_checkpointing"
    )
    # TRL would truncate silently at 1024 tokens and run map and filter over the packed sequences.
    max_length: int | None = None
    dataset_kwargs: dict[str, Any] | str | None = field(
        default_factory=lambda: {"skip_prepare_dataset": True}
    )


TrainingClass = TypeVar("TrainingClass", PretrainConfig, FineTuneConfig)


def training_arguments(training_class: type[TrainingClass], values: SettingValues) -> TrainingClass:
    """Build them; a dry run on a machine without accelerator is built for the CPU.

    That is how a recipe for bf16 on GPUs is checked on a login node. Raises UnfitClusterError
    for a process without a device, before building it takes that device.
    """
    import torch

    instead: dict[str, Any] = {}
    if values["dry_run"] and not torch.accelerator.is_available():
        instead = {"use_cpu": True, "tf32": None}
    elif torch.cuda.is_available() and not (values["dry_run"] or values["use_cpu"]):
        problem = missing_devices(os.environ, torch.cuda.device_count())
        if problem:
            raise UnfitClusterError(problem)
    with without_launch(is_dry_run=values["dry_run"]):
        return values.build(training_class, **instead)


def missing_devices(environment: Mapping[str, str], visible_gpus: int) -> str | None:
    """Say that there are more processes on this host than GPUs to give them; None if not.

    torchrun starts all processes of a host with the same GPUs in sight: all of them refuse. Tasks
    that srun started may each see a GPU of their own, which is all that such a task can look for.
    """
    if str_to_bool(environment.get("ACCELERATE_USE_CPU", "0")):
        return None
    processes = int(environment.get("LOCAL_WORLD_SIZE", "1"))
    local_rank = int(environment.get("LOCAL_RANK", "0"))
    needed = processes if "TORCHELASTIC_RUN_ID" in environment else local_rank + 1
    if needed <= visible_gpus:
        return None
    visible = environment.get("CUDA_VISIBLE_DEVICES", "not set")
    return (
        f"this host has {processes} processes (this is local rank {local_rank}), but torch sees "
        f"{visible_gpus} GPU(s) (CUDA_VISIBLE_DEVICES: {visible}): start as many processes as GPUs "
        "(--num_processes over all nodes), or ask Slurm for as many GPUs (--gpus-per-node)."
    )
