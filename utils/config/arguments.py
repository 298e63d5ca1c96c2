"""Read `DIR=weight` and `NAME=DIR`, the two ways in which settings name token datasets."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Literal

from trl import ModelConfig

from utils.config.errors import REFUSED_MODEL_SETTINGS

_SPLIT_NAME = re.compile(r"[a-z0-9_]+")


@dataclass(frozen=True)
class TrainSource:
    """A token dataset to train on; its weight is its share of the samples, None without any."""

    directory: str
    weight: float | None = None


def train_sources(entries: Sequence[str]) -> tuple[TrainSource, ...]:
    """Read `DIR` or `DIR=weight` entries; raises ValueError on an entry that is neither."""
    return tuple(map(_train_source, entries))


def eval_splits(entries: Sequence[str]) -> dict[str, str]:
    """Read `NAME=DIR` entries, or `DIR` whose last folder is the name.

    Raises ValueError on an entry that is neither, or a name given twice.
    """
    splits: dict[str, str] = {}
    for entry in entries:
        name, equals, directory = entry.partition("=")
        if not equals:
            name, directory = re.sub(r"[^a-z0-9]+", "_", Path(entry).name.lower()).strip("_"), entry
        if not directory or not _SPLIT_NAME.fullmatch(name):
            raise ValueError(
                f"eval_data {entry!r}: expected NAME=DIR, the name of lower-case letters, digits "
                "and underscores (it becomes the metric eval_NAME_loss)"
            )
        if name in splits:
            raise ValueError(f"eval_data names {name!r} twice: {splits[name]} and {directory}")
        splits[name] = directory
    return splits


def weight_problems(sources: Sequence[TrainSource]) -> list[str]:
    """Say what is wrong with the training datasets taken together."""
    problems = []
    weighted = [source for source in sources if source.weight is not None]
    if weighted and len(weighted) < len(sources):
        bare = ", ".join(source.directory for source in sources if source.weight is None)
        problems.append(
            f"train_data gives weights to some datasets and none to {bare}: weight all or none"
        )
    directories = [source.directory for source in sources]
    for directory in dict.fromkeys(directories):
        if directories.count(directory) > 1:
            problems.append(f"train_data names {directory} twice: give it a weight instead")
    return problems


def _train_source(entry: str) -> TrainSource:
    directory, equals, tail = entry.rpartition("=")
    if not equals or "/" in tail:  # the sign belongs to the path
        return TrainSource(entry)
    try:
        weight = float(tail)
    except ValueError:
        weight = math.nan
    if not directory or not 0 < weight < math.inf:
        raise ValueError(
            f"train_data {entry!r}: expected DIR or DIR=weight, the weight a number above 0"
        )
    return TrainSource(directory, weight)


# What the user may set of data and model in `pretrain.py` and `sft_train.py`.

ATTENTION_IMPLEMENTATIONS = (
    "auto",
    "packed_varlen",
    "sdpa",
    "flash_attention_2",
    "flash_attention_3",
    "flex_attention",
    "eager",
)


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
            "help": "held-out token datasets, NAME=DIR (or DIR, its last folder being the name); "
            "each logs eval_NAME_loss and "
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
            "help": "tokenizer directory; null: the one beside the training data, which it was "
            "made with, else the model's own"
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
    save_dtype: str = field(
        default="auto",
        metadata={
            "help": "type of the weights in final/; auto: that of the model the run began with (a "
            "model from random weights: as trained). Checkpoints are always exact",
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
    compile: bool | None = field(
        default=None,
        metadata={
            "help": "compile the model layer by layer: faster steps after a slow first one; what "
            "was compiled is kept between jobs (TORCHINDUCTOR_CACHE_DIR); null: on where a GPU "
            "trains a dense model"
        },
    )


# What the user may set of a run as a whole: `RunArguments`.


@dataclass
class RunArguments:
    """How the run as a whole is done."""

    _argument_group_name = "run"

    global_batch_size: int = field(
        metadata={
            "help": "sequences per optimizer step over all ranks; gradient accumulation follows "
            "from it, per_device_train_batch_size and the number of ranks"
        }
    )
    dry_run: bool = field(
        default=False,
        metadata={
            "help": "resolve and check the settings, print the arithmetic and the memory "
            "estimate, and stop before weights are loaded"
        },
    )
    hang_timeout_s: float = field(
        default=600,
        metadata={
            "help": "seconds without any progress after which the run ends with exit code 76 and "
            "says which rank stands where; three times that while saving and in the first step; "
            "0: never"
        },
    )
    save_minutes: float | None = field(
        default=30,
        metadata={
            "help": "write a checkpoint also when the last one is that many minutes old; no "
            "candidate for the best one; null or 0: never, as with save_strategy: no"
        },
    )
    save_best: bool = field(
        default=False,
        metadata={
            "help": "write a checkpoint also whenever an evaluation gives a new best of "
            "metric_for_best_model"
        },
    )
    accept_changes: list[str] = field(
        default_factory=list,
        metadata={
            "help": "settings whose other value this run shall go on with, though it makes another "
            "run of it; train_data stands for changed contents too"
        },
    )
    async_save: bool = field(
        default=False,
        metadata={
            "help": "write checkpoints in the background: training waits for the copy to the "
            "node's memory (/dev/shm), not for the storage"
        },
    )
    optim_states: Literal["float32", "bfloat16", "int8"] | None = field(
        default=None,
        metadata={
            "help": "what AdamW keeps its two moments as: 8, 4 or about 2 bytes a parameter, "
            "rounded so that nothing is lost on average; null: as the weights are"
        },
    )
    stochastic_rounding: bool = field(
        default=False,
        metadata={
            "help": "with dtype: bfloat16, round the weights up or down at random after each step: "
            "to the nearest, small updates are lost"
        },
    )
