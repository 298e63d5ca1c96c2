"""Where layers cannot be compiled is known, and said, before anything starts."""

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
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


def test_the_cache_outlives_the_job(monkeypatch, tmp_path):
    monkeypatch.setenv(CACHE_VARIABLE, "/scratch/mine")
    assert prepare_compilation("ddp") == Path("/scratch/mine")
    monkeypatch.delenv(CACHE_VARIABLE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert prepare_compilation("ddp") == tmp_path / "stoker" / "compiled"


def test_no_compiler(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(ConfigurationError, match=r"needs a C\+\+ compiler, and there is no g\+\+"):
        prepare_compilation("single")
    monkeypatch.setenv("CXX", "my-g++")
    with pytest.raises(ConfigurationError, match=r"there is no my-g\+\+ here"):
        prepare_compilation("single")
    assert prepare_compilation("single", compiles_here=False), "a login node asks nobody"


def test_zero_3():
    with pytest.raises(ConfigurationError, match="ZeRO-3 gathers weights in hooks"):
        prepare_compilation("zero3")


def test_a_model_without_layers_that_transformers_marks():
    with pytest.raises(ConfigurationError, match="Linear is not built of layers"):
        compile_layers(nn.Linear(2, 2))


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


@pytest.fixture
def group_of_one():
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    yield torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize("sharded", [False, True], ids=["whole", "fsdp2"])
def test_layers_are_compiled_once_for_any_number_of_documents_and_length(sharded, request):
    torch.manual_seed(0)
    model, plain = Layer(), Layer()
    plain.load_state_dict(model.state_dict())
    compile_layers(model)
    if sharded:
        fully_shard(model, mesh=request.getfixturevalue("group_of_one"))
    before = compiled_graphs()
    for ends in ([0, 12], [0, 3, 12], [0, 1, 2, 7, 12], [0, 5, 12]):
        boundaries, results = torch.tensor(ends), []
        leave_length_open(boundaries)
        states = torch.randn(12, 4, requires_grad=True)
        bound = longest_segment(boundaries, 12)
        for trained in (model, plain):
            states.grad = None
            trained.zero_grad()
            found = trained(states, boundaries, max_length_q=bound)
            found.sum().backward()
            gradients = [one.grad for one in trained.parameters()]
            whole = [
                one.full_tensor() if sharded and trained is model else one for one in gradients
            ]
            results.append([found, states.grad, *whole])
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
