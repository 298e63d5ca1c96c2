"""The settings of a run. Each field is a flag and a key of recipes (YAML files).

The functions at the end parse values such as `DIR=weight`, `NAME=DIR`, `50B` and `10:13`.
"""

import copy
import math
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from transformers import TrainingArguments
from trl import ModelConfig, SFTConfig

from utils.config.declarations import setting, shown
from utils.config.preparation import RawDataArguments
from utils.host.redaction import redact, redacted

DTYPES = ("auto", "bfloat16", "float16", "float32")
Arguments = TypeVar("Arguments")


@dataclass(frozen=True)
class RunArguments:
    """How the run as a whole is done."""

    global_batch_size: int = setting(
        None, "sequences per optimizer step over all ranks; null: derived from ranks and data"
    )
    max_tokens: float | str | None = setting(
        None,
        "train for that many tokens instead of max_steps, rounded up to whole steps: 50e9, 50B, "
        "500M; padding counts",
    )
    dry_run: bool = setting(
        False, "check the settings and the data, print arithmetic and memory estimate, and stop"
    )
    strategy: str = setting(
        "auto",
        "how processes share the model: auto (DDP if there are several), single_gpu, multi_gpu, "
        "fsdp2, zero1, zero2, zero3, cpu (files of accelerate_configs/), or the path of an "
        "accelerate config; the launchers read this setting, and ACCELERATE_CONFIG overrides it",
    )
    assume: str | None = setting(
        None,
        "dry run as if on these GPUs: 8xH100-80GB, 2x8xA100-40GB (nodes x GPUs), 8x48GB (GPUs of "
        "any type)",
    )
    suggest: bool = setting(
        False, "dry run: also print the fastest strategy, micro-batch and recomputation that fit"
    )
    hang_timeout_s: float = setting(
        600,
        "seconds without progress after which the run ends and names the rank that hangs; three "
        "times that in the first step, evaluations and saves; 0: never",
    )
    save_minutes: float | None = setting(
        30, "write a checkpoint also when the last one is that many minutes old; null or 0: never"
    )
    save_best: bool = setting(
        False,
        "write a checkpoint also whenever an evaluation gives a new best of metric_for_best_model",
    )
    early_stopping_patience: int | None = setting(
        None,
        "end the run when metric_for_best_model has not improved in this many evaluations in a "
        "row; null: never",
    )
    early_stopping_threshold: float = setting(
        0.0, "early stopping counts only improvements of the metric that are larger than this"
    )
    ema_decay: float | None = setting(
        None,
        "average the weights exponentially with this decay, such as 0.999: final/ holds the "
        "average; takes 4 bytes a parameter; null: off",
    )
    sample_prompts: list[str] = setting(
        [],
        "prompts that the model continues, greedily, at each evaluation: texts, or .txt and "
        ".jsonl files with one prompt per line; if sft_train.py trains on chats, each prompt is "
        "put into the chat template",
    )
    profile_steps: str | None = setting(
        None,
        "profile these steps on rank 0 (10:13 means 10, 11 and 12): writes a trace for "
        "ui.perfetto.dev and a table of the ten slowest kernels into profile/; null: none",
    )
    sample_max_new_tokens: int = setting(64, "the most new tokens for each of sample_prompts")
    accept_changes: list[str] = setting(
        [],
        "names of changed settings to accept when the run resumes, although they alter its result",
    )
    async_save: bool = setting(
        False, "write checkpoints in the background: training waits only for the copy to /dev/shm"
    )
    lm_eval_tasks: list[str] = setting(
        [], "benchmarks of lm-evaluation-harness to run on final/ at the end, on one GPU"
    )
    optim_states: str | None = setting(
        None,
        "type of AdamW's two moments: 8, 4 or about 2 bytes a parameter; null: the type of the "
        "weights",
        choices=("float32", "bfloat16", "int8"),
    )
    stochastic_rounding: bool = setting(
        False,
        "with dtype: bfloat16, round weights up or down at random; without it small updates are "
        "lost",
    )


