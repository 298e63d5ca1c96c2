"""The weights that a run starts from: --init_from, --init_optimizer, and LoRA's base."""

import hashlib
import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import payloads
import pytest
import torch
from huggingface_hub import constants

from utils.checkpoints.files import Manifest, flush_and_record, list_files, write_manifest
from utils.config.errors import ConfigurationError
from utils.model.stages import find_stage, weights_directory, weights_origin
from utils.model.weights import base_weights
from utils.training.optimizer import InheritedOptimizer, MuonAdamW


def model_directory(directory: Path, *names: str) -> Path:
    """Make a directory with these files; their contents do not matter."""
    directory.mkdir(parents=True)
    for name in names:
        (directory / name).write_text(name)
    return directory


def run_directory(directory: Path) -> Path:
    model_directory(directory, "config.yaml")
    (directory / "provenance.json").write_text(json.dumps({"run_id": "run-7", "starts": []}))
    return directory


def checkpoint(directory: Path, *names: str) -> Path:
    """Make a committed checkpoint with these files."""
    model_directory(directory, *names)
    step = int(directory.name.rpartition("-")[2])
    files = flush_and_record(directory, list_files(directory))
    write_manifest(directory, Manifest("run-7", 1, "single", 4, step=step, files=files))
    return directory


def settings(init_from: Path, output_dir: Path = Path("new"), **model):
    model = {"use_peft": False, "init_optimizer": False} | model
    return SimpleNamespace(
        model=SimpleNamespace(init_from=str(init_from), **model),
        training=SimpleNamespace(output_dir=str(output_dir)),
    )


WHOLE = ("config.json", "model.safetensors")


def test_init_from_resolves_to_a_weights_directory(tmp_path):
    run = run_directory(tmp_path / "run")
    checkpoint(run / "checkpoint-9", *WHOLE)
    checkpoint(run / "checkpoint-10", *WHOLE)
    model_directory(run / "checkpoint-11", *WHOLE)  # not committed
    assert find_stage(str(run)) == run / "checkpoint-10"
    assert find_stage(str(run / "checkpoint-9")) == run / "checkpoint-9"
    model_directory(run / "final", *WHOLE)
    assert find_stage(f"{run}/") == run / "final"
    model = model_directory(tmp_path / "model", *WHOLE)
    assert find_stage(str(model)) == model
    with pytest.raises(ConfigurationError, match=r"there is no such directory: .*final"):
        find_stage(str(run_directory(tmp_path / "begun")))
    damaged = model_directory(tmp_path / "damaged.checkpoint-3", *WHOLE)
    with pytest.raises(ConfigurationError, match="holds no whole model in safetensors"):
        find_stage(str(damaged))


def record(run: Path, *origins: dict | None) -> None:
    starts = [{"weights_from": origin} for origin in origins]
    (run / "provenance.json").write_text(json.dumps({"run_id": "run-7", "starts": starts}))


def test_weights_by_another_name_are_the_same_and_a_link_elsewhere_changes_none(
    tmp_path, monkeypatch
):
    run, link = run_directory(tmp_path / "run"), tmp_path / "link"
    one, other, third = (model_directory(tmp_path / name, *WHOLE) for name in "abc")
    link.symlink_to(one)
    record(run, weights_origin(settings(link, run), "single", None), None)
    monkeypatch.chdir(tmp_path)
    for name in (link, one, Path("run/../a")):
        assert weights_directory(settings(name, run)) == one
    link.unlink()
    link.symlink_to(other)
    assert weights_directory(settings(link, run)) == one
    assert weights_directory(settings(third, run)) == third, "another --init_from is looked up"


def test_recorded_weights_that_are_gone_are_named_with_the_ways_out(tmp_path):
    stage, run = run_directory(tmp_path / "stage"), run_directory(tmp_path / "run")
    checkpoint(stage / "checkpoint-3", *WHOLE)
    record(run, weights_origin(settings(stage, run), "single", None))
    model_directory(stage / "final", *WHOLE)
    shutil.rmtree(stage / "checkpoint-3")
    message = "checkpoint-3, which it still needs: there is no such directory.* let --init_from"
    with pytest.raises(ConfigurationError, match=message):
        weights_directory(settings(stage, run))
    assert weights_directory(settings(stage / "final", run)) == stage / "final"


