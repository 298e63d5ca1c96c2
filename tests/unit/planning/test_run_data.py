"""Ranks open a dataset one after the other, and refuse it together."""

import contextlib

import pytest

from utils.config.errors import ConfigurationError
from utils.planning import run_data


def test_a_refused_dataset_leaves_no_rank_behind(monkeypatch):
    """What rank 0 raises while the others wait for it would end it alone."""
    others_went_on = []

    class Ranks:
        @contextlib.contextmanager
        def main_process_first(self):
            yield  # as accelerate has it: what is raised here skips the barrier
            others_went_on.append(True)

    def refuse():
        raise ConfigurationError("no dataset")

    monkeypatch.setattr(run_data, "PartialState", Ranks)
    with pytest.raises(ConfigurationError, match="no dataset"):
        run_data._first_rank_first(refuse)
    assert others_went_on == [True]
    assert run_data._first_rank_first(lambda: "opened") == "opened"
