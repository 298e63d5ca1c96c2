"""Property tests are judged by what they find, not by how fast a busy machine runs one example.

No progress bars, and a cache of its own for who asks for one.
"""

import datasets
import pytest
from hypothesis import settings

settings.register_profile("data", deadline=None, max_examples=40)
settings.load_profile("data")
datasets.disable_progress_bars()


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    """Keep what is measured of a dataset with this test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
