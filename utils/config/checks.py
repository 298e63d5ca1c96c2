"""The settings whose changes a run is to accept: they have to exist."""

import importlib.util
import inspect
import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from accelerate.utils.environment import str_to_bool

from utils.config.arguments import TrainSource, eval_splits, train_sources, weight_problems
from utils.config.batch import accumulation_steps
from utils.config.declarations import SettingValues, UnusableSettingError
from utils.config.errors import ConfigurationError
from utils.config.precision import check_optimizer_states, check_precision


def check_accepted_changes(values: SettingValues) -> Iterator[str]:
    """Refuse names that are no settings: nothing would be accepted by them."""
    for name in values["accept_changes"]:
        if name not in values:
            nearest = get_close_matches(name, values, n=1)
            hint = f"did you mean {nearest[0]}?" if nearest else "--help lists all settings"
            yield f"accept_changes ({values.sources['accept_changes']}): no setting {name}: {hint}"


# Compares the processes on this host with the devices that torch sees for them.


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
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    chosen = " is not set" if visible is None else f"={visible}"
    return (
        f"this host has {processes} processes (this is local rank {local_rank}), but torch sees "
        f"{visible_gpus} GPU{'s' if visible_gpus != 1 else ''} (CUDA_VISIBLE_DEVICES{chosen}): "
        "start as many processes as GPUs (--num_processes over all nodes), or ask Slurm for as "
        "many GPUs (--gpus-per-node)."
    )


# Where the weights of a run come from: one place, and what goes with it.

LORA_SETTINGS = (
    "lora_r",
    "lora_alpha",
    "lora_dropout",
    "lora_target_modules",
    "lora_target_parameters",
    "lora_modules_to_save",
    "use_rslora",
    "use_dora",
)


def check_model_origin(values: SettingValues) -> Iterator[str]:
    """Refuse anything but exactly one source of weights: a model, a stage or a configuration.

    A configuration goes with a stage: it is how the next one changes positions and the like.
    """
    name, config, stage = (
        values[setting] for setting in ("model_name_or_path", "model_config", "init_from")
    )
    if name is None and config is None and stage is None:
        yield (
            "no model: give model_name_or_path (weights to start from), init_from (those of an "
            "earlier stage) or model_config (a configuration to start from scratch)"
        )
    if name is not None and config is not None:
        yield (
            f"both {values.shown('model_name_or_path')} and {values.shown('model_config')} are "
            "given: start from weights or from scratch (init_from goes with a model_config)"
        )
    if name is not None and stage is not None:
        yield (
            f"both {values.shown('model_name_or_path')} and {values.shown('init_from')} give the "
            "weights: keep init_from to hold its tensors to the letter, or the other"
        )
    if name is None and values.changed("model_revision"):
        yield f"{values.shown('model_revision')} has no effect on a model from scratch or a stage"
    if values["init_optimizer"]:
        yield from _optimizer_problems(values)


def _optimizer_problems(values: SettingValues) -> Iterator[str]:
    shown = values.shown("init_optimizer")
    if values["init_from"] is None:
        yield f"{shown} has no effect without init_from: the checkpoint that has its state"
    if values["use_peft"]:
        yield f"{shown} does not go with use_peft: no earlier optimizer knows its new adapters"


def check_lora(values: SettingValues) -> Iterator[str]:
    """Refuse LoRA settings without `use_peft`, and LoRA without weights to adapt."""
    if not values["use_peft"]:
        for name in filter(values.changed, LORA_SETTINGS):
            yield f"{values.shown(name)} has no effect without use_peft: true"
    elif values["model_config"] is not None and values["init_from"] is None:
        yield "use_peft adapts existing weights: it does not go with model_config alone"


# Settings that need a package which is not installed: loggers, optimizers, kernels, DeepSpeed.

