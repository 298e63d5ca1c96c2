"""The settings of a training run by room, as both scripts read them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from transformers import TrainingArguments

from utils.config.arguments import DataArguments, ModelArguments
from utils.config.checks.contradictions import FINE_TUNING_CHECKS, PRETRAINING_CHECKS, Check
from utils.config.cpu_precision import with_precision
from utils.config.derived import with_derived
from utils.config.overruled import without_overruled
from utils.config.reading.parsing import parse_arguments
from utils.config.reading.settings import SettingValues
from utils.config.run_arguments import RunArguments
from utils.config.trainer_arguments import FineTuneConfig, PretrainConfig

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
