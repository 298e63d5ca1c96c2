"""What torchtitan takes for granted, as far as that can be known without it."""

import gc
import importlib.util
import os
from unittest import mock

import pytest
import torch

from benchmarks.contestants.torchtitan_process import (
    cpu_as_device,
    group_of_one,
    supply_what_is_missing,
)
from benchmarks.recording.job import CannotRunError


def train_as_torchtitan_does():
    gc.disable()
    torch.autograd.set_multithreading_enabled(False)
    torch.distributed.init_process_group("gloo")
    assert torch.distributed.get_world_size() == 1
    raise ValueError("broken")


def test_a_group_of_one_is_there_and_gone_again():
    with mock.patch.dict(os.environ, {"RANK": "7"}):
        os.environ.pop("WORLD_SIZE", None)
        with pytest.raises(ValueError, match="broken"), group_of_one():
            train_as_torchtitan_does()
        assert os.environ["RANK"] == "7"
        assert "WORLD_SIZE" not in os.environ
    assert not torch.distributed.is_initialized()
    assert torch._C._is_multithreading_enabled()
    assert gc.isenabled()


def test_without_triton_it_says_so(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(CannotRunError, match="triton is not installed"):
        supply_what_is_missing()


def test_a_cpu_is_a_device_with_nothing_to_tell():
    device = cpu_as_device()
    assert device.device_count() == 1
    assert device.get_device_properties("cpu").total_memory > 0
    assert device.memory_stats("cpu").get("active_bytes.all.peak", -1) == -1
