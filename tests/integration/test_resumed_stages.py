"""Runs that began with an earlier stage's weights, resumed: from what of whose, in which state."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import tiny
from launching import run_two_processes
from safetensors.torch import load_file, save_file

import pretrain
import sft_train
from utils.config.errors import ConfigurationError

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


@pytest.fixture
def from_stage(next_stage) -> Callable[..., list[str]]:
    """Command line of a run that has configuration and tokenizer from its stage alone."""

    def argv(run: Path, init_from: Path, **changes: object) -> list[str]:
        return next_stage(run, init_from, tokenizer_name_or_path=None, **changes)

    return argv


@pytest.fixture
def whole(stages, first, from_stage) -> Path:
    """A run from the first stage that nothing interrupted; its stage is gone."""
    run, gone = stages / "whole", stages / "gone"
    if not run.exists():
        copy_stage(first, gone)
        pretrain.main(from_stage(run, gone))
        shutil.rmtree(gone)
    return run


def copy_stage(first: Path, copy: Path) -> None:
    """The first stage somewhere else, with a setting of its own for `generate`."""
    shutil.copytree(first, copy)
    path = copy / "final" / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"max_new_tokens": 7}))


def finished(run: Path) -> dict[str, bytes]:
    """The files of the finished model."""
    return {path.name: path.read_bytes() for path in (run / "final").iterdir()}


def weights(directory: Path) -> bytes:
    return (directory / "model.safetensors").read_bytes()


def other_epsilon(path: Path) -> None:
    """A configuration as good and as long as the run's, whose model computes something else."""
    config = path.read_text()
    assert '"rms_norm_eps": 1e-06' in config
    path.write_text(config.replace("1e-06", "1e-01"))


def emptied(path: Path) -> None:
    path.write_text("")


@pytest.mark.parametrize(
    ("name", "damage"),
    [("config.json", other_epsilon), ("config.json", Path.unlink), ("tokenizer.json", emptied)],
)
def test_nothing_of_a_damaged_checkpoint_has_a_part_in_the_resumed_run(
    name, damage, whole, from_stage, tmp_path, capsys
):
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    shutil.rmtree(run / "final")
    damage(run / "checkpoint-6" / name)
    pretrain.main(from_stage(run, whole.parent / "gone"))
    shown = capsys.readouterr().out
    assert f"checkpoint-6 is damaged ({name} " in shown
    assert "set aside as damaged.checkpoint-6" in shown
    assert tiny.starts(run)[1]["resumed_from"] == str(run / "checkpoint-3")
    assert weights(run / "checkpoint-6") == weights(whole / "checkpoint-6")
    assert finished(run) == finished(whole)


def test_a_stage_is_not_needed_once_the_run_has_a_checkpoint(
    whole, from_stage, first, tmp_path, capsys
):
    run, gone = tmp_path / "run", tmp_path / "gone"
    copy_stage(first, gone)
    pretrain.main(from_stage(run, gone))
    tiny.cut(run, step=3)
    shutil.rmtree(gone)
    capsys.readouterr()
    pretrain.main(from_stage(run, gone))
    shown = capsys.readouterr().out
    assert f"init_from {gone} is ignored: the run has {run}/checkpoint-3 of its own" in shown
    assert "changed since" not in shown
    assert weights(run / "checkpoint-6") == weights(whole / "checkpoint-6")
    assert finished(run) == finished(whole)
    assert json.loads(finished(run)["generation_config.json"])["max_new_tokens"] == 7


def test_two_fsdp_ranks_need_neither_their_stage_nor_a_damaged_checkpoint(
    first, from_stage, tmp_path
):
    run, gone = tmp_path / "run", tmp_path / "gone"
    copy_stage(first, gone)
    argv = from_stage(run, gone, per_device_train_batch_size=1)
    done = run_two_processes("fsdp2", ROOT / "pretrain.py", argv)
    assert done.returncode == 0, done.stdout[-4000:]
    checkpoint, uninterrupted = run / "checkpoint-6", finished(run)
    assert (checkpoint / "pytorch_model_fsdp_0").is_dir()
    committed = json.loads((checkpoint / "manifest.json").read_text())["checkpoint"]["files"]
    assert {"config.json", "tokenizer.json", "tokenizer_config.json"} < committed.keys()
    other_epsilon(checkpoint / "config.json")
    shutil.rmtree(run / "final")
    shutil.rmtree(gone)
    done = run_two_processes("fsdp2", ROOT / "pretrain.py", argv)
    assert done.returncode == 0, done.stdout[-4000:]
    assert f"init_from {gone} is ignored: the run has {run}/checkpoint-3 of its own" in done.stdout
    assert (run / "damaged.checkpoint-6").is_dir()
    assert finished(run) == uninterrupted


def scaled(stage: Path, target: Path) -> None:
    """The first stage's model with other weights."""
    shutil.copytree(stage, target)
    tensors = load_file(target / "model.safetensors")
    tensors = {name: tensor * 0.5 for name, tensor in tensors.items()}
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})


def test_the_weights_under_adapters_stay_those_of_the_first_start(
    first, fine_tuning, tmp_path, capsys
):
    run, stage = tmp_path / "run", tmp_path / "stage"
    shutil.copytree(first, stage)
    shutil.rmtree(stage / "final")  # the earlier run is not finished yet
    argv = fine_tuning(run, init_from=stage, use_peft="true", model_name_or_path=None)
    sft_train.main(argv)
    uninterrupted = finished(run)
    tiny.cut(run, step=3)
    scaled(first / "final", stage / "final")
    capsys.readouterr()
    sft_train.main(argv)
    found = f"weights: from {stage}/checkpoint-6, step 6 of run"
    shown = capsys.readouterr().out
    assert found in shown
    assert finished(run) == uninterrupted
    shutil.rmtree(run / "final")
    shutil.rmtree(stage / "checkpoint-6")
    with pytest.raises(ConfigurationError, match="it still needs: there is no such directory"):
        sft_train.main(argv)
