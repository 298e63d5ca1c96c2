"""Fixtures of whole runs: tiny data and models, made once per session, and command lines."""

from collections.abc import Callable
from pathlib import Path

import pytest
import tiny
import torch

import pretrain


@pytest.fixture(scope="session")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """tokenizer/, documents/, heldout/, chats/, chats_heldout/ and model.json."""
    root = tmp_path_factory.mktemp("workspace")
    tiny.make_tokenizer(root / "tokenizer")
    tiny.make_model_config(root / "model.json")
    tiny.save(root / "documents", {"input_ids": tiny.documents(200, seed=0)})
    tiny.save(root / "heldout", {"input_ids": tiny.documents(31, seed=1)})
    tiny.save(root / "chats", tiny.masked(tiny.documents(120, seed=2)))
    tiny.save(root / "chats_heldout", tiny.masked(tiny.documents(23, seed=3)))
    return root


@pytest.fixture(autouse=True)
def _one_thread_and_a_private_cache(tmp_path_factory, monkeypatch):
    torch.set_num_threads(1)
    cache = tmp_path_factory.getbasetemp() / "cache"
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))


@pytest.fixture(scope="session")
def pretraining(workspace: Path) -> Callable[..., list[str]]:
    """Return the command line of a small pretraining run, with settings changed as given."""

    def argv(output_dir: Path, **changes: object) -> list[str]:
        settings = {
            "train_data": workspace / "documents",
            "tokenizer_name_or_path": workspace / "tokenizer",
            "model_config": workspace / "model.json",
            "output_dir": output_dir,
        }
        return tiny.flags(**(tiny.RUN | settings | changes))

    return argv


@pytest.fixture(scope="session")
def base_model(workspace: Path) -> Path:
    """A model directory with random weights, to fine-tune."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(workspace / "model.json")
    directory = workspace / "base"
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    tiny.make_tokenizer(directory)
    return directory


@pytest.fixture
def fine_tuning(workspace: Path, base_model: Path) -> Callable[..., list[str]]:
    """Return the command line of a small fine-tuning run, with settings changed as given."""

    def argv(output_dir: Path, **changes: object) -> list[str]:
        settings = {
            "train_data": workspace / "chats",
            "model_name_or_path": base_model,
            "output_dir": output_dir,
        }
        return tiny.flags(**(tiny.RUN | settings | changes))

    return argv


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
