"""Bad input, in one table: a start and its dry run refuse it with the same message."""

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file

import pretrain
import sft_train
from utils.checkpoints import discovery
from utils.config.errors import ConfigurationError
from utils.plan import run_plan

pytestmark = pytest.mark.slow

SHORT = {"max_steps": 3}
LORA = {"use_peft": "true", "lora_target_modules": ["q_proj", "v_proj"]}
SECRET = "hf_" + "x" * 34
MAMBA = "model_type: mamba\nhidden_size: 32\nnum_hidden_layers: 2\n"
# These faults are found while weights load. By then the run directory exists.
LOADING = {"no optimizer", "stage of other shapes", "missing tensor", "half a file"}


@dataclass
class Place:
    """The directories of a case: its private one, and the session's data and models."""

    path: Path
    workspace: Path
    base_model: Path
    finished: Path
    fine_tuned: Path
    monkeypatch: pytest.MonkeyPatch

    @property
    def run(self) -> Path:
        return self.path / "run"

    def resumed(self, **changes: object) -> dict[str, object]:
        """Return settings that resume a copy of the pretraining that ended at step 3."""
        return {"output_dir": shutil.copytree(self.finished, self.run), **changes}

    def rewritten(self, files: str, change: Callable[[str], str]) -> dict[str, object]:
        """Return the settings of `resumed` after a change of some files in the copy."""
        changes = self.resumed()
        for path in self.run.glob(files):
            path.write_text(change(path.read_text()))
        return changes

    def without_checkpoints(self, record: str | None = None) -> dict[str, object]:
        """Return the settings of `resumed` after all checkpoints were deleted."""
        changes = self.rewritten("provenance.json", lambda text: record or text)
        shutil.rmtree(self.run / "checkpoint-3")
        return changes

    def model(self, **changes: object) -> dict[str, object]:
        return {"model_config": tiny.make_model_config(self.path / "model.json", **changes)}

    def text(self, text: str) -> dict[str, object]:
        (self.path / "model.yaml").write_text(text)
        return {"model_config": self.path / "model.yaml"}

    def weights(self, change: Callable[[Path], object]) -> dict[str, object]:
        """Return settings with a copy of the base model after a change of its weights' file."""
        model = shutil.copytree(self.base_model, self.path / "model")
        change(model / "model.safetensors")
        return {"model_name_or_path": model}


def foreign_directory(place: Place) -> dict[str, object]:
    place.run.mkdir()
    (place.run / "thesis.tex").write_text("all my work")
    return {}


def several_splits(place: Place) -> dict[str, object]:
    empty = tiny.save(place.path / "empty", {"input_ids": [[5, 6], []]})
    beyond = tiny.save(place.path / "beyond", {"input_ids": [[5, 6], [7, 9000]]})
    return {"train_data": empty, "eval_data": [f"a={beyond}", "b=/missing"], "eval_steps": 3}


def no_room(place: Place) -> dict[str, object]:
    place.monkeypatch.setattr(discovery, "free_disk_bytes", lambda _: 1)
    return {}


def weights_as_pickle(place: Place) -> dict[str, object]:
    (place.path / "stage").mkdir()
    (place.path / "stage/pytorch_model.bin").write_bytes(b"")
    return {"init_from": place.path / "stage", "model_config": None}


def drop_a_tensor(path: Path) -> None:
    weights = load_file(path)
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, path, metadata={"format": "pt"})


