"""What torchtune's recipes are told and how they are watched, as far as is known without it."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from benchmarks.baselines import torchtune_recipe
from benchmarks.baselines.torchtune_config import recipe_config
from benchmarks.cells.gpu import GPU_CELLS
from benchmarks.cells.kinds import TrainingCell
from benchmarks.cells.shapes import LLAMA_8B
from benchmarks.recording.job import Job

CELLS = {cell.name: cell for cell in GPU_CELLS if isinstance(cell, TrainingCell)}
PAIR = torch.tensor([[5, 6, 7, 8, 9, 1]])  # documents of two and three tokens, and padding
BATCH = {
    "tokens": PAIR,
    "labels": torch.tensor([[-100, 6, -100, 8, 9, -100]]),
    "input_pos": torch.tensor([[0, 1, 0, 1, 2, 3]]),
}


@pytest.fixture
def job(tmp_path):
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "config.json").write_text(json.dumps(LLAMA_8B))
    (tmp_path / "weights" / "model.safetensors").touch()
    return Job(
        str(tmp_path), str(tmp_path / "scratch"), "sft", "bf16_weights", 4096, 1, 20, 5, trace=True
    )


@pytest.mark.parametrize("name", ["llama_8b_sft", "llama_8b_lora"])
def test_recipes_are_told_of_the_cell(job, name):
    rank = CELLS[name].lora_rank
    told = recipe_config(replace(job, precision=CELLS[name].precision, lora_rank=rank))
    assert told["dtype"] == "bf16"
    assert told["max_steps_per_epoch"] == 22
    assert told["optimizer"]["lr"] == job.learning_rate
    assert told["checkpointer"]["checkpoint_files"] == ["model.safetensors"]
    model = told["model"]
    assert model["embed_dim"] == 4096
    assert model["num_kv_heads"] == 8
    assert model.get("lora_rank", 0) == model.get("lora_alpha", 0) == rank
    assert model["_component_"].endswith("lora_llama3" if rank else "llama3.llama3")


def test_a_recipe_is_watched_and_saves_nothing():
    weight = torch.nn.Parameter(torch.ones(1))
    recipe = SimpleNamespace(
        _loss_step=lambda batch: 3 * weight.sum() + 0 * batch.pop("labels").sum(),
        _optimizer=torch.optim.SGD([weight], lr=0.1),
        save_checkpoint=None,
    )
    seen = []
    recorder = SimpleNamespace(
        saw_batch=lambda tokens, labels: seen.append((tokens.tolist(), labels.tolist())),
        saw_chats=lambda inputs: seen.append(inputs["position_ids"].tolist()),
        saw_loss=lambda loss: seen.append(loss.item()),
        ended_step=lambda: seen.append("stepped"),
    )
    torchtune_recipe.watch_recipe(recipe, recorder)
    recipe._loss_step(dict(BATCH)).backward()
    recipe._optimizer.step()
    recipe.save_checkpoint(epoch=0)
    tokens, labels, positions = (BATCH[key].tolist() for key in ("tokens", "labels", "input_pos"))
    assert seen == [(tokens, labels), positions, 3.0, "stepped"]
