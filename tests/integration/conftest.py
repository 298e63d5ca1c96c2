"""Fixtures of whole runs, from run_fixtures.py and provoked_runs.py."""

from provoked_runs import kept, start, uninterrupted  # noqa: F401 - as below
from run_fixtures import (  # noqa: F401 - pytest finds fixtures by their names here
    _one_thread_and_a_private_cache,
    base_model,
    chats_heldout,
    fine_tuned,
    fine_tuning,
    heldout,
    pretrained,
    pretraining,
    workspace,
)