# The fault, as a function of the place or as settings, and a part of the message.
PRETRAINING = {
    "foreign directory": (foreign_directory, "holds no run of Stoker"),
    "finished, checkpoints gone": (Place.without_checkpoints, "finished run without checkpo"),
    "no room": (no_room, "will be there at once"),
    "broken record": (
        lambda place: place.without_checkpoints("{"), "no checkpoint here has a whole copy"),
    "all checkpoints damaged": (
        lambda place: place.rewritten("checkpoint-*/config.json", lambda text: text + " "),
        "no committed checkpoint of this run is whole"),
    "checkpoint of a run": (
        lambda place: place.rewritten(
            "provenance.json", lambda _: json.dumps({"run_id": "other", "starts": []})
        ),
        "is a checkpoint of another run"),
    "changed seed": (lambda place: place.resumed(seed=7), "its seed is 42, now it is 7"),
    "no stage": ({"init_from": "/none", "model_config": None}, "there is no such directory"),
    "stage as a pickle": (weights_as_pickle, "holds no whole model in safetensors"),
    "no optimizer": (
        lambda place: {
            "init_from": place.finished / "final", "init_optimizer": "true", "model_config": None,
        },
        "has no optimizer.pt"),
    "stage of other shapes": (
        lambda place: place.model(intermediate_size=32) | {"init_from": place.finished},
        "the model needs"),
    "several splits": (
        several_splits,
        (
            "empty: row 1 is empty",
            "beyond: holds token id 9000, but the vocabulary ends at 127",
            "/missing: no such directory")),
    "little data": (
        {"global_batch_size": 1000},
        "fewer than global_batch_size 1,000: give --global_batch_size 1, for 109 steps an epoch "
        "(at most 109), or add data",
    ),
    "batch": ({"global_batch_size": 5}, "does not divide over 1 rank"),
    "positions": (
        {"sequence_length": 256},
        ("beyond the model's 128 positions", "--model_config.max_position_embeddings 256 "),
    ),
    "vocabulary": (lambda place: place.model(vocab_size=100), "the vocabulary ends at 99"),
    "unknown architecture": (lambda place: place.model(model_type="none"), "none"),
    "no model type": (lambda place: place.text("hidden_size: 3"), "needs a model_type"),
    "no YAML": (lambda place: place.text("model_type: ["), "is not JSON or YAML"),
    "state-space model": (lambda place: place.text(MAMBA), "mamba"),
    "no tokenizer": ({"tokenizer_name_or_path": None}, "give --tokenizer_name_or_path"),
    "token as a flag": ({"hub_token": SECRET}, "HF_TOKEN"),
    "kernel": ({"attn_implementation": "flash_attention_2"}, "flash_attention_2"),
    # Libraries find these faults in the objects that settings name.
    "schedule": (
        {"lr_scheduler_type": "polynomial", "learning_rate": 1e-8},
        "learning_rate 1e-08 (--learning_rate): lr_end (1e-07) must be smaller than initial lr"),
    "beyond 64 bits": (
        {"pad_embeddings_to_multiple_of": 2**64, "per_device_eval_batch_size": 2**64},
        (
            "(--pad_embeddings_to_multiple_of): it must be at least 1 and below 10**9",
            "(--per_device_eval_batch_size): it must be at least 1 and below 2**20")),
    "plateau": (
        lambda place: {
            "eval_data": f"a={place.workspace}/heldout", "metric_for_best_model": "a_loss",
            "lr_scheduler_type": "reduce_lr_on_plateau", "lr_scheduler_kwargs": '{"factor": 2}',
        },
        "Factor should be < 1.0"),
    "no pair": ({"optim_args": "0x10"}, "optim_args 0x10 (--optim_args): '0x10' is no KEY=VALUE"),
    "no number": (
        {"optim": "sgd", "optim_args": "momentum=x"},
        "optim sgd (--optim), optim_args momentum=x (--optim_args): could not convert string"),
    "rate twice": ({"optim_args": "lr=5"}, "lr has no effect in optim_args: leave it out"),
    "decay twice": (
        {"optim": "sgd", "optim_args": "momentum=0.9,weight_decay=0.1"},
        "weight_decay has no effect in optim_args: leave it out"),
    "key of another": (
        {"optim": "sgd", "optim_args": "nesterov=true,momentum=0.9,rank=8"},
        "rank has no effect in optim_args: leave it out"),
    "no package": ({"optim": "lomo"}, "optim lomo (--optim): You need to install `lomo_optim`"),
    "unknown tracker": ({"report_to": "a.b"}, "report_to a.b (--report_to): a.b is not supported"),
    "no tracker": ({"report_to": "clearml"}, "report_to clearml (--report_to): ClearMLCallback"),
    "recomputation": (
        {"activation_checkpointing": "full", "activation_checkpointing_kwargs": '{"x": 1}'},
        'activation_checkpointing_kwargs {"x": 1} (--activation_checkpointing_kwargs): Unexpected',
    ),
    "layers": (
        {
            "activation_checkpointing": "full",
            "activation_checkpointing_kwargs": '{"every_n_layers": 0}',
        },
        "every_n_layers has to be a whole number above 0, not 0"),
    "debugging": (
        {"debug": "underflow_overflow", "compile": "true", "loss_head": "fused"},
        "debug underflow_overflow (--debug) needs --compile false and --loss_head logits"),
    "copies": (
        lambda place: place.monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "2") or {},
        "srun started 2 copies of this script that do not know of each other"),
}  # fmt: skip
FINE_TUNING = {
    "of another script": (
        lambda place: {"output_dir": shutil.copytree(place.finished, place.run)},
        "holds a run of pretrain.py"),
    "changed rank of LoRA": (
        lambda place: LORA | {
            "output_dir": shutil.copytree(place.fine_tuned, place.run), "lora_r": 2,
        },
        "its lora_r is 4, now it is 2"),
    "missing tensor": (
        lambda place: place.weights(drop_a_tensor), "layers.1.mlp.up_proj.weight is missing"),
    "half a file": (
        lambda place: place.weights(lambda path: path.write_bytes(path.read_bytes()[:100])), ""),
    "no model": (
        lambda place: {
            "model_name_or_path": place.path / "none",
            "tokenizer_name_or_path": place.workspace / "tokenizer",
        },
        "no model can be made of it"),
    "long chat": ({"sequence_length": 32}, "more than sequence_length 32"),
}  # fmt: skip
CASES = {
    **{name: (pretrain, *case) for name, case in PRETRAINING.items()},
    **{name: (sft_train, *case) for name, case in FINE_TUNING.items()},
}


