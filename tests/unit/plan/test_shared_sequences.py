"""Models and launches that cannot share sequences are refused, and the planner divides by ranks."""

import logging
from dataclasses import replace

import planned
import pytest
import torch
from planned import ATTENTION, LLAMA
from transformers import AutoConfig

from utils.config.errors import ConfigurationError, Report
from utils.model.attention import AttentionChoice
from utils.plan.context_parallel import check_context_parallel_model
from utils.plan.forecast import make_planner, suggest
from utils.plan.memory_estimate import GIB, estimate_memory
from utils.plan.memory_plan import MEMORY_MARGIN, RESERVED, context_sizes

SIZES = {
    "vocab_size": 512, "hidden_size": 96, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 12, "num_key_value_heads": 4,
}  # fmt: skip


@pytest.fixture
def shared(monkeypatch):
    """Return a function that parses settings with context_parallel for a launch of 12 ranks."""
    monkeypatch.setenv("WORLD_SIZE", "12")
    monkeypatch.delenv("ACCELERATE_CONFIG", raising=False)

    def make(size, **changes):
        given = {"context_parallel": size, "global_batch_size": 12, "dry_run": "true"}
        return planned.settings(**given | changes)

    return make


def refusal(settings, config, attention=ATTENTION):
    with pytest.raises(ConfigurationError) as error:
        check_context_parallel_model(settings, config, attention, torch.device("cpu"), Report())
    return " ".join(error.value.problems)


def test_a_model_that_ranks_cannot_share_is_refused_with_the_reason(shared):
    llama = AutoConfig.for_model("llama", **SIZES)
    assert "3 does not divide sequence_length 64: use a multiple" in refusal(shared(3), llama)
    length = {"sequence_length": 120}
    said = "12 attention heads and 4 key heads do not divide over 3 ranks: take one of 1, 2, 4, 12."
    assert said in refusal(shared(3, **length), llama)
    said = refusal(shared(2), AutoConfig.for_model("llama", **SIZES, attention_dropout=0.1))
    assert "attention dropout (0.1)" in said
    sdpa = AttentionChoice("sdpa", "sdpa", "as requested")
    assert "this run uses sdpa (as requested): set context_parallel: 1" in refusal(
        shared(2), llama, sdpa
    )
    recurrent = AutoConfig.for_model("mamba", hidden_size=64, num_hidden_layers=2, vocab_size=512)
    assert "mamba has recurrent layers, which carry a state" in refusal(shared(2), recurrent)
    llama4 = AutoConfig.for_model("llama4_text", **SIZES)
    assert "a rank would count from the start of its slice" in refusal(shared(2), llama4)
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    dynamic = AutoConfig.for_model("llama", **SIZES, rope_parameters=rope)
    assert "rotary positions of type dynamic" in refusal(shared(2), dynamic)


def test_what_is_possible_passes_and_groups_over_nodes_are_a_warning(shared, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    config, device = AutoConfig.for_model("llama", **SIZES), torch.device("cpu")
    for size, warned in ((1, 0), (2, 0), (4, 1)):
        report = Report()
        check_context_parallel_model(shared(size), config, ATTENTION, device, report)
        assert [level for level, _ in report] == [logging.WARNING] * warned


@pytest.mark.parametrize(
    ("size", "strategy", "said"),
    [
        (5, "auto", r"12 processes are not groups of 5: .* \(2, 3, 4, 6, 12\), or other GPUs"),
        (0, "auto", "context_parallel 0 .*at least 1"),
        (2, "zero2", "context_parallel 2 .* does not go with DeepSpeed"),
    ],
)
def test_a_launch_without_whole_groups_and_deepspeed_are_refused(size, strategy, said, shared):
    with pytest.raises(ConfigurationError, match=said):
        shared(size, strategy=strategy, use_cpu=None)


@pytest.mark.parametrize("attention", ["sdpa", "eager", "flex_attention"])
def test_another_attention_is_refused_by_a_dry_run_without_a_gpu_too(attention, shared):
    with pytest.raises(ConfigurationError, match=f"leave out attn_implementation {attention}"):
        shared(2, attn_implementation=attention)


def test_groups_read_a_micro_batch_together_and_one_process_shares_with_nobody(shared, monkeypatch):
    given = shared(4, global_batch_size=None, per_device_train_batch_size=2)
    assert given.run.global_batch_size == 6, "three groups of two sequences"
    monkeypatch.delenv("WORLD_SIZE")
    alone = shared(4)
    assert alone.run.context_parallel == 1
    assert "context_parallel 4 (--context_parallel) has no effect on one" in alone.values.notes[0]


def test_activations_divide_by_the_ranks_and_states_do_not(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    long = {"sequence_length": 1024, "global_batch_size": 4, "dry_run": "true"}
    long |= {"per_device_train_batch_size": 1}
    estimates = [
        estimate_memory(
            planned.setup(
                LLAMA, planned.settings(**long, context_parallel=size), world_size=4, strategy="ddp"
            ),
            "none",
        )
        for size in (1, 2, 4)
    ]
    weights = {each.weights for each in estimates}
    assert len(weights) == 1
    one, two, four = (each.activations for each in estimates)
    assert one / two == pytest.approx(2, rel=0.15)
    assert one / four == pytest.approx(4, rel=0.25)


def test_a_sequence_that_does_not_fit_is_shared_by_suggestion(monkeypatch):
    monkeypatch.delenv("STOKER_GPU_MEMORY_GIB", raising=False)
    given = planned.settings(
        use_cpu=None, dry_run="true", assume="4xA100-40GB", sequence_length=2**14, bf16="true",
        global_batch_size=4,
    )  # fmt: skip
    run = planned.setup(LLAMA, given, world_size=4, strategy="fsdp2")
    assert context_sizes(run) == [2, 4]
    planner = make_planner(run, 2.0**13)
    least = [planner.candidate("fsdp2", 1, "full", size).total_bytes for size in (1, 2)]
    # Four layers send queries and outputs of 64 numbers, and half as many keys and values, in bf16.
    # Half of them stay on the rank. Their gradients follow.
    pairs = replace(given, run=replace(given.run, context_parallel=2))
    assert planner.head_bytes(replace(run, settings=pairs), "none") == 4 * 192 * 2 / 2 * 2
    room = sum(least) / 2 * MEMORY_MARGIN["cuda"] / (1 - RESERVED["cuda"])
    planner = replace(planner, gpus=replace(planner.gpus, memory_gib=room / GIB))
    report = Report()
    suggest(planner, report)
    ((_, text),) = report
    assert "\n  context_parallel: 2\n" in text
