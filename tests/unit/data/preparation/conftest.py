"""A source of short texts and a tokenizer, which most tests of preparation begin with."""

import preparation_samples as samples
import pytest

from utils.data.prepare import plan, units


@pytest.fixture
def small_units(monkeypatch):
    """Let the few documents here make several units."""
    monkeypatch.setattr(plan, "SMALLEST_UNIT_BYTES", 2000)


@pytest.fixture
def source(tmp_path):
    return samples.text_source(tmp_path / "texts.jsonl")


@pytest.fixture
def tokenizer(tmp_path):
    return samples.saved_tokenizer(tmp_path / "tokenizer")


@pytest.fixture
def workers_for_little(monkeypatch):
    """Let the few documents here be enough work for worker processes."""
    worth = dict.fromkeys(units.LEAST_BYTES_A_WORKER, 1)
    monkeypatch.setattr(units, "LEAST_BYTES_A_WORKER", worth)
