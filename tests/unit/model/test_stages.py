"""What --init_from stands for, what is refused for it, and an optimizer taken over."""

import hashlib
import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import payloads
import pytest
import torch

from utils.checkpoints.files import Manifest, flush_and_record, list_files, write_manifest
from utils.config.errors import ConfigurationError, StorageError
from utils.model.stages import (
    find_stage,
    stage_of,
    stage_tokenizer,
    weights_directory,
    weights_origin,
)
from utils.training.optimizer import InheritedOptimizer


def model_directory(directory: Path, *names: str) -> Path:
    """A directory with these files; what is in them does not matter here."""
    directory.mkdir(parents=True)
    for name in names:
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_text(name)
    return directory


def run_directory(directory: Path) -> Path:
    model_directory(directory, "config.yaml")
    (directory / "provenance.json").write_text(json.dumps({"run_id": "run-7", "starts": []}))
    return directory


def checkpoint(directory: Path, *names: str, run_id: str = "run-7") -> Path:
    """A committed checkpoint with these files."""
    model_directory(directory, *names)
    step = int(directory.name.rpartition("-")[2])
    files = flush_and_record(directory, list_files(directory))
    write_manifest(directory, Manifest(run_id, 1, "single", 4, step=step, files=files))
    return directory


def settings(
    init_from: Path | None, output_dir: Path = Path("new"), accept: tuple[str, ...] = (), **model
):
    model = {"use_peft": False, "init_optimizer": False} | model
    return SimpleNamespace(
        run=SimpleNamespace(accept_changes=accept),
        model=SimpleNamespace(init_from=None if init_from is None else str(init_from), **model),
        training=SimpleNamespace(output_dir=str(output_dir)),
    )


WHOLE = ("config.json", "model.safetensors")


def test_what_a_directory_stands_for(tmp_path):
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


NO_MODEL = "holds no whole model in safetensors"
UNFIT = {
    "run": (("config.yaml",), "there is no such directory: .*final"),
    "damaged.checkpoint-3": (WHOLE, NO_MODEL),
    "checkpoint-3": (
        ("adapter_config.json", "adapter_model.safetensors"),
        "holds a LoRA adapter without the weights .* final/, which has both merged",
    ),
    "pickled": (("config.json", "pytorch_model.bin"), NO_MODEL),
}


def test_what_is_no_stage_is_refused_with_the_way_out(tmp_path):
    for name, (files, message) in UNFIT.items():
        with pytest.raises(ConfigurationError, match=message):
            find_stage(str(model_directory(tmp_path / name, *files)))


DESCRIBED = (*WHOLE, "tokenizer.json", "pytorch_model_fsdp_0/x")


@pytest.mark.parametrize("name", ["config.json", "manifest.json"])
def test_a_runs_own_checkpoint_takes_the_place_of_the_stage_if_it_is_whole(name, tmp_path, caplog):
    stage = model_directory(tmp_path / "stage", *WHOLE, "tokenizer.json")
    run, gone = run_directory(tmp_path / "run"), tmp_path / "gone"
    assert stage_of(settings(None, run)) is None
    assert stage_of(settings(stage, run)) == stage
    assert stage_tokenizer(settings(stage, run)) == str(stage)
    older, newest = (checkpoint(run / f"checkpoint-{step}", *DESCRIBED) for step in (3, 6))
    (newest / "model.safetensors").write_text("Model.safetensors")  # no tensors are read for it
    assert stage_of(settings(gone, run)) == newest
    assert stage_of(settings(stage, run, use_peft=True)) == stage
    (newest / name).write_text((newest / name).read_text()[::-1])
    assert stage_of(settings(gone, run)) == older
    assert stage_tokenizer(settings(gone, run)) == str(older)
    assert f"{newest} is damaged" in caplog.text
    assert sorted(path.name for path in run.glob("check*")) == [older.name, newest.name]
    (older / "config.json").write_text("{}")
    with pytest.raises(StorageError, match="no committed checkpoint of this run is whole"):
        stage_of(settings(gone, run))
    checkpoint(run / "checkpoint-9", *DESCRIBED, run_id="run-8")
    with pytest.raises(ConfigurationError, match=r"checkpoint of another run \(run-8, not run-7\)"):
        stage_of(settings(gone, run))


@pytest.fixture
def recorded(tmp_path):
    """A run directory whose first start found its weights in checkpoint-3 of the run `stage`."""
    stage, run = run_directory(tmp_path / "stage"), run_directory(tmp_path / "run")
    checkpoint(stage / "checkpoint-3", *WHOLE)
    record(run, weights_origin(settings(stage, run), "single", None))
    model_directory(stage / "final", *WHOLE)
    return run