@pytest.fixture(scope="module")
def ended(pretrained, fine_tuned, tmp_path_factory) -> tuple[Path, Path]:
    """Run a pretraining and a LoRA fine-tuning of three steps."""
    root = tmp_path_factory.mktemp("ended")
    pretraining = pretrained(root / "pretrained", **SHORT)
    return pretraining, fine_tuned(root / "tuned", **SHORT, **LORA, lora_r=4)


@pytest.fixture
def place(tmp_path, workspace, base_model, ended, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")  # a start without the fault could train here
    return Place(tmp_path, workspace, base_model, *ended, monkeypatch)


def files_of(directory: Path) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in directory.rglob("*")}


@pytest.mark.parametrize("name", CASES)
def test_the_dry_run_refuses_what_the_start_refuses(name, place, pretraining, fine_tuning):
    script, wrong, said = CASES[name]
    argv_of = pretraining if script is pretrain else fine_tuning
    changes = {"output_dir": place.run, **(wrong if isinstance(wrong, dict) else wrong(place))}
    argv = argv_of(changes.pop("output_dir"), **changes)
    before, existed = files_of(place.path), place.run.exists()
    with pytest.raises(ConfigurationError) as dry:
        script.main([*argv, "--dry_run", "true"])
    assert files_of(place.path) == before, "a dry run writes nothing"
    with pytest.raises(ConfigurationError) as start:
        script.main(argv)
    assert existed or name in LOADING or not place.run.exists(), "a refused run wrote something"
    for words in [said] if isinstance(said, str) else said:
        assert words in str(start.value)
        assert words in str(dry.value)
    assert SECRET not in str(start.value)


def test_what_starts_passes_the_dry_run_and_says_how_it_resumes(
    place, pretraining, fine_tuning, capsys
):
    assert pretrain.main(pretraining(place.run, dry_run="true")) == 0
    assert "(new)" in capsys.readouterr().out
    assert not place.run.exists()
    shutil.copytree(place.finished, place.run)
    before = files_of(place.run)
    assert pretrain.main(pretraining(place.run, dry_run="true")) == 0
    out = capsys.readouterr().out
    assert f"a start would resume from {place.run}/checkpoint-3" in out
    assert re.search(r"max_steps: 3 -> 6", out)
    assert pretrain.main(pretraining(place.run, **SHORT, dry_run="true")) == 0
    assert "is finished: a start would have nothing to do" in capsys.readouterr().out
    assert files_of(place.run) == before
    tuned = fine_tuning(place.path / "sft", **LORA, dry_run="true")
    assert sft_train.main(tuned) == 0


def test_an_error_of_a_library_has_the_lines_of_the_plan(place, pretraining):
    def fail(*_: object) -> None:
        raise RuntimeError("no kernel image")

    place.monkeypatch.setattr(run_plan, "rehearse", fail)
    with pytest.raises(RuntimeError, match="no kernel image") as failure:
        pretrain.main(pretraining(place.run, dry_run="true"))
    assert failure.value.__notes__[0].startswith("batch: ")


def test_a_dry_run_knows_the_gpus_that_cluster_env_names(place, pretraining, capsys):
    """A dry run on a login node refuses by STOKER_GPU_MEMORY_GIB as a start does by the device."""
    place.monkeypatch.delenv("ACCELERATE_USE_CPU")
    argv = [*pretraining(place.run, activation_checkpointing="auto"), "--dry_run", "true"]
    place.monkeypatch.setenv("STOKER_GPU_MEMORY_GIB", "79")
    assert pretrain.main(argv) == 0
    assert "auto: none; predicted GiB" in capsys.readouterr().out
    place.monkeypatch.setenv("STOKER_GPU_MEMORY_GIB", "0.001")
    with pytest.raises(ConfigurationError, match=r"GiB predicted for a device of 0\.0 GiB"):
        pretrain.main(argv)


