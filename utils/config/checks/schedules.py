"""The settings of a learning-rate schedule, checked against the function that will get them."""

import inspect
from collections.abc import Iterator
from typing import Any

from utils.config.reading.settings import SettingValues

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
