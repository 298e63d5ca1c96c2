"""How Unsloth is driven, as far as that can be known without it."""

from unittest import mock

import pytest
import torch
import transformers  # noqa: F401 - imported, as some test before may have done

from benchmarks.contestants import unsloth_sft
from benchmarks.recording.job import CannotRunError, Job


@pytest.fixture
def job(tmp_path):
    return Job(str(tmp_path), str(tmp_path), "sft", "bf16", 64, 2, steps=3, warmup_steps=1)


def test_it_says_what_it_lacks(job):
    with (
        mock.patch("torch.cuda.is_available", return_value=False),
        pytest.raises(CannotRunError, match="needs a GPU"),
    ):
        unsloth_sft.train(job)
    with (
        mock.patch("torch.cuda.is_available", return_value=True),
        pytest.raises(CannotRunError, match="needs a process of its own"),
    ):
        unsloth_sft.train(job)


def test_trl_knows_what_it_is_told(job):
    from trl import SFTConfig

    told = SFTConfig(**unsloth_sft.settings(job))
    assert told.max_grad_norm == 1.0
    assert told.packing
    assert told.completion_only_loss


def test_a_dropout_of_nothing_is_taken(monkeypatch):
    monkeypatch.setattr(
        unsloth_sft, "flash_attn_varlen_func", lambda *args, **options: (args, options)
    )
    query = torch.zeros(1)
    told = unsloth_sft.varlen_without_dropout(query, dropout_p=0.0, causal=True)
    assert told == ((query,), {"causal": True})
    with pytest.raises(AssertionError):
        unsloth_sft.varlen_without_dropout(query, dropout_p=0.1, causal=True)
