"""Settings of a CPU run: float32 products by the faster library, a heap that keeps memory."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from utils.kernels import cpu_products
from utils.kernels.cpu_products import (
    align_weights,
    choose_products,
    keep_freed_memory,
    products_name,
    uses_onednn,
)

# Count page faults of ten rounds that allocate, write and free 64 MiB, after a first round.
FAULTS = """
import os, resource
from utils.kernels.cpu_products import keep_freed_memory
print(keep_freed_memory(os.environ))
before = None
for _ in range(11):
    bytearray(64 << 20)
    before = before or resource.getrusage(resource.RUSAGE_SELF).ru_minflt
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.fixture(autouse=True)
def amd(monkeypatch):
    """Pretend that this is an AMD CPU with AVX-512 and without AMX."""
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    monkeypatch.setattr(cpu_products, "has_amx", lambda: False)
    monkeypatch.setattr(cpu_products, "cpu_fact", lambda _: "AuthenticAMD")


def test_onednn_multiplies_where_mkl_is_slow_if_it_rounds_nothing(monkeypatch):
    assert products_name() == "torch's default"
    monkeypatch.setattr(cpu_products, "_products_are_exact", lambda: False)
    assert "would round factors" in choose_products()
    assert (uses_onednn(), torch.get_float32_matmul_precision()) == (False, "highest")
    monkeypatch.setattr(cpu_products, "_products_are_exact", lambda: True)
    assert "full precision verified" in choose_products()
    assert (uses_onednn(), products_name()) == (True, "oneDNN")


@pytest.mark.parametrize("other", ["AMX", "Intel", "AVX2", "told"])
def test_elsewhere_nothing_changes(other, monkeypatch):
    if other == "told":
        torch.set_float32_matmul_precision("high")
    elif other == "AMX":
        monkeypatch.setattr(cpu_products, "has_amx", lambda: True)
    elif other == "Intel":
        monkeypatch.setattr(cpu_products, "cpu_fact", lambda _: "GenuineIntel")
    elif other == "AVX2":
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    before = torch.get_float32_matmul_precision()
    assert choose_products() is None
    assert torch.get_float32_matmul_precision() == before


def test_the_check_detects_rounding():
    assert cpu_products._products_are_exact()
    with torch.autocast("cpu", torch.bfloat16):
        assert not cpu_products._products_are_exact()


@pytest.mark.slow
def test_freed_memory_is_not_cleared_again_unless_the_user_decided():
    inherited = {n: v for n, v in os.environ.items() if not n.startswith("MALLOC_")}
    found = []
    for told in ({}, {"MALLOC_MMAP_MAX_": "65536"}):  # the user set glibc's default
        command, root = [sys.executable, "-c", FAULTS], Path(__file__).parents[3]
        found += subprocess.check_output(command, cwd=root, env=inherited | told, text=True).split()
    pages = 10 * (64 << 20) // os.sysconf("SC_PAGE_SIZE")
    assert found[::2] == ["True", "False"]
    assert int(found[1]) < pages / 100
    assert int(found[3]) > pages / 2, "malloc keeps it by default: this test shows nothing"
    assert not keep_freed_memory({"GLIBC_TUNABLES": "glibc.malloc.mmap_max=4"})


def test_weights_begin_at_cache_lines():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    values = torch.randn(8, 8)
    model[0].weight.data = torch.empty(65)[1:].view(8, 8).copy_(values)
    model[1].weight = model[0].weight
    in_place = model[0].bias.data_ptr()
    align_weights(model)
    assert model[0].weight.data_ptr() % 64 == 0
    assert model[1].weight is model[0].weight
    assert torch.equal(model[0].weight, values)
    assert model[0].bias.data_ptr() == in_place, "those that lie well stay"
