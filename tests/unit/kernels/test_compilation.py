"""Where layers cannot be compiled is known, and said, before anything starts."""

from pathlib import Path

import pytest
from torch import nn

from utils.config.errors import ConfigurationError
from utils.kernels.compilation import CACHE_VARIABLE, compile_layers, prepare_compilation


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
    with pytest.raises(ConfigurationError, match=r"needs a C\+\+ compiler, and none of g\+\+"):
        prepare_compilation("single")
    monkeypatch.setenv("CXX", "my-g++")
    with pytest.raises(ConfigurationError, match=r"my-g\+\+ \(CXX, CC\) is not found"):
        prepare_compilation("single")


def test_zero_3():
    with pytest.raises(ConfigurationError, match="ZeRO-3 gathers weights in hooks"):
        prepare_compilation("zero3")


def test_a_model_without_layers_that_transformers_marks():
    with pytest.raises(ConfigurationError, match="Linear is not built of layers"):
        compile_layers(nn.Linear(2, 2))