# Where `report_to` sends to, by the package that it imports, and pip's name of that.
REPORTERS = {
    "azure_ml": ("azureml", "azureml-sdk"),
    "clearml": ("clearml", "clearml"),
    "codecarbon": ("codecarbon", "codecarbon"),
    "comet_ml": ("comet_ml", "comet-ml"),
    "dagshub": ("dagshub", "dagshub"),
    "dvclive": ("dvclive", "dvclive"),
    "flyte": ("flytekit", "flytekit"),
    "kubeflow": ("kubeflow", "kubeflow"),
    "mlflow": ("mlflow", "mlflow"),
    "neptune": ("neptune", "neptune"),
    "swanlab": ("swanlab", "swanlab"),
    "tensorboard": ("tensorboard", "tensorboard"),
    "trackio": ("trackio", "trackio"),
    "wandb": ("wandb", "wandb"),
}
# Optimizers of other packages, by a part of their names (transformers/trainer_optimizer.py).
OPTIMIZERS = {
    "torch_4bit": ("torchao", "torchao"),
    "torch_8bit": ("torchao", "torchao"),
    "torch_npu": ("torch_npu", "torch-npu"),
    "torch_xla": ("torch_xla", "torch-xla"),
    "anyprecision": ("torchdistx", "torchdistx"),
    "galore": ("galore_torch", "galore-torch"),
    "apollo": ("apollo_torch", "apollo-torch"),
    "lomo": ("lomo_optim", "lomo-optim"),
    "grokadamw": ("grokadamw", "grokadamw"),
    "schedule_free": ("schedulefree", "schedulefree"),
    "stable_adamw": ("optimi", "torch-optimi"),
    "8bit": ("bitsandbytes", "bitsandbytes"),
    "32bit": ("bitsandbytes", "bitsandbytes"),
    "bnb": ("bitsandbytes", "bitsandbytes"),
    "ademamix": ("bitsandbytes", "bitsandbytes"),
}
KERNELS = {"flash_attention_2": "flash_attn", "flash_attention_3": "flash_attn_interface"}


def is_installed(package: str) -> bool:
    """Whether Python would find a package; it is not imported."""
    return importlib.util.find_spec(package) is not None


def check_packages(values: Mapping[str, Any]) -> Iterator[str]:
    """Refuse what needs a package that is not installed, and say what else could be done."""
    reporters = values["report_to"] or []
    for name in [reporters] if isinstance(reporters, str) else reporters:
        if name in ("none", "all"):
            continue
        if name not in REPORTERS:
            yield f"report_to {name}: expected {', '.join(REPORTERS)}, all or none"
        elif not is_installed(REPORTERS[name][0]):
            yield (
                f"report_to {name}: it is not installed: pip install {REPORTERS[name][1]}, or "
                "leave it out: metrics.jsonl in the run's directory has every figure"
            )
    optimizer = str(getattr(values["optim"], "value", values["optim"]))
    package, pip_name = next(
        (found for part, found in OPTIMIZERS.items() if part in optimizer), ("torch", "")
    )
    if not is_installed(package):
        yield (
            f"optim {optimizer} is in {package}, which is not installed: pip install {pip_name}, "
            "or use adamw_torch (with optim_states: int8 its two moments take 2 bytes a parameter)"
        )
    kernel = values["attn_implementation"]
    if kernel in KERNELS and not is_installed(KERNELS[kernel]):
        yield (
            f"attn_implementation {kernel} is in {KERNELS[kernel]}, which is not installed: pip "
            "install flash-attn, or use auto, which needs no package"
        )
    by_deepspeed = os.environ.get("ACCELERATE_USE_DEEPSPEED", "").lower() == "true"
    if by_deepspeed and not is_installed("deepspeed"):
        yield "the accelerate config asks for DeepSpeed: pip install deepspeed, or use fsdp2.yaml"


# The range that each numeric setting has to lie in.


@dataclass(frozen=True)
class Range:
    """Numbers from `least` to `most`; `open_below` and `open_above` leave the bound out."""

    least: float
    most: float = math.inf
    open_below: bool = False
    open_above: bool = True

    def __contains__(self, value: float) -> bool:
        above = value > self.least if self.open_below else value >= self.least
        below = value < self.most if self.open_above else value <= self.most
        return above and below

    def __str__(self) -> str:
        least = f"{'above' if self.open_below else 'at least'} {self.least:g}"
        if self.most == math.inf:
            return least
        return f"{least} and {'below' if self.open_above else 'at most'} {self.most:g}"


