"""A start with layers that cannot be compiled is refused before it does anything."""

import pytest
import torch
from tiny import compiled_graphs
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from utils.config.errors import ConfigurationError
from utils.model.compilation import (
    CACHE_VARIABLE,
    LEAST_GRAPHS,
    check_compilation,
    compile_cache,
    compile_layers,
)


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
