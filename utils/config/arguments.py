"""The settings of a training run. Each field is a flag and a recipe key. help.yaml has the help.

The functions at the end parse values such as `DIR=weight`, `NAME=DIR`, `50B` and `10:13`.
"""

import copy
import math
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import TrainingArguments
from transformers.training_args import OptimizerNames
from trl import ModelConfig, SFTConfig

from utils.config.declarations import Arguments, counted_ranks, setting, shown
from utils.config.errors import ConfigurationError
from utils.config.preparation import RawDataArguments
from utils.host.redaction import redact, redacted

DTYPES = ("auto", "bfloat16", "float16", "float32")
ATTENTION = (
    *("auto", "packed_varlen", "sdpa", "flash_attention_2", "flash_attention_3", "cudnn"),
    *("flex_attention", "eager"),
)
MUON = "muon"  # transformers has no optimizer of this name
OPTIMIZERS = (*(each.value for each in OptimizerNames), MUON)
CHECKPOINTING = ("none", "selective", "full", "auto", True, False)


@dataclass(frozen=True)
class RunArguments:
    """Settings of the run as a whole: its length, launch, saves and checks."""

    global_batch_size: int = setting(None, also=dict)
    batch_warmup: dict[str, int] | None = None
    max_tokens: float | str | None = None
    dry_run: bool = False
    strategy: str = "auto"
    dp_shard: int | None = None
    context_parallel: int = 1
    assume: str | None = None
    suggest: bool = False
    hang_timeout_s: float = 600
    restarts_in_job: int = 3
    max_gpu_hours: float | None = None
    verify_resume_steps: int = 2
    on_spike: str = setting("none", choices=("none", "stop"))
    save_minutes: float | None = 30
    save_best: bool = False
    early_stopping_patience: int | None = None
    early_stopping_threshold: float = 0.0
    ema_decay: float | None = None
    sample_prompts: list[str] = setting([])
    profile_steps: str | None = None
    sample_max_new_tokens: int = 64
    accept_changes: list[str] = setting([])
    async_save: bool = False
    stage_data: bool | str = False
    lm_eval_tasks: list[str] = setting([])
    optim_states: str | None = setting(None, choices=("float32", "bfloat16", "int8"))
    stochastic_rounding: bool = False
    ddp_comm_hook: str | None = setting(None, choices=("bf16",))


@dataclass(frozen=True)
class DataArguments(RawDataArguments):
    """Settings of the token datasets, and of the sequences made of them."""

    train_data: list[str]
    sequence_length: int = setting(None)
    eval_data: list[str] = setting([])
    max_eval_sequences: int | None = None
    packing: str = setting("best_fit", choices=("best_fit", "in_order", "concat", "none"))
    order: str = setting("shuffled", choices=("shuffled", "sequential"))
    on_overlong: str = setting("error", choices=("error", "truncate", "drop"))
    skip_documents: str | None = None
    tokenizer_name_or_path: str | None = None


@dataclass
class ModelArguments(ModelConfig):
    """Settings of the model and LoRA, with the names of trl.ModelConfig."""

    model_name_or_path: str | None = None
    model_config: str | None = None
    model_config_overrides: dict[str, Any] | None = None
    init_from: str | None = None
    init_optimizer: bool = False
    freeze: list[str] = setting([])
    train_only: list[str] = setting([])
    pad_embeddings_to_multiple_of: int | None = None
    dtype: str | None = setting(None, choices=DTYPES)
    save_dtype: str = setting("auto", choices=DTYPES)
    attn_implementation: str | None = setting("auto", choices=ATTENTION)
    loss_head: str = setting("auto", choices=("auto", "fused", "logits"))
    compile: bool | None = None
    fp8: bool | str = setting(False, choices=(False, True, "tensorwise"))


