"""Model FLOPs agree with sums by hand and torch's counter; the roofline with a computed one."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.cells.shapes import GPT2_124M, LLAMA_1B, LLAMA_8B, QWEN3_600M
from benchmarks.cells.toy import toy_shape
from benchmarks.hardware.flops import model_size
from benchmarks.hardware.roofline import Peaks, StepWork, seconds_per_token

GIVEN = {
    # Weights that multiply tokens, by hand: layers * (attention + MLP) + last layer.
    "gpt2": (GPT2_124M, 12 * (4 * 768**2 + 8 * 768**2) + 50257 * 768, 12 * 768),
    "qwen3": (
        QWEN3_600M,
        28 * (1024 * (2048 + 1024 + 1024) + 2048 * 1024 + 3 * 1024 * 3072) + 151936 * 1024,
        28 * 16 * 128,
    ),
    "1B": (
        LLAMA_1B,
        16 * (2048 * (2048 + 512 + 512 + 2048) + 3 * 2048 * 8192) + 128256 * 2048,
        16 * 32 * 64,
    ),
    "8B": (
        LLAMA_8B,
        32 * (4096 * (4096 + 1024 + 1024 + 4096) + 3 * 4096 * 14336) + 128256 * 4096,
        32 * 32 * 128,
    ),
}


@pytest.mark.parametrize("name", GIVEN)
def test_flops_of_published_shapes_are_those_computed_manually(name):
    shape, linear, attention = GIVEN[name]
    size = model_size(shape)
    assert size.linear == linear
    assert size.flops(4096) == 6 * linear + 12 * attention * 4096


def test_parameters_are_those_that_were_published():
    found = {name: model_size(shape).parameters for name, (shape, _, _) in GIVEN.items()}
    assert found == {
        "gpt2": 124_439_808,
        "qwen3": 596_049_920,
        "1B": 1_235_814_400,
        "8B": 8_030_261_248,
    }


def counted(model, length: int, **inputs) -> int:
    with FlopCounterMode(display=False) as counter:
        tokens = torch.arange(length).view(1, -1) % 200
        model(input_ids=tokens, labels=tokens, use_cache=False, **inputs).loss.backward()
    return counter.get_total_flops()


@pytest.mark.parametrize("shape", [GPT2_124M, QWEN3_600M, LLAMA_8B], ids=lambda s: s["model_type"])
def test_torch_counts_the_same_in_a_small_model(shape):
    shape, length = toy_shape(shape), 96
    config = AutoConfig.for_model(**shape, attn_implementation="eager")
    flops = counted(AutoModelForCausalLM.from_config(config), length)
    # The table of rotary positions is another product, of a few thousand FLOPs.
    assert flops == pytest.approx(length * model_size(shape).flops(length), rel=2e-4)


def test_frozen_weights_count_four():
    from peft import LoraConfig, get_peft_model

    shape, length, rank = toy_shape(LLAMA_8B), 96, 4
    config = AutoConfig.for_model(**shape, attn_implementation="eager")
    model = AutoModelForCausalLM.from_config(config)
    model = get_peft_model(model, LoraConfig(r=rank, target_modules="all-linear"))
    # Otherwise the first layer's gradient would stop at its adapters.
    model.enable_input_require_grads()
    size = model_size(shape, lora_rank=rank)
    trained = sum(one.numel() for one in model.parameters() if one.requires_grad)
    assert size.trained == size.adapters == trained
    assert counted(model, length) == pytest.approx(length * size.flops(length), rel=2e-4)


def test_the_roofline_is_the_one_computed_manually():
    """The example is Llama-3.2-1B at 4,096 tokens on 794.5 TFLOP/s and 4 TB/s."""
    size = model_size(LLAMA_1B)
    parts = seconds_per_token(
        size, StepWork(32768, 4096), Peaks(794.5e12, 4e12), "FlashAttention 2"
    )
    microseconds = {name: 1e6 * seconds for name, seconds in parts.items()}
    assert microseconds == {
        "products": pytest.approx(7.4145 / 0.720, rel=1e-3),  # 6 * 1.2357e9 FLOP at 720 TFLOP/s
        "attention": pytest.approx(0.8053 / 0.330, rel=1e-3),  # 6 * 32768 * 4096 at 330
        "elementwise": pytest.approx(5.374 / 4, rel=1e-3),  # 2 * 16 * (34 * 2048 + 12 * 8192) B
        "loss": pytest.approx(1.2826 / 4, rel=1e-3),  # 10 * 128256 B
        "optimizer": pytest.approx(38 * 1235.8 / 32768 / 4, rel=1e-3),
    }
