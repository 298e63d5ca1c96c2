"""Predictions of memory and disk space, the checkpointing that fits, and refusals."""

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from families import tiny_config
from planned import CPU, ELSEWHERE, LAUNCH, LLAMA, MIXTRAL, settings, work
from safetensors.torch import save_model
from transformers import LlamaForCausalLM

from utils.config.errors import ConfigurationError
from utils.config.settings import parse_fine_tuning
from utils.model.adapters import plan_adapters, trained_bytes, with_adapters
from utils.model.architecture import causal_lm_class
from utils.model.compilation import CHOICES
from utils.model.weights import weights_dtype
from utils.plan import memory_plan
from utils.plan.memory_plan import (
    GIB,
    MemoryEstimate,
    checkpoint_bytes,
    checkpointing_choices,
    choose,
    count_parameters,
    estimate_memory,
    optimizer_bytes_per_parameter,
    plan_memory,
    planned_device,
)


def estimate(total: int, counted: bool = True) -> MemoryEstimate:
    return MemoryEstimate(0, 0, 0, total, counted=counted)


def test_the_gpu_of_the_nodes_is_a_number_of_gib():
    run = settings().run
    assert planned_device(run, {}) == (None, None)
    assert planned_device(run, {memory_plan.VARIABLE: ""}) == (None, None)
    found = planned_device(run, {memory_plan.VARIABLE: "39.5"})
    assert found == (int(39.5 * GIB * 0.94), int(39.5 * GIB))
    for given in ("H100", "0", "nan"):
        with pytest.raises(ConfigurationError, match=f"{given}: give the GiB of one GPU"):
            planned_device(run, {memory_plan.VARIABLE: given})


@pytest.mark.parametrize(("gib", "ends"), [(90, True), (85, False)])
def test_a_prediction_may_be_a_tenth_too_high(gib, ends, monkeypatch):
    monkeypatch.setattr(memory_plan, "estimate_memory", lambda *_: estimate(gib * GIB))
    monkeypatch.setenv(memory_plan.VARIABLE, "80")
    advice = "for a device of 80.0 GiB .strategy single, 1 rank.*micro-batch 1.*a smaller model"
    given, alone = settings(per_device_train_batch_size=1), replace(LAUNCH, device="cuda")
    with pytest.raises(ConfigurationError, match=advice) if ends else nullcontext():
        plan, report = plan_memory(given, LLAMA, alone, ELSEWHERE)
        assert plan.choice == "none"
        assert "It will probably run out" in report[-1][1]


@pytest.mark.parametrize(("device", "kernels"), [("cpu", CPU), ("cuda", ELSEWHERE)])
def test_weights_that_no_device_holds_are_refused_with_the_place_of_their_sizes(
    device, kernels, monkeypatch
):
    predicted: list[MemoryEstimate] = []
    monkeypatch.setattr(memory_plan, "estimate_memory", lambda *_: predicted[-1])
    monkeypatch.setattr(memory_plan, "memory_room_bytes", lambda: 80 * GIB)
    monkeypatch.setenv(memory_plan.VARIABLE, "80")
    given, launch = settings(model_config="my.json"), replace(LAUNCH, device=device)
    for gib, fits in ((75, True), (90, False)):
        predicted.append(MemoryEstimate(gib * GIB, 0, 0, 0, counted=True))
        alone = r"The weights alone take 90.0 GiB: are the sizes in my.json right\?"
        with nullcontext() if fits else pytest.raises(ConfigurationError, match=alone) as refusal:
            plan_memory(given, LLAMA, launch, kernels)
        assert fits or "activation_checkpointing: full" not in str(refusal.value)


def test_on_a_gpu_a_start_predicts_what_would_help(monkeypatch):
    """The out-of-memory page and the headroom use these predictions. On a CPU there are none."""
    counted = []

    def stand_in(_settings, _config, launch, work, choice, _counts):
        counted.append(choice)
        static = 30 if launch.strategy == "fsdp2" else 60
        return MemoryEstimate(0, 0, static, work.rows * (9 - 4 * CHOICES.index(choice)), True)

    monkeypatch.setattr(memory_plan, "estimate_memory", stand_in)
    monkeypatch.setattr(memory_plan, "own_device", lambda _launch: (10**9, 10**9))
    given = settings(per_device_train_batch_size=4, activation_checkpointing="none")
    for device, calls in (("cuda", 5), ("cpu", 1)):
        counted.clear()
        launch = replace(LAUNCH, device=device, world_size=2, strategy="ddp")
        plan, _ = plan_memory(given, LLAMA, launch, CPU)
        assert (plan.choice, plan.sequence_bytes, len(counted)) == ("none", 9, calls)
        if device == "cuda":
            assert plan.predicted_bytes == {"none": 96, "selective": 80, "full": 64}
            assert plan.sharded_bytes == 66


