"""Predictions of memory and disk space, the checkpointing that fits, and refusals."""

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from families import tiny_config
from planned import LLAMA, MIXTRAL, settings, setup
from safetensors.torch import save_model
from transformers import AutoConfig, LlamaForCausalLM

from utils.config.arguments import with_values
from utils.config.errors import ConfigurationError, Report
from utils.config.settings import parse_fine_tuning, parse_pretraining
from utils.model.adapters import plan_adapters, trained_bytes, with_adapters
from utils.model.architecture import causal_lm_class
from utils.model.layers import CHOICES
from utils.model.weights import weights_dtype
from utils.plan import memory_estimate, memory_plan
from utils.plan.memory_estimate import (
    GIB,
    MemoryEstimate,
    checkpoint_bytes,
    estimate_memory,
    optimizer_bytes_per_parameter,
)
from utils.plan.memory_plan import (
    checkpointing_choices,
    choose_checkpointing,
    plan_memory,
    planned_device,
)


def test_the_gpu_of_the_nodes_is_a_number_of_gib():
    assert planned_device(None, {memory_plan.GPU_MEMORY_VARIABLE: ""}) == (None, None)
    found = planned_device(None, {memory_plan.GPU_MEMORY_VARIABLE: "39.5"})
    assert found == (int(39.5 * GIB * 0.94), int(39.5 * GIB))
    for given in ("H100", "0", "nan"):
        with pytest.raises(ConfigurationError, match=f"{given}: give the GiB of one GPU"):
            planned_device(None, {memory_plan.GPU_MEMORY_VARIABLE: given})


@pytest.mark.parametrize(
    ("device", "elsewhere", "weights", "total", "refused"),
    [
        # A prediction may be a tenth too high.
        ("cuda", True, 0, 90, "for a device of 80.0 GiB .strategy single, 1 rank.*micro-batch 1"),
        ("cuda", True, 0, 85, None),
        # On a CPU only weights that do not fit are refused.
        ("cpu", False, 90, 90, "for a device of 76.0 GiB"),
        ("cpu", False, 75, 85, None),
    ],
)
def test_a_run_that_does_not_fit_is_refused(
    device, elsewhere, weights, total, refused, monkeypatch
):
    found = MemoryEstimate(weights * GIB, 0, 0, (total - weights) * GIB, counted=True)
    monkeypatch.setattr(memory_plan, "estimate_memory", lambda *_: found)
    monkeypatch.setattr(memory_plan, "memory_room_bytes", lambda: 80 * GIB)
    monkeypatch.setenv(memory_plan.GPU_MEMORY_VARIABLE, "80")
    given = settings(per_device_train_batch_size=1)
    run, report = setup(LLAMA, given, device=device, elsewhere=elsewhere), Report()
    with pytest.raises(ConfigurationError, match=refused) if refused else nullcontext() as refusal:
        assert plan_memory(run, report).choice == "none"
        assert "It will probably run out" in report[-1][1]
    assert not refused or str(refusal.value).endswith("take a smaller model")


def test_on_a_gpu_a_start_predicts_what_would_help(monkeypatch):
    """The out-of-memory page and the headroom use these predictions. On a CPU there are none."""
    counted = []

    def stand_in(run, choice, rows=4):
        counted.append(choice)
        static = 30 if run.launch.strategy == "fsdp2" else 60
        return MemoryEstimate(0, 0, static, rows * (9 - 4 * CHOICES.index(choice)), True)

    monkeypatch.setattr(memory_plan, "estimate_memory", stand_in)
    monkeypatch.setattr(memory_plan, "own_device", lambda _launch: (10**9, 10**9))
    given = settings(per_device_train_batch_size=4, activation_checkpointing="none")
    for device, calls in (("cuda", 5), ("cpu", 1)):
        counted.clear()
        run = setup(LLAMA, given, device=device, world_size=2, strategy="ddp")
        plan = plan_memory(run, Report())
        assert (plan.choice, plan.sequence_bytes, len(counted)) == ("none", 9, calls)
        if device == "cuda":
            assert plan.predicted_bytes == {"none": 96, "selective": 80, "full": 64}
            assert plan.sharded_bytes == 66


