"""Settings of the data tests: property tests without deadlines, and no progress bars.

A busy machine must not fail a property test. `own_cache` gives a test its own cache.
"""

import datasets
import pytest
from hypothesis import settings

settings.register_profile("data", deadline=None, max_examples=40)
settings.load_profile("data")
datasets.disable_progress_bars()


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    """Cache the measurements of datasets in a directory of this test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
