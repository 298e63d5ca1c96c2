"""A GPU compiles unless something speaks against it, and a run keeps what it was begun with."""

import json
import logging
from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig, MixtralConfig

from utils.checkpoints.files import PROVENANCE
from utils.config.errors import ConfigurationError
from utils.launch.processes import LaunchFacts
from utils.model import compilation
from utils.model import compilation as compilation_choice
from utils.model.compilation import choose_compilation

SIZES = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
    "vocab_size": 16,
}  # fmt: skip


def chosen(
    tmp_path, *, device="cuda", strategy="single", asked=None, elsewhere=False, model=LlamaConfig
):
    settings = SimpleNamespace(
        model=SimpleNamespace(compile=asked), training=SimpleNamespace(output_dir=tmp_path)
    )
    launch = LaunchFacts(0, 1, strategy, ("n",), device)
    return choose_compilation(settings, model(**SIZES), launch, elsewhere)


def record_start(tmp_path, compiled):
    (tmp_path / PROVENANCE).write_text(json.dumps({"starts": [{"compiled": compiled}]}))


@pytest.fixture(autouse=True)
def a_gpu(monkeypatch, caplog):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(compilation_choice.importlib.util, "find_spec", lambda _name: object())
    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)
    monkeypatch.setenv(compilation.CACHE_VARIABLE, "/scratch/mine")
    caplog.set_level(logging.INFO, "utils.model.compilation")


@pytest.fixture
def no_compiler(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    for variable in ("CC", "CXX"):
        monkeypatch.delenv(variable, raising=False)


def test_a_gpu_compiles_by_default(tmp_path, caplog):
    assert chosen(tmp_path)
    assert "compile: auto, layer by layer, static shapes, kept in /scratch/mine" in caplog.text


def test_a_cpu_does_not(tmp_path, caplog):
    assert not chosen(tmp_path, device="cpu")
    assert not caplog.text


def test_nobody_else_decides_what_is_logged(tmp_path, caplog):
    assert not chosen(tmp_path, asked=False)
    assert not caplog.text
    assert chosen(tmp_path, asked=True, device="cpu")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"strategy": "zero3"}, "ZeRO-3 gathers weights"),
        ({"model": MixtralConfig}, "as are routed to it"),
    ],
)
def test_what_speaks_against_it_is_logged(changes, said, tmp_path, caplog):
    assert not chosen(tmp_path, **changes)
    assert said in caplog.text


def test_a_rank_that_cannot_keeps_the_others_from_it(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(
        compilation_choice, "gathered", lambda own: [own, "its node has no compiler"]
    )
    assert not chosen(tmp_path)
    assert "compile: off, as its node has no compiler" in caplog.text


def test_a_gpu_that_is_too_old(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    assert not chosen(tmp_path)
    assert "below 8.0" in caplog.text


def test_no_triton(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(compilation_choice.importlib.util, "find_spec", lambda _name: None)
    assert not chosen(tmp_path)
    assert "triton is not installed" in caplog.text


def test_torch_is_told_not_to(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    assert not chosen(tmp_path)
    assert "TORCHDYNAMO_DISABLE is set" in caplog.text


def test_a_model_whose_layers_nobody_marks(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(compilation_choice, "marked_layers", lambda _model: [])
    assert not chosen(tmp_path)
    assert "marks no layers in LlamaForCausalLM" in caplog.text


@pytest.mark.usefixtures("no_compiler")
def test_without_a_compiler_it_is_off_unless_asked_for(tmp_path, caplog):
    assert not chosen(tmp_path)
    assert "needs a C++ compiler" in caplog.text
    with pytest.raises(ConfigurationError, match=r"needs a C\+\+ compiler"):
        chosen(tmp_path, asked=True)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("compiled", [True, False])
def test_a_run_that_resumes_keeps_it(device, compiled, tmp_path, caplog):
    record_start(tmp_path, compiled)
    assert chosen(tmp_path, device=device) is compiled
    assert ("as in the last start of this run" in caplog.text) == (compiled or device == "cuda")


@pytest.mark.usefixtures("no_compiler")
def test_a_run_that_cannot_keep_it_is_refused(tmp_path):
    record_start(tmp_path, compiled=True)
    with pytest.raises(ConfigurationError, match="were compiled, here they cannot be"):
        chosen(tmp_path)
    assert not chosen(tmp_path, asked=False)


@pytest.mark.usefixtures("no_compiler")
def test_a_dry_run_on_a_login_node_needs_no_compiler(tmp_path, caplog):
    assert chosen(tmp_path, device="cpu", asked=True, elsewhere=True)
    assert "the compute node needs a C++ compiler" in caplog.text
    assert not chosen(tmp_path, device="cpu", elsewhere=True)
    assert "compile: settled on the compute node, on where a GPU trains" in caplog.text
