"""float32 products on a CPU: by the faster library, where that is proved to round nothing."""

import pytest
import torch
from torch import nn

from utils.kernels import cpu_products
from utils.kernels.cpu_products import align_weights, by_onednn, products_name, settle_products

HIGHEST, MEDIUM = "highest", "medium"


@pytest.fixture(autouse=True)
def amd(monkeypatch):
    """A CPU of AMD's with AVX-512 and without AMX."""
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: True)
    monkeypatch.setattr(cpu_products, "has_amx", lambda: False)
    monkeypatch.setattr(cpu_products, "vendor", lambda: "AuthenticAMD")


def test_where_mkl_is_slow_onednn_multiplies(monkeypatch):
    monkeypatch.setattr(cpu_products, "_exact", lambda: True)
    assert products_name() == "torch's default"
    assert settle_products("cpu") == (
        "oneDNN's, faster than MKL's on this CPU; proved to round no factor"
    )
    assert torch.get_float32_matmul_precision() == MEDIUM
    assert (by_onednn(), products_name()) == (True, "oneDNN")


def test_where_it_would_round_it_does_not(monkeypatch):
    monkeypatch.setattr(cpu_products, "_exact", lambda: False)
    assert "would round factors" in settle_products("cpu")
    assert torch.get_float32_matmul_precision() == HIGHEST
    assert not by_onednn()


@pytest.mark.parametrize(
    ("name", "value"),
    [("has_amx", True), ("vendor", "GenuineIntel"), ("vendor", "")],
    ids=["AMX", "Intel", "unknown"],
)
def test_elsewhere_nothing_changes(name, value, monkeypatch):
    monkeypatch.setattr(cpu_products, name, lambda: value)
    assert settle_products("cpu") is None
    assert torch.get_float32_matmul_precision() == HIGHEST


def test_neither_on_a_gpu_nor_without_avx512(monkeypatch):
    assert settle_products("cuda") is None
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    assert settle_products("cpu") is None
    assert torch.get_float32_matmul_precision() == HIGHEST


def test_what_someone_told_torch_stays():
    torch.set_float32_matmul_precision("high")
    assert settle_products("cpu") is None
    assert torch.get_float32_matmul_precision() == "high"


def test_the_proof_sees_what_rounds():
    assert cpu_products._exact()
    with torch.autocast("cpu", torch.bfloat16):
        assert not cpu_products._exact()


def test_on_this_cpu_products_are_as_exact_as_before(monkeypatch):
    monkeypatch.undo()
    left, right = torch.randn(130, 70), torch.randn(70, 90)
    before = (left @ right - left.double() @ right.double()).abs().max()
    settle_products("cpu")
    after = (left @ right - left.double() @ right.double()).abs().max()
    assert after < 3 * before < 1e-4


def test_weights_begin_at_cache_lines():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    values = torch.randn(8, 8)
    apart = torch.empty(65)[1:].view(8, 8)
    model[0].weight.data = apart.copy_(values)
    model[1].weight = model[0].weight
    in_place = model[0].bias.data_ptr()
    align_weights(model)
    assert model[0].weight.data_ptr() % 64 == 0
    assert model[1].weight is model[0].weight
    assert torch.equal(model[0].weight, values)
    assert model[0].bias.data_ptr() == in_place, "those that lie well stay"
