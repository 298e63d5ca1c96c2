"""What nobody set and what follows from the rest: the batch's sizes, when and by what to judge."""

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from transformers import TrainingArguments

from utils.config.arguments import DataArguments, ModelArguments, RunArguments, eval_splits
from utils.config.batch import fitting_micro_batch
from utils.config.checks import FINE_TUNING_CHECKS, PRETRAINING_CHECKS, Check, schedule_keywords
from utils.config.command_line import read_settings
from utils.config.declarations import Given, SettingValues, UnusableSettingError, shown
from utils.config.precision import with_precision
from utils.config.trainer_arguments import (
    FineTuneConfig,
    PretrainConfig,
    TrainingClass,
    training_arguments,
)

Found = Iterator[tuple[str, Any, str]]  # setting, value, why


def with_derived(values: SettingValues) -> SettingValues:
    """Return the values with what follows from them, and a note for each."""
    for derive in (_batch_sizes, _when_to_evaluate, _best_metric):
        found = {}
        try:
            for name, value, why in derive(values):
                found[name] = Given(value, why)
        except UnusableSettingError:
            pass  # a fault that was found says why
        notes = [f"{name} {shown(entry.value)}: {entry.source}" for name, entry in found.items()]
        values = values.replaced(found, notes)
    return values


def _batch_sizes(values: SettingValues) -> Found:
    """Derive the global batch from the micro-batch, or a micro-batch that divides the global one.

    A micro-batch only says how much is computed at once, so a smaller one trains the same. One
    that was given stays, unless what does not go with it comes from a stronger source: a flag, or
    the number of ranks of this launch.
    """
    total, micro = values["global_batch_size"], values["per_device_train_batch_size"]
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
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


def _when_to_evaluate(values: SettingValues) -> Found:
    """Derive the rhythm of evaluations from that of the checkpoints."""
    strategy = values["eval_strategy"]
    by_steps = values["save_strategy"] == "steps"
    if values["eval_data"] and values.rank("eval_strategy") == 0 and not values["eval_on_start"]:
        strategy = "steps" if by_steps or values["eval_steps"] is not None else "epoch"
        yield "eval_strategy", strategy, f"{values.shown('eval_data')} is given"
    if strategy == "steps" and values["eval_steps"] is None and by_steps and values["eval_data"]:
        yield "eval_steps", values["save_steps"], f"with each of {values.shown('save_steps')}"


def _best_metric(values: SettingValues) -> Found:
    """Derive what the best model is judged by, where there is one split, and which way round."""
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


# Settings that have no effect because of another one: `--eval_strategy no` beside eval_steps.

OUR_OPTIMIZERS = ("adamw_torch", "adamw_torch_fused")
BEST_MODEL = "load_best_model_at_end save_best metric_for_best_model greater_is_better"
LORA = (
    "lora_r lora_alpha lora_dropout lora_target_modules lora_target_parameters "
    "lora_modules_to_save use_rslora use_dora"
)

Condition = Callable[[Any, SettingValues], bool]  # of the cause's value, and of all


class Rule(NamedTuple):
    """While the value of `cause` meets the condition, the settings in `moot` have no effect."""

    cause: str
    condition: Condition
    moot: str


def _is(*words: object) -> Condition:
    return lambda value, _: value in words


def _is_not(*words: object) -> Condition:
    return lambda value, _: value not in words


_is_given = _is_not(None, [], "")


def _never_evaluates(strategy: str, values: SettingValues) -> bool:
    return strategy == "no" and not values["eval_on_start"]


def _recomputes_no_layers(word: bool | str | None, values: SettingValues) -> bool:
    return word not in (True, "full") and values["gradient_checkpointing"] is not True


def _takes_other_keywords(schedule: str, values: SettingValues) -> bool:
    accepted, _, is_open_ended = schedule_keywords(schedule)
    return not is_open_ended and not set(values["lr_scheduler_kwargs"] or ()) <= set(accepted)


