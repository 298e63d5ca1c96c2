"""Defaults of compilation and padding. A resumed run keeps its first choice."""

import json
from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, xLSTMConfig

from utils.checkpoints.files import PROVENANCE
from utils.config.errors import ConfigurationError, Report
from utils.launch.processes import LaunchFacts
from utils.model import layers
from utils.model.attention import FLEX
from utils.model.layers import choose_compilation, pads_to_longest


def chosen(path, device="cuda", strategy="single", asked=None, elsewhere=False, model=LlamaConfig):
    settings = SimpleNamespace(
        model=SimpleNamespace(compile=asked), training=SimpleNamespace(output_dir=path),
        run=SimpleNamespace(assume=None),
    )  # fmt: skip
    launch = LaunchFacts(0, 1, strategy, ("n",), device)
    return choose_compilation(settings, model(num_hidden_layers=1), launch, elsewhere)


def record_start(tmp_path, **facts):
    (tmp_path / PROVENANCE).write_text(json.dumps({"starts": [facts]}))


@pytest.fixture(autouse=True)
def a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(layers.importlib.util, "find_spec", lambda _name: object())
    monkeypatch.setenv(layers.CACHE_VARIABLE, "/scratch/mine")


def test_a_gpu_compiles_by_default_and_a_cpu_does_not(tmp_path):
    nothing_to_say = False, ""
    assert chosen(tmp_path, device="cpu") == chosen(tmp_path, asked=False) == nothing_to_say
    assert chosen(tmp_path, asked=True, device="cpu")[0]
    said = "auto, layer by layer, static shapes, kept in /scratch/mine"
    assert chosen(tmp_path) == (True, said)


def test_what_speaks_against_it_is_said(tmp_path, monkeypatch):
    def against(said, **changes):
        compiled, why = chosen(tmp_path, **changes)
        assert not compiled
        assert said in why

    against("ZeRO-3 gathers weights", strategy="zero3")
    against("as are routed to it", model=MixtralConfig)
    for module, name, stand_in, said in (
        (torch.cuda, "get_device_capability", lambda: (7, 5), "below 8.0"),
        (layers.importlib.util, "find_spec", lambda _: None, "triton is not installed"),
        (LlamaForCausalLM, "supports_gradient_checkpointing", False, "marks no layers in Llama"),
        (layers, "gathered", lambda own: [own, "node 2 cannot"], "off, as node 2 cannot"),
    ):
        with monkeypatch.context() as changed:
            changed.setattr(module, name, stand_in)
            against(said)


def test_without_a_compiler_it_is_off_unless_asked_for_here(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    for variable in ("CC", "CXX"):
        monkeypatch.delenv(variable, raising=False)
    compiled, why = chosen(tmp_path)
    assert not compiled
    assert "needs a C++ compiler" in why
    with pytest.raises(ConfigurationError, match=r"needs a C\+\+ compiler"):
        chosen(tmp_path, asked=True)
    # A dry run on a login node needs no compiler.
    assert chosen(tmp_path, device="cpu", asked=True, elsewhere=True)[0]
    assert not chosen(tmp_path, device="cpu", elsewhere=True)[0]
    record_start(tmp_path, compiled=True)
    with pytest.raises(ConfigurationError, match=r"needs a C\+\+ compiler"):
        chosen(tmp_path)
    assert not chosen(tmp_path, asked=False)[0]


@pytest.mark.parametrize("compiled", [True, False])
def test_a_run_that_resumes_keeps_it(compiled, tmp_path):
    record_start(tmp_path, compiled=compiled)
    for device in ("cpu", "cuda"):
        found, why = chosen(tmp_path, device=device)
        assert found is compiled
        assert "as in the last start of this run" in why


def test_unpacked_batches_are_padded_to_the_longest_unless_something_needs_one_length(tmp_path):
    def said(packing="none", attention="sdpa", compiled=False, config=None, ranks=1, fp8=False):
        settings = SimpleNamespace(
            data=SimpleNamespace(packing=packing), training=SimpleNamespace(output_dir=tmp_path),
            run=SimpleNamespace(context_parallel=ranks), model=SimpleNamespace(fp8=fp8),
        )  # fmt: skip
        report = Report()
        found = pads_to_longest(settings, config or LlamaConfig(), attention, compiled, report)
        return found, "".join(text for _, text in report)

    assert said(packing="best_fit") == (False, "")
    assert said() == (True, "padding: each micro-batch to its longest document, in steps of 64")
    record_start(tmp_path, to_longest=True)
    assert said()[0]
    for changes in ({"compiled": True}, {"attention": FLEX}):
        found, text = said(**changes)
        assert not found
        assert "one length" in text
    assert said(config=xLSTMConfig(chunk_size=64))[0]
    assert said(config=xLSTMConfig(chunk_size=128))[1].endswith("a multiple of chunk_size 128")
    assert said(ranks=3)[1].endswith("a multiple of context_parallel 3")
    assert said(ranks=8)[0]
    assert said(ranks=4, fp8=True)[0]
    assert said(ranks=8, fp8=True)[1].endswith("as fp8 needs a multiple of 16 tokens on each rank")
    record_start(tmp_path, compiled=False)  # by an older version
    kept = "padding: each micro-batch to sequence_length, as in the last start of this run"
    assert said() == (False, kept)
