"""Contradictions between settings: found before anything is built.

What a stronger source makes moot is gone by then (utils/config/overruled.py): what is left
contradicts itself within one source, or cannot be true.

Each check takes all values and yields one line for each fault; a check that reads a missing or
ill-typed setting is skipped by the parser. No check opens a file.
"""

import os
from collections.abc import Callable, Iterator

from accelerate.utils.environment import str_to_bool

from utils.config.batch import accumulation_steps
from utils.config.checks.accepted import check_accepted_changes
from utils.config.checks.evaluation import (
    check_best_model,
    check_evaluation,
    check_rhythms,
    check_saves,
)
from utils.config.checks.origin import check_lora, check_model_origin
from utils.config.checks.packages import check_packages
from utils.config.checks.precision import check_optimizer_states, check_precision
from utils.config.checks.ranges import check_duration, check_ranges
from utils.config.checks.schedules import check_schedule
from utils.config.data_sources import TrainSource, train_sources, weight_problems
from utils.config.errors import ConfigurationError
from utils.config.reading.settings import SettingValues

Check = Callable[[SettingValues], Iterator[str]]


def check_output_dir(values: SettingValues) -> Iterator[str]:
    """Refuse a run without a directory: transformers would write into ./trainer_output."""
    if not values["output_dir"]:
        yield "output_dir is required: the directory of this run"


def check_hardware(values: SettingValues) -> Iterator[str]:
    """Refuse what this machine cannot compute; a dry run may plan for another one."""
    import torch

    here = values["use_cpu"] or str_to_bool(os.environ.get("ACCELERATE_USE_CPU", "0"))
    if values["dry_run"] and not here:
        return
    if torch.accelerator.is_available() and not values["use_cpu"]:
        return
    place = "on the CPU (use_cpu)" if values["use_cpu"] else "and no accelerator is visible here"
    if values["fp16"]:
        yield (
            f"fp16 needs a GPU, {place}: leave it out, or use bf16 on a CPU with AMX or AVX512-BF16"
        )
    if values["tf32"]:
        yield f"tf32 needs an NVIDIA GPU, {place}: leave it out"
    for name in ("bf16", "bf16_full_eval"):
        if values[name] and not values["use_cpu"]:
            yield (
                f"{name} needs a GPU, {place}: to compute in bfloat16 on this CPU, fast only with "
                "AMX or AVX512-BF16, add use_cpu: true; otherwise leave it out"
            )


def check_train_data(values: SettingValues) -> Iterator[str]:
    """Refuse entries that are not DIR or DIR=weight, and some weights without the others."""
    sources: list[TrainSource] = []
    for entry in values["train_data"]:
        try:
            sources += train_sources([entry])
        except ValueError as error:
            yield str(error)
    yield from weight_problems(sources)


def check_activation_checkpointing(values: SettingValues) -> Iterator[str]:
    """Refuse a second word on one thing: old names, and options of what full alone has."""
    for kind in ("checkpointing", "checkpointing_kwargs"):
        old, new = f"gradient_{kind}", f"activation_{kind}"
        if new in values and values.changed(old) and values.changed(new):
            yield f"{values.shown(old)} and {values.shown(new)} are one setting: keep the second"
    word = values["activation_checkpointing"]
    full = True in (word, values["gradient_checkpointing"]) or word == "full"
    for name in ("activation_checkpointing_kwargs", "gradient_checkpointing_kwargs"):
        options = values[name] or {}
        if "selective" in options:
            yield f"{values.shown(name)}: activation_checkpointing: selective says so"
        elif options and not full:
            yield f"{values.shown(name)} goes with activation_checkpointing: full alone"
    if word == "auto" and values.changed("activation_offloading"):
        yield (
            f"{values.shown('activation_offloading')}: what auto predicts knows nothing of it; say "
            "which activation_checkpointing you want"
        )


def check_loader(values: SettingValues) -> Iterator[str]:
    """Refuse settings of loader processes where there are none."""
    if values["dataloader_num_workers"] == 0:
        for name in ("dataloader_persistent_workers", "dataloader_prefetch_factor"):
            if values.changed(name):
                yield f"{values.shown(name)} has no effect without dataloader_num_workers"


def check_global_batch(values: SettingValues) -> Iterator[str]:
    """Refuse a global batch that does not divide over the ranks of this launch."""
    sizes = values["global_batch_size"], values["per_device_train_batch_size"]
    if min(sizes) < 1:
        return  # check_ranges says so
    try:
        accumulation_steps(*sizes, world_size=int(os.environ.get("WORLD_SIZE", "1")))
    except ConfigurationError as error:
        launched = "WORLD_SIZE" in os.environ
        yield error.problems[0] + ("" if launched else " (this process was started alone)")


def check_every_weight_is_trained(values: SettingValues) -> Iterator[str]:
    """Refuse LoRA in pretraining."""
    if values["use_peft"]:
        yield f"{values.shown('use_peft')}: pretrain.py trains every weight; LoRA is for sft_train"


def check_documents_are_split(values: SettingValues) -> Iterator[str]:
    """Refuse a choice for long documents where they are always split."""
    if values.changed("on_overlong"):
        yield f"{values.shown('on_overlong')}: pretraining splits long documents; leave it out"


TRAINING_CHECKS: tuple[Check, ...] = (
    check_output_dir,
    check_model_origin,
    check_lora,
    check_precision,
    check_optimizer_states,
    check_hardware,
    check_train_data,
    check_evaluation,
    check_rhythms,
    check_saves,
    check_best_model,
    check_ranges,
    check_duration,
    check_schedule,
    check_activation_checkpointing,
    check_loader,
    check_global_batch,
    check_accepted_changes,
    check_packages,
)
PRETRAINING_CHECKS = (*TRAINING_CHECKS, check_every_weight_is_trained, check_documents_are_split)
FINE_TUNING_CHECKS = TRAINING_CHECKS
