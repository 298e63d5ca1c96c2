"""The plan chooses and reports the types of weights, computations and Adam's states."""

from dataclasses import replace

import pytest
import torch
from planned import LAUNCH, settings
from transformers import LlamaConfig

from utils.config.errors import ConfigurationError
from utils.config.settings import parse_fine_tuning
from utils.plan.number_types import OptimizerStates, choose_optimizer_states, precision_line

ROUNDED = {"dtype": "bfloat16", "stochastic_rounding": "true"}
LORA = {"dtype": "bfloat16", "use_peft": "true", "model_name_or_path": "m", "model_config": None}


def parsed(**changes):
    return settings(parse_fine_tuning, **{"bf16": "false"} | changes)


@pytest.mark.parametrize(
    ("changes", "states", "said"),
    [
        ({}, None, "float32 weights, no mixed precision"),
        ({"optim_states": "float32"}, None, "float32 weights, no mixed precision"),
        ({"optim_states": "int8"}, OptimizerStates("int8", False), "Adam's states in int8"),
        ({"dtype": "bfloat16"}, None, "rounded to the nearest: updates below a 500th"),
        (ROUNDED, OptimizerStates("bfloat16", True), "in bfloat16, weights rounded stochastically"),
        (LORA, None, "bfloat16 weights, no mixed precision"),  # these weights are not trained
        (LORA | {"bf16": "true"}, None, "bfloat16 weights, mixed precision bf16"),
        (LORA | {"optim_states": "float32"}, None, "bfloat16 weights, no mixed precision"),
    ],
)
def test_torchs_own_optimizer_stays_where_it_keeps_what_is_asked_for(changes, states, said):
    given, config = parsed(**changes), LlamaConfig()
    chosen = choose_optimizer_states(given, config, LAUNCH)
    assert chosen == states
    assert said in precision_line(given, config, chosen, "cpu")


def test_float32_that_nobody_chose_is_spoken_of_on_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    hint = " (--bf16 true is several times as fast on a GPU)"
    # An explicit false needs no warning.
    for bf16, device, said in (("null", "cuda", hint), ("null", "cpu", ""), ("false", "cuda", "")):
        line = precision_line(parsed(bf16=bf16, use_cpu="false"), LlamaConfig(), None, device)
        assert line == f"float32 weights, no mixed precision{said}"


def test_states_that_cannot_be_kept_so_are_refused(monkeypatch):
    int8, config = parsed(optim_states="int8"), LlamaConfig(dtype=torch.float32)
    for strategy in ("zero2", "fsdp1"):
        with pytest.raises(ConfigurationError, match=f"states int8 .* not go with {strategy}"):
            choose_optimizer_states(int8, config, replace(LAUNCH, strategy=strategy))
    assert choose_optimizer_states(int8, config, replace(LAUNCH, strategy="fsdp2"))
    by_model = parsed(**ROUNDED | {"dtype": "auto"})
    with pytest.raises(ConfigurationError, match="no effect on weights in float32"):
        choose_optimizer_states(by_model, config, LAUNCH)
    assert choose_optimizer_states(by_model, LlamaConfig(dtype=torch.bfloat16), LAUNCH)
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    with pytest.raises(ConfigurationError, match=r"bf16 true \(the accelerate config says so\)"):
        parsed(**ROUNDED | {"bf16": "null"})
