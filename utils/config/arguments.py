"""What the user may set of run, data and model: each field is a flag and a key of recipes.

The training arguments are in trainer_arguments.py. Also here: what `DIR=weight`, `NAME=DIR` and
`global_batch_size` mean.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from trl import ModelConfig

from utils.config.declarations import setting
from utils.config.errors import ConfigurationError
from utils.config.unknown_names import REFUSED_MODEL_SETTINGS

DTYPES = ("auto", "bfloat16", "float16", "float32")


@dataclass
class RunArguments:
    """How the run as a whole is done."""

    _argument_group_name = "run"

    global_batch_size: int = setting(
        help="sequences per optimizer step over all ranks; gradient accumulation follows from it, "
        "per_device_train_batch_size and the number of ranks"
    )
    dry_run: bool = setting(
        False,
        "resolve and check the settings, print the arithmetic and the memory estimate, and stop "
        "before weights are loaded",
    )
    hang_timeout_s: float = setting(
        600,
        "seconds without any progress after which the run ends with exit code 76 and names the "
        "rank that hangs; three times that while saving and in the first step; 0: never",
    )
    save_minutes: float | None = setting(
        30,
        "write a checkpoint also when the last one is that many minutes old (never a candidate for "
        "the best one); null or 0: never, as with save_strategy: no",
    )
    save_best: bool = setting(
        False,
        "write a checkpoint also whenever an evaluation gives a new best of metric_for_best_model",
    )
    accept_changes: list[str] = setting(
        [],
        "settings with which this run resumes although their new value makes it another run; "
        "train_data stands for changed contents too",
    )
    async_save: bool = setting(
        False,
        "write checkpoints in the background: training waits for the copy to the node's memory "
        "(/dev/shm), not for the storage",
    )
    optim_states: Literal["float32", "bfloat16", "int8"] | None = setting(
        None,
        "type of AdamW's two moments: 8, 4 or about 2 bytes a parameter, rounded so that nothing "
        "is lost on average; null: as the weights are",
    )
    stochastic_rounding: bool = setting(
        False,
        "with dtype: bfloat16, round the weights up or down at random after each step: to the "
        "nearest, small updates are lost",
    )


@dataclass
class DataArguments:
    """The token datasets and how they become sequences."""

    _argument_group_name = "data"

    train_data: list[str] = setting(
        help="token datasets to train on, DIR or DIR=weight (all or none weighted, by share of the "
        "samples)"
    )
    sequence_length: int = setting(help="tokens per packed sequence")
    eval_data: list[str] = setting(
        [],
        "held-out token datasets, NAME=DIR (or DIR, its last folder being the name); each logs "
        "eval_NAME_loss and eval_NAME_perplexity",
    )
    packing: Literal["best_fit", "concat", "none"] = setting(
        "best_fit",
        "how documents fill sequences: best_fit keeps documents whole, concat puts them end to "
        "end, none gives each a sequence of its own",
    )
    on_overlong: Literal["error", "truncate", "drop"] = setting(
        "error",
        "fine-tuning: what to do with a document longer than sequence_length (pretraining splits "
        "it)",
    )
    tokenizer_name_or_path: str | None = setting(
        None,
        "tokenizer directory; null: the one beside the training data, which it was made with, else "
        "the model's own",
    )

    @property
    def train_sources(self) -> "tuple[TrainSource, ...]":
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

    model_name_or_path: str | None = setting(
        None, "model directory or Hub name whose weights to start from"
    )
    model_config: str | None = setting(
        None,
        "JSON or YAML file with a transformers configuration (model_type and the rest): start from "
        "random weights instead of model_name_or_path, or from those of init_from",
    )
    init_from: str | None = setting(
        None,
        "an earlier stage whose weights to start from: the directory of a run, of a checkpoint or "
        "of a model; the architecture is its own, or model_config's",
    )
    init_optimizer: bool = setting(
        False,
        "take over the optimizer's state (Adam's moments and counts) from the checkpoint that "
        "init_from names, under a new schedule",
    )
    dtype: str | None = setting(
        None,
        "type of the weights in memory; null: float32, as stable training needs. Mixed precision "
        "is --bf16",
        choices=DTYPES,
    )
    save_dtype: str = setting(
        "auto",
        "type of the weights in final/; auto: that of the model the run began with (a model from "
        "random weights: as trained). Checkpoints are always exact",
        choices=DTYPES,
    )
    attn_implementation: str | None = setting(
        "auto",
        "attention kernel; auto takes the fastest one here that keeps packed documents apart, and "
        "logs which",
        choices=(
            *("auto", "packed_varlen", "sdpa", "flash_attention_2", "flash_attention_3"),
            *("flex_attention", "eager"),
        ),
    )
    loss_head: str = setting(
        "auto",
        "fused computes the loss some tokens at a time, so that their logits are never all in "
        "memory; auto takes it where a test at the start finds the same loss as of logits",
        choices=("auto", "fused", "logits"),
    )
    compile: bool | None = setting(
        None,
        "compile the model layer by layer: faster steps after a slow first one; later jobs reuse "
        "what was compiled (TORCHINDUCTOR_CACHE_DIR); null: on where a GPU trains a dense model",
    )


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


def accumulation_steps(global_batch_size: int, micro_batch_size: int, world_size: int) -> int:
    """Return the micro-batches that each rank accumulates per optimizer step.

    All three are counts: sequences per optimizer step over all ranks, sequences per rank and
    forward pass, and ranks. Raises ConfigurationError when the global batch does not divide,
    with the nearest ones that do; it is never rounded.
    """
    at_once = micro_batch_size * world_size
    if global_batch_size > 0 and global_batch_size % at_once == 0:
        return global_batch_size // at_once
    below = max(global_batch_size, 0) // at_once * at_once
    nearest = [size for size in (below, below + at_once) if size > 0]
    advice = f"use global_batch_size {' or '.join(map(str, nearest))}"
    if smaller := fitting_micro_batch(global_batch_size, micro_batch_size, world_size):
        advice += f", or per_device_train_batch_size {smaller}"
    ranks = f"{world_size} {'rank' if world_size == 1 else 'ranks'}"
    raise ConfigurationError(
        f"global_batch_size {global_batch_size} does not divide over {ranks} of "
        f"{micro_batch_size} sequences each, which makes {at_once} at once: {advice}"
    )


def batch_arithmetic(
    micro_batch_size: int, sequence_length: int, world_size: int, accumulation: int
) -> str:
    """Write out how many tokens one optimizer step sees."""
    tokens = micro_batch_size * sequence_length * world_size * accumulation
    return (
        f"{micro_batch_size} sequences x {sequence_length:,} tokens x {world_size} "
        f"{'rank' if world_size == 1 else 'ranks'} x {accumulation} accumulation "
        f"= {tokens:,} tokens/step"
    )


def fitting_micro_batch(global_batch_size: int, micro_batch_size: int, world_size: int) -> int:
    """Return the largest micro-batch below the one asked for that divides; 0 if there is none."""
    sizes = range(min(micro_batch_size, global_batch_size // world_size), 0, -1)
    return next((size for size in sizes if global_batch_size % (size * world_size) == 0), 0)
