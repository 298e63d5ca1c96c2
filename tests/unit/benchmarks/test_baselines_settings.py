"""What peers are told on a GPU, as far as that can be known without one."""

import os
from unittest import mock

import pytest

from benchmarks.baselines import settings, unsloth_sft
from benchmarks.recording.job import Job


@pytest.fixture
def job(tmp_path):
    return Job(str(tmp_path), str(tmp_path), "sft", "bf16", 64, 2, steps=3, warmup_steps=1)


def test_libraries_know_what_they_are_told_on_a_gpu(job):
    from transformers import TrainingArguments
    from trl import SFTConfig

    with mock.patch.dict(os.environ), mock.patch("torch.cuda.is_available", return_value=True):
        told = settings.common_settings(job) | settings.tuned_settings()
    assert told["use_cpu"] is False
    assert told["accelerator_config"] == {"non_blocking": True}
    with mock.patch.dict(os.environ):
        for known in (TrainingArguments, SFTConfig):
            arguments = known(**told | {"use_cpu": True})
            assert arguments.dataloader_prefetch_factor == 4
            assert arguments.accelerator_config.non_blocking


def test_trl_knows_what_unsloth_tells_it(job):
    from trl import SFTConfig

    told = SFTConfig(**unsloth_sft.settings(job))
    assert told.max_grad_norm == 1.0
    assert told.packing
    assert told.completion_only_loss
