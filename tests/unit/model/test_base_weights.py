"""LoRA's base weights are identified by digests of a directory, or by a Hub model's commit."""

import hashlib
from types import SimpleNamespace

import pytest
from huggingface_hub import constants

from utils.model.weights import base_weights

COMMITS = ["a" * 40, "b" * 40]


def of(**model):
    defaults = dict.fromkeys(("init_from", "model_name_or_path", "model_revision"))
    return base_weights(
        SimpleNamespace(
            model=SimpleNamespace(**(defaults | {"use_peft": True} | model)),
            training=SimpleNamespace(output_dir="no-such-run"),
            run=SimpleNamespace(accept_changes=[]),
        )
    )


def directory(path, *names):
    path.mkdir(parents=True)
    for name in names:
        (path / name).write_text(name)
    return path


def digests(*names):
    return {"sha256": {name: hashlib.sha256(name.encode()).hexdigest() for name in names}}


def test_a_directory_is_identified_by_its_safetensors_else_by_pickles(tmp_path):
    assert of(use_peft=False, model_name_or_path=str(tmp_path)) is None, "the run has its own"
    names = ("model-1.safetensors", "model-2.safetensors")
    found = directory(tmp_path / "base", "config.json", "pytorch_model.bin", *names)
    assert of(model_name_or_path=str(found)) == of(init_from=str(found)) == digests(*names)
    older = directory(tmp_path / "older", "pytorch_model.bin", "training_args.bin")
    assert of(model_name_or_path=str(older)) == digests("pytorch_model.bin")
    assert of(model_name_or_path=str(directory(tmp_path / "empty", "config.json"))) is None


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """Make a Hub cache with two commits of a model; main is the first."""
    repository = tmp_path / "hub" / "models--some--model"
    for commit in COMMITS:
        directory(repository / "snapshots" / commit, "config.json")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMITS[0])
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return repository


def test_a_hub_model_is_identified_by_its_commit(hub):
    assert of(model_name_or_path="some/model") == {"commit": COMMITS[0]}
    (hub / "refs" / "main").write_text(COMMITS[1])
    assert of(model_name_or_path="some/model") == {"commit": COMMITS[1]}
    assert of(model_name_or_path="some/model", model_revision=COMMITS[0]) == {"commit": COMMITS[0]}