def test_weights_that_are_not_as_they_were_committed_are_refused(tmp_path):
    directory = checkpoint(tmp_path / "checkpoint-9", *WHOLE)
    (directory / "model.safetensors").write_text("Model.safetensors")
    with pytest.raises(ConfigurationError, match=r"not as it was committed.*has other contents"):
        weights_origin(settings(directory), "single", None)


def test_an_optimizer_that_is_split_or_unsafe_is_not_taken_over(tmp_path):
    directory = checkpoint(tmp_path / "checkpoint-9", *WHOLE, "optimizer.pt")
    with pytest.raises(ConfigurationError, match=r"this run is fsdp2\. Take the optimizer"):
        weights_origin(settings(directory, init_optimizer=True), "fsdp2", None)
    unsafe = model_directory(tmp_path / "checkpoint-8", *WHOLE)
    payloads.write(unsafe, "optimizer.pt", payloads.Touch(tmp_path / "touched"))
    with pytest.raises(ConfigurationError, match=r"optimizer.pt names posix.system"):
        weights_origin(settings(unsafe, init_optimizer=True), "ddp", None)
    assert not (tmp_path / "touched").exists()


def optimizer(kind=torch.optim.AdamW, width: int = 3, steps: int = 0, **options: float):
    model = torch.nn.Linear(width, 2)
    made = kind(model.parameters(), **options)
    for _ in range(steps):
        model(torch.ones(1, width)).sum().backward()
        made.step()
    return made


def test_an_optimizer_of_something_else_is_refused(tmp_path):
    torch.save(optimizer(steps=1).state_dict(), tmp_path / "optimizer.pt")
    weight = torch.nn.Parameter(torch.zeros(2, 3))
    muon = MuonAdamW([{"params": [weight], "muon": True, "momentum": 0.9}], in_bf16=False)
    for fresh, message in (
        (optimizer(width=4), r"exp_avg of tensor 0 is \(2, 3\), not \(2, 4\)"),
        (optimizer(torch.optim.SGD, lr=0.1), "it is of another kind of optimizer"),
        (muon, r"another kind of optimizer \(they differ in momentum, muon\): set the same optim"),
        (torch.optim.AdamW([weight]), r"groups of \[2\] tensors"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            InheritedOptimizer(tmp_path).on_train_begin(None, None, None, optimizer=fresh)


COMMITS = ["a" * 40, "b" * 40]


def of(**model):
    defaults = dict.fromkeys(("init_from", "model_name_or_path", "model_revision"))
    given = SimpleNamespace(**(defaults | {"use_peft": True} | model))
    training = SimpleNamespace(output_dir="no-such-run")
    return base_weights(SimpleNamespace(model=given, training=training))


def digests(*names):
    return {"sha256": {name: hashlib.sha256(name.encode()).hexdigest() for name in names}}


def test_a_directory_is_identified_by_its_safetensors_else_by_pickles(tmp_path):
    assert of(use_peft=False, model_name_or_path=str(tmp_path)) is None, "the run has its own"
    names = ("model-1.safetensors", "model-2.safetensors")
    found = model_directory(tmp_path / "base", "config.json", "pytorch_model.bin", *names)
    assert of(model_name_or_path=str(found)) == of(init_from=str(found)) == digests(*names)
    older = model_directory(tmp_path / "older", "pytorch_model.bin", "training_args.bin")
    assert of(model_name_or_path=str(older)) == digests("pytorch_model.bin")
    assert of(model_name_or_path=str(model_directory(tmp_path / "empty", "config.json"))) is None


def test_a_hub_model_is_identified_by_its_commit(tmp_path, monkeypatch):
    repository = tmp_path / "hub" / "models--some--model"
    for commit in COMMITS:
        model_directory(repository / "snapshots" / commit, "config.json")
    (repository / "refs").mkdir()
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    for commit in COMMITS:  # of the branch main
        (repository / "refs" / "main").write_text(commit)
        assert of(model_name_or_path="some/model") == {"commit": commit}
    assert of(model_name_or_path="some/model", model_revision=COMMITS[0]) == {"commit": COMMITS[0]}
