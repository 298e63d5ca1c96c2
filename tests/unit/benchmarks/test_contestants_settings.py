"""What peers are told on a GPU, as far as that can be known without one."""

import os
from unittest import mock

import pytest

from benchmarks.contestants import settings
from benchmarks.recording.job import CannotRunError, Job


@pytest.fixture
def job(tmp_path):
    return Job(str(tmp_path), str(tmp_path), "sft", "bf16", 64, 2, steps=3, warmup_steps=1)


def test_libraries_know_what_they_are_told_on_a_gpu(job):
    from transformers import TrainingArguments
    from trl import SFTConfig

    with mock.patch.dict(os.environ), mock.patch("torch.cuda.is_available", return_value=True):
        told = settings.common_settings(job) | settings.tuned_settings(job)
    assert told["use_cpu"] is False
    assert told["accelerator_config"] == {"non_blocking": True}
    with mock.patch.dict(os.environ):
        for known in (TrainingArguments, SFTConfig):
            arguments = known(**told | {"use_cpu": True})
            assert arguments.dataloader_prefetch_factor == 4
            assert arguments.accelerator_config.non_blocking


def test_liger_without_a_gpu_says_so(job, monkeypatch):
    monkeypatch.setattr(settings, "_installed", lambda _: False)
    with pytest.raises(CannotRunError, match="liger_kernel is not installed"):
        settings.use_liger_kernels(None)
    monkeypatch.setattr(settings, "_installed", lambda _: True)
    with pytest.raises(CannotRunError, match="need a GPU"):
        settings.use_liger_kernels(None)
