"""Fixtures of whole runs: tiny data and models, made once per session, and command lines."""

from collections.abc import Callable
from pathlib import Path

import pytest
import tiny
import torch

import pretrain
import sft_train


@pytest.fixture(scope="session")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make tokenizer/, documents/, heldout/, chats/, chats_heldout/ and model.json."""
    root = tmp_path_factory.mktemp("workspace")
    tiny.make_tokenizer(root / "tokenizer")
    tiny.make_model_config(root / "model.json")
    tiny.save(root / "documents", {"input_ids": tiny.documents(200, seed=0)})
    tiny.save(root / "heldout", {"input_ids": tiny.documents(31, seed=1)})
    tiny.save(root / "chats", tiny.masked(tiny.documents(120, seed=2)))
    tiny.save(root / "chats_heldout", tiny.masked(tiny.documents(23, seed=3)))
    return root


@pytest.fixture(scope="module", autouse=True)
def _one_thread_and_a_private_cache(tmp_path_factory):
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache"))
        yield


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
def pretrained(pretraining) -> Callable[..., Path]:
    """Return a function that pretrains in this process and returns the run's directory."""

    def run(output_dir: Path, **changes: object) -> Path:
        assert pretrain.main(pretraining(output_dir, **changes)) == 0
        return output_dir

    return run


@pytest.fixture(scope="session")
def heldout(workspace: Path) -> dict[str, object]:
    """Return settings that evaluate a split of documents every three steps."""
    return {"eval_data": f"heldout={workspace / 'heldout'}", "eval_steps": 3}


@pytest.fixture(scope="session")
def base_model(workspace: Path) -> Path:
    """Make a model directory with random weights for fine-tuning."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(workspace / "model.json")
    directory = workspace / "base"
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    tiny.make_tokenizer(directory)
    return directory


@pytest.fixture(scope="session")
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
def fine_tuned(fine_tuning) -> Callable[..., Path]:
    """Return a function that fine-tunes in this process and returns the run's directory."""

    def run(output_dir: Path, **changes: object) -> Path:
        assert sft_train.main(fine_tuning(output_dir, **changes)) == 0
        return output_dir

    return run


@pytest.fixture(scope="session")
def chats_heldout(workspace: Path) -> dict[str, object]:
    """Return settings that evaluate a split of chats every three steps."""
    return {"eval_data": f"heldout={workspace / 'chats_heldout'}", "eval_steps": 3}