_COUNT = Range(1)
_ABOVE_ZERO = Range(0, open_below=True)
_ZERO_OR_MORE = Range(0)
_SHARE = Range(0, 1)

RANGES = {
    "adam_beta1": _SHARE,
    "adam_beta2": _SHARE,
    "adam_epsilon": _ABOVE_ZERO,
    "dataloader_num_workers": _ZERO_OR_MORE,
    "dataloader_prefetch_factor": _COUNT,
    "ddp_timeout": _COUNT,
    "eval_delay": _ZERO_OR_MORE,
    "eval_steps": _ABOVE_ZERO,
    "global_batch_size": _COUNT,
    "hang_timeout_s": _ZERO_OR_MORE,
    "learning_rate": _ABOVE_ZERO,
    "logging_steps": _ABOVE_ZERO,
    "lora_alpha": _COUNT,
    "lora_dropout": _SHARE,
    "lora_r": _COUNT,
    "max_grad_norm": _ZERO_OR_MORE,
    "num_train_epochs": _ABOVE_ZERO,
    "per_device_eval_batch_size": _COUNT,
    "per_device_train_batch_size": _COUNT,
    "save_minutes": _ZERO_OR_MORE,
    "save_steps": _ABOVE_ZERO,
    "save_total_limit": Range(2),  # one may turn out to be damaged
    "seed": Range(0, 2**32 - 1, open_above=False),  # as NumPy takes it
    "sequence_length": Range(2),  # one token has no next one
    "warmup_steps": _ZERO_OR_MORE,
    "weight_decay": _ZERO_OR_MORE,
}


def check_duration(values: SettingValues) -> Iterator[str]:
    """Refuse 0 and negative numbers of steps: transformers takes them for "not set"."""
    if values["max_steps"] != -1 and values["max_steps"] not in _COUNT:
        yield f"{values.shown('max_steps')}: it must be at least 1, or -1 to go by num_train_epochs"


def check_ranges(values: SettingValues) -> Iterator[str]:
    """Yield every number out of its range; NaN is in none."""
    for name, allowed in RANGES.items():
        try:
            value = values[name]
        except UnusableSettingError:
            continue
        if value is not None and value not in allowed:
            yield f"{values.shown(name)}: it must be {allowed}"


# The settings of a learning-rate schedule, checked against the function that will get them.

# What transformers' get_scheduler passes itself.
_PASSED = {"optimizer", "num_warmup_steps", "num_training_steps", "last_epoch"}
_TAKE_NO_KEYWORDS = ("constant", "constant_with_warmup")


def check_schedule(values: SettingValues) -> Iterator[str]:
    """Refuse keywords that the schedule does not take, and a schedule without those it needs.

    Trainer makes the schedule after the weights are loaded: a wrong key would fail that late.
    """
    kind, given = values["lr_scheduler_type"], values["lr_scheduler_kwargs"] or {}
    if kind == "constant" and values.changed("warmup_steps"):
        yield f"{values.shown('warmup_steps')} has no effect: use constant_with_warmup"
    accepted, required, _ = _keywords(kind)
    for key in unknown_keywords(values):
        known = ", ".join(accepted) or "none"
        yield f"lr_scheduler_kwargs: {kind} takes no {key!r}; it takes: {known}"
    for key in required:
        if key not in given:
            yield f"lr_scheduler_type {kind} needs lr_scheduler_kwargs: {{{key}: ...}}"
    minimum = {"min_lr", "min_lr_rate"}
    if minimum <= set(accepted) and len(minimum & given.keys()) != 1:
        yield f"lr_scheduler_type {kind} needs lr_scheduler_kwargs with min_lr or min_lr_rate"


def unknown_keywords(values: SettingValues) -> list[str]:
    """Return the keys of lr_scheduler_kwargs that the schedule does not take."""
    accepted, _, open_ended = _keywords(values["lr_scheduler_type"])
    given = values["lr_scheduler_kwargs"] or {}
    return [] if open_ended else [key for key in given if key not in accepted]


