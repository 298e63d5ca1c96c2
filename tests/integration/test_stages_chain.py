"""Each stage starts from exactly the final weights of the previous one, also when resumed."""

import hashlib
import json
import shutil
from pathlib import Path

import pytest
import tiny
import torch
from launching import run_processes
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import pretrain
import sft_train
from utils.config.errors import ConfigurationError

pytestmark = pytest.mark.slow

ROPE = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
HELDOUT = {"input_ids": tiny.documents(31, seed=1)}
CHATS_HELDOUT = tiny.masked(tiny.documents(23, seed=3))
LONGER = {"max_position_embeddings": 256, "rope_parameters": ROPE}


@pytest.fixture(scope="module")
def first(pretrained, tmp_path_factory) -> Path:
    """Run a first stage with checkpoints at steps 3 and 6, and an attention that is not uniform."""
    run = tmp_path_factory.mktemp("stages") / "first"
    sharp = tiny.make_model_config(run.with_name("first.json"), initializer_range=0.2)
    return pretrained(run, model_config=sharp)


# A run that starts from a stage takes its weights, configuration and tokenizer.
NEXT = {"model_config": None, "tokenizer_name_or_path": None}
EVALUATED = {"eval_on_start": True, "eval_steps": 6}


def assert_began_with(run: Path, weights: Path, columns: dict = HELDOUT, config=None) -> None:
    """Check the initial weights by plain forward passes of transformers, document by document."""
    model = AutoModelForCausalLM.from_pretrained(
        weights, config=config, attn_implementation="eager"
    )
    expected = tiny.plain_loss(model, columns)
    assert tiny.evaluations(run, "heldout")[0] == pytest.approx(expected, rel=1e-5)


def test_a_chain_of_three_stages(first, pretrained, fine_tuned, heldout, chats_heldout, tmp_path):
    """Short pretraining, pretraining on longer sequences with other rope settings, fine-tuning."""
    longer = tmp_path / "longer.json"  # the earlier stage's configuration, edited
    config = json.loads((first / "final" / "config.json").read_text())
    longer.write_text(json.dumps(config | LONGER, indent=2))
    changes = NEXT | {"model_config": longer, "sequence_length": 128} | heldout | EVALUATED
    second = pretrained(tmp_path / "second", init_from=first, **changes)
    config = AutoConfig.from_pretrained(second / "final")
    assert_began_with(second, first / "final", config=config)
    with pytest.raises(AssertionError):  # the rope settings change the losses
        assert_began_with(second, first / "final")

    changes = {"model_name_or_path": None} | chats_heldout | EVALUATED
    third = fine_tuned(tmp_path / "third", init_from=second, **changes)
    assert_began_with(third, second / "final", CHATS_HELDOUT)
    config = AutoConfig.from_pretrained(third / "final")
    assert config.max_position_embeddings == 256
    assert config.rope_parameters["factor"] == 2.0
    assert AutoTokenizer.from_pretrained(third / "final").get_vocab()["<eos>"] == 0

    weights = (first / "final" / "model.safetensors").read_bytes()
    assert tiny.starts(second)[0]["weights_from"] == {
        "init_from": str(first),
        "path": str(first / "final"),
        "run_id": run_id(first),
        "sha256": {"model.safetensors": hashlib.sha256(weights).hexdigest()},
    }


def run_id(run: Path) -> str:
    return json.loads((run / "provenance.json").read_text())["run_id"]


def test_a_checkpoint_as_a_stage_with_its_optimizer(first, pretrained, tmp_path, capsys):
    once = NEXT | {"max_steps": 1, "save_steps": 1, "learning_rate": 3e-3}
    once["init_from"] = first / "checkpoint-3"
    run = pretrained(tmp_path / "run", init_optimizer="true", **once)
    assert f"from {first}/checkpoint-3" in capsys.readouterr().out
    fresh = pretrained(tmp_path / "fresh", **once)
    before, after, anew = (
        torch.load(checkpoint / "optimizer.pt", weights_only=True)
        for checkpoint in (first / "checkpoint-3", run / "checkpoint-1", fresh / "checkpoint-1")
    )
    assert {float(state["step"]) for state in after["state"].values()} == {4.0}
    assert {float(state["step"]) for state in anew["state"].values()} == {1.0}
    assert after["param_groups"][0]["initial_lr"] == 3e-3
    # Adam's moments combine the previous moments with this step's gradient, equal in both runs.
    for index, state in after["state"].items():
        expected = 0.9 * before["state"][index]["exp_avg"] + anew["state"][index]["exp_avg"]
        torch.testing.assert_close(state["exp_avg"], expected)
    assert tiny.losses(run) == tiny.losses(fresh)
    origin = tiny.starts(run)[0]["weights_from"]
    assert (origin["run_id"], origin["step"]) == (run_id(first), 3)


def test_a_lora_checkpoint_is_refused_and_its_final_model_is_a_stage(
    first, fine_tuned, pretraining, pretrained, heldout, tmp_path
):
    settings = {"init_from": first, "use_peft": "true", "model_name_or_path": None}
    run = fine_tuned(tmp_path / "lora", **settings, max_steps=3)
    for directory in (run / "checkpoint-3", run / "adapter"):
        argv = pretraining(tmp_path / "after", init_from=directory, **NEXT)
        with pytest.raises(
            ConfigurationError, match=r"no whole model .* final/ of a finished run .LoRA's"
        ):
            pretrain.main(argv)
    changes = NEXT | heldout | EVALUATED
    after = pretrained(tmp_path / "after", init_from=run, max_steps=1, **changes)
    assert_began_with(after, run / "final")


