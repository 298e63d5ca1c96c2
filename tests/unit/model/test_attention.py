"""What --attn_implementation means on each machine, and every refusal."""

import sys

import pytest
import torch
import transformers

from utils.config.errors import ConfigurationError
from utils.model.attention import choose_attention

FP32, BF16 = torch.float32, torch.bfloat16
SIZES = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 2, "use_cache": False}
GROUPED = {**SIZES, "num_key_value_heads": 1, "head_dim": 32}
LLAMA = transformers.LlamaConfig(**SIZES)


def flash_attn_varlen_func(q, k, v, dropout_p=0.0, softcap=0.0, window_size=(-1, -1)):
    """Stand in for FlashAttention 2's function."""


def flash_attn_3_varlen_func(q, k, v, softcap=0.0, window_size=(-1, -1)):
    """Stand in for FlashAttention 3's function, which has no dropout."""


@pytest.fixture
def gpu(monkeypatch):
    """Return a function that makes this machine look like one with a GPU and flash packages."""

    def pretend(capability=(9, 0), packages=()):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
        functions = {
            "flash_attn": flash_attn_varlen_func,
            "flash_attn_interface": flash_attn_3_varlen_func,
        }
        for package, function in functions.items():
            module = type(sys)(package)
            module.flash_attn_varlen_func = function
            present = module if package in packages else None
            monkeypatch.setitem(sys.modules, package, present)

    return pretend


@pytest.mark.parametrize("requested", [None, "auto", "packed_varlen"])
def test_on_the_cpu_documents_go_one_by_one(requested):
    choice = choose_attention(requested, LLAMA, "cpu", FP32)
    name = requested or "auto"
    assert choice.name == "packed_varlen"
    assert choice.kernel == "per_document_sdpa"
    assert choice.reason == f"{name}: packed_varlen through per-document SDPA (CPU)"


BOTH = ("flash_attn", "flash_attn_interface")


def test_mixed_precision_decides_over_the_weights_dtype(gpu):
    gpu((9, 0), BOTH)
    assert choose_attention("auto", LLAMA, "cuda", FP32, BF16).kernel == "flash_attention_3"
    slow = choose_attention("auto", LLAMA, "cuda", FP32)
    assert slow.kernel == "per_document_sdpa"
    assert "CUDA; flash kernels: computed in float32" in slow.reason


@pytest.mark.parametrize(
    ("config", "kernel"),
    [
        (transformers.GPT2Config(n_layer=2, n_embd=64, n_head=2), "flash_attention_2"),  # dropout
        (transformers.Gemma2Config(**GROUPED), "flash_attention_3"),  # soft caps
        (transformers.GptOssConfig(**GROUPED), "per_document_sdpa"),  # sinks
    ],
    ids=["gpt2", "gemma2", "gpt_oss"],
)
def test_auto_takes_a_kernel_that_computes_what_the_model_needs(gpu, config, kernel):
    gpu((9, 0), BOTH)
    assert choose_attention("auto", config, "cuda", BF16).kernel == kernel


def test_the_reason_for_a_slow_kernel_on_a_gpu_is_told(gpu):
    gpu((9, 0), ())
    config = transformers.GPT2Config(n_layer=2, n_embd=64, n_head=2)
    reason = choose_attention("auto", config, "cuda", BF16).reason
    assert "FlashAttention 2: no module named flash_attn;" in reason
    assert "torch's varlen_attn lacks attention dropout (0.1)" in reason


def test_without_the_attention_interface_auto_takes_a_mask():
    choice = choose_attention("auto", transformers.FalconConfig(**SIZES), "cpu", FP32)
    assert choice.name == "sdpa"
    assert "FalconForCausalLM does not call attention" in choice.reason
    assert "grows with the square of the sequence length" in choice.reason


@pytest.mark.parametrize("name", ["sdpa", "eager"])
def test_block_masks_are_taken_as_requested_and_their_cost_told(name):
    choice = choose_attention(name, LLAMA, "cpu", FP32)
    assert (choice.name, choice.kernel) == (name, name)
    assert "memory grows with the square of the sequence length" in choice.reason


