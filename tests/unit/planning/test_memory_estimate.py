"""What a run keeps on a device and on the disk, and in which types, before a weight is loaded."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from planned import LAUNCH, LLAMA, MIXTRAL, settings, work
from safetensors.torch import save_model
from transformers import LlamaConfig, LlamaForCausalLM

from utils.config.arguments import ModelArguments
from utils.config.errors import ConfigurationError
from utils.config.settings import parse_fine_tuning
from utils.launch.processes import LaunchFacts
from utils.planning import memory_estimate
from utils.planning.memory_estimate import (
    OptimizerStates,
    checkpoint_bytes,
    choose_optimizer_states,
    optimizer_bytes_per_parameter,
    precision_line,
)

ROUNDED = {"dtype": "bfloat16", "stochastic_rounding": "true"}
LORA = {"dtype": "bfloat16", "use_peft": "true", "model_name_or_path": "m"}


def parsed(changes, tmp_path):
    given = {
        "train_data": "data", "sequence_length": "64", "global_batch_size": "8",
        "per_device_train_batch_size": "1", "output_dir": str(tmp_path / "run"), "use_cpu": "true",
        "bf16": "false", **changes,
    }  # fmt: skip
    if "model_name_or_path" not in given:
        given["model_config"] = "model.json"
    return parse_fine_tuning([w for name, value in given.items() for w in (f"--{name}", value)], "")


@pytest.mark.parametrize(
    ("changes", "states", "said"),
    [
        ({}, None, "float32 weights, no mixed precision"),
        ({"optim_states": "float32"}, None, "float32 weights, no mixed precision"),
        ({"optim_states": "int8"}, OptimizerStates("int8", False), "Adam's states in int8"),
        ({"dtype": "bfloat16"}, None, "rounded to the nearest: updates below a 500th"),
        (ROUNDED, OptimizerStates("bfloat16", True), "in bfloat16, weights rounded stochastically"),
        (LORA, None, "bfloat16 weights, no mixed precision"),  # of which nothing is trained
        (LORA | {"optim_states": "float32"}, None, "bfloat16 weights, no mixed precision"),
    ],
)
def test_torchs_own_optimizer_stays_where_it_keeps_what_is_asked_for(
    changes, states, said, tmp_path
):
    settings, config = parsed(changes, tmp_path), LlamaConfig()
    chosen = choose_optimizer_states(settings, config, LAUNCH)
    assert chosen == states
    assert said in precision_line(settings, config, chosen, "cpu")


@pytest.mark.parametrize(
    ("bf16", "said"),
    [
        (
            "false",
            "bfloat16 weights, no mixed precision, adapters and their products in float32 "
            "(--bf16 true: products in bfloat16)",
        ),
        ("true", "bfloat16 weights, mixed precision bf16"),
    ],
)
def test_products_of_adapters_in_float32_are_spoken_of(bf16, said, tmp_path):
    settings = parsed(LORA | {"bf16": bf16}, tmp_path)
    assert precision_line(settings, LlamaConfig(), None, "cpu") == said


@pytest.mark.parametrize(
    ("bf16", "device", "said"),
    [
        ("null", "cuda", " (--bf16 true is several times as fast on a GPU)"),
        ("null", "cpu", ""),
        ("false", "cuda", ""),  # who says so knows it
    ],
)
def test_float32_that_nobody_chose_is_spoken_of_on_a_gpu(bf16, device, said, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    settings = parsed({"bf16": bf16, "use_cpu": "false"}, tmp_path)
    line = precision_line(settings, LlamaConfig(), None, device)
    assert line == f"float32 weights, no mixed precision{said}"


def test_a_dry_run_says_that_it_does_not_know_the_node(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    settings = parsed({"bf16": "null", "use_cpu": "false", "dry_run": "true"}, tmp_path)
    said = precision_line(settings, LlamaConfig(), None, "cpu")
    assert (
        said
        == "float32 weights, no mixed precision (bf16 where a CPU with AMX or AVX512-BF16 trains)"
    )


@pytest.mark.parametrize("strategy", ["zero2", "fsdp1"])
def test_strategies_that_keep_states_in_their_own_way_are_refused(strategy, tmp_path):
    settings = parsed({"optim_states": "int8"}, tmp_path)
    with pytest.raises(ConfigurationError, match=f"optim_states int8 .* not go with {strategy}"):
        choose_optimizer_states(settings, LlamaConfig(), replace(LAUNCH, strategy=strategy))
    assert choose_optimizer_states(settings, LlamaConfig(), replace(LAUNCH, strategy="fsdp2"))


def test_weights_whose_type_the_model_decides_have_to_be_in_bfloat16(tmp_path):
    settings = parsed(ROUNDED | {"dtype": "auto"}, tmp_path)
    with pytest.raises(ConfigurationError, match="no effect on weights in float32"):
        choose_optimizer_states(settings, LlamaConfig(dtype=torch.float32), LAUNCH)
    assert choose_optimizer_states(settings, LlamaConfig(dtype=torch.bfloat16), LAUNCH)


def test_mixed_precision_of_the_accelerate_config_is_refused_beside_rounding(tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    with pytest.raises(ConfigurationError, match=r"bf16 true \(the accelerate config says so\)"):
        parsed(ROUNDED | {"bf16": "null"}, tmp_path)


@pytest.mark.parametrize(
    ("states", "weights", "bytes_"),
    [(None, torch.float32, 8), (None, torch.bfloat16, 4), ("bfloat16", torch.float32, 4),
     ("float32", torch.bfloat16, 8), ("int8", torch.bfloat16, 2.03)],
)  # fmt: skip
def test_bytes_of_the_states(states, weights, bytes_):
    assert optimizer_bytes_per_parameter(states, weights) == pytest.approx(bytes_, abs=0.01)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_are_counted_on_the_model(dtype, caplog):
    none, full = (
        memory_estimate.estimate_memory(settings(), MIXTRAL, LAUNCH, work(weights=dtype), choice)
        for choice in ("none", "full")
    )
    assert none.counted
    assert none.activations > full.activations
    assert "rule of thumb" not in caplog.text


def test_what_cannot_run_without_data_is_estimated_by_a_formula_with_a_log_line(
    monkeypatch, caplog
):
    def refuse(*_):
        raise RuntimeError("data-dependent")

    monkeypatch.setattr(memory_estimate, "trace", refuse)
    estimate = memory_estimate.estimate_memory(settings(), MIXTRAL, LAUNCH, work(), "full")
    assert not estimate.counted
    assert "a rule of thumb takes the place of the count" in caplog.text
    assert "data-dependent" in caplog.text


@pytest.mark.parametrize(("accumulation", "copies"), [(1, 1), (4, 2)])
def test_under_ddp_the_buckets_hold_the_gradients(accumulation, copies):
    """With accumulation those of the first micro-batches lie beside the buckets."""
    given = settings()
    given.training.gradient_accumulation_steps = accumulation
    launch = LaunchFacts(rank=0, world_size=2, strategy="ddp", hosts=("here",) * 2, device="cpu")
    found = memory_estimate.estimate_memory(given, LLAMA, launch, work(), "none")
    assert found.gradients == copies * found.weights


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