MISFITS = (
    "tensor model.layers.1.mlp.up_proj.weight is missing in {0}.",
    "tensor model.norm.weight in {0} has shape (31,), the model needs (32,).",
    "tensor model.layers.9.mlp.up_proj.weight in {0} has no place in the model.",
)


FSDP2, ZERO3 = (pytest.param(name, marks=pytest.mark.exhaustive) for name in ("fsdp2", "zero3"))


@pytest.mark.parametrize("strategy", [FSDP2, "zero3"])
def test_sharded_strategies_start_from_a_stage(strategy, first, pretraining, heldout, tmp_path):
    run = tmp_path / "run"
    argv = pretraining(run, init_from=first, max_steps=1, **NEXT, **heldout | EVALUATED)
    run_processes(strategy, "pretrain.py", argv).succeeded()
    assert_began_with(run, first / "final")


@pytest.mark.parametrize("strategy", ["fsdp2", ZERO3])
def test_sharded_strategies_refuse_weights_that_do_not_fit(strategy, first, pretraining, tmp_path):
    directory = shutil.copytree(first / "final", tmp_path / "misfit")
    weights = load_file(directory / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    weights["model.layers.9.mlp.up_proj.weight"] = torch.zeros(2, 2)
    weights["model.norm.weight"] = torch.zeros(31)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    argv = pretraining(tmp_path / "run", init_from=directory, max_steps=1, **NEXT)
    done = run_processes(strategy, "pretrain.py", argv)
    for text in MISFITS:
        assert done.stdout.count(text.format(directory)) == 1, done.stdout[-4000:]
    assert "configuration error:" in done.stdout


def finished(run: Path) -> dict[str, bytes]:
    """Return the files of the finished model, except its card, which contains times."""
    files = [path for path in (run / "final").iterdir() if path.name != "README.md"]
    return {path.name: path.read_bytes() for path in files}


@pytest.mark.parametrize("config", [None, "fsdp2"], ids=["alone", "fsdp2"])
def test_a_resumed_run_needs_neither_its_stage_nor_a_damaged_checkpoint(
    config, first, pretraining, tmp_path, capsys
):
    """The finished model is the same if the stage is gone and a checkpoint is damaged."""
    run, gone = tmp_path / "run", shutil.copytree(first, tmp_path / "gone")
    generation = gone / "final" / "generation_config.json"  # gets a setting of this test
    generation.write_text(json.dumps(json.loads(generation.read_text()) | {"max_new_tokens": 7}))
    argv = pretraining(run, init_from=gone, per_device_train_batch_size=1, **NEXT)

    def start() -> str:
        if config is not None:
            return run_processes(config, "pretrain.py", argv).succeeded()
        assert pretrain.main(argv) == 0
        return capsys.readouterr().out

    start()
    uninterrupted, checkpoint = finished(run), run / "checkpoint-6"
    assert json.loads(uninterrupted["generation_config.json"])["max_new_tokens"] == 7
    assert (checkpoint / "pytorch_model_fsdp_0").is_dir() == (config == "fsdp2")
    committed = json.loads((checkpoint / "manifest.json").read_text())["checkpoint"]["files"]
    assert {"config.json", "tokenizer.json", "tokenizer_config.json"} < committed.keys()
    config_json = (checkpoint / "config.json").read_text()
    assert '"rms_norm_eps": 1e-06' in config_json
    # A valid configuration with as many bytes; its model computes something else.
    (checkpoint / "config.json").write_text(config_json.replace("1e-06", "1e-01"))
    shutil.rmtree(run / "final")
    shutil.rmtree(gone)
    shown = start()
    assert f"init_from {gone} is ignored: the run has {run}/checkpoint-3 of its own" in shown
    assert "checkpoint-6 is damaged (config.json " in shown
    assert (run / "damaged.checkpoint-6").is_dir()
    assert "changed since" not in shown
    assert tiny.starts(run)[1]["resumed_from"] == str(run / "checkpoint-3")
    assert finished(run) == uninterrupted


def test_the_weights_under_adapters_stay_those_of_the_first_start(
    first, fine_tuning, fine_tuned, tmp_path, capsys
):
    stage = shutil.copytree(first, tmp_path / "stage")
    shutil.rmtree(stage / "final")  # as if the earlier run was not finished yet
    settings = {"init_from": stage, "use_peft": "true", "model_name_or_path": None}
    run = fine_tuned(tmp_path / "run", **settings)
    uninterrupted = finished(run)
    tiny.cut(run, step=3)
    shutil.copytree(first / "final", stage / "final")  # its weights are halved below
    tensors = load_file(stage / "final" / "model.safetensors")
    halved = {name: tensor * 0.5 for name, tensor in tensors.items()}
    save_file(halved, stage / "final" / "model.safetensors", metadata={"format": "pt"})
    capsys.readouterr()
    fine_tuned(run, **settings)
    assert f"weights: from {stage}/checkpoint-6" in capsys.readouterr().out
    assert finished(run) == uninterrupted
    shutil.rmtree(run / "final")
    shutil.rmtree(stage / "checkpoint-6")
    with pytest.raises(ConfigurationError, match="it still needs: there is no such directory"):
        sft_train.main(fine_tuning(run, **settings))
