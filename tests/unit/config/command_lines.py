"""Command lines of both scripts, parsed and checked as the scripts do."""

import pytest

from utils.config.arguments import DataArguments, ModelArguments, RunArguments
from utils.config.checks import FINE_TUNING_CHECKS, PRETRAINING_CHECKS
from utils.config.command_line import parse_arguments
from utils.config.errors import ConfigurationError
from utils.config.settings import SETTLE
from utils.config.trainer_arguments import PretrainConfig

BASE = {
    "global_batch_size": "8",
    "sequence_length": "64",
    "train_data": "data/x",
    "model_config": "model.yaml",
    "use_cpu": "true",
}


def parse_training_settings(training_class, argv):
    checks = PRETRAINING_CHECKS if training_class is PretrainConfig else FINE_TUNING_CHECKS
    classes = (RunArguments, DataArguments, ModelArguments, training_class)
    return parse_arguments(classes, argv, checks=checks, settle=SETTLE)


def words(changes):
    given = {**BASE, "output_dir": "runs/x", **changes}
    return [
        word
        for name, value in given.items()
        if value is not None
        for word in (f"--{name}", *(value if isinstance(value, list) else [value]))
    ]


def parse(training_class=PretrainConfig, **changes):
    return parse_training_settings(training_class, words(changes))


def problems_of(training_class=PretrainConfig, **changes):
    with pytest.raises(ConfigurationError) as caught:
        parse(training_class, **changes)
    return caught.value.problems


EVALUATED = {"eval_data": ["a=data/a", "b=data/b"], "eval_strategy": "steps", "eval_steps": "10"}

METRICS = "one of eval_a_loss, eval_a_perplexity, eval_b_loss, eval_b_perplexity"
