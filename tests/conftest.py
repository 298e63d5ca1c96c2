"""What every test runs under: offline, no telemetry, few threads; tiny models and tokenizers."""

import logging
import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
os.environ["WANDB_MODE"] = "disabled"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import pytest


@pytest.fixture(autouse=True)
def _restore_environment():
    """Undo what a test (or the code under test) changed in the environment."""
    before = dict(os.environ)
    yield
    logging.captureWarnings(False)  # a run in this process turns it on
    os.environ.clear()
    os.environ.update(before)
