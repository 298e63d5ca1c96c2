"""Linear layers in fp8: the numbers beside a float64 reference, the chosen layers, the devices."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import AutoConfig

from utils.config.errors import ConfigurationError
from utils.launch.processes import LaunchFacts
from utils.model import layers
from utils.model.layers import ROWWISE, TENSORWISE, Float8Plan, float8_layers

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
# Bits of the fraction give the largest relative error of rounding to the nearest: 2**-(bits + 1).
ROUNDING = {E4M3: 2.0**-4, E5M2: 2.0**-3}
LLAMA_8B = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "head_dim": 128,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
}  # fmt: skip


def rounded(values: torch.Tensor, dim: int, recipe: str, dtype: torch.dtype) -> torch.Tensor:
    """Round to fp8 and back, in float64, with a scale for each row along `dim`, or for all."""
    rows = recipe == ROWWISE
    largest = values.abs().amax(dim, keepdim=True) if rows else values.abs().max()
    scale = torch.finfo(dtype).max / largest.double()
    if rows:
        scale = torch.exp2(torch.floor(torch.log2(scale)))
    scaled = values.float() * scale.float()
    return scaled.to(dtype).double() / scale.float().double()


@pytest.mark.parametrize(("recipe", "of_gradients"), [(ROWWISE, E4M3), (TENSORWISE, E5M2)])
def test_the_three_products_are_those_of_rounded_factors(recipe, of_gradients):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 48, bias=False))
    weight = model[0].weight
    Float8Plan(recipe, ("0",), emulated=True).convert(model)
    assert model[0].weight is weight
    assert list(model.state_dict()) == ["0.weight"]
    inputs = torch.randn(2, 32, 64, requires_grad=True)
    output = model(inputs)
    above = torch.randn_like(output)
    output.backward(above)
    rows, grads = inputs.detach().flatten(0, 1), above.flatten(0, 1)
    # A product sums over the last dimension of both factors.
    products = {
        "output": (output.flatten(0, 1), (rows, E4M3), (weight, E4M3)),
        "gradient of the input": (
            inputs.grad.flatten(0, 1), (grads, of_gradients), (weight.T, E4M3)
        ),
        "gradient of the weight": (weight.grad, (grads.T, of_gradients), (rows.T, E4M3)),
    }  # fmt: skip
    for name, (found, (one, left_type), (other, right_type)) in products.items():
        left, right = one.detach(), other.detach()
        expected = rounded(left, 1, recipe, left_type) @ rounded(right, 1, recipe, right_type).T
        size = left.double().abs() @ right.double().abs().T
        # The same rounded factors are summed in float32: 64 terms, each 2**-24 of the sum.
        assert ((found - expected).abs() <= 64 * 2.0**-24 * size + 1e-6).all(), name
        exact = left.double() @ right.double().T
        a, b = ROUNDING[left_type], ROUNDING[right_type]
        error = (found - exact).abs()
        assert (error <= (a + b + a * b) * size + 1e-2).all(), name  # 1e-2: numbers below the range
        assert error.max() > 1e-3, "nothing was rounded"


def test_only_matrices_of_the_decoders_later_layers_are_chosen():
    layers, left_out = float8_layers(AutoConfig.for_model(**LLAMA_8B))
    assert len(layers) == 31 * 7
    assert not any(".layers.0." in name or "lm_head" in name for name in layers)
    first = "7 of the first decoder layer (q_proj, k_proj, v_proj, ...)"
    assert left_out == ["the last layer", first]


@pytest.mark.parametrize(
    ("config", "count", "text"),
    [
        ({"model_type": "qwen3", "num_hidden_layers": 28}, 27 * 7, "7 of the first"),
        ({"model_type": "gpt2"}, 0, "48 of another class than nn.Linear (c_attn, c_proj, c_fc)"),
        (LLAMA_8B | {"intermediate_size": 14328}, 31 * 4, "96 with sizes that 16 does not divide"),
        ({"model_type": "qwen3_moe", "num_hidden_layers": 4}, 3 * 4, "the experts' grouped matri"),
        ({"model_type": "qwen2_moe", "num_hidden_layers": 4}, 3 * 7, "4 with sizes that 16 does"),
    ],
    ids=["qwen3", "gpt2", "odd-sizes", "experts", "gate-of-one-row"],
)  # fmt: skip
def test_what_stays_in_bf16_is_counted_and_named(config, count, text):
    layers, left_out = float8_layers(AutoConfig.for_model(**config))
    assert len(layers) == count
    assert text in "; ".join(left_out)


LAUNCH = LaunchFacts(rank=0, world_size=1, strategy="single", hosts=("a",), device="cuda")


@pytest.mark.parametrize(
    ("assume", "device", "capability", "elsewhere", "outcome"),
    [
        (None, "cuda", (9, 0), False, False),
        (None, "cpu", None, False, True),
        (None, "cpu", None, True, False),  # a login node
        ("8xH100-80GB", "cpu", None, True, False),
        ("8xA100-80GB", "cpu", None, True, "not A100-80GB"),
        (None, "cuda", (8, 6), False, "not capability 8.6"),
        (None, "mps", None, False, "not capability 0.0"),
    ],
)
def test_the_device_decides(assume, device, capability, elsewhere, outcome, monkeypatch):
    monkeypatch.setattr(layers, "gpu_capability", lambda: capability)
    values = SimpleNamespace(shown=lambda name: f"{name} true")
    settings = SimpleNamespace(run=SimpleNamespace(assume=assume), values=values)
    given = settings, replace(LAUNCH, device=device), elsewhere
    if isinstance(outcome, bool):
        assert layers._emulates_fp8(*given) is outcome
        return
    with pytest.raises(ConfigurationError, match=rf"compute capability 8\.9 or newer .*{outcome}"):
        layers._emulates_fp8(*given)
