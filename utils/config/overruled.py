"""What a stronger source makes moot: `--eval_strategy no` on a recipe that evaluates.

Flags are stronger than recipes, later recipes than earlier ones. What has no effect because a
stronger source says otherwise goes back to its default, with a line in the log. Within one source
it stays a contradiction, which the checks refuse.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from utils.config.checks.origin import LORA_SETTINGS
from utils.config.checks.precision import OUR_OPTIMIZERS
from utils.config.checks.schedules import unknown_keywords
from utils.config.reading.settings import SettingValues, UnusableSettingError

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