@dataclass(frozen=True)
class DataArguments(RawDataArguments):
    """The token datasets and how they become sequences."""

    train_data: list[str] = setting(
        help="token datasets to train on, DIR or DIR=weight; give weights to all or none: A=3 B=1 "
        "takes three samples of A for one of B. A raw file or folder (to 1 GB of .jsonl, .json, "
        ".parquet, .csv, text) is first prepared in output_dir/data"
    )
    sequence_length: int = setting(None, "tokens per packed sequence; null: derived from the data")
    eval_data: list[str] = setting(
        [], "held-out datasets, NAME=DIR or DIR; each logs eval_NAME_loss, _perplexity, _accuracy"
    )
    max_eval_sequences: int | None = setting(
        None,
        "evaluate each split on at most this many sequences, always the same ones; null: all",
    )
    packing: str = setting(
        "best_fit",
        "best_fit keeps documents whole, in_order too and in their order, concat puts them end to "
        "end, none gives each its own sequence",
        choices=("best_fit", "in_order", "concat", "none"),
    )
    order: str = setting(
        "shuffled", "shuffled by seed, or in the data's order", choices=("shuffled", "sequential")
    )
    on_overlong: str = setting(
        "error",
        "fine-tuning: what to do with a document longer than sequence_length",
        choices=("error", "truncate", "drop"),
    )
    tokenizer_name_or_path: str | None = setting(
        None,
        "tokenizer directory; null: the tokenizer beside the training data, or else the model's "
        "own",
    )


@dataclass
class ModelArguments(ModelConfig):
    """The model and LoRA, as trl.ModelConfig names them; from scratch with `model_config`."""

    model_name_or_path: str | None = setting(
        None, "start from the weights of this model: directory or name on the Hub"
    )
    model_config: str | None = setting(
        None,
        "JSON or YAML file with a transformers configuration: start from random weights, not from "
        "model_name_or_path; with init_from, start from its weights",
    )
    model_config_overrides: dict[str, Any] | None = setting(
        None, "values over those of model_config; as a flag --model_config.num_hidden_layers 4"
    )
    init_from: str | None = setting(
        None,
        "start from the weights of an earlier stage: directory of a run, checkpoint or model",
    )
    init_optimizer: bool = setting(
        False,
        "also start with Adam's state from init_from, which must be a checkpoint; the schedule is "
        "new",
    )
    freeze: list[str] = setting([], "layers and weights to freeze: embed_tokens layers.0 mlp")
    train_only: list[str] = setting([], "layers and weights to train, all others are frozen")
    pad_embeddings_to_multiple_of: int | None = setting(
        None,
        "round the number of rows of the embedding up to a multiple of this: 64 or 128 give "
        "faster products; the added rows are no tokens. null: 64 if tokens are added, otherwise "
        "no rounding",
    )
    dtype: str | None = setting(
        None,
        "type of the weights in memory; null: float32. Mixed precision is --bf16",
        choices=DTYPES,
    )
    save_dtype: str = setting(
        "auto",
        "type of the weights in final/; auto: the type of the model that the run began with",
        choices=DTYPES,
    )
    attn_implementation: str | None = setting(
        "auto",
        "attention kernel; auto takes the fastest available one that keeps packed documents apart",
        choices=(
            *("auto", "packed_varlen", "sdpa", "flash_attention_2", "flash_attention_3", "cudnn"),
            *("flex_attention", "eager"),
        ),
    )
    loss_head: str = setting(
        "auto",
        "fused computes the loss for some tokens at a time, which saves memory; auto takes fused "
        "if a test at the start finds the same loss as with logits",
        choices=("auto", "fused", "logits"),
    )
    compile: bool | None = setting(
        None,
        "compile the model layer by layer: faster steps after a slow first one; null: on if a GPU "
        "trains a dense model",
    )


