"""Muon trains the hidden matrices; its states take the predicted bytes."""

from dataclasses import replace
from functools import partial

import pytest
import tiny
import torch
from planned import LLAMA, MIXTRAL, settings, setup
from transformers import AutoConfig, AutoModelForCausalLM, Trainer

from utils.config.errors import ConfigurationError
from utils.config.settings import parse_fine_tuning
from utils.model.adapters import plan_adapters, trained_matrices, with_adapters
from utils.plan.memory_estimate import estimate_memory
from utils.plan.rehearsal import muon_options
from utils.plan.run_plan import choose_optimizer_states
from utils.training.optimizer import make_muon

GPT2 = AutoConfig.for_model("gpt2", n_embd=64, n_layer=2, n_head=4, n_positions=64, vocab_size=512)
LORA = {"use_peft": "true", "lora_r": 4, "model_name_or_path": "m", "model_config": None}


@pytest.mark.parametrize(
    ("config", "lora", "names"),
    [
        (LLAMA, False, {"q_proj.weight", "k_proj.weight", "v_proj.weight", "o_proj.weight",
                        "gate_proj.weight", "up_proj.weight", "down_proj.weight"}),
        (GPT2, False, {"c_attn.weight", "c_proj.weight", "c_fc.weight"}),
        (MIXTRAL, False, {"q_proj.weight", "k_proj.weight", "v_proj.weight", "o_proj.weight",
                          "experts.gate_up_proj", "experts.down_proj"}),
        # AdamW trains the adapters of experts.
        (MIXTRAL, True, {f"{layer}_proj.lora_{part}.default.weight"
                         for layer in "qkvo" for part in "AB"}),
    ],
    ids=["llama", "gpt2", "mixtral", "mixtral-lora"],
)  # fmt: skip
def test_muon_trains_the_hidden_matrices_and_its_states_take_the_predicted_bytes(
    config, lora, names
):
    given = settings(parse_fine_tuning, optim="muon", **LORA if lora else {})
    if lora:
        given = replace(given, model=plan_adapters(given.model, config).model)
    model = with_adapters(AutoModelForCausalLM.from_config(config), given.model)
    matrices = set(trained_matrices(model))
    found = {name for name, weight in model.named_parameters() if weight in matrices}
    assert {name for each in found for name in names if each.endswith(name)} == names
    assert all(each.endswith(tuple(names)) for each in found)
    defaults = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "options": muon_options(None)}
    decaying = partial(Trainer.get_decay_parameter_names, None)
    optimizer = make_muon(model, decaying, 0.1, in_bf16=False, **defaults)
    assert all(group["weight_decay"] == 0.1 for group in optimizer.param_groups if group["muon"])
    for weight in model.parameters():
        weight.grad = torch.zeros_like(weight) if weight.requires_grad else None
    optimizer.step()
    states = [value for each in optimizer.state.values() for value in each.values()]
    taken = sum(value.nbytes for value in states if value.ndim)  # without step counts
    assert taken == estimate_memory(setup(config, given), "none").optimizer


def test_what_muon_cannot_do_is_refused():
    given = settings(optim="muon")
    for strategy in ("zero2", "fsdp1"):
        launch = setup(strategy=strategy).launch
        with pytest.raises(ConfigurationError, match=f"optim muon .* does not go with {strategy}"):
            choose_optimizer_states(given, LLAMA, launch)
    assert choose_optimizer_states(given, LLAMA, setup(strategy="fsdp2").launch) is None
    assert muon_options("momentum=0.9") == {"momentum": 0.9, "ns_steps": 5}
    for wrong in ("momentum=1", "ns_steps=0", "ns_steps=2.5", "nesterov=true", "momentum=x"):
        with pytest.raises(ValueError, match=r"muon takes momentum, at least 0 and below 1"):
            muon_options(wrong)
    rounded = tiny.flags(
        train_data="d", output_dir="o", model_config="m", optim="muon", dtype="bfloat16",
        stochastic_rounding="true",
    )  # fmt: skip
    with pytest.raises(
        ConfigurationError, match=r"stochastic_rounding true .* has no effect: optim"
    ):
        parse_fine_tuning(rounded, "")