STEPS_COUNT = Rule("max_steps", _is_not(-1), "num_train_epochs")  # as transformers documents it
# Both may stand in one source.
PREFERENCES = (
    Rule("eval_strategy", _is("no"), "eval_on_start"),
    STEPS_COUNT,
    Rule("num_train_epochs", _is_given, "max_steps"),
    Rule("lr_scheduler_type", _takes_other_keywords, "lr_scheduler_kwargs"),
)
RULES = (
    # When to evaluate, save and log.
    Rule("eval_strategy", _never_evaluates, "eval_data"),
    Rule("eval_data", _is([]), f"eval_strategy eval_steps eval_on_start {BEST_MODEL}"),
    Rule("eval_strategy", _is("no"), f"eval_steps {BEST_MODEL}"),
    Rule("eval_strategy", _is("epoch"), "eval_steps"),
    Rule("save_strategy", _is("no"), "save_steps save_minutes save_best"),
    Rule("save_strategy", _is("epoch"), "save_steps"),
    Rule("logging_strategy", _is("no", "epoch"), "logging_steps"),
    # Where the weights come from; a model_config with init_from changes positions and the like.
    Rule("model_name_or_path", _is_given, "model_config init_from init_optimizer"),
    Rule("init_from", _is_given, "model_name_or_path model_revision"),
    Rule("init_from", _is(None), "init_optimizer"),
    Rule("model_config", _is_given, "model_name_or_path model_revision"),
    Rule("use_peft", _is(False), LORA),
    Rule("use_peft", _is(True), "stochastic_rounding init_optimizer"),
    # In which types it is computed.
    Rule("bf16", _is(True), "fp16 stochastic_rounding"),
    Rule("fp16", _is(True), "bf16 optim_states stochastic_rounding"),
    Rule("dtype", _is(None, "float32", "float16"), "stochastic_rounding"),
    Rule("stochastic_rounding", _is(True), "bf16 optim_args"),
    Rule("use_cpu", _is(True), "tf32"),
    Rule("optim", _is_not(*OUR_OPTIMIZERS), "optim_states stochastic_rounding"),
    Rule("optim_states", _is_given, "optim_args"),
    Rule("lr_scheduler_type", _is("constant"), "warmup_steps"),
    # What is computed again in the backward pass.
    Rule(
        "activation_checkpointing",
        _is_given,
        "gradient_checkpointing gradient_checkpointing_kwargs",
    ),
    Rule(
        "gradient_checkpointing",
        _is_given,
        "activation_checkpointing activation_checkpointing_kwargs",
    ),
    Rule(
        "activation_checkpointing",
        _recomputes_no_layers,
        "activation_checkpointing_kwargs gradient_checkpointing_kwargs",
    ),
    Rule("activation_checkpointing", _is("auto"), "activation_offloading"),
    Rule(
        "dataloader_num_workers",
        _is(0),
        "dataloader_persistent_workers dataloader_prefetch_factor",
    ),
)


def without_overruled(values: SettingValues) -> SettingValues:
    """Return the values without what a stronger source leaves no effect, and a note for each."""
    for rule in (*PREFERENCES, *RULES):
        found = _without_effect(rule, values)
        moot = [name for name in found if 0 < values.rank(name) < values.rank(rule.cause)]
        values = values.without(moot, [found[name] for name in moot])
    return values.replaced({}, _without_effect(STEPS_COUNT, values).values())


def check_effects(values: SettingValues) -> Iterator[str]:
    """Refuse settings that have no effect; of two that exclude each other the second only."""
    refused: set[str] = set()
    for rule in RULES:
        if rule.cause not in refused:
            found = _without_effect(rule, values)
            # What is off or null has no effect anyway.
            found = {name: line for name, line in found.items() if values[name]}
            yield from (line for name, line in found.items() if name not in refused)
            refused |= found.keys()


def _without_effect(rule: Rule, values: SettingValues) -> dict[str, str]:
    """Return the settings that somebody changed and a rule makes moot, each with a line."""
    try:
        if not rule.condition(values[rule.cause], values):
            return {}
        return {
            name: f"{values.shown(name)} has no effect: {values.shown(rule.cause)}"
            for name in rule.moot.split()
            if values.changed(name)
        }
    except UnusableSettingError:
        return {}  # a fault above says why


# The settings of a training run by room, as both scripts read them.

# In this order: a derived value follows from what counts.
SETTLE = (without_overruled, with_derived, with_precision)


@dataclass(frozen=True)
class RunSettings:
    """What the user set, one object each for run, data, model and training.

    values: every setting by name with its source. resolved: the same as plain data.
    """

    run: RunArguments
    data: DataArguments
    model: ModelArguments
    training: TrainingArguments
    values: SettingValues
    resolved: dict[str, Any]


def parse_pretraining(argv: Sequence[str] | None, description: str) -> RunSettings:
    """Read the settings of `pretrain.py`; raises ConfigurationError with every fault."""
    return _parse(PretrainConfig, PRETRAINING_CHECKS, argv, "pretrain.py", description)


def parse_fine_tuning(argv: Sequence[str] | None, description: str) -> RunSettings:
    """Read the settings of `sft_train.py`; raises ConfigurationError with every fault."""
    return _parse(FineTuneConfig, FINE_TUNING_CHECKS, argv, "sft_train.py", description)


def _parse(
    training_class: type[TrainingClass],
    checks: Sequence[Check],
    argv: Sequence[str] | None,
    prog: str,
    description: str,
) -> RunSettings:
    values = read_settings(
        (RunArguments, DataArguments, ModelArguments, training_class),
        argv,
        settle=SETTLE,
        checks=(check_effects, *checks),
        prog=prog,
        description=description,
    )
    return RunSettings(
        values.build(RunArguments),
        values.build(DataArguments),
        values.build(ModelArguments),
        training_arguments(training_class, values),
        values,
        dict(values),
    )
