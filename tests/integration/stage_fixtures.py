"""Fixtures of stages: a finished first one, and command lines of runs that start from it."""

from collections.abc import Callable
from pathlib import Path

import pytest
import tiny

import pretrain


@pytest.fixture(scope="session")
def stages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of the stages that tests share."""
    return tmp_path_factory.mktemp("stages")


@pytest.fixture
def first(stages: Path, pretraining: Callable[..., list[str]]) -> Path:
    """A finished first stage with a checkpoint at its steps 3 and 6; its attention is not flat."""
    run = stages / "first"
    if not run.exists():
        sharp = tiny.make_model_config(stages / "first.json", initializer_range=0.2)
        pretrain.main(pretraining(run, model_config=sharp))
    return run


@pytest.fixture
def next_stage(pretraining: Callable[..., list[str]]) -> Callable[..., list[str]]:
    """Return the command line of a pretraining run that starts from an earlier stage."""

    def argv(run: Path, init_from: Path, **changes: object) -> list[str]:
        return pretraining(run, **({"init_from": init_from, "model_config": None} | changes))

    return argv