def _keywords(kind: str) -> tuple[list[str], list[str], bool]:
    """Return the keywords a schedule takes, those it needs, and whether it takes any other."""
    from transformers import SchedulerType
    from transformers.optimization import TYPE_TO_SCHEDULER_FUNCTION

    if kind in _TAKE_NO_KEYWORDS:
        return [], [], False
    function: Any = TYPE_TO_SCHEDULER_FUNCTION[SchedulerType(kind)]
    parameters = inspect.signature(function).parameters.values()
    own = [parameter for parameter in parameters if parameter.name not in _PASSED]
    named = [parameter for parameter in own if parameter.kind is not parameter.VAR_KEYWORD]
    required = [parameter.name for parameter in named if parameter.default is parameter.empty]
    return [parameter.name for parameter in named], required, len(named) < len(own)


# Contradictions in when and on what a run evaluates, logs and saves, and picks its best model.

# What compares evaluations with each other, and so needs to know which number counts.
_JUDGES = (
    ("load_best_model_at_end", True),
    ("save_best", True),
    ("lr_scheduler_type", "reduce_lr_on_plateau"),
    ("lr_scheduler_type", "greedy"),
)


def check_evaluation(values: SettingValues) -> Iterator[str]:
    """Refuse evaluation without splits, splits that are never evaluated, and an unsaid rhythm."""
    try:
        splits = eval_splits(values["eval_data"])
    except ValueError as error:
        yield str(error)
        return
    rhythm = values["eval_strategy"]
    evaluates = rhythm != "no" or values["eval_on_start"]
    if evaluates and not splits:
        asked = "eval_strategy" if rhythm != "no" else "eval_on_start"
        yield f"{values.shown(asked)} needs eval_data NAME=DIR"
    if splits and not evaluates:
        yield (
            f"eval_data is given ({values.sources['eval_data']}) but never evaluated: set "
            "eval_strategy: steps and eval_steps, or eval_strategy: epoch"
        )
    if rhythm == "steps" and values["eval_steps"] is None:
        yield f"{values.shown('eval_strategy')} needs eval_steps: every log would evaluate else"


def check_rhythms(values: SettingValues) -> Iterator[str]:
    """Refuse a number of steps where the strategy does not count steps."""
    for steps, strategy in (
        ("eval_steps", "eval_strategy"),
        ("save_steps", "save_strategy"),
        ("logging_steps", "logging_strategy"),
    ):
        if values.changed(steps) and values[strategy] != "steps":
            yield f"{values.shown(steps)} has no effect: {strategy} is {values[strategy]}"


def check_saves(values: SettingValues) -> Iterator[str]:
    """Refuse kinds of saves that exclude each other."""
    if values["save_strategy"] == "best":
        yield (
            f"{values.shown('save_strategy')} saves nothing while the model does not improve, and "
            "nothing at the end: a crash would lose all since. Give save_best: true beside "
            "save_steps"
        )
    if values["save_strategy"] == "no":
        for name in ("save_minutes", "save_best"):
            if values.changed(name) and values[name]:
                yield f"{values.shown(name)} has no effect: save_strategy is no"


def check_best_model(values: SettingValues) -> Iterator[str]:
    """Refuse to judge models by no metric, by one that no split logs, or the wrong way round."""
    try:
        splits = eval_splits(values["eval_data"])
    except ValueError:
        return  # check_evaluation says so
    metrics = [f"eval_{name}_{kind}" for name in splits for kind in ("loss", "perplexity")]
    known = f"one of {', '.join(metrics)}" if metrics else "the loss of a split in eval_data"
    metric = values["metric_for_best_model"]
    for judge in (name for name, value in _JUDGES if values[name] == value):
        if metric is None:
            yield f"{values.shown(judge)} needs metric_for_best_model: {known}"
        if values["eval_strategy"] == "no":
            yield f"{values.shown(judge)} needs an eval_strategy"
    if metric is None:
        return
    if f"eval_{metric.removeprefix('eval_')}" not in metrics:
        yield f"{values.shown('metric_for_best_model')}: no such metric is logged; give {known}"
    if metric.endswith("perplexity") and values["greater_is_better"] is not False:
        yield "a lower perplexity is better: add greater_is_better: false"
    if metric.endswith("loss") and values["greater_is_better"]:
        yield f"{values.shown('greater_is_better')}: a lower loss is better"


# Contradictions between settings: found before anything is built.

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
