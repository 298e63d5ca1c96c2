"""Counting on one layer of a kind is counting on all, and follows what tensors really take."""

import copy
from types import SimpleNamespace

import pytest
import torch
from families import tiny_config
from torch.profiler import ProfilerActivity, profile
from transformers import AutoConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from utils.config.errors import ConfigurationError
from utils.config.settings import RunSettings, parse_fine_tuning, parse_pretraining
from utils.launch.processes import LaunchFacts
from utils.model.attention import AttentionChoice
from utils.model.compilation import CHOICES
from utils.model.loss_head import LossHeadChoice
from utils.planning import memory_estimate, memory_plan
from utils.planning import memory_trace as activations
from utils.planning import memory_trace as compiled_layers
from utils.planning.memory_trace import (
    LiveBytes,
    Phases,
    Stretch,
    Workload,
    cut_as_compiled,
    most_alive,
    trace,
    typical_lengths,
)

LLAMA = AutoConfig.for_model(
    "llama", hidden_size=64, intermediate_size=160, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2, vocab_size=512,
)  # fmt: skip
# Every second layer attends in a window.
GEMMA = AutoConfig.for_model(
    "gemma2", hidden_size=64, intermediate_size=160, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, vocab_size=512, sliding_window=16,
)  # fmt: skip
MIXTRAL = AutoConfig.for_model(
    "mixtral", hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, vocab_size=512, num_local_experts=4,
)  # fmt: skip
CPU = AttentionChoice("packed_varlen", "per_document", "")
LAUNCH = LaunchFacts(rank=0, world_size=1, strategy="single", hosts=("here",), device="cpu")


def settings(parse=parse_pretraining, **changes) -> RunSettings:
    given = {
        "train_data": "d", "sequence_length": 64, "global_batch_size": 8, "output_dir": "o",
        "model_config": "m", "use_cpu": "true",
    } | changes  # fmt: skip
    argv = [word for name, value in given.items() if value for word in (f"--{name}", str(value))]
    return parse(argv, "")


def work(**changes) -> Workload:
    values = {
        "rows": 2, "sequence_length": 64, "weights": torch.float32, "autocast": None,
        "device": "cpu", "attention": CPU, "loss_head": LossHeadChoice("fused", "as set"),
        "lengths": [64, 64],
    }  # fmt: skip
    return Workload(**(values | changes))


def most(config, choice, given=None, **changes) -> Phases:
    step = trace(given or settings(), config, work(**changes), choice)
    return most_alive(step.stretches, step.layer_gradients, 1, held=0)


def stored(choice: str) -> int:
    """Return what stays of one layer after its forward pass."""
    stretches = trace(settings(), LLAMA, work(), choice).stretches
    return next(each.live for each in stretches if each.name == "forward 0")


def test_bytes_are_counted_from_birth_to_death():
    weight = torch.ones(7, 7)
    with LiveBytes([weight]) as live:
        live.begin("first")
        kept = torch.ones(100)
        view = kept.view(10, 10), weight.t()
        gone = torch.ones(1000)
        del gone
        live.begin("second")
        del kept, view
    first, second = live.stretches[1:]
    assert (first.live, first.peak) == (400, 4400)
    assert (second.live, second.peak) == (-400, 0)
    assert second.change["first"] == -400


