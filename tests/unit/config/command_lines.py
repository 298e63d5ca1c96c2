"""Helpers that parse and check command lines as pretrain.py and sft_train.py do."""

import pytest
import tiny

from utils.config.errors import ConfigurationError
from utils.config.settings import parse_fine_tuning, parse_pretraining

BASE = {
    "global_batch_size": "8",
    "sequence_length": "64",
    "train_data": "data/x",
    "model_config": "model.yaml",
    "use_cpu": "true",
    "output_dir": "runs/x",
}


def parse(parse_argv=parse_pretraining, **changes):
    return parse_argv(tiny.flags(**{**BASE, **changes}), description="")


def problems_of(parse_argv=parse_pretraining, **changes):
    with pytest.raises(ConfigurationError) as caught:
        parse(parse_argv, **changes)
    return caught.value.problems


BOTH = pytest.mark.parametrize("parse_argv", [parse_pretraining, parse_fine_tuning])
EVALUATED = {"eval_data": ["a=data/a", "b=data/b"], "eval_strategy": "steps", "eval_steps": "10"}
METRICS = "one of eval_a_loss, eval_a_perplexity, eval_b_loss, eval_b_perplexity"