def record(run: Path, *origins: dict | None) -> None:
    starts = [{"weights_from": origin} for origin in origins]
    (run / "provenance.json").write_text(json.dumps({"run_id": "run-7", "starts": starts}))


@pytest.mark.parametrize("use_peft", [False, True])
def test_the_weights_of_the_first_start_are_those_of_every_start(
    use_peft, recorded, tmp_path, caplog, monkeypatch
):
    caplog.set_level("INFO")
    stage, found = tmp_path / "stage", tmp_path / "stage" / "checkpoint-3"
    assert find_stage(str(stage)) == stage / "final"
    assert stage_of(settings(stage, recorded, use_peft=use_peft)) == found
    weights_origin(settings(stage, recorded, use_peft=use_peft), "single", None)
    assert f"from {found}, step 3 of run run-7" in caplog.text
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to(stage)
    for name in ("run/../stage", tmp_path / "link"):
        assert weights_directory(settings(Path(name), recorded)) == found


def test_a_link_that_points_elsewhere_by_now_changes_no_weights(tmp_path):
    run = run_directory(tmp_path / "run")
    one, other, third = (model_directory(tmp_path / name, *WHOLE) for name in "abc")
    (tmp_path / "link").symlink_to(one)
    record(run, weights_origin(settings(tmp_path / "link", run), "single", None), None)
    (tmp_path / "link").unlink()
    (tmp_path / "link").symlink_to(other)
    assert weights_directory(settings(tmp_path / "link", run)) == one
    assert weights_directory(settings(third, run)) == third, "another --init_from is looked up"


def test_recorded_weights_that_are_gone_are_named_with_the_ways_out(recorded, tmp_path, caplog):
    stage = tmp_path / "stage"
    shutil.rmtree(stage / "checkpoint-3")
    message = "checkpoint-3, which it still needs: there is no such directory.* --accept_changes"
    with pytest.raises(ConfigurationError, match=message):
        weights_directory(settings(stage, recorded))
    accepted = settings(stage, recorded, accept=("init_from",))
    assert weights_directory(accepted) == stage / "final"
    assert "--init_from is looked up again, as accepted" in caplog.text


def test_the_origin_of_a_final_model_is_its_run_and_digests_which_are_checked(tmp_path):
    run = run_directory(tmp_path / "run")
    model_directory(run / "final", *WHOLE)
    digest = hashlib.sha256(b"model.safetensors").hexdigest()
    assert weights_origin(settings(run), "zero3", None) == {
        "init_from": str(run), "path": str(run / "final"), "run_id": "run-7",
        "sha256": {"model.safetensors": digest},
    }  # fmt: skip
    directory = checkpoint(tmp_path / "checkpoint-9", *WHOLE)
    (directory / "model.safetensors").write_text("Model.safetensors")
    with pytest.raises(ConfigurationError, match=r"not as it was committed.*has other contents"):
        weights_origin(settings(directory), "single", None)


def test_an_optimizer_that_is_split_not_there_or_unsafe_is_not_taken_over(tmp_path):
    directory = checkpoint(tmp_path / "checkpoint-9", *WHOLE, "optimizer.pt")
    with pytest.raises(ConfigurationError, match="under fsdp2 each rank has a part"):
        weights_origin(settings(directory, init_optimizer=True), "fsdp2", None)
    run = run_directory(tmp_path / "run")
    model_directory(run / "final", *WHOLE)
    with pytest.raises(ConfigurationError, match=r"final has no optimizer.pt: let --init_from"):
        weights_origin(settings(run, init_optimizer=True), "single", None)
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


def begin(directory: Path, fresh: torch.optim.Optimizer) -> None:
    nothing = SimpleNamespace()
    InheritedOptimizer(directory).on_train_begin(nothing, nothing, nothing, optimizer=fresh)


def test_an_optimizer_of_something_else_is_refused(tmp_path):
    torch.save(optimizer(steps=1).state_dict(), tmp_path / "optimizer.pt")
    for fresh, message in (
        (optimizer(width=4), r"exp_avg of tensor 0 has shape \(2, 3\), the tensor has \(2, 4\)"),
        (optimizer(torch.optim.SGD, lr=0.1), "it is of another kind of optimizer"),
        (torch.optim.AdamW([torch.nn.Parameter(torch.zeros(2, 3))]), r"groups of \[2\] tensors"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            begin(tmp_path, fresh)
