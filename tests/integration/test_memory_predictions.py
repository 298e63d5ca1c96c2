"""A run takes the predicted memory, and recomputation changes none of its losses."""

import pytest
import tiny
import torch

from benchmarks.memory.predictions import BOUND, SHAPES, measure
from utils.model.layers import CHOICES
from utils.plan import memory_plan

pytestmark = pytest.mark.slow
OVERCOUNTED = {("compiled", "selective"), ("compiled", "full")}


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is measured instead")
@pytest.mark.parametrize(
    ("name", "choice"),
    [("recipe_shape", "none"), pytest.param("experts", "full", marks=pytest.mark.exhaustive)],
)
def test_a_cpu_takes_what_was_predicted(name, choice):
    found = measure(SHAPES[name], choice)
    assert found["choice"] == choice
    assert abs(found["ratio"] - 1) < BOUND["cpu"], found


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize(
    ("name", "choice"),
    # Runs with recomputation are not compared: the prediction for compiled layers is too high.
    [(name, choice) for name in SHAPES for choice in CHOICES if (name, choice) not in OVERCOUNTED],
)
def test_a_gpu_takes_what_was_predicted(name, choice):
    found = measure(SHAPES[name], choice)
    assert abs(found["ratio"] - 1) < BOUND["cuda"], found


def test_choices_train_alike_and_auto_says_what_it_took(fine_tuned, tmp_path, monkeypatch, capfd):
    for choice in ("none", "selective", "auto"):
        if choice == "auto":
            monkeypatch.setattr(memory_plan, "own_device", lambda _: (2**18, None))
        changes = {"use_peft": True, "lora_dropout": 0.1, "max_steps": 2}
        fine_tuned(tmp_path / choice, activation_checkpointing=choice, **changes)
    said = capfd.readouterr().out
    assert "activation checkpointing: auto: full; predicted GiB: none " in said
    assert "nothing fits with that margin" in said
    assert "It will probably run out" in said
    losses = [tiny.losses(tmp_path / choice) for choice in ("none", "selective", "auto")]
    assert len(losses[0]) == 2
    assert losses[0] == losses[1] == losses[2]
    record = tiny.starts(tmp_path / "auto")[0]["activation_checkpointing"]
    assert (record["requested"], record["choice"]) == ("auto", "full")
    assert [*record["predicted_bytes"]] == ["none", "selective", "full"]
    assert record["room_bytes"] == 2**18
