"""Where the weights of a run come from: one place, and what goes with it."""

from collections.abc import Iterator

from utils.config.reading.settings import SettingValues

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
