"""Fixtures of the proofs behind docs/exactness.md. `--exhaustive` runs every case."""

import datetime
import json
import os
import platform
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from resumed_runs import models  # noqa: F401 - as below
from run_fixtures import (  # noqa: F401 - pytest finds fixtures by their names here
    _one_thread_and_a_private_cache,
    base_model,
    fine_tuning,
    pretraining,
    workspace,
)

from benchmarks.hardware.circumstances import current_commit

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "exactness"


@pytest.fixture(scope="session")
def exhaustive(request: pytest.FixtureRequest) -> bool:
    """Return whether to run every case instead of a sample."""
    return request.config.getoption("--exhaustive")


@pytest.fixture(scope="module")
def figures(exhaustive: bool) -> Iterator[Callable[[str], dict[str, Any]]]:
    """Return a function from the name of a proof to a dict that the tests fill with figures.

    The figures are printed after the module. An exhaustive run writes them to
    benchmarks/results/exactness/NAME.json, which the documents quote.
    """
    found: dict[str, dict[str, Any]] = {}
    yield lambda name: found.setdefault(name, {})
    for name, values in found.items():
        text = json.dumps(values, indent=2)
        print(f"\n{name}{'' if exhaustive else ' (sampled)'}: {text}")
        if exhaustive:
            RESULTS.mkdir(parents=True, exist_ok=True)
            record = {
                "made_by": f"make test-exhaustive ({name})",
                "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
                "commit": current_commit(),
                "hardware": f"{os.cpu_count()} CPU cores ({platform.machine()})",
                "python": platform.python_version(),
                "torch": torch.__version__,
                "transformers": transformers.__version__,
                **values,
            }
            (RESULTS / f"{name}.json").write_text(json.dumps(record, indent=2) + "\n")