@dataclass
class _ChangedDefaults:
    """The defaults of TrainingArguments that do not suit a run nobody watches, each with why."""

    # The filter would hide NaN and wait for the device twice in every micro-batch.
    logging_nan_inf_filter: bool = setting(False, "leave NaN and infinite losses out of the mean")
    # transformers' default, 500 steps, may take a night: both scripts have TRL's default, 10.
    logging_steps: float = setting(10, "steps between two logs; below 1 a share of all steps")
    # With several nodes the same line would be logged once per node.
    log_on_each_node: bool = setting(False, "log on the first rank of every node")
    # Checkpoints of a long run would fill a quota. The best checkpoint is always kept.
    save_total_limit: int | None = setting(3, "newest checkpoints to keep; null: all")
    # A search for unused parameters walks the graph at every step; dense models have none.
    ddp_find_unused_parameters: bool | None = setting(
        False, "let DDP look for parameters without gradient (conditional layers)"
    )
    # SFTConfig would turn bf16 on if it is not set, on an old GPU or a slow CPU too.
    bf16: bool | None = setting(
        None,
        "bfloat16 mixed precision; null: as in the accelerate config, or else on if a GPU of "
        "compute capability 8.0 or newer trains, or a CPU with AMX or AVX512-BF16",
    )
    # transformers has true (here: full) or false: RunPlan.training_arguments passes a boolean.
    activation_checkpointing: bool | str | None = setting(
        None,
        "what the backward pass computes again to save memory: none, selective (all but products "
        "and attention), full (whole layers), or auto: as little as the memory allows; null: auto "
        "on a GPU of compute capability 8.0 or newer, otherwise none",
        choices=("none", "selective", "full", "auto", True, False),
    )
    resume_from_checkpoint: str | bool | None = setting(
        None,
        "a checkpoint of another directory, to resume its run in a new output_dir; a run resumes "
        "from its own checkpoints by itself",
    )
    push_to_hub: bool = setting(
        False, "upload final/ to the Hub at the end of the run, with HF_WRITE_TOKEN"
    )
    hub_model_id: str | None = setting(
        None, "OWNER/NAME of the model on the Hub; null: your own, named like output_dir"
    )
    # The Hub's own default is public.
    hub_private_repo: bool | None = setting(True, "make a new model on the Hub private")
    # Batches have no columns besides the model's inputs.
    remove_unused_columns: bool = False
    dataloader_num_workers: int | None = setting(
        None, "processes that load data; null: on a GPU up to 2, if the rank has cores to spare"
    )
    # Our HangWatch acts before torch if hang_timeout_s is at most 2000, and reports more.
    ddp_timeout: int = setting(7200, "seconds after which torch aborts a collective")
    # Evaluation only sums losses: logits of a 128k vocabulary must not be gathered.
    prediction_loss_only: bool = True

    def __post_init__(self) -> None:
        as_boolean = {"none": False, "full": True}  # transformers' values of these two
        if isinstance(self.activation_checkpointing, str):
            word = self.activation_checkpointing
            self.activation_checkpointing = as_boolean.get(word, word)
        super().__post_init__()  # type: ignore[misc] # the libraries' class comes after this one
        if self.device.type == "cpu":  # type: ignore[attr-defined]
            self.dataloader_pin_memory = False  # there is no GPU to copy to

    def to_dict(self) -> dict[str, Any]:
        """Return the settings for trackers such as wandb, with known secrets masked."""
        return redacted(super().to_dict())  # type: ignore[misc]


@dataclass
class PretrainConfig(_ChangedDefaults, TrainingArguments):  # type: ignore[misc] # a wider type
    """Settings of transformers.TrainingArguments, some of them with other defaults."""


@dataclass
class FineTuneConfig(_ChangedDefaults, SFTConfig):  # type: ignore[misc] # a wider type
    """Settings of trl.SFTConfig, with defaults for data that is already tokenized and packed."""

    # TRL would turn activation checkpointing on, which costs 20 % of the speed.
    gradient_checkpointing: bool | None = setting(  # type: ignore[assignment] # as transformers'
        None, "deprecated: use activation_checkpointing"
    )
    # TRL would truncate silently at 1024 tokens and run map and filter over the packed sequences.
    max_length: int | None = None
    dataset_kwargs: dict[str, Any] | str | None = field(
        default_factory=lambda: {"skip_prepare_dataset": True}
    )


def with_values(arguments: Arguments, **values: Any) -> Arguments:
    """Return a copy with replaced values. Skip `__post_init__`, which would set up devices."""
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
    """Parse `10:13` or `10` to (first step, last step + 1). Raise ValueError for other forms.

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
    """Parse the entries `DIR` or `DIR=weight` to {directory: weight}. `DIR` has the weight None.

    Raises ValueError if an entry has another form, a directory repeats, or only some have weights.
    """
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
    """Parse the entries `NAME=DIR` or `DIR` to {name: directory}.

    Without NAME, the name is that of the last folder in DIR, in lower case with underscores.
    Raises ValueError for an entry of any other form, and for a name given twice.
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


def fitting_micro_batch(global_batch_size: int, micro_batch_size: int, world_size: int) -> int:
    """Return the largest micro-batch that divides a rank's batch; 0 if ranks do not divide it."""
    sizes = range(min(micro_batch_size, global_batch_size // world_size), 0, -1)
    return next((size for size in sizes if global_batch_size % (size * world_size) == 0), 0)
