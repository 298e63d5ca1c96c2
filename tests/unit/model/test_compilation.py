"""Recomputation changes no bit; layers that cannot be compiled are refused at the start."""

import pytest
import torch
from families import DENSE, EXPERTS, INSIDE, names, tiny_config, tiny_model
from tiny import compiled_graphs
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from utils.config.errors import ConfigurationError
from utils.kernels.varlen import NAME, PER_DOCUMENT, register_packed_varlen
from utils.model.layers import (
    CACHE_VARIABLE,
    CHOICES,
    LEAST_GRAPHS,
    check_compilation,
    checkpoint_policy,
    compile_cache,
    compile_layers,
    keep_products,
)
from utils.model.loss_head import LossHeadChoice

WITHOUT = {"jetmoe"}  # refused with activation checkpointing
ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"
DROPOUT = {"gpt2": {"resid_pdrop": 0.1, "attn_pdrop": 0.1, "embd_pdrop": 0.1}}


class Operators(TorchDispatchMode):
    """Counts the operators that run, by name."""

    def __init__(self):
        super().__init__()
        self.counts: dict[str, int] = {}

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        name = operator._schema.name.rpartition("::")[2]
        self.counts[name] = self.counts.get(name, 0) + 1
        return operator(*args, **(kwargs or {}))


def recomputing(model: PreTrainedModel, choice: str) -> PreTrainedModel:
    if choice == "selective":
        keep_products(model)
    if choice != "none":
        model.activation_checkpointing_enable()
    return model.train()


def build(name: str, choice: str) -> PreTrainedModel:
    model = tiny_model(tiny_config(name, **DROPOUT.get(name, {})))
    register_packed_varlen(PER_DOCUMENT)
    model.set_attn_implementation(NAME)
    LossHeadChoice("fused", "").install(model)
    return recomputing(model, choice)


def step(model: PreTrainedModel) -> tuple[dict[str, torch.Tensor], dict[str, int]]:
    """Return loss and gradients of a packed micro-batch, and the operators that ran."""
    tokens = torch.arange(2 * 24).view(2, 24) % 61
    bounds = torch.tensor([0, 5, 24, 31, 48, 48], dtype=torch.int32)
    starts = bounds[torch.searchsorted(bounds, torch.arange(48), right=True) - 1]
    places = (torch.arange(48) - starts).view(2, 24)
    torch.manual_seed(1)
    with Operators() as operators:
        loss = model(
            input_ids=tokens, labels=tokens, position_ids=places, use_cache=False,
            cu_seq_lens_q=bounds, cu_seq_lens_k=bounds, max_length_q=24, max_length_k=24,
        ).loss  # fmt: skip
        loss.backward()
    found = {name: value.grad for name, value in model.named_parameters()}
    return {"loss": loss.detach(), **found}, operators.counts


@pytest.mark.parametrize("name", ["llama", *DROPOUT])
def test_recomputation_changes_no_bit_and_selective_computes_no_product_again(name):
    results = {choice: step(build(name, choice)) for choice in CHOICES}
    ran = {choice: counts for choice, (_, counts) in results.items()}
    expected = results["none"][0]
    for choice in CHOICES[1:]:
        actual = results[choice][0]
        assert actual.keys() == expected.keys()
        for key, value in expected.items():
            assert torch.equal(actual[key], value), (choice, key)
    if name not in DROPOUT:
        for operator in ("mm", ATTENTION):
            assert ran["none"][operator] == ran["selective"][operator] < ran["full"][operator]
        for cheap in ("silu", "rsqrt"):
            assert ran["none"][cheap] < ran["selective"][cheap] == ran["full"][cheap]


@pytest.mark.parametrize("autocast", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", sorted({*names(DENSE, EXPERTS, INSIDE)} - WITHOUT))
def test_every_choice_trains_every_family_alike(name, autocast):
    gradients = {}
    for choice in CHOICES:
        model = recomputing(tiny_model(tiny_config(name)), choice)
        tokens = torch.arange(2, 42).view(2, 20)
        torch.manual_seed(1)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        gradients[choice] = {key: value.grad for key, value in model.named_parameters()}
    for key, expected in gradients["none"].items():
        for choice in CHOICES[1:]:
            found = gradients[choice][key]
            assert found is expected is None or torch.equal(found, expected), (choice, key)


def test_what_draws_random_numbers_is_drawn_again():
    attention = torch.ops.aten._scaled_dot_product_flash_attention.default
    states = (None, None, None)
    assert checkpoint_policy(None, attention, *states) is CheckpointPolicy.MUST_SAVE
    assert checkpoint_policy(None, attention, *states, 0.1) is CheckpointPolicy.PREFER_RECOMPUTE
    dropout = torch.ops.aten.native_dropout.default
    assert checkpoint_policy(None, dropout, None, 0.1, True) is CheckpointPolicy.PREFER_RECOMPUTE


def test_where_layers_cannot_be_compiled_is_said_before_anything_starts(monkeypatch, tmp_path):
    monkeypatch.delenv(CACHE_VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert compile_cache() == tmp_path / "stoker" / "compiled", "it outlives the job"
    with pytest.raises(ConfigurationError, match="ZeRO-3 gathers weights in hooks"):
        check_compilation("zero3")
    with pytest.raises(ConfigurationError, match="Linear is not built of layers"):
        compile_layers(nn.Linear(2, 2))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("CXX", "my-g++")
    with pytest.raises(ConfigurationError, match=r"compiler, and there is no my-g\+\+ here"):
        check_compilation("single")
    check_compilation("single", compiles_here=False)  # a login node needs no compiler


class Widening(GradientCheckpointingLayer):
    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, width + 1)

    def forward(self, states):
        return self.linear(states)


@pytest.mark.slow
def test_no_two_layers_need_be_alike():
    torch._dynamo.reset()
    model = nn.Sequential(*(Widening(width) for width in range(2, 2 + LEAST_GRAPHS + 1)))
    compile_layers(model)
    before = compiled_graphs()
    model(torch.randn(3, 2))
    assert compiled_graphs() - before == len(model) > LEAST_GRAPHS
