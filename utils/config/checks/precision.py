"""Contradictions in what is computed, and what weights and Adam's states are kept as."""

from collections.abc import Iterator

from utils.config.reading.settings import SettingValues

OUR_OPTIMIZERS = ("adamw_torch", "adamw_torch_fused")


def check_precision(values: SettingValues) -> Iterator[str]:
    """Refuse two mixed precisions, and weights of a type that cannot be trained."""
    if values["bf16"] and values["fp16"]:
        yield f"{values.shown('bf16')} and {values.shown('fp16')}: choose one mixed precision"
    if values["dtype"] == "float16" and not values["use_peft"]:
        yield (
            "dtype float16: weights in float16 cannot be trained (updates underflow); leave dtype "
            "at null, and set fp16: true for mixed precision"
        )


def check_optimizer_states(values: SettingValues) -> Iterator[str]:
    """Refuse `optim_states` beside other optimizers, and rounding without weights to round."""
    given = [name for name in ("optim_states", "stochastic_rounding") if values.changed(name)]
    for shown in map(values.shown, given):
        if values["optim"] not in OUR_OPTIMIZERS:
            yield f"{shown} is for {' and '.join(OUR_OPTIMIZERS)}, not for {values.shown('optim')}"
        if values["fp16"]:
            yield f"{shown} knows nothing of the loss scaler of fp16: use bf16"
        if values["optim_args"]:
            yield f"{values.shown('optim_args')} has no effect with {shown}"
    if values["stochastic_rounding"]:
        yield from _rounding_problems(values)


def _rounding_problems(values: SettingValues) -> Iterator[str]:
    shown = values.shown("stochastic_rounding")
    if values["use_peft"]:
        yield f"{shown} has no effect with use_peft: adapters are kept in float32"
    elif values["dtype"] not in ("bfloat16", "auto"):
        yield (
            f"{shown} has no effect on weights in float32 (dtype {values['dtype'] or 'null'}): set "
            "dtype: bfloat16 to keep them in 2 bytes"
        )
    if values["bf16"]:
        yield (
            f"{shown} goes without mixed precision ({values.shown('bf16')}): weights in bfloat16 "
            "are computed with as they are"
        )