TOTALS = {"none": estimate(30), "selective": estimate(20), "full": estimate(10)}


@pytest.mark.parametrize(
    ("room", "choice"), [(33, "none"), (32, "selective"), (21, "full"), (5, "full")]
)
def test_auto_takes_the_least_recomputation_that_fits(room, choice):
    chosen, reason = choose("auto", TOTALS, room, 1.1)
    assert chosen == choice
    assert ("nothing fits" in reason) == (room == 5)
    assert choose("none", TOTALS, room, 1.1)[0] == "none", "what is set is not changed"
    unknown = {name: estimate(1, counted=False) for name in CHOICES}
    assert choose("auto", unknown, room, 1.1)[0] == "full"


def test_one_place_says_what_is_recomputed(monkeypatch):
    llama, jetmoe = LLAMA, tiny_config("jetmoe")

    def choices(config=llama, strategy="single", **given):
        launch = replace(LAUNCH, world_size=2, strategy=strategy)
        return checkpointing_choices(settings(**given), config, launch)

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
    refused(words, llama, "zero3", activation_checkpointing="selective")
    monkeypatch.setenv("FSDP_ACTIVATION_CHECKPOINTING", "true")
    refused("leave it to the recipe", llama, "fsdp2")


def test_states_and_what_cannot_run_without_data(monkeypatch):
    for kept, weights, expected in (
        (None, torch.float32, 8), (None, torch.bfloat16, 4), ("bfloat16", torch.float32, 4),
        ("float32", torch.bfloat16, 8), ("int8", torch.bfloat16, 2.03125),
    ):  # fmt: skip
        assert optimizer_bytes_per_parameter(kept, weights.itemsize) == expected
    none, full = (
        estimate_memory(settings(), MIXTRAL, LAUNCH, work(weights=torch.bfloat16), choice, (9, 9))
        for choice in ("none", "full")
    )
    assert none.counted
    assert none.activations > 1.6 * full.activations, "its experts are not kept"

    def refuse(*_):
        raise RuntimeError("data-dependent")

    monkeypatch.setattr(memory_plan, "trace", refuse)
    found = estimate_memory(settings(), MIXTRAL, LAUNCH, work(), "full", (9, 9))
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
    counts = count_parameters(given.model, config)
    found = estimate_memory(given, config, LAUNCH, work(weights=dtype), "none", counts)
    assert found.weights == sum(weight.nbytes for weight in model.parameters())
    assert found.gradients == sum(weight.nbytes for weight in trained)
    assert found.optimizer == sum(state.nbytes for state in states)


def test_adapters_of_weights_in_4_bits_are_counted_in_float32():
    """Layers in lora_modules_to_save are also trained in float32 (FineTuneTrainer)."""
    lora = {"use_peft": "true", "load_in_4bit": "true", "lora_modules_to_save": "lm_head"}
    base = {"model_config": None, "model_name_or_path": "m", "dtype": "bfloat16"}
    given = settings(parse_fine_tuning, **base, **lora)
    model = plan_adapters(given.model, LLAMA).model
    counts = count_parameters(model, LLAMA)
    assert trained_bytes(model, LLAMA, torch.bfloat16, counts[1]) == 4 * counts[1]


@pytest.mark.parametrize(("accumulation", "copies"), [(1, 1), (4, 2)])
def test_under_ddp_the_buckets_hold_the_gradients(accumulation, copies):
    """With accumulation the gradients of earlier micro-batches exist beside the buckets."""
    given = settings(global_batch_size=2 * 2 * accumulation, per_device_train_batch_size=2)
    launch = replace(LAUNCH, world_size=2, strategy="ddp")
    found = estimate_memory(given, LLAMA, launch, work(), "none", (5000, 5000))
    assert found.gradients == copies * found.weights


def test_one_more_sequence_is_predicted_with_the_accumulation_of_the_run():
    """A larger micro-batch alone would not accumulate, and its gradients would count once."""
    given = settings(global_batch_size=2, per_device_train_batch_size=1)
    one, two = (
        estimate_memory(given, LLAMA, LAUNCH, replace(work(), rows=rows), "none", (5000, 5000))
        for rows in (1, 2)
    )
    assert one.gradients == two.gradients == one.weights


def disk(strategy: str = "ddp", bf16: str = "false", **given) -> int:
    launch = replace(LAUNCH, world_size=2, strategy=strategy)
    return checkpoint_bytes(settings(bf16=bf16, **given), LLAMA, launch)


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
