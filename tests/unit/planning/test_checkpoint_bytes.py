"""The size of a checkpoint is worked out as it comes out on the disk."""

from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_model
from transformers import LlamaConfig, LlamaForCausalLM

from utils.config.arguments import ModelArguments
from utils.launch.processes import LaunchFacts
from utils.planning.memory_estimate import checkpoint_bytes

CONFIG = LlamaConfig(
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=512,
)


def size(strategy: str = "ddp", mixed: str = "no", training: dict | None = None, **model) -> int:
    settings = SimpleNamespace(
        run=SimpleNamespace(optim_states=None),
        model=ModelArguments(model_config="model.json", **model),
        training=SimpleNamespace(
            mixed_precision=mixed,
            **{"save_only_model": False, "save_strategy": "steps"} | (training or {}),
        ),
    )
    return checkpoint_bytes(settings, CONFIG, LaunchFacts(0, 2, strategy, ("n",) * 2, "cpu"))


def test_it_is_what_weights_and_adamw_take_on_the_disk(tmp_path):
    model = LlamaForCausalLM(CONFIG)
    optimizer = torch.optim.AdamW(model.parameters())
    model(input_ids=torch.ones(1, 4, dtype=torch.long)).logits.sum().backward()
    optimizer.step()
    save_model(model, str(tmp_path / "model.safetensors"))
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    real = sum(path.stat().st_size for path in tmp_path.iterdir())
    assert size() == pytest.approx(real, rel=0.05)
    assert size(training={"save_only_model": True}) == pytest.approx(
        (tmp_path / "model.safetensors").stat().st_size, rel=0.05
    )


def test_deepspeed_keeps_masters_and_the_weights_once_more():
    parameters = sum(parameter.numel() for parameter in LlamaForCausalLM(CONFIG).parameters())
    assert size("zero2") == 16 * parameters  # float32: weights twice, two states
    assert size("zero2", "bf16") == (4 + 2 + 12) * parameters
    assert size("zero2", "bf16", dtype="bfloat16") == (2 + 2 + 12) * parameters


def test_adapters_are_saved_alone():
    adapters = size(use_peft=True, lora_target_modules=["q_proj", "v_proj"])
    assert 0 < adapters < size() / 5


def test_a_run_without_checkpoints_needs_room_for_its_weights():
    assert size(training={"save_strategy": "no"}) == size() / 3