@pytest.mark.parametrize("autocast", [None, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("config", [LLAMA, GEMMA], ids=["llama", "gemma2"])
@pytest.mark.parametrize("choice", CHOICES)
def test_one_layer_of_a_kind_stands_for_all(config, choice, autocast, monkeypatch):
    expected = most(config, choice, autocast=autocast)
    monkeypatch.setattr(activations, "_kinds", lambda _, layers: list(range(len(layers))))
    assert most(config, choice, autocast=autocast) == expected


def test_more_recomputation_keeps_less():
    none, selective, full = (stored(choice) for choice in CHOICES)
    layer_input = 2 * 64 * LLAMA.hidden_size * 4
    assert layer_input == full < selective < none


@pytest.mark.parametrize("autocast", [None, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("config", [LLAMA, GEMMA], ids=["llama", "gemma2"])
def test_compiled_layers_keep_less_and_one_stands_for_all(config, autocast, monkeypatch):
    found = most(config, "none", autocast=autocast, compiled=True)
    eager = most(config, "none", autocast=autocast)
    assert found.activations < 0.85 * eager.activations
    monkeypatch.setattr(activations, "_kinds", lambda _, layers: list(range(len(layers))))
    assert most(config, "none", autocast=autocast, compiled=True) == found


def test_what_is_computed_again_is_counted_as_without_the_compiler():
    for choice in ("selective", "full"):
        assert most(LLAMA, choice, compiled=True) == most(LLAMA, choice)


def test_layers_that_cannot_be_cut_are_counted_as_they_are(monkeypatch, caplog):
    def refuse(*_):
        raise RuntimeError("not traceable")

    monkeypatch.setattr(compiled_layers, "_cut", refuse)
    assert most(LLAMA, "none", compiled=True) == most(LLAMA, "none")
    assert "LlamaForCausalLM are counted as not compiled, which is more: Runtime" in caplog.text


def test_a_plan_counts_layers_as_they_will_run():
    data = SimpleNamespace(train=SimpleNamespace(plans=[]))
    head = LossHeadChoice("fused", "")
    given = settings(per_device_train_batch_size=2)
    for compiled in (True, False):
        kernels = memory_plan.Kernels(CPU, head, compiled)
        assert memory_plan._workload(given, data, LLAMA, LAUNCH, kernels).compiled is compiled


@pytest.mark.slow
@pytest.mark.parametrize("autocast", [None, torch.bfloat16], ids=["fp32", "bf16"])
def test_the_cut_keeps_what_a_compiled_layer_keeps(autocast):
    """By what torch's allocator has given out after a forward pass, and by the count."""
    config = copy.deepcopy(LLAMA)
    config._attn_implementation = "sdpa"
    layer = LlamaDecoderLayer(config, 0).train()
    states = torch.randn(4, 64, LLAMA.hidden_size, requires_grad=True)
    rotations = (torch.randn(4, 64, 16), torch.randn(4, 64, 16))

    def forward(module):
        with torch.autocast("cpu", autocast, enabled=autocast is not None):
            return module(states, position_embeddings=rotations)

    compiled = torch.compile(layer, dynamic=False)
    forward(compiled).sum().backward()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        result = forward(compiled)
    taken = sum(event.self_cpu_memory_usage for event in profiler.key_averages())
    del result

    def counted(cut):
        with cut_as_compiled([layer] if cut else []):
            forward(layer).sum().backward()
            with LiveBytes([states, *rotations, *layer.parameters()]) as live:
                result = forward(layer)
            kept = live.stretches[0].live
            del result
        return kept

    assert taken == counted(cut=True)
    assert taken < 0.85 * counted(cut=False)


def test_adapters_leave_out_the_gradients_of_frozen_weights():
    lora = settings(parse_fine_tuning, model_config="", model_name_or_path="m", use_peft="true")
    step = trace(lora, LLAMA, work(), "none")
    pretrained = trace(settings(), LLAMA, work(), "none")
    assert 0 < 10 * sum(step.layer_gradients.values()) < sum(pretrained.layer_gradients.values())


def test_gradients_of_an_earlier_micro_batch_are_there_from_the_start():
    stretches = [Stretch("forward 0", peak=10), Stretch("backward 0", peak=5)]
    stretches[0].change["forward 0"] = 8
    stretches[1].change |= {"forward 0": -8, "backward 0": 6}
    first = most_alive(stretches, {"backward 0": 6}, 1, held=0)
    later = most_alive(stretches, {"backward 0": 6}, 1, held=6)
    assert (first.peak, first.gradients) == (13, 0)
    assert (later.peak, later.gradients) == (19, 6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_are_counted_on_the_model(dtype, caplog):
    none, full = (
        memory_estimate.estimate_memory(settings(), MIXTRAL, LAUNCH, work(weights=dtype), choice)
        for choice in ("none", "full")
    )
    assert none.counted
    assert none.activations > full.activations
    assert "rule of thumb" not in caplog.text


def test_what_cannot_run_without_data_is_estimated_by_a_formula_aloud(monkeypatch, caplog):
    def refuse(*_):
        raise RuntimeError("data-dependent")

    monkeypatch.setattr(memory_estimate, "trace", refuse)
    estimate = memory_estimate.estimate_memory(settings(), MIXTRAL, LAUNCH, work(), "full")
    assert not estimate.counted
    assert "a rule of thumb takes the place of the count" in caplog.text
    assert "data-dependent" in caplog.text


def test_short_documents_keep_their_share():
    assert sum(typical_lengths([100, 100, 600], 2000)) == 2000
    found = typical_lengths([100, 100, 600], 2000)
    assert sum(length for length in found if length <= 256) == 500


TOTALS = {"none": 30, "selective": 20, "full": 10}


@pytest.mark.parametrize(
    ("room", "choice"), [(33, "none"), (32, "selective"), (21, "full"), (5, "full")]
)
def test_auto_takes_the_least_recomputation_that_fits(room, choice):
    chosen, reason = memory_plan.choose("auto", TOTALS, room, 1.1)
    assert chosen == choice
    assert ("nothing fits" in reason) == (room == 5)


def test_what_is_set_is_not_changed():
    assert memory_plan.choose("none", {"none": 30}, 5, 1.1)[0] == "none"


def test_one_place_says_what_is_recomputed(monkeypatch):
    sharded = LaunchFacts(0, 2, "zero3", ("here",), "cpu")
    with pytest.raises(ConfigurationError, match="selective does not go with ZeRO-3"):
        memory_plan.requested_choice(settings(activation_checkpointing="selective"), sharded)
    monkeypatch.setenv("FSDP_ACTIVATION_CHECKPOINTING", "true")
    sharded = LaunchFacts(0, 2, "fsdp2", ("here",), "cpu")
    with pytest.raises(ConfigurationError, match="leave it to the recipe"):
        memory_plan.requested_choice(settings(), sharded)


def test_a_model_without_checkpointing_is_not_checkpointed():
    jetmoe, llama = tiny_config("jetmoe"), tiny_config("llama")
    assert list(memory_plan.choices("auto", jetmoe, LAUNCH)) == ["none"]
    assert list(memory_plan.choices("auto", llama, LAUNCH)) == list(CHOICES)
    with pytest.raises(ConfigurationError, match="full: transformers has none for jetmoe"):
        memory_plan.choices("full", jetmoe, LAUNCH)


@pytest.mark.parametrize(
    ("given", "choice"),
    [
        ({}, "none"),
        ({"activation_checkpointing": "false"}, "none"),
        ({"activation_checkpointing": "true"}, "full"),
        ({"gradient_checkpointing": "true"}, "full"),
        ({"activation_checkpointing": "selective"}, "selective"),
        ({"activation_checkpointing": "auto"}, "auto"),
    ],
)
def test_words_and_booleans(given, choice):
    assert memory_plan.requested_choice(settings(**given), LAUNCH) == choice


@pytest.mark.parametrize(("accumulation", "copies"), [(1, 1), (4, 2)])
def test_under_ddp_the_buckets_hold_the_gradients(accumulation, copies):
    """With accumulation those of the first micro-batches lie beside the buckets."""
    given = settings()
    given.training.gradient_accumulation_steps = accumulation
    launch = LaunchFacts(rank=0, world_size=2, strategy="ddp", hosts=("here",) * 2, device="cpu")
    found = memory_estimate.estimate_memory(given, LLAMA, launch, work(), "none")
    assert found.gradients == copies * found.weights
