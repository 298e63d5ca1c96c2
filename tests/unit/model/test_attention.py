"""The attention for each --attn_implementation on each machine, and every refusal."""

import sys
from types import SimpleNamespace

import pytest
import torch
import transformers

from utils.config.errors import ConfigurationError
from utils.model.attention import attention_choices
from utils.model.probe import observe_attention, probe_config

FP32, BF16 = torch.float32, torch.bfloat16
SIZES = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 2, "use_cache": False}
GROUPED = {**SIZES, "num_key_value_heads": 1, "head_dim": 32}
LLAMA = transformers.LlamaConfig(**SIZES)


def choices(requested, config, device_type, dtype):
    needs = observe_attention(probe_config(config))
    return attention_choices(requested, config, needs, device_type, dtype)


FLASH2, FLASH3 = "flash_attention_2", "flash_attention_3"


def version_2(q, k, v, dropout_p=0.0, softcap=0.0, window_size=(-1, -1)):
    """Stand in for FlashAttention 2's function."""


def version_3(q, k, v, softcap=0.0, window_size=(-1, -1)):
    """Stand in for FlashAttention 3's function, which has no dropout."""


STAND_INS = {"flash_attn": version_2, "flash_attn_interface": version_3}


@pytest.fixture
def gpu(monkeypatch):
    """Return a function that pretends that there is a GPU with flash packages."""

    def pretend(capability=(9, 0), packages=tuple(STAND_INS)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
        for package, function in STAND_INS.items():
            module = SimpleNamespace(flash_attn_varlen_func=function)
            monkeypatch.setitem(sys.modules, package, module if package in packages else None)

    return pretend


GPT2 = transformers.GPT2Config(n_layer=2, n_embd=64, n_head=2)  # with dropout
SINKS = transformers.GptOssConfig(**GROUPED)
CAPS = transformers.Gemma2Config(**GROUPED)


def test_on_the_cpu_documents_go_one_by_one():
    choice = next(choices(None, LLAMA, "cpu", FP32))
    assert (choice.name, choice.kernel) == ("packed_varlen", "per_document_sdpa")
    assert choice.reason == "auto: packed_varlen through per-document SDPA (CPU)"


def test_auto_takes_a_kernel_that_computes_what_the_model_needs_and_says_why_no_other(gpu):
    gpu()
    assert next(choices("auto", CAPS, "cuda", BF16)).kernel == "flash_attention_3"
    assert next(choices("auto", SINKS, "cuda", BF16)).kernel == "per_document_sdpa"
    gpu((9, 0), ())
    reason = next(choices("auto", GPT2, "cuda", BF16)).reason
    assert "FlashAttention 2: no module named flash_attn;" in reason
    assert "torch's varlen_attn lacks attention dropout (0.1)" in reason


def test_what_is_asked_for_is_taken_where_it_runs(gpu):
    gpu()
    for name in ("sdpa", "eager", "flash_attention_2", "flash_attention_3"):
        choice, flash = next(choices(name, LLAMA, "cuda", BF16)), "flash" in name
        assert (choice.name, choice.kernel) == ("packed_varlen" if flash else name, name)
        assert ("block mask" in choice.reason) == (not flash)


MAMBA = transformers.MambaConfig(hidden_size=64, num_hidden_layers=2)


@pytest.mark.parametrize(
    ("requested", "config", "machine", "told"),
    [
        (FLASH2, LLAMA, {"device": "cpu"}, "cannot run on cpu here: it needs an NVIDIA GPU"),
        (FLASH2, LLAMA, {"packages": ()}, r"no module named flash_attn.: it needs .* its package"),
        (FLASH3, LLAMA, {"capability": (8, 0)}, "not a Hopper GPU"),
        (FLASH2, LLAMA, {"dtype": FP32}, "flash kernels: computed in float32.: .*--bf16 true"),
        (FLASH3, GPT2, {}, r"FlashAttention 3 lacks attention dropout \(0.1\)"),
        (FLASH2, SINKS, {}, "FlashAttention 2 lacks attention sinks"),
        ("sdpa", CAPS, {}, "Gemma2ForCausalLM does not support it"),
        (
            "packed_varlen",
            MAMBA,
            {},
            "MambaForCausalLM does not support it: Mamba.*AttentionInterface",
        ),
        ("auto", transformers.ViTConfig(), {}, "model type 'vit' .* no causal language model"),
    ],
)
def test_what_cannot_train_here_is_refused_and_nothing_is_fetched(
    gpu, monkeypatch, requested, config, machine, told
):
    def fetch(*_, **__):
        raise AssertionError("reached for the Hub")

    monkeypatch.setattr("transformers.modeling_utils.lazy_import_flash_attention", fetch)
    gpu(**{name: machine[name] for name in ("capability", "packages") if name in machine})
    device, dtype = machine.get("device", "cuda"), machine.get("dtype", BF16)
    with pytest.raises(ConfigurationError, match=told):
        next(choices(requested, config, device, dtype))