@dataclass
class _ChangedDefaults:
    """Settings of TrainingArguments with other defaults, for unattended runs. Comments say why."""

    # The filter would hide NaN and wait for the device twice in every micro-batch.
    logging_nan_inf_filter: bool = False
    # transformers' default, 500 steps, may take a night: both scripts have TRL's default, 10.
    logging_steps: float = 10
    # With several nodes the same line would be logged once per node.
    log_on_each_node: bool = False
    # Checkpoints of a long run would fill a quota. The best checkpoint is always kept.
    save_total_limit: int | None = 3
    # The search for unused parameters costs time at every step. Dense models use all parameters.
    ddp_find_unused_parameters: bool | None = False
    # SFTConfig would turn bf16 on by default, even on an old GPU or a slow CPU.
    bf16: bool | None = None
    # transformers' choices, and muon.
    optim: str = setting(TrainingArguments.default_optim, choices=OPTIMIZERS)
    # transformers has true (here: full) or false: RunPlan.training_arguments passes a boolean.
    activation_checkpointing: bool | str | None = setting(None, choices=CHECKPOINTING)
    resume_from_checkpoint: str | bool | None = None
    push_to_hub: bool = False
    hub_model_id: str | None = None
    # The Hub's own default is public.
    hub_private_repo: bool | None = True
    # Batches have no columns besides the model's inputs.
    remove_unused_columns: bool = False
    dataloader_num_workers: int | None = None
    # Our HangWatch acts before torch if hang_timeout_s is at most 2000, and reports more.
    ddp_timeout: int = 7200
    # Evaluation only sums losses: logits of a 128k vocabulary must not be gathered.
    prediction_loss_only: bool = True

    def __post_init__(self) -> None:
        as_boolean = {"none": False, "full": True}  # transformers' values of these two
        if isinstance(self.activation_checkpointing, str):
            word = self.activation_checkpointing
            self.activation_checkpointing = as_boolean.get(word, word)
        own = self.optim if self.optim == MUON else None
        if own:
            self.optim = TrainingArguments.default_optim
        super().__post_init__()  # type: ignore[misc] # the libraries' class comes after this one
        self.optim = own or self.optim
        if self.device.type == "cpu":  # type: ignore[attr-defined]
            self.dataloader_pin_memory = False  # there is no GPU to copy to

    def to_dict(self) -> dict[str, Any]:
        """Return {name: value} of the settings, without secrets, for trackers such as wandb."""
        return redacted(super().to_dict())  # type: ignore[misc]


@dataclass
class PretrainConfig(_ChangedDefaults, TrainingArguments):  # type: ignore[misc] # a wider type
    """Settings of transformers.TrainingArguments, some of them with other defaults."""


@dataclass
class FineTuneConfig(_ChangedDefaults, SFTConfig):  # type: ignore[misc] # a wider type
    """Settings of trl.SFTConfig, with defaults for data that is already tokenized and packed."""

    # TRL would turn activation checkpointing on, which costs 20 % of the speed.
    gradient_checkpointing: bool | None = None  # type: ignore[assignment] # as transformers'
    # TRL would truncate silently at 1024 tokens and run map and filter over the packed sequences.
    max_length: int | None = None
    dataset_kwargs: dict[str, Any] | str | None = field(
        default_factory=lambda: {"skip_prepare_dataset": True}
    )


def with_values(arguments: Arguments, **values: Any) -> Arguments:
    """Return a copy with `values` changed. Skips `__post_init__`, which would set up devices."""
    copied = copy.copy(arguments)
    vars(copied).update(values)
    return copied


def token_count(written: float | str) -> int:
    """Parse a number of tokens: 50e9, "50e9" or "50B". Raise ValueError for any other form.

    >>> token_count("1.5B"), token_count("500 M"), token_count(50e9)
    (1500000000, 500000000, 50000000000)
    """
    number, powers = str(written).strip(), "KMBT"
    unit = number[-1:].upper()
    with suppress(ValueError, OverflowError):
        tokens = float(number[:-1] if unit and unit in powers else number)
        if (count := round(tokens * 1000 ** (powers.find(unit) + 1 if unit else 0))) > 0:
            return count
    raise ValueError(
        f"max_tokens {shown(written)}: expected a number of tokens above 0, such as 500M, 50B, 50e9"
    )


def profiled_steps(written: str) -> tuple[int, int]:
    """Parse `FIRST:STOP` or `FIRST` to (first step, step after the last one). Raises ValueError.

    >>> profiled_steps("10:13"), profiled_steps("10")
    ((10, 13), (10, 11))
    """
    first, colon, stop = written.partition(":")
    with suppress(ValueError):
        steps = int(first), int(stop) if colon else int(first) + 1
        if 0 < steps[0] < steps[1]:
            return steps
    raise ValueError(
        f"profile_steps {written}: expected FIRST:STOP, as 10:13 for the steps 10, 11 and 12; the "
        "first step is 1"
    )


