"""The settings of the two training scripts: argument classes and checks in one call."""

from collections.abc import Sequence

from utils.config.arguments import (
    DataArguments,
    FineTuneConfig,
    ModelArguments,
    PretrainConfig,
    RunArguments,
)
from utils.config.checks import FINE_TUNING_CHECKS, PRETRAINING_CHECKS
from utils.config.parsing import parse_arguments
from utils.config.settings import Settings


def parse_training_settings(
    training_class: type[PretrainConfig] | type[FineTuneConfig],
    argv: Sequence[str] | None = None,
    description: str | None = None,
) -> Settings:
    """Return the settings; they unpack into run, data, model and training arguments.

    Building the training arguments starts the process group of the launch. Raises
    ConfigurationError with every fault before that.
    """
    pretraining = issubclass(training_class, PretrainConfig)
    return parse_arguments(
        (RunArguments, DataArguments, ModelArguments, training_class),
        argv,
        checks=PRETRAINING_CHECKS if pretraining else FINE_TUNING_CHECKS,
        description=description,
    )
