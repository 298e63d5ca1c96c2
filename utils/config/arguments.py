"""What the user may set in `pretrain.py` and `sft_train.py`: our settings, and changed defaults."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Self

from transformers import TrainingArguments
from trl import ModelConfig, SFTConfig

from utils.config.checks.devices import missing_devices
from utils.config.cpu_precision import settled_precision
from utils.config.data_sources import TrainSource, eval_splits, train_sources
from utils.config.errors import UnfitClusterError
from utils.config.planned_launch import alone
from utils.config.reading.settings import SettingValues
from utils.config.refusals import (
    REFUSED_FINE_TUNING_SETTINGS,
    REFUSED_MODEL_SETTINGS,
    REFUSED_TRAINING_SETTINGS,
)

ATTENTION_IMPLEMENTATIONS = (
    "auto",
    "packed_varlen",
    "sdpa",
    "flash_attention_2",
    "flash_attention_3",
    "flex_attention",
    "eager",
)


# What is computed again in the backward pass instead of kept; true is full, false none.
CHECKPOINTING = ("none", "selective", "full", "auto")


@dataclass
class DataArguments:
    """The token datasets and how they become sequences."""

    _argument_group_name = "data"

    train_data: list[str] = field(
        metadata={
            "help": "token datasets to train on, DIR or DIR=weight (all or none weighted, by "
            "share of the samples)"
        }
    )
    sequence_length: int = field(metadata={"help": "tokens per packed sequence"})
    eval_data: list[str] = field(
        default_factory=list,
        metadata={
            "help": "held-out token datasets, NAME=DIR; each logs eval_NAME_loss and "
            "eval_NAME_perplexity"
        },
    )
    packing: Literal["best_fit", "concat", "none"] = field(
        default="best_fit",
        metadata={
            "help": "how documents fill sequences: best_fit keeps documents whole, concat puts "
            "them end to end, none gives each a sequence of its own"
        },
    )
    on_overlong: Literal["error", "truncate", "drop"] = field(
        default="error",
        metadata={
            "help": "fine-tuning: what to do with a document longer than sequence_length "
            "(pretraining splits it)"
        },
    )
    tokenizer_name_or_path: str | None = field(
        default=None,
        metadata={
            "help": "tokenizer directory; null: the model's own, or the one beside the training "
            "data for a model from scratch"
        },
    )

    @property
    def train_sources(self) -> tuple[TrainSource, ...]:
        """The training datasets with their weights."""
        return train_sources(self.train_data)

    @property
    def eval_splits(self) -> dict[str, str]:
        """The directory of each evaluation split, by name."""
        return eval_splits(self.eval_data)


@dataclass
class ModelArguments(ModelConfig):
    """TRL's names for models and LoRA; from scratch with `model_config`."""

    _argument_group_name = "model"
    refused_settings: ClassVar[Mapping[str, str]] = REFUSED_MODEL_SETTINGS

    model_name_or_path: str | None = field(
        default=None,
        metadata={"help": "model directory or Hub name whose weights to start from"},
    )
    model_config: str | None = field(
        default=None,
        metadata={
            "help": "JSON or YAML file with a transformers configuration (model_type and the "
            "rest): start from random weights instead of model_name_or_path, or from those of "
            "init_from"
        },
    )
    init_from: str | None = field(
        default=None,
        metadata={
            "help": "an earlier stage whose weights to start from: the directory of a run, of a "
            "checkpoint or of a model; the architecture is its own, or model_config's"
        },
    )
    init_optimizer: bool = field(
        default=False,
        metadata={
            "help": "take the optimizer's state (Adam's moments and counts) over from the "
            "checkpoint that init_from names, under a new schedule"
        },
    )
    dtype: str | None = field(
        default=None,
        metadata={
            "help": "type of the weights in memory; null: float32, as stable training needs. "
            "Mixed precision is --bf16",
            "choices": ["auto", "bfloat16", "float16", "float32"],
        },
    )
    attn_implementation: str | None = field(
        default="auto",
        metadata={
            "help": "attention kernel; auto takes the fastest one here that keeps packed "
            "documents apart, and says which",
            "choices": ATTENTION_IMPLEMENTATIONS,
        },
    )
    loss_head: str = field(
        default="auto",
        metadata={
            "help": "fused computes the loss some tokens at a time, so that their logits are never "
            "all in memory; auto takes it where it is proved to compute the same as logits",
            "choices": ["auto", "fused", "logits"],
        },
    )
    compile: bool = field(
        default=False,
        metadata={
            "help": "compile the model layer by layer: faster steps after a slow first one; what "
            "was compiled is kept between jobs (TORCHINDUCTOR_CACHE_DIR)"
        },
    )


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
    # AMX multiplies bf16 several times as fast; elsewhere it is slower on a CPU, and on a GPU the
    # user's decision. SFTConfig would turn it on wherever it is not said.
    bf16: bool | None = field(
        default=None,
        metadata={
            "help": "bfloat16 mixed precision instead of float32; null: on where a CPU with AMX "
            "trains weights in float32, off elsewhere"
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

    @classmethod
    def settled_by_machine(cls, values: SettingValues) -> dict[str, tuple[Any, str]]:
        """Return the settings left open that this machine decides, each with why."""
        return settled_precision(values, os.environ)

    @classmethod
    def from_settings(cls, given: Mapping[str, Any], values: SettingValues) -> Self:
        """Build it; a dry run on a machine without accelerator is built for the CPU.

        That is how a recipe for bf16 on GPUs is checked on a login node. Raises UnfitClusterError
        for a process without a device, before building it takes that device.
        """
        import torch

        given = dict(given)
        if torch.cuda.is_available() and not (values["dry_run"] or values["use_cpu"]):
            problem = missing_devices(os.environ, torch.cuda.device_count())
            if problem:
                raise UnfitClusterError(problem)
        if not values["dry_run"]:
            return cls(**given)
        if not torch.accelerator.is_available():
            given |= {"use_cpu": True, "tf32": None}
        with alone():  # the processes that WORLD_SIZE stands for are not there to be met
            return cls(**given)

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
