"""Checks that refuse settings which cannot work, before any file is opened.

A check gets the values of all settings and yields one line per fault. It ends early if a setting
that it reads has a reported fault. utils/config/rules.py lists settings that contradict each other.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any

from huggingface_hub.utils import HFValidationError, validate_repo_id

from utils.config.arguments import eval_splits, profiled_steps, token_count, train_sources
from utils.config.declarations import (
    LM_EVAL,
    TORCHAO,
    SettingsCheck,
    SettingValues,
    UnusableSettingError,
    is_installed,
    is_true,
)
from utils.config.foreign_words import other_names, unknown_name
from utils.config.launch_settings import check_launch_settings
from utils.config.own_code import source_of
from utils.config.raw_data import check_raw_data
from utils.config.strategy import check_strategy

# Settings that need a metric_for_best_model.
NEED_BEST_METRIC = ("save_best", "load_best_model_at_end", "early_stopping_patience")
# Functions that parse the text of a setting, and raise ValueError.
PARSERS: dict[str, Callable[[Any], object]] = {
    "max_tokens": token_count,
    "profile_steps": profiled_steps,
    "train_data": train_sources,
    "eval_data": eval_splits,
    "callbacks": lambda entries: [source_of(entry) for entry in entries],
    "loss": source_of,
}


def check_forms(values: SettingValues) -> Iterator[str]:
    """Yield an error text for each setting that cannot be parsed; mark the setting unusable."""
    for name, read in PARSERS.items():
        try:
            if name not in values.unusable and values[name] is not None:
                read(values[name])
        except ValueError as error:
            values.unusable.add(name)
            yield str(error)


def check_run(values: SettingValues) -> Iterator[str]:
    """Yield errors of output_dir, model, hub_model_id, use_peft, lm_eval_tasks, accept_changes."""
    if not values["output_dir"]:
        yield "output_dir is required: the directory of this run"
    if not (values["model_name_or_path"] or values["model_config"] or values["init_from"]):
        yield (
            "no model: give model_name_or_path (weights to start from), init_from (those of an "
            "earlier stage) or model_config (a configuration to start from scratch)"
        )
    try:
        validate_repo_id(values["hub_model_id"])
    except HFValidationError as error:
        yield f"{values.shown('hub_model_id')}: give OWNER/NAME: {error}"
    if values["use_peft"] and values["model_config"] and not values["init_from"]:
        yield "use_peft adapts existing weights: it does not go with model_config alone"
    if values["lm_eval_tasks"] and not is_installed("lm_eval"):
        yield f"lm_eval_tasks needs lm_eval, which is not installed: pip install '{LM_EVAL}'"
    for name in values["accept_changes"]:
        if name not in values:
            source = values.source("accept_changes")
            yield f"accept_changes ({source}): {unknown_name(name, values)}"


def check_debug(values: SettingValues) -> Iterator[str]:
    """Yield an error text if `debug` is unknown or does not work with compile or loss_head."""
    if "underflow_overflow" in values["debug"]:
        if values["compile"] is not False or values["loss_head"] != "logits":
            yield f"{values.shown('debug')} needs --compile false and --loss_head logits"
    elif values["debug"]:
        yield f"{values.shown('debug')}: {other_names()['debug']}"


def check_order(values: SettingValues) -> Iterator[str]:
    """Yield an error text if `packing: best_fit` would reorder documents in `order: sequential`."""
    if values["order"] == "sequential" and values["packing"] == "best_fit":
        given = values.shown("packing")
        yield f"{given} does not keep {values.shown('order')}: give packing: in_order"


def check_precision(values: SettingValues) -> Iterator[str]:
    """Yield error texts on dtype, fp16 and load_in_4bit.

    Weights in float16 cannot be trained, fp16 needs a GPU, and load_in_4bit needs LoRA and the
    package bitsandbytes.
    """
    if values["dtype"] == "float16" and not values["use_peft"]:
        yield (
            "dtype float16: weights in float16 cannot be trained (updates underflow); leave dtype "
            "at null, and set fp16: true for mixed precision"
        )
    if values["fp16"] and values.on_cpu:
        yield f"{values.shown('fp16')} needs a GPU, this run is on the CPU: leave it out"
    if values["load_in_4bit"] and not values["use_peft"]:
        yield (
            f"{values.shown('load_in_4bit')}: weights in 4 bits stay as they are, adapters train "
            "beside them: set use_peft: true for sft_train.py, or load_in_4bit: false"
        )
    if values["load_in_4bit"] and not is_installed("bitsandbytes"):
        yield "load_in_4bit needs bitsandbytes, which is not installed: pip install bitsandbytes"


def check_fp8(values: SettingValues) -> Iterator[str]:
    """Yield an error text if fp8 is used with load_in_4bit or without torchao.

    `plan_float8` checks later whether GPU and model can use fp8.
    """
    if not values["fp8"]:
        return
    shown = values.shown("fp8")
    if values["load_in_4bit"]:
        yield f"{shown} does not go with {values.shown('load_in_4bit')}: leave one of them out"
    if not is_installed("torchao"):
        yield f"{shown} needs torchao, which is not installed: pip install '{TORCHAO}'"


def check_backend(values: SettingValues) -> Iterator[str]:
    """Yield an error text if the torch.distributed backend cannot connect the processes."""
    import torch

    backend, shown = values["ddp_backend"], values.shown("ddp_backend")
    if backend is None:
        return
    if values.world_size == 1:
        values.notes.append(f"{shown} has no effect: there is one process")
    elif values.on_cpu and backend not in ("gloo", "mpi"):
        yield f"{shown} does not connect processes on the CPU: leave it out"
    elif backend != "nccl" and not torch.distributed.is_backend_available(backend):
        yield f"{shown}: torch has no such backend here; leave it out"


def check_context_parallel_ranks(values: SettingValues) -> Iterator[str]:
    """Yield error texts if context_parallel does not fit the ranks, attention or strategy."""
    size, processes, environment = values["context_parallel"], values.world_size, values.environment
    shown = values.shown("context_parallel")
    if size < 2:
        return
    if values["attn_implementation"] in ("sdpa", "eager", "flex_attention"):
        yield (
            f"{shown}: ranks share sequences through packed_varlen alone: leave out "
            f"{values.shown('attn_implementation')}"
        )
    if processes % size:
        fitting = [str(each) for each in range(2, processes + 1) if processes % each == 0]
        yield (
            f"{shown}: {processes} processes are not groups of {size}: give a number that divides "
            f"them ({', '.join(fitting)}), or other GPUs"
        )
    if is_true("ACCELERATE_USE_DEEPSPEED", environment):
        yield (
            f"{shown} does not go with DeepSpeed, which would shard and scale the loss in its own "
            "way: use strategy: fsdp2 or multi_gpu"
        )
    if is_true("ACCELERATE_USE_FSDP", environment) and environment.get("FSDP_VERSION") != "2":
        yield f"{shown} was proved with FSDP2, not with FSDP1: use strategy: fsdp2"


def check_evaluation(values: SettingValues) -> Iterator[str]:
    """Yield error texts on the evaluations and on the best model's metric.

    save_strategy `best` is refused, because it saves nothing at the end of a run.
    """
    splits = eval_splits(values["eval_data"])
    if values["save_strategy"] == "best":
        yield (
            f"{values.shown('save_strategy')} saves nothing at the end, nor while the model does "
            "not improve: give save_best: true beside save_steps"
        )
    if not splits:
        return
    if values["eval_strategy"] == "steps" and values["eval_steps"] is None:
        yield f"{values.shown('eval_strategy')} needs eval_steps: otherwise each log would evaluate"
    metrics = [f"eval_{name}_{kind}" for name in splits for kind in ("loss", "perplexity")]
    metric, known = values["metric_for_best_model"], f"one of {', '.join(metrics)}"
    if metric is None:
        judges = [name for name in NEED_BEST_METRIC if values[name]]
        if values["lr_scheduler_type"] in ("reduce_lr_on_plateau", "greedy"):
            judges.append("lr_scheduler_type")
        for judge in judges:
            yield f"{values.shown(judge)} needs metric_for_best_model: {known}"
    elif f"eval_{metric.removeprefix('eval_')}" not in metrics:
        given = values.shown("metric_for_best_model")
        yield f"{given}: no loss or perplexity of a split; give {known}"
    elif values["greater_is_better"]:
        yield f"{values.shown('greater_is_better')}: a lower loss or perplexity is better"


# (text of a range, test, settings that must be in the range). NaN is in no range.
RANGES: tuple[tuple[str, Callable[[float], bool], str], ...] = (
    ("at least 0", lambda value: 0 <= value < math.inf,
     "early_stopping_threshold eval_delay hang_timeout_s max_grad_norm "
     "save_minutes warmup_steps weight_decay"),
    ("above 0", lambda value: 0 < value < math.inf,
     "adam_epsilon eval_steps learning_rate logging_steps max_gpu_hours neftune_noise_alpha "
     "num_train_epochs save_steps"),
    ("above 0 and below 1", lambda value: 0 < value < 1, "ema_decay"),
    ("at least 0 and below 1", lambda value: 0 <= value < 1,
     "adam_beta1 adam_beta2 lora_dropout"),
    ("at least 0 and below 1000", lambda value: 0 <= value < 1000,
     "restarts_in_job verify_resume_steps"),
    # Products of these numbers with the sizes of a model must fit into 64 bits.
    ("at least 1 and below 10**9", lambda value: 1 <= value < 10**9,
     "context_parallel dataloader_prefetch_factor ddp_timeout early_stopping_patience "
     "global_batch_size lora_alpha lora_r max_eval_sequences pad_embeddings_to_multiple_of "
     "sample_max_new_tokens"),
    # The sequences of an evaluation are padded to whole micro-batches.
    ("at least 1 and below 2**20", lambda value: 1 <= value < 2**20,
     "per_device_eval_batch_size per_device_train_batch_size"),
    ("at least 0 and below 2**31", lambda value: 0 <= value < 2**31, "ddp_bucket_cap_mb"),
    ("at least 0 and at most 1024", lambda value: 0 <= value <= 1024, "dataloader_num_workers"),
    # The newest checkpoint may be damaged, so keep two. A sequence of one token has no target.
    ("at least 2", lambda value: value >= 2,
     "dp_shard save_total_limit sequence_length"),
    ("at least 0 and below 2**32", lambda value: 0 <= value < 2**32, "seed"),
    ("at least 1, or -1 to go by num_train_epochs", lambda value: value >= 1 or value == -1,
     "max_steps"),
)  # fmt: skip


def check_ranges(values: SettingValues) -> Iterator[str]:
    """Yield an error text for every number outside of its range."""
    for range_text, is_within, names in RANGES:
        for name in names.split():
            try:
                value = values[name]
            except UnusableSettingError:
                continue
            if value is not None and not is_within(value):
                yield f"{values.shown(name)}: it must be {range_text}"


def check_pretraining(values: SettingValues) -> Iterator[str]:
    """Yield an error text for each setting that only sft_train.py supports."""
    if values["use_peft"]:
        yield f"{values.shown('use_peft')}: pretrain.py trains every weight; LoRA is for sft_train"
    if values.changed("on_overlong"):
        yield f"{values.shown('on_overlong')}: pretraining splits long documents; leave it out"


FINE_TUNING_CHECKS: tuple[SettingsCheck, ...] = (
    check_forms,
    check_raw_data,
    check_run,
    check_debug,
    check_order,
    check_strategy,
    check_launch_settings,
    check_precision,
    check_fp8,
    check_backend,
    check_context_parallel_ranks,
    check_evaluation,
    check_ranges,
)
PRETRAINING_CHECKS = (*FINE_TUNING_CHECKS, check_pretraining)
