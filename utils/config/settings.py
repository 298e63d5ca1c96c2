"""What nobody set and what follows from the rest: the batch's sizes, when and by what to judge."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import TrainingArguments

from utils.config.arguments import DataArguments, ModelArguments, RunArguments, eval_splits
from utils.config.batch import fitting_micro_batch
from utils.config.checks import (
    FINE_TUNING_CHECKS,
    LORA_SETTINGS,
    PRETRAINING_CHECKS,
    Check,
    unknown_keywords,
)
from utils.config.command_line import parse_arguments
from utils.config.declarations import SettingValues, UnusableSettingError
from utils.config.precision import OUR_OPTIMIZERS, with_precision
from utils.config.trainer_arguments import FineTuneConfig, PretrainConfig

Found = Iterator[tuple[str, Any, str]]  # setting, value, why


def with_derived(values: SettingValues) -> tuple[SettingValues, list[str]]:
    """Return the values with what follows from them, and a line for each."""
    lines = []
    for derive in (_batch_sizes, _when_to_evaluate, _best_metric):
        found = list(_found(derive, values, os.environ))
        lines += [f"{name} {_shown(value)}: {why}" for name, value, why in found]
        values = values.replaced({name: (value, why) for name, value, why in found})
    return values, lines


def _shown(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _found(
    derive: Callable[[SettingValues, Mapping[str, str]], Found],
    values: SettingValues,
    environment: Mapping[str, str],
) -> Found:
    try:
        yield from derive(values, environment)
    except UnusableSettingError:
        return  # that fault is said


def _batch_sizes(values: SettingValues, environment: Mapping[str, str]) -> Found:
    """Derive the global batch from the micro-batch, or a micro-batch that divides the global one.

    A micro-batch only says how much is computed at once, so a smaller one trains the same. One
    that was given stays, unless what does not go with it comes from a stronger source: a flag, or
    the number of ranks of this launch.
    """
    total, micro = values["global_batch_size"], values["per_device_train_batch_size"]
    ranks = int(environment.get("WORLD_SIZE", "1"))
    given = values.rank("per_device_train_batch_size") > 0
    if total is None:
        if given and micro > 0:
            yield (
                "global_batch_size", micro * ranks,
                f"{values.shown('per_device_train_batch_size')} x {ranks} "
                f"{'rank' if ranks == 1 else 'ranks'}; set it, and any number of ranks trains the "
                "same",
            )  # fmt: skip
        return
    if micro < 1 or total < 1 or total % (micro * ranks) == 0:
        return
    weaker = values.rank("per_device_train_batch_size") < values.rank("global_batch_size")
    by_launch = total % micro == 0  # it divides on one rank
    smaller = fitting_micro_batch(total, micro, ranks)
    if smaller and (weaker or by_launch):
        instead = f"{values.shown('per_device_train_batch_size')} does not divide " if given else ""
        where = f" over {ranks} ranks" if ranks > 1 else ""
        yield (
            "per_device_train_batch_size", smaller,
            f"{instead or 'what divides '}{values.shown('global_batch_size')}{where}",
        )  # fmt: skip


def _when_to_evaluate(values: SettingValues, environment: Mapping[str, str]) -> Found:
    """Derive the rhythm of evaluations from that of the checkpoints."""
    del environment
    strategy = values["eval_strategy"]
    by_steps = values["save_strategy"] == "steps"
    if values["eval_data"] and values.rank("eval_strategy") == 0 and not values["eval_on_start"]:
        strategy = "steps" if by_steps or values["eval_steps"] is not None else "epoch"
        yield "eval_strategy", strategy, f"{values.shown('eval_data')} is given"
    if strategy == "steps" and values["eval_steps"] is None and by_steps and values["eval_data"]:
        yield "eval_steps", values["save_steps"], f"with each of {values.shown('save_steps')}"


def _best_metric(values: SettingValues, environment: Mapping[str, str]) -> Found:
    """Derive what the best model is judged by, where there is one split, and which way round."""
    del environment
    metric = values["metric_for_best_model"]
    judge = next((name for name in ("save_best", "load_best_model_at_end") if values[name]), None)
    try:
        splits = list(eval_splits(values["eval_data"]))
    except ValueError:
        return  # check_evaluation says so
    if metric is None and judge is not None and len(splits) == 1:
        metric = f"eval_{splits[0]}_loss"
        yield "metric_for_best_model", metric, f"{values.shown(judge)}, and the only split"
    if metric is not None and metric.endswith("perplexity") and values["greater_is_better"] is None:
        yield "greater_is_better", False, f"a lower {metric} is better"


# What a stronger source makes moot: `--eval_strategy no` on a recipe that evaluates.

JUDGED = ("load_best_model_at_end", "save_best", "metric_for_best_model", "greater_is_better")
EVALUATION = ("eval_strategy", "eval_steps", "eval_on_start", *JUDGED)
ADAM_SETTINGS = ("optim_states", "stochastic_rounding")


@dataclass(frozen=True)
class Rule:
    """A setting that, where `holds`, leaves no effect to the settings that it makes moot."""

    cause: str
    holds: Callable[[SettingValues], bool]
    moot: tuple[str, ...]


def _is(name: str, *words: object) -> Callable[[SettingValues], bool]:
    return lambda values: values[name] in words


def _given(name: str) -> Callable[[SettingValues], bool]:
    return lambda values: values[name] not in (None, [], "")


def _never_evaluates(values: SettingValues) -> bool:
    return values["eval_strategy"] == "no" and not values["eval_on_start"]


def _checkpointing_is_not_full(values: SettingValues) -> bool:
    return values["activation_checkpointing"] not in (True, "full")


RULES = (
    Rule("eval_strategy", _is("eval_strategy", "no"), ("eval_steps", "eval_on_start", *JUDGED)),
    Rule("eval_strategy", _never_evaluates, ("eval_data",)),
    Rule("eval_strategy", _is("eval_strategy", "epoch"), ("eval_steps",)),
    Rule("eval_data", _is("eval_data", []), EVALUATION),
    Rule("save_strategy", _is("save_strategy", "no"), ("save_steps", "save_minutes", "save_best")),
    Rule("save_strategy", _is("save_strategy", "epoch"), ("save_steps",)),
    Rule("logging_strategy", _is("logging_strategy", "no", "epoch"), ("logging_steps",)),
    # Where the weights come from.
    Rule(
        "model_name_or_path",
        _given("model_name_or_path"),
        ("model_config", "init_from", "init_optimizer"),
    ),
    Rule("init_from", _given("init_from"), ("model_name_or_path", "model_revision")),
    Rule("init_from", _is("init_from", None), ("init_optimizer",)),
    Rule("model_config", _given("model_config"), ("model_name_or_path", "model_revision")),
    Rule("use_peft", _is("use_peft", False), LORA_SETTINGS),
    Rule("use_peft", _is("use_peft", True), ("stochastic_rounding", "init_optimizer")),
    # In which types it is computed.
    Rule("bf16", _is("bf16", True), ("fp16", "stochastic_rounding")),
    Rule("fp16", _is("fp16", True), ("bf16", *ADAM_SETTINGS)),
    Rule("dtype", _is("dtype", None, "float32"), ("stochastic_rounding",)),
    Rule("stochastic_rounding", _is("stochastic_rounding", True), ("bf16",)),
    Rule("use_cpu", _is("use_cpu", True), ("tf32",)),
    Rule("optim", lambda values: values["optim"] not in OUR_OPTIMIZERS, ADAM_SETTINGS),
    Rule("optim_states", _given("optim_states"), ("optim_args",)),
    # How long, and along which curve.
    Rule("max_steps", lambda values: values["max_steps"] != -1, ("num_train_epochs",)),
    Rule("num_train_epochs", _given("num_train_epochs"), ("max_steps",)),
    Rule("lr_scheduler_type", _is("lr_scheduler_type", "constant"), ("warmup_steps",)),
    Rule(
        "lr_scheduler_type", lambda values: bool(unknown_keywords(values)), ("lr_scheduler_kwargs",)
    ),
    # What is computed again.
    Rule(
        "activation_checkpointing",
        _given("activation_checkpointing"),
        ("gradient_checkpointing", "gradient_checkpointing_kwargs"),
    ),
    Rule(
        "activation_checkpointing", _checkpointing_is_not_full, ("activation_checkpointing_kwargs",)
    ),
    Rule(
        "activation_checkpointing",
        _is("activation_checkpointing", "auto"),
        ("activation_offloading",),
    ),
    Rule(
        "gradient_checkpointing",
        _given("gradient_checkpointing"),
        ("activation_checkpointing", "activation_checkpointing_kwargs"),
    ),
    Rule(
        "dataloader_num_workers",
        _is("dataloader_num_workers", 0),
        ("dataloader_persistent_workers", "dataloader_prefetch_factor"),
    ),
)  # fmt: skip


def without_overruled(values: SettingValues) -> tuple[SettingValues, list[str]]:
    """Return the values without what a stronger source makes moot, and a line for each."""
    lines = []
    for rule in RULES:
        moot = list(_moot(rule, values))
        lines += [
            f"{values.shown(name)} has no effect: {values.shown(rule.cause)}" for name in moot
        ]
        values = values.without(moot)
    if {"max_steps", "num_train_epochs"} <= values.keys():
        lines += _both_durations(values)
    return values, lines


def _moot(rule: Rule, values: SettingValues) -> list[str]:
    try:
        if rule.cause not in values or not rule.holds(values):
            return []
        stronger = values.rank(rule.cause)
        changed = [name for name in rule.moot if values.changed(name)]
        return [name for name in changed if 0 < values.rank(name) < stronger]
    except UnusableSettingError:
        return []  # that fault is said


def _both_durations(values: SettingValues) -> Iterator[str]:
    """Say which of two durations in one source counts, as transformers documents it."""
    try:
        if values["max_steps"] != -1 and values.changed("num_train_epochs"):
            shown = values.shown("max_steps")
            yield f"{values.shown('num_train_epochs')} has no effect: {shown} counts"
    except UnusableSettingError:
        return


# The settings of a training run by room, as both scripts read them.

# In this order: a derived value follows from what counts.
SETTLE = (without_overruled, with_derived, with_precision)


@dataclass(frozen=True)
class RunSettings:
    """What the user set: one object a room, and every value by name with where it came from.

    `notes` are lines to log: what was overruled by a stronger source, and what was derived.
    """

    run: RunArguments
    data: DataArguments
    model: ModelArguments
    training: TrainingArguments
    values: SettingValues
    resolved: dict[str, Any]
    notes: tuple[str, ...] = ()


def parse_pretraining(argv: Sequence[str] | None, description: str) -> RunSettings:
    """Read the settings of `pretrain.py`; raises ConfigurationError with every fault."""
    return _parse(PretrainConfig, PRETRAINING_CHECKS, argv, "pretrain.py", description)


def parse_fine_tuning(argv: Sequence[str] | None, description: str) -> RunSettings:
    """Read the settings of `sft_train.py`; raises ConfigurationError with every fault."""
    return _parse(FineTuneConfig, FINE_TUNING_CHECKS, argv, "sft_train.py", description)


def _parse(
    training_class: type,
    checks: Sequence[Check],
    argv: Sequence[str] | None,
    prog: str,
    description: str,
) -> RunSettings:
    classes = (RunArguments, DataArguments, ModelArguments, training_class)
    settings = parse_arguments(
        classes,
        argv,
        checks=checks,
        settle=SETTLE,
        prog=prog,
        description=description,
    )
    run, data, model, training = settings
    return RunSettings(
        run, data, model, training, settings.values, settings.as_dict(), settings.notes
    )
