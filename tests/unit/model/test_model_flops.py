"""Model FLOPs in training equal those of the benchmarks for sharded and quantized weights too."""

import copy

import families
import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, Gemma4Config, Gemma4TextConfig

from benchmarks.cells.shapes import GPT2_124M, LLAMA_8B, QWEN3_600M
from benchmarks.hardware import device as benchmarks_device
from benchmarks.hardware import flops as benchmarks_flops
from utils.config.strategy import known_gpus
from utils.data.packing import plan_packing
from utils.model import flops
from utils.model.architecture import without_weights
from utils.model.flops import effective_length, peak_flops, token_products
from utils.model.probe import observe_attention, probe_config


def on_meta(config):
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize("rank", [0, 8])
@pytest.mark.parametrize("shape", [GPT2_124M, QWEN3_600M, LLAMA_8B], ids=lambda s: s["model_type"])
def test_the_count_is_the_benchmarks(shape, rank):
    model = on_meta(AutoConfig.for_model(**shape))
    if rank:
        model = get_peft_model(model, LoraConfig(r=rank, target_modules="all-linear"))
    expected = benchmarks_flops.model_size(shape, rank)
    for length in (512, 4096):
        assert token_products(model).flops(length) == expected.flops(length)


# Weights that multiply a token in these two-layer models, computed by hand: width 32, 4 heads of 8,
# 2 key/value heads, MLPs of 64 (3 matrices), 128 words.
ATTENTION = 2 * (2 * 32 * 32 + 2 * 32 * 16)
HEAD = 32 * 128
FORWARD = {
    "llama": ATTENTION + 2 * 3 * 32 * 64 + HEAD,
    "mixtral": ATTENTION + 2 * 2 * 3 * 32 * 64 + HEAD,  # 2 of 8 experts
    "qwen3_moe": ATTENTION + 2 * 2 * 3 * 32 * 16 + HEAD,
    "gemma3": ATTENTION + 2 * 3 * 32 * 64 + HEAD,  # the tower does not count
}


@pytest.mark.parametrize("family", FORWARD)
def test_experts_count_by_those_used_and_towers_not_at_all(family):
    model = on_meta(families.tiny_config(family))
    products = token_products(model)
    assert products.forward == products.trained == FORWARD[family]
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    assert token_products(model).flops(0) == 4 * FORWARD[family]


def test_windows_and_other_sizes_of_keys_count_in_attention():
    windowed = token_products(on_meta(families.tiny_config("gpt_oss")))
    assert windowed.attention == ((32, 16), (32, None))
    assert windowed.flops(100) - windowed.flops(0) == 12 * 32 * (16 + 100)
    latent = token_products(on_meta(families.tiny_config("deepseek_v3")))
    assert latent.attention == ((4 * (16 + 8) / 2, None),) * 2


def test_heads_and_windows_are_those_of_each_layer():
    layers = ["sliding_attention", "full_attention", "full_attention"]
    text = Gemma4TextConfig(
        hidden_size=32, intermediate_size=64, vocab_size=128, num_hidden_layers=3,
        layer_types=layers, sliding_window=4, num_attention_heads=4, num_key_value_heads=2,
        head_dim=8, global_head_dim=16, num_global_key_value_heads=1, attention_k_eq_v=True,
        num_kv_shared_layers=0, vocab_size_per_layer_input=128, hidden_size_per_layer_input=0,
    )  # fmt: skip
    sliding, full = (4 * 8, 4), (4 * 16, None)
    products = token_products(on_meta(text))
    assert products.attention == (sliding, full, full)
    assert token_products(without_weights(Gemma4Config(text_config=text))) == products
    small = probe_config(text)
    assert [layer.head_dim for layer in small.per_layer_config] == [8, 16]
    assert observe_attention(small).head_dim == 16


def test_shards_packed_weights_and_trained_copies_count_as_the_layer():
    config = families.tiny_config("llama")
    whole = token_products(on_meta(config))
    sharded = on_meta(config)
    for module in sharded.modules():
        if isinstance(module, nn.Linear):
            module.weight = nn.Parameter(torch.empty(0, device="meta"))
    assert token_products(sharded) == whole
    experts = on_meta(families.tiny_config("mixtral"))
    expected = token_products(experts)
    for parameter in experts.parameters():  # as under DeepSpeed's ZeRO-3
        parameter.ds_shape, parameter.data = parameter.shape, torch.empty(0, device="meta")
    assert token_products(experts) == expected
    copied = get_peft_model(
        copy.deepcopy(families.tiny_model(config)),
        LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"]),
    )
    adapters = 2 * 2 * (32 + 32)
    found = token_products(copied)
    assert (found.forward, found.trained) == (whole.forward + adapters, HEAD + adapters)


def test_the_effective_length_is_that_of_the_sequences_trained_on():
    generator = np.random.default_rng(0)
    short, long = generator.integers(2, 50, 300), generator.integers(50, 200, 100)
    plans = [plan_packing(lengths, 256) for lengths in (short, long)]
    seen = [benchmarks_flops.effective_length(lengths.tolist()) for lengths in (short, long)]
    for plan, expected in zip(plans, seen, strict=True):
        assert effective_length([plan], np.ones(1)) == pytest.approx(expected)
    every_sequence = np.array([plan.sequences for plan in plans])
    both = benchmarks_flops.effective_length([*short.tolist(), *long.tolist()])
    shares = every_sequence / every_sequence.sum()
    assert effective_length(plans, shares) == pytest.approx(both)
    assert effective_length(plans, np.array([1.0, 0.0])) == pytest.approx(seen[0])


def test_peaks_are_those_of_known_cards_alone(monkeypatch):
    assert all(gpu["names"] for gpu in known_gpus().values() if "tflops" in gpu)
    for name, peak in benchmarks_device.DENSE_BF16.items():
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _, name=name: name)
        assert peak_flops(torch.device("cuda")) == peak
    monkeypatch.setattr(flops.torch.cuda, "get_device_name", lambda _: "NVIDIA H100 PCIe")
    assert peak_flops(torch.device("cuda")) is None, "slower clocks than the SXM card's"
    assert peak_flops(torch.device("cpu")) is None
