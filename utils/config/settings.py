"""The settings of a run, from command line to objects: overruled, derived, checked, built."""

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from transformers import TrainingArguments

from utils.config.arguments import (
    DataArguments,
    ModelArguments,
    RunArguments,
    eval_splits,
    fitting_micro_batch,
)
from utils.config.checks import FINE_TUNING_CHECKS, PRETRAINING_CHECKS, schedule_keywords
from utils.config.command_line import read_settings
from utils.config.declarations import Check, SettingValues, UnusableSettingError
from utils.config.precision import with_precision
from utils.config.trainer_arguments import (
    FineTuneConfig,
    PretrainConfig,
    TrainingClass,
    training_arguments,
)


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
        settle=(
            without_overruled,
            derive_batch_sizes,
            derive_evaluation,
            derive_best_metric,
            with_precision,
        ),
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


OUR_OPTIMIZERS = ("adamw_torch", "adamw_torch_fused")
BEST_MODEL = "load_best_model_at_end save_best metric_for_best_model greater_is_better"
LORA = (
    "lora_r lora_alpha lora_dropout lora_target_modules lora_target_parameters "
    "lora_modules_to_save use_rslora use_dora"
)
RECOMPUTED, OLD_NAME = "activation_checkpointing", "gradient_checkpointing"
WORKERS = "dataloader_persistent_workers dataloader_prefetch_factor"

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
    Rule(RECOMPUTED, _is_given, f"{OLD_NAME} {OLD_NAME}_kwargs"),
    Rule(OLD_NAME, _is_given, f"{RECOMPUTED} {RECOMPUTED}_kwargs"),
    Rule(RECOMPUTED, _recomputes_no_layers, f"{RECOMPUTED}_kwargs {OLD_NAME}_kwargs"),
    Rule(RECOMPUTED, _is("auto"), "activation_offloading"),
    Rule("dataloader_num_workers", _is(0), WORKERS),
)


def without_overruled(values: SettingValues) -> SettingValues:
    """Return the values without what a stronger source leaves no effect, and a note for each.

    Flags are stronger than recipes, later recipes than earlier ones.
    """
    for rule in (*PREFERENCES, *RULES):
        found = _without_effect(rule, values)
        moot = [name for name in found if 0 < values.rank(name) < values.rank(rule.cause)]
        values = values.without(moot, [found[name] for name in moot])
    return values.replaced({}, _without_effect(STEPS_COUNT, values).values())


def check_effects(values: SettingValues) -> Iterator[str]:
    """Refuse what has no effect because of its own source or of a default.

    Of two settings that exclude each other one is named.
    """
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


def derive_batch_sizes(values: SettingValues) -> SettingValues:
    """Derive the global batch from the micro-batch, or a micro-batch that divides the global one.

    A micro-batch only says how much is computed at once, so a smaller one trains the same. One
    that was given stays, unless what does not go with it comes from a stronger source: a flag, or
    the number of ranks of this launch.
    """
    total, micro = values["global_batch_size"], values["per_device_train_batch_size"]
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    micro_rank = values.rank("per_device_train_batch_size")
    shown = values.shown("per_device_train_batch_size")
    if total is None and micro_rank > 0 and micro > 0:
        why = (
            f"{shown} x {ranks} {'rank' if ranks == 1 else 'ranks'}; set it, and any number of "
            "ranks trains the same"
        )
        return values.derived("global_batch_size", micro * ranks, why)
    if total is None or micro < 1 or total < 1 or total % (micro * ranks) == 0:
        return values
    divides_on_one_rank = total % micro == 0
    smaller = fitting_micro_batch(total, micro, ranks)
    if not smaller or not (micro_rank < values.rank("global_batch_size") or divides_on_one_rank):
        return values
    why = f"{shown} does not divide " if micro_rank > 0 else "what divides "
    why += values.shown("global_batch_size") + (f" over {ranks} ranks" if ranks > 1 else "")
    return values.derived("per_device_train_batch_size", smaller, why)


def derive_evaluation(values: SettingValues) -> SettingValues:
    """Derive when to evaluate from when checkpoints are written."""
    if not values["eval_data"]:
        return values
    by_steps = values["save_strategy"] == "steps"
    if values.rank("eval_strategy") == 0 and not values["eval_on_start"]:
        strategy = "steps" if by_steps or values["eval_steps"] is not None else "epoch"
        values = values.derived("eval_strategy", strategy, f"{values.shown('eval_data')} is given")
    if values["eval_strategy"] == "steps" and values["eval_steps"] is None and by_steps:
        why = f"with each of {values.shown('save_steps')}"
        values = values.derived("eval_steps", values["save_steps"], why)
    return values


def derive_best_metric(values: SettingValues) -> SettingValues:
    """Derive what the best model is judged by, where there is one split, and which way round."""
    try:
        splits = list(eval_splits(values["eval_data"]))
    except ValueError:
        return values  # check_evaluation says so
    judge = next((name for name in ("save_best", "load_best_model_at_end") if values[name]), None)
    if values["metric_for_best_model"] is None and judge is not None and len(splits) == 1:
        why = f"{values.shown(judge)}, and the only split"
        values = values.derived("metric_for_best_model", f"eval_{splits[0]}_loss", why)
    metric = values["metric_for_best_model"] or ""
    if metric.endswith("perplexity") and values["greater_is_better"] is None:
        values = values.derived("greater_is_better", False, f"a lower {metric} is better")
    return values
