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
    benchmarks/results/exactness/NAME.json, which the documents quote. A run of some of the tests
    replaces their rows only. Each row has its commit.
    """
    found: dict[str, dict[str, Any]] = {}
    yield lambda name: found.setdefault(name, {})
    for name, values in found.items():
        text = json.dumps(values, indent=2)
        print(f"\n{name}{'' if exhaustive else ' (sampled)'}: {text}")
        if exhaustive:
            RESULTS.mkdir(parents=True, exist_ok=True)
            path = RESULTS / f"{name}.json"
            earlier = json.loads(path.read_text()) if path.exists() else {}
            path.write_text(json.dumps(merged(name, values, earlier), indent=2) + "\n")


def merged(name: str, values: dict[str, Any], earlier: dict[str, Any]) -> dict[str, Any]:
    """Return the record of a proof: the rows of `values`, and the other rows of an earlier record.

    Each row gets the commit that it was made at.
    """
    made = {
        "made_by": f"make test-exhaustive ({name})",
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "commit": current_commit(),
        "hardware": f"{os.cpu_count()} CPU cores ({platform.machine()})",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    rows = {name: row for name, row in earlier.items() if name not in made}
    for row in rows.values():
        if isinstance(row, dict):
            row.setdefault("commit", earlier["commit"])
    for row_name, row in values.items():
        rows[row_name] = {**row, "commit": made["commit"]} if isinstance(row, dict) else row
    return made | rows
