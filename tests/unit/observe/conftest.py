"""The fixture of the report's tests."""

from pathlib import Path

import pytest
from made_up_run import write_run


@pytest.fixture
def made_up_run(tmp_path: Path) -> Path:
    """Make a run directory with three starts."""
    return write_run(tmp_path / "runs" / "made-up")