def test_a_login_node_proves_what_needs_no_gpu(place, pretraining, capsys):
    """A dry run without a GPU still checks that the attention keeps packed documents apart.

    torch built for CUDA names a GPU as accelerator, even on a machine without a GPU. Bloom is
    refused: it adds positions to the scores by itself, so packed documents would see each other.
    """
    place.monkeypatch.delenv("ACCELERATE_USE_CPU")
    place.monkeypatch.setattr(
        torch.accelerator,
        "current_accelerator",
        lambda check_available=False: None if check_available else torch.device("cuda"),
    )
    assert pretrain.main([*pretraining(place.run), "--dry_run", "true"]) == 0
    assert "(there is no accelerator here); keeps packed documents apart" in capsys.readouterr().out
    bloom = "model_type: bloom\nhidden_size: 32\nn_layer: 2\nn_head: 4\nvocab_size: 128\n"
    argv = pretraining(place.run, **place.text(bloom))
    with pytest.raises(ConfigurationError) as dry:
        pretrain.main([*argv, "--dry_run", "true"])
    with pytest.raises(ConfigurationError) as start:
        pretrain.main(argv)
    assert dry.value.problems == start.value.problems
    assert pretrain.main([*pretraining(place.run, **place.text(MAMBA)), "--dry_run", "true"]) == 0
    assert "checked there, where the run trains" in capsys.readouterr().out


def test_a_dry_run_starts_no_processes_and_a_start_of_one_needs_no_backend(place, pretraining):
    """accelerate assumes a launch if a backend is named or MPI's variables are set."""
    one_step = {**SHORT, "max_steps": 1, "ddp_backend": "gloo"}
    argv = pretraining(place.run, **one_step)
    assert pretrain.main(argv) == 0
    shutil.rmtree(place.run)
    for name in ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "WORLD_SIZE"):
        with place.monkeypatch.context() as patch:
            patch.setenv(name, "2")
            assert pretrain.main([*argv, "--dry_run", "true"]) == 0
    place.monkeypatch.setenv("WORLD_SIZE", "2")
    argv = pretraining(place.run, **{**one_step, "ddp_backend": "nccl"})
    with pytest.raises(ConfigurationError, match=r"ddp_backend nccl .* processes on the CPU"):
        pretrain.main([*argv, "--dry_run", "true"])


def test_a_dry_run_of_a_job_is_not_judged_by_where_it_is_submitted(place, pretraining):
    """submit.sh may run inside an salloc. The tasks of the salloc are not those of the job."""
    place.monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "2")
    argv = [*pretraining(place.run), "--dry_run", "true"]
    with pytest.raises(ConfigurationError, match="srun started 2 copies"):
        pretrain.main(argv)
    place.monkeypatch.setenv("STOKER_SUBMITTING", "1")
    assert pretrain.main(argv) == 0


def test_what_has_no_effect_is_logged(place, pretraining, capsys):
    moot = {"optim": "sgd", "adam_beta1": 0.5, "warmup_steps": 50, "ddp_backend": "gloo"}
    assert pretrain.main(pretraining(place.run, **moot, dry_run="true")) == 0
    out = capsys.readouterr().out
    assert "ddp_backend gloo (--ddp_backend) has no effect: there is one process" in out
    assert out.count("adam_beta1 0.5 (--adam_beta1) has no effect: optim sgd (--optim)") == 1
    assert (
        "the learning rate is at most 0.001 in this run, not 0.01 (6 steps, warmup_steps 50" in out
    )


def test_too_few_steps_to_learn_from_are_a_warning(place, pretraining, capsys):
    short = {"max_steps": None, "num_train_epochs": 1, "global_batch_size": 8, "dry_run": "true"}
    assert pretrain.main(pretraining(place.run, **short)) == 0
    advice = (
        "14 steps may be too few to learn from: give --global_batch_size 1 --num_train_epochs 1"
    )
    assert advice in capsys.readouterr().out


def test_an_option_that_the_optimizer_has_anyway_is_accepted(place, pretraining):
    """Trainer always gives Adafactor these two options, and many recipes set them."""
    options = "scale_parameter=False,relative_step=False"
    argv = pretraining(place.run, optim="adafactor", optim_args=options, dry_run="true")
    assert pretrain.main(argv) == 0
    argv = pretraining(place.run, optim_args="fused=true", dry_run="true")
    assert pretrain.main(argv) == 0
    argv = pretraining(
        place.run, optim="ademamix", optim_args="alpha=5.0,beta3=0.9999", dry_run="true"
    )
    assert pretrain.main(argv) == 0, "transformers' defaults, which published recipes spell out"


def test_the_run_directory_is_looked_at_before_the_data(place, pretraining):
    absent = foreign_directory(place) | {"train_data": place.run / "absent"}
    for changes in ({}, {"dry_run": "true"}):
        with pytest.raises(ConfigurationError, match="holds no run of Stoker"):
            pretrain.main(pretraining(place.run, **(absent | changes)))
