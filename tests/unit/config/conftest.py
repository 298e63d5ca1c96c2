"""Fixtures of the machine and the launch for which settings are checked."""

import pytest
import torch

from utils.config import precision


@pytest.fixture
def started_alone(monkeypatch, tmp_path):
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK", "ACCELERATE_MIXED_PRECISION"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(precision, "has_fast_bf16", lambda: False)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def no_accelerator(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)


@pytest.fixture
def amx(monkeypatch, started_alone, no_accelerator):
    """Pretend to be a single process on a CPU with AMX, without a GPU."""
    for name in ("USE_CPU", "USE_FSDP", "USE_DEEPSPEED"):
        monkeypatch.delenv(f"ACCELERATE_{name}", raising=False)
    monkeypatch.setattr(precision, "has_fast_bf16", lambda: True)
