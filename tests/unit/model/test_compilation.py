"""Where layers cannot be compiled is known, and said, before anything starts."""

import pytest
import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from utils.config.errors import ConfigurationError
from utils.data.loader import longest_segment
from utils.model.compilation import (
    CACHE_VARIABLE,
    LEAST_GRAPHS,
    compile_layers,
    compiled_graphs,
    leave_length_open,
    prepare_compilation,
)


def test_where_layers_cannot_be_compiled_is_said_before_anything_starts(monkeypatch, tmp_path):
    monkeypatch.delenv(CACHE_VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert prepare_compilation("ddp") == tmp_path / "stoker" / "compiled", "it outlives the job"
    with pytest.raises(ConfigurationError, match="ZeRO-3 gathers weights in hooks"):
        prepare_compilation("zero3")
    with pytest.raises(ConfigurationError, match="Linear is not built of layers"):
        compile_layers(nn.Linear(2, 2))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("CXX", "my-g++")
    with pytest.raises(ConfigurationError, match=r"compiler, and there is no my-g\+\+ here"):
        prepare_compilation("single")
    assert prepare_compilation("single", compiles_here=False), "a login node asks nobody"


@torch.library.custom_op("stoker_tests::sums", mutates_args={})
def sums(states: torch.Tensor, ends: torch.Tensor, longest: int) -> torch.Tensor:
    """Return for each token what its document sums to: it takes what attention kernels take."""
    lengths = ends.diff()
    assert lengths.max() <= longest
    documents = torch.arange(len(lengths)).repeat_interleave(lengths)
    totals = torch.zeros(len(lengths), states.shape[1]).index_add(0, documents, states)
    return totals[documents]


@sums.register_fake
def _(states, ends, longest):
    return torch.empty_like(states)


def remember(ctx, inputs, output):
    _, ends, ctx.longest = inputs
    ctx.save_for_backward(ends)


sums.register_autograd(
    lambda ctx, gradient: (sums(gradient, *ctx.saved_tensors, ctx.longest), None, None),
    setup_context=remember,
)


class Layer(GradientCheckpointingLayer):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, states, ends, **kwargs):
        return states + sums(self.linear(states), ends, kwargs["max_length_q"]).relu()


@pytest.mark.slow
def test_layers_are_compiled_once_for_any_number_of_documents_and_length():
    torch.manual_seed(0)
    model, plain = Layer(), Layer()
    plain.load_state_dict(model.state_dict())
    compile_layers(model)
    before = compiled_graphs()
    for ends in ([0, 12], [0, 3, 12], [0, 1, 2, 7, 12], [0, 5, 12]):
        boundaries, results = torch.tensor(ends), []
        leave_length_open(boundaries)
        states = torch.randn(12, 4, requires_grad=True)
        for trained in (model, plain):
            bound = longest_segment(boundaries, 12)
            found = trained(states, boundaries, max_length_q=bound)
            wanted = (states, *trained.parameters())
            results.append([found, *torch.autograd.grad(found.sum(), wanted)])
        torch.testing.assert_close(*results)
    assert compiled_graphs() == before + 1


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