def test_flex_attention_is_taken_on_a_gpu():
    choice = choose_attention("flex_attention", LLAMA, "cuda", BF16)
    assert choice.name == "flex_attention"
    assert "block mask from position_ids" in choice.reason


@pytest.mark.parametrize("version", [2, 3])
def test_flash_attention_is_taken_where_it_is_installed(gpu, version):
    gpu((9, 0), BOTH)
    assert choose_attention(f"flash_attention_{version}", LLAMA, "cuda", BF16).name == (
        f"flash_attention_{version}"
    )


def refuse(match, requested, config=LLAMA, device="cuda", dtype=BF16):
    with pytest.raises(ConfigurationError, match=match):
        choose_attention(requested, config, device, dtype)


def test_an_unknown_name_is_refused_with_the_list():
    refuse("kernels-community/flash-attn2: not one of auto, packed_varlen, sdpa, flash_attention_2,"
           " flash_attention_3, flex_attention, eager; kernels are not fetched from the Hub",
           "kernels-community/flash-attn2")  # fmt: skip


@pytest.mark.parametrize("version", [2, 3])
def test_flash_attention_on_the_cpu_is_refused(version):
    refuse(
        "needs an NVIDIA GPU, and this run is on cpu", f"flash_attention_{version}", device="cpu"
    )


@pytest.mark.parametrize(
    ("version", "install"), [(2, "pip install flash-attn"), (3, "build it from the hopper/ folder")]
)
def test_a_missing_flash_attention_is_refused_with_what_to_install(gpu, version, install):
    gpu((9, 0), ())
    refuse(rf"FlashAttention {version} is not here \(no module.*{install}",
           f"flash_attention_{version}")  # fmt: skip


def test_nothing_is_fetched_when_flash_attention_is_missing(gpu, monkeypatch):
    gpu((9, 0), ())

    def fetch(*_, **__):
        raise AssertionError("reached for the Hub")

    monkeypatch.setattr("transformers.modeling_utils.lazy_import_flash_attention", fetch)
    refuse("is not here", "flash_attention_2")


def test_flash_attention_3_needs_hopper(gpu):
    gpu((8, 0), BOTH)
    refuse("needs a Hopper GPU", "flash_attention_3")


def test_flash_attention_in_fp32_is_refused(gpu):
    gpu((9, 0), BOTH)
    refuse("float16 or bfloat16, not in torch.float32; set --bf16", "flash_attention_2", dtype=FP32)


def test_terms_that_transformers_would_drop_are_refused(gpu):
    gpu((9, 0), BOTH)
    gpt2 = transformers.GPT2Config(n_layer=2, n_embd=64, n_head=2)
    refuse(
        r"FlashAttention 3 does not compute attention dropout \(0.1\)", "flash_attention_3", gpt2
    )
    sinks = transformers.GptOssConfig(**GROUPED)
    refuse("does not compute attention sinks", "flash_attention_2", sinks)
    refuse("GptOssForCausalLM does not support it", "flash_attention_2", sinks)


def test_attention_that_the_model_does_not_support_is_refused():
    gemma = transformers.Gemma2Config(**GROUPED)
    refuse("Gemma2ForCausalLM does not support it; use auto", "sdpa", gemma, "cpu", FP32)


def test_flex_attention_on_the_cpu_is_refused():
    refuse("has no backward pass on the CPU", "flex_attention", device="cpu", dtype=FP32)


def test_flex_attention_with_dropout_is_refused():
    config = transformers.LlamaConfig(**SIZES, attention_dropout=0.1)
    refuse(r"does not compute the config's attention dropout \(0.1\)", "flex_attention", config)


def test_packed_varlen_without_the_attention_interface_is_refused():
    mamba = transformers.MambaConfig(hidden_size=64, num_hidden_layers=2)
    refuse("MambaForCausalLM does not call attention through", "packed_varlen", mamba)


def test_a_model_type_without_a_causal_language_model_is_refused():
    refuse("model type 'vit' .* no causal language model", "auto", transformers.ViTConfig())
