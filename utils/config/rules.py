"""Rules on settings that have no effect while another setting has a certain value."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

from utils.config.declarations import SettingValues, UnusableSettingError

OF_EVALUATIONS = (
    "eval_steps eval_on_start max_eval_sequences sample_prompts save_best metric_for_best_model "
    "greater_is_better"
)
ADAMW = ("adamw_torch", "adamw_torch_fused")
LORA_SETTINGS = (
    "lora_r lora_alpha lora_dropout lora_target_modules lora_target_parameters "
    "lora_modules_to_save use_rslora use_dora"
)


def _is(*words: object) -> Callable[[Any], bool]:
    return lambda value: value in words


def _is_not(*words: object) -> Callable[[Any], bool]:
    return lambda value: value not in words


_is_given = _is_not(None, [], "")
Rule = tuple[str, Callable[[Any], bool], str]
Rules = tuple[Rule, ...]

# A rule is (cause, test, names): if the value of `cause` passes the test, `names` have no effect.
# MOOT: training is the same without the named settings, so a line in the log is enough.
MOOT: Rules = (
    # When to evaluate, save and log.
    ("eval_data", _is([]), f"eval_strategy {OF_EVALUATIONS}"),
    ("eval_strategy", _is("no"), f"eval_data {OF_EVALUATIONS}"),
    ("eval_strategy", _is("epoch"), "eval_steps"),
    ("save_strategy", _is("no"), "save_steps save_minutes save_best"),
    ("save_strategy", _is("epoch"), "save_steps"),
    ("logging_strategy", _is("no", "epoch"), "logging_steps"),
    ("logging_strategy", _is("no"), "on_spike"),
    ("lr_scheduler_type", _is("constant", "constant_with_warmup"), "lr_scheduler_kwargs"),
    ("report_to", _is(None, "none", [], ["none"]), "run_name"),
    ("sample_prompts", _is([]), "sample_max_new_tokens"),
    ("early_stopping_patience", _is(None), "early_stopping_threshold"),
    # The model, its adapters and its upload.
    ("init_from", _is_given, "model_revision"),
    ("model_config", _is_given, "model_revision"),
    ("push_to_hub", _is(False), "hub_model_id hub_private_repo"),
    ("use_peft", _is(True), "stochastic_rounding pad_embeddings_to_multiple_of"),
    ("load_in_4bit", _is(False), "bnb_4bit_quant_type use_bnb_nested_quant"),
    # How the same numbers are computed.
    ("use_cpu", _is(True), "tf32"),
    ("optim", _is_not(*ADAMW), "optim_states"),
    ("activation_checkpointing", _is_not(True, "full"), "activation_checkpointing_kwargs"),
    ("activation_checkpointing", _is("auto"), "activation_offloading"),
    ("dataloader_num_workers", _is(0), "dataloader_persistent_workers dataloader_prefetch_factor"),
)
# CONTRADICTIONS: `cause` and the named settings ask for different trainings, which is an error.
# Exception: a flag overrules recipes, and a later recipe an earlier one, without an error.
CONTRADICTIONS: Rules = (
    ("eval_data", _is([]), "load_best_model_at_end early_stopping_patience"),
    ("eval_strategy", _is("no"), "load_best_model_at_end early_stopping_patience"),
    ("save_strategy", _is("no"), "load_best_model_at_end"),
    ("max_steps", _is_not(-1), "max_tokens"),
    ("max_tokens", _is_given, "max_steps"),
    # Where the weights come from. init_from with model_config may change, for example, positions.
    ("model_name_or_path", _is_given, "model_config init_from init_optimizer"),
    ("init_from", _is_given, "model_name_or_path"),
    ("init_from", _is(None), "init_optimizer"),
    ("model_config", _is(None), "model_config_overrides"),
    ("model_config", _is_given, "model_name_or_path"),
    ("use_peft", _is(False), LORA_SETTINGS),
    ("use_peft", _is(True), "init_optimizer freeze train_only"),
    # The types in which weights are stored and used.
    ("bf16", _is(True), "fp16 stochastic_rounding"),
    ("fp16", _is(True), "bf16 optim_states stochastic_rounding"),
    ("dtype", _is(None, "float32", "float16"), "stochastic_rounding"),
    ("stochastic_rounding", _is(True), "bf16 optim_args"),
    ("optim", _is_not(*ADAMW), "stochastic_rounding"),
    ("optim_states", _is_given, "optim_args"),
    ("lr_scheduler_type", _is("constant", "reduce_lr_on_plateau", "greedy"), "warmup_steps"),
)
RULES = (*MOOT, *CONTRADICTIONS)


def reset_overruled(values: SettingValues) -> None:
    """Reset settings of a recipe that contradict a flag or a later recipe.

    Also reset settings that another setting of the user switches off (see MOOT). Settings that a
    default switches off stay, because a derived value may still replace this default.
    """
    rank = values.rank
    for name, cause in _without_effect(values, CONTRADICTIONS):
        if 0 < rank(name) < rank(cause):
            reset_setting(values, name, cause)
    for name, cause in _without_effect(values, MOOT):
        if rank(name) > 0 and rank(cause) > 0:
            reset_setting(values, name, cause)


def reset_without_effect(values: SettingValues) -> None:
    """Reset all settings without effect (see MOOT). Call this once missing values are derived."""
    for name, cause in _without_effect(values, MOOT):
        # A value that is off or null has no effect anyway.
        if values.rank(name) > 0 and values[name]:
            reset_setting(values, name, cause)


def check_contradictions(values: SettingValues) -> Iterator[str]:
    """Yield an error text for each pair of settings that contradict each other."""
    refused: set[str] = set()
    # Given causes come first, because a value that the user wrote explains more than a default.
    by_rank = sorted(CONTRADICTIONS, key=lambda rule: values.rank(rule[0]), reverse=True)
    for name, cause in _without_effect(values, by_rank):
        if values[name] and not refused & {cause, name}:
            refused.add(name)
            is_off = values.rank(cause) == 0 and values[cause] in (None, False, "no", [])
            yield no_effect(values, name, cause) + (f": give --{cause}" if is_off else "")


def _without_effect(values: SettingValues, rules: Sequence[Rule]) -> Iterator[tuple[str, str]]:
    for cause, applies, names in rules:
        with suppress(UnusableSettingError):  # the fault is already reported
            if applies(values[cause]):
                yield from [(name, cause) for name in names.split() if values.changed(name)]


def no_effect(values: SettingValues, name: str, cause: str) -> str:
    """Return the log line on a setting without effect. cause: the setting that switches it off."""
    return f"{values.shown(name)} has no effect: {values.shown(cause)}"


def reset_setting(values: SettingValues, name: str, cause: str) -> None:
    """Reset a setting to its default. Add a log line that names `cause`, another setting."""
    values.notes.append(no_effect(values, name, cause))
    del values.given[name]