def test_a_start_predicts_ranks_that_share_a_sequence_where_no_smaller_batch_is_possible(
    monkeypatch,
):
    def stand_in(run, choice, rows=1):
        return MemoryEstimate(0, 0, 60, 30 // run.settings.run.context_parallel, True)

    monkeypatch.setattr(memory_plan, "estimate_memory", stand_in)
    monkeypatch.setattr(memory_plan, "own_device", lambda _launch: (10**9, 10**9))
    for rows, shared in ((1, {2: 75}), (2, {})):
        given = settings(per_device_train_batch_size=rows, activation_checkpointing="none")
        run = setup(LLAMA, given, device="cuda", world_size=2, strategy="ddp")
        assert plan_memory(run, Report()).context_bytes == shared


def test_the_plan_says_that_fp8_counts_as_bf16():
    for fp8, said in ((False, False), ("tensorwise", True)):
        given, report = settings(), Report()
        given = replace(given, model=with_values(given.model, fp8=fp8))
        plan_memory(setup(LLAMA, given), report)
        (line,) = [text for _, text in report if "parameters, all trained" in text]
        assert line.endswith("; fp8 counts as bf16") == said


TOTALS = {
    name: MemoryEstimate(0, 0, 0, total, counted=True)
    for name, total in {"none": 30, "selective": 20, "full": 10}.items()
}


@pytest.mark.parametrize(
    ("room", "choice"), [(33, "none"), (32, "selective"), (21, "full"), (5, "full")]
)
def test_auto_takes_the_least_recomputation_that_fits(room, choice):
    chosen, reason = choose_checkpointing("auto", TOTALS, room, 1.1)
    assert chosen == choice
    assert ("nothing fits" in reason) == (room == 5)
    assert choose_checkpointing("none", TOTALS, room, 1.1)[0] == "none", (
        "what is set is not changed"
    )
    unknown = {name: MemoryEstimate(0, 0, 0, 1, counted=False) for name in CHOICES}
    assert choose_checkpointing("auto", unknown, room, 1.1)[0] == "full"


def test_one_place_says_what_is_recomputed():
    jetmoe = tiny_config("jetmoe")

    def choices(config=LLAMA, strategy="single", **given):
        run = setup(config, settings(**given), (9, 9), world_size=2, strategy=strategy)
        return checkpointing_choices(run)

    def refused(message, *arguments, **given):
        with pytest.raises(ConfigurationError, match=message):
            choices(*arguments, **given)

    words = {"none": "none", "false": "none", "true": "full", "selective": "selective"}
    for given, choice in words.items():
        assert choices(activation_checkpointing=given) == (choice, list(CHOICES))
    assert choices(gradient_checkpointing="true") == ("full", list(CHOICES))
    auto = {"activation_checkpointing": "auto"}
    assert choices(**auto) == ("auto", ["none", "selective", "full"])
    assert choices(strategy="zero3", **auto) == ("auto", ["none", "full"])
    assert choices(jetmoe, **auto) == ("auto", ["none"])
    refused("full is not possible for jetmoe.*to none", jetmoe, activation_checkpointing="full")
    words = "selective is not possible for llama with strategy zero3: set it to none or full"
    refused(words, LLAMA, "zero3", activation_checkpointing="selective")


def test_states_and_what_cannot_run_without_data(monkeypatch):
    for kept, weights, expected in (
        (None, torch.float32, 8), (None, torch.bfloat16, 4), ("bfloat16", torch.float32, 4),
        ("float32", torch.bfloat16, 8), ("int8", torch.bfloat16, 2.03125),
    ):  # fmt: skip
        assert optimizer_bytes_per_parameter(kept, weights.itemsize) == expected
    run = setup(MIXTRAL, settings(dtype="bfloat16"), (9, 9))
    none, full = (estimate_memory(run, choice, 2) for choice in ("none", "full"))
    assert none.counted
    assert none.activations > 1.6 * full.activations, "its experts are not kept"

    def refuse(*_):
        raise RuntimeError("data-dependent")

    monkeypatch.setattr(memory_estimate, "trace", refuse)
    found = estimate_memory(run, "full")
    assert not found.counted
    assert found.total == found.weights + found.gradients + found.optimizer
    assert "without data (RuntimeError: data-dependent), so activations are not" in found.fault


@pytest.mark.parametrize("config", [LLAMA, MIXTRAL], ids=lambda config: config.model_type)
@pytest.mark.parametrize(
    "changes", [{}, {"lora_modules_to_save": "lm_head"}, {"dtype": "float32"}, {"use_peft": None}]
)
def test_trained_weights_are_counted_in_the_type_that_training_has_them_in(config, changes):
    """PEFT keeps adapters in float32 (weights, gradients, states) beside bfloat16 weights."""
    lora = {"use_peft": "true", "dtype": "bfloat16", "bf16": "false"} | changes
    base = {"model_config": None, "model_name_or_path": "m"}
    given = settings(parse_fine_tuning, global_batch_size=16, **base, **lora)
    if adapters := plan_adapters(given.model, config):
        given = replace(given, model=adapters.model)
    dtype = weights_dtype(given.model, config)
    model = with_adapters(causal_lm_class(config)(config).to(dtype), given.model)
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    for weight in trained:
        weight.grad = torch.zeros_like(weight)
    optimizer = torch.optim.AdamW(trained)
    optimizer.step()
    states = [each[name] for each in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
    # With accumulation all gradients are there at the peak.
    found = estimate_memory(setup(config, given), "none", 2)
    assert found.weights == sum(weight.nbytes for weight in model.parameters())
    assert found.gradients == sum(weight.nbytes for weight in trained)
    assert found.optimizer == sum(state.nbytes for state in states)


def test_adapters_of_weights_in_4_bits_are_counted_in_float32():
    """Layers in lora_modules_to_save are also trained in float32 (FineTuneTrainer)."""
    lora = {"use_peft": "true", "load_in_4bit": "true", "lora_modules_to_save": "lm_head"}
    base = {"model_config": None, "model_name_or_path": "m", "dtype": "bfloat16"}
    given = settings(parse_fine_tuning, **base, **lora)
    model = plan_adapters(given.model, LLAMA).model
    trained = setup(LLAMA, replace(given, model=model)).parameters[1]
    assert trained_bytes(model, LLAMA, torch.bfloat16, trained) == 4 * trained


@pytest.mark.parametrize(("accumulation", "copies"), [(1, 1), (4, 2)])
def test_under_ddp_the_buckets_hold_the_gradients(accumulation, copies):
    """With accumulation the gradients of earlier micro-batches exist beside the buckets."""
    given = settings(global_batch_size=2 * 2 * accumulation, per_device_train_batch_size=2)
    run = setup(LLAMA, given, (5000, 5000), world_size=2, strategy="ddp")
    found = estimate_memory(run, "none")
    assert found.gradients == copies * found.weights


def test_one_more_sequence_is_predicted_with_the_accumulation_of_the_run():
    """A larger micro-batch alone would not accumulate, and its gradients would count once."""
    given = settings(global_batch_size=2, per_device_train_batch_size=1)
    one, two = (estimate_memory(setup(LLAMA, given, (5000, 5000)), "none", rows) for rows in (1, 2))
    assert one.gradients == two.gradients == one.weights


def disk(strategy: str = "ddp", bf16: str = "false", **given) -> int:
    run = setup(LLAMA, settings(bf16=bf16, **given), world_size=2, strategy=strategy)
    return checkpoint_bytes(run)


def test_a_checkpoint_is_what_weights_and_adamw_take_on_the_disk(tmp_path):
    model = LlamaForCausalLM(LLAMA)
    optimizer = torch.optim.AdamW(model.parameters())
    model(input_ids=torch.ones(1, 4, dtype=torch.long)).logits.sum().backward()
    optimizer.step()
    save_model(model, str(tmp_path / "model.safetensors"))
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    written = sum(file.stat().st_size for file in tmp_path.iterdir())
    assert disk() == pytest.approx(written, rel=0.05)
    assert disk(save_strategy="no") == disk() / 3
    assert disk(ema_decay="0.999") == disk() / 3 * 4
    lora = {"model_config": None, "model_name_or_path": "m", "use_peft": "true"}
    lora["lora_target_modules"] = ".*q_proj"
    adapters = disk(parse=parse_fine_tuning, **lora)
    assert 0 < adapters < disk() / 5
    assert disk(parse=parse_fine_tuning, dtype="bfloat16", **lora) == adapters, "float32 too"
    # DeepSpeed saves master weights, and the weights again.
    parameters = sum(parameter.numel() for parameter in model.parameters())
    assert disk("zero2") == 16 * parameters  # float32: weights twice, two states
    assert disk("zero2", bf16="true") == (4 + 2 + 12) * parameters
    assert disk("zero2", bf16="true", dtype="bfloat16") == (2 + 2 + 12) * parameters


MIB = 2**20
MODEL = AutoConfig.for_model(
    "llama", hidden_size=256, intermediate_size=704, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=4, vocab_size=1024,
)  # fmt: skip
LEAST = "per_device_train_batch_size: 1, activation_checkpointing: full"


# Weights, gradients and AdamW's states of the 2.1 M parameters take 32.5 MiB.
@pytest.mark.parametrize(
    ("parse", "batch", "ranks", "strategy", "mib", "named"),
    [
        (parse_pretraining, 32, 1, "single", 80,
         "this fits: per_device_train_batch_size: 1; or activation_checkpointing: full"),
        (parse_pretraining, None, 1, "single", 80,  # derived from a micro-batch of 4 on 4 GPUs
         "this fits: per_device_train_batch_size: 1, global_batch_size: 16; or activation_"),
        (parse_pretraining, 32, 1, "single", 50, f"this fits: {LEAST}"),
        (parse_pretraining, 32, 1, "single", 20, f"this fits: GPUs: 8, strategy: fsdp2, {LEAST}"),
        (parse_fine_tuning, 32, 1, "single", 26, f"; or use_peft: true, dtype: bfloat16, {LEAST}"),
        (parse_pretraining, 32, 4, "ddp", 30, f"this fits: strategy: fsdp2, {LEAST}"),
        (parse_pretraining, 32, 1, "single", 1, "take a smaller model"),
    ],
)  # fmt: skip
def test_what_a_refusal_names(parse, batch, ranks, strategy, mib, named, monkeypatch):
    monkeypatch.setattr(memory_estimate, "WORKSPACE_BYTES", 0)
    monkeypatch.setattr(memory_plan, "planned_device", lambda *_: (mib * MIB, mib * MIB))
    base = {"model_config": None, "model_name_or_path": "m"} if parse is parse_fine_tuning else {}
    run = settings(
        parse, use_cpu=None, dry_run="true", assume="4xA100-40GB", bf16="true",
        global_batch_size=batch, per_device_train_batch_size=4, sequence_length=512,
        activation_checkpointing="none", **base,
    )  # fmt: skip
    planned = setup(MODEL, run, world_size=ranks, strategy=strategy, elsewhere=True)
    report = Report()
    with pytest.raises(ConfigurationError) as refusal:
        plan_memory(planned, report)
    (text,) = refusal.value.problems
    assert [line.partition(":")[0] for _, line in report][-2:] == [
        "memory", "activation checkpointing",
    ]  # fmt: skip
    assert text.endswith(named) or (batch is None and named in text)
