"""The range that each numeric setting has to lie in."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from utils.config.reading.settings import SettingValues, UnusableSettingError


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
