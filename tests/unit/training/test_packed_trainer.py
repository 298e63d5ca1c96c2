"""What Trainer does for every micro-batch and ours does once."""

import json

import pytest
import tiny
from torch import nn
from transformers import AutoModelForCausalLM

import pretrain
from utils.training.trainer import keep_mode


class Counted(nn.Linear):
    calls = 0

    def train(self, mode=True):
        Counted.calls += 1
        return super().train(mode)


def test_a_model_in_training_is_left_alone():
    model = nn.Sequential(nn.Dropout(), Counted(2, 2))
    Counted.calls = 0
    keep_mode(model)
    for _ in range(3):
        assert model.train() is model
    assert Counted.calls == 1
    assert model.eval() is model
    assert not any(module.training for module in model.modules())
    assert model.train() is model
    assert all(module.training for module in model.modules())
    assert Counted.calls == 3


def test_a_part_in_evaluation_is_set_to_train_with_the_rest():
    """As PEFT has it: the loaded model is in evaluation, the one around it is not."""
    model = nn.Sequential(nn.Dropout(), nn.Sequential(nn.Dropout()).eval())
    assert model.training
    keep_mode(model)
    model.train()
    assert all(module.training for module in model.modules())
    model[1].eval()
    model.train()
    assert all(module.training for module in model.modules())


@pytest.mark.slow
def test_the_estimate_of_operations_is_trainers(tmp_path):
    workspace, run = tmp_path, tmp_path / "run"
    tiny.make_tokenizer(workspace / "tokenizer")
    tiny.save(workspace / "documents", {"input_ids": tiny.documents(200, seed=0)})
    settings = {
        "train_data": workspace / "documents",
        "tokenizer_name_or_path": workspace / "tokenizer",
        "model_config": tiny.make_model_config(workspace / "model.json"),
        "output_dir": run,
    }
    assert pretrain.main(tiny.flags(**(tiny.RUN | settings))) == 0
    state = json.loads((run / "checkpoint-6" / "trainer_state.json").read_text())
    model = AutoModelForCausalLM.from_pretrained(run / "final")
    tokens = 6 * 4 * 64
    assert state["total_flos"] == 6 * tokens * model.num_parameters(exclude_embeddings=True)