def train_sources(entries: Sequence[str]) -> dict[str, float | None]:
    """Parse entries `DIR=weight` or `DIR` to {directory: weight or None}. Raises ValueError."""
    sources: dict[str, float | None] = {}
    for entry in entries:
        directory, equals, tail = entry.rpartition("=")
        weight = None
        if not equals or "/" in tail:  # the = is part of the path
            directory = entry
        else:
            with suppress(ValueError):
                weight = float(tail)
            if not directory or weight is None or not 0 < weight < math.inf:
                raise ValueError(
                    f"train_data {entry!r}: expected DIR or DIR=weight, the weight a number above 0"
                )
        if directory in sources:
            raise ValueError(f"train_data names {directory} twice: give it a weight instead")
        sources[directory] = weight
    bare = [directory for directory, weight in sources.items() if weight is None]
    if 0 < len(bare) < len(sources):
        raise ValueError(f"train_data gives no weight to {', '.join(bare)}: weight all or none")
    return sources


def eval_splits(entries: Sequence[str]) -> dict[str, str]:
    """Parse entries `NAME=DIR` or `DIR` to {name: directory}. Raises ValueError.

    Without NAME, the last folder of DIR gives the name, in lower case with underscores.
    """
    splits: dict[str, str] = {}
    for entry in entries:
        name, equals, directory = entry.partition("=")
        if not equals:
            folder = redact(Path(entry).name).lower()
            name, directory = re.sub(r"[^a-z0-9]+", "_", folder).strip("_"), entry
        if not directory or not re.fullmatch(r"[a-z0-9_]+", name):
            raise ValueError(
                f"eval_data {entry!r}: expected NAME=DIR, the name of lower-case letters, digits "
                "and underscores (it becomes the metric eval_NAME_loss)"
            )
        if name in splits:
            raise ValueError(f"eval_data names {name!r} twice: {splits[name]} and {directory}")
        splits[name] = directory
    return splits


def batch_sizes(last: int | None, by_step: Mapping[Any, int]) -> dict[int, int]:
    """Return {first step: global batch size from this step on}. Raises ConfigurationError.

    by_step: the user's mapping, where steps may be strings. last: the setting global_batch_size,
    which must equal the last size. Pass None if global_batch_size itself is
    the mapping.

    >>> batch_sizes(128, {"0": 64, "2000": 128})
    {0: 64, 2000: 128}
    """
    with suppress(ValueError, TypeError):
        sizes = dict(sorted((int(step), size) for step, size in by_step.items()))
        counts = [*sizes.values()]
        rises = counts == sorted({count for count in counts if type(count) is int and count > 0})
        begins = min(sizes) == 0 and len(sizes) == len(by_step)  # "0" and "00" are one step
        if begins and rises and last in (None, counts[-1]):
            return sizes
    raise ConfigurationError(
        f"global_batch_size {shown(by_step)}: expected rising sizes by first step, such as "
        "{0: 64, 2000: 128}. batch_warmup holds them, and global_batch_size the last one"
    )


def fitting_micro_batch(global_batch_size: int, micro_batch_size: int, world_size: int) -> int:
    """Return the largest divisor of global_batch_size / world_size up to `micro_batch_size`.

    Returns 0 if global_batch_size is not a multiple of world_size.
    """
    sizes = range(min(micro_batch_size, global_batch_size // world_size), 0, -1)
    return next((size for size in sizes if global_batch_size % (size * world_size) == 0), 0)


def accumulation_steps(global_batch_size: int, micro_batch_size: int, world_size: int) -> int:
    """Return the number of micro-batches that each rank accumulates per optimizer step.

    Raises ConfigurationError if the global batch is not a multiple of micro-batch x ranks.
    """
    at_once = micro_batch_size * world_size
    if global_batch_size > 0 and global_batch_size % at_once == 0:
        return global_batch_size // at_once
    below = max(global_batch_size, 0) // at_once * at_once
    nearest = [str(size) for size in (below, below + at_once) if size > 0]
    advice = f"use global_batch_size {' or '.join(nearest)}"
    if smaller := fitting_micro_batch(global_batch_size, micro_batch_size, world_size):
        advice += f", or per_device_train_batch_size {smaller}"
    raise ConfigurationError(
        f"global_batch_size {global_batch_size} does not divide over {counted_ranks(world_size)} "
        f"(with context_parallel: groups of ranks) of {micro_batch_size} sequences each, which "
        f"makes {at_once} at once: {advice}"
    )
