"""The forecast repeats measured speeds and counts FLOPs like benchmarks/hardware/flops.py."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from planned import LLAMA, settings, setup
from transformers import AutoConfig

from benchmarks.cells.shapes import GPT2_124M, LLAMA_1B, LLAMA_8B, QWEN3_600M
from benchmarks.hardware.flops import model_size
from utils.config.settings import parse_fine_tuning
from utils.config.strategy import assumed_gpus
from utils.plan.forecast import MULTI_GPU, SHARES, make_planner
from utils.plan.memory_plan import with_changes

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results" / "gpu"
BATCH = {
    "per_device_train_batch_size": 2, "global_batch_size": 8, "sequence_length": 4096,
    "bf16": "true", "dry_run": "true", "assume": "1xH200-141GB", "use_cpu": None,
}  # fmt: skip
LORA = {
    "parse": parse_fine_tuning, "use_peft": "true", "lora_target_modules": "all-linear",
    "model_config": None, "model_name_or_path": "m",
}  # fmt: skip
# Measured runs: shape, rank of LoRA, width.
MEASURED = {
    "gpt2_124m": (GPT2_124M, 0, 768),
    "qwen3_600m_sft": (QWEN3_600M, 0, 1024),
    "llama_1b_pretrain": (LLAMA_1B, 0, 2048),
    "llama_8b_lora": (LLAMA_8B, 16, 4096),
}

# Published tokens per second of each H100: model, nodes of 8 GPUs, tokens a sequence, sequences of
# a micro-batch, micro-batches of a step, recomputation, compiled, rank of LoRA, speed.
TORCHTITAN = "pytorch/torchtitan b5bcd76, benchmarks/llama3_h100_202412_torchtitan.md"
FOUNDRY = "mosaicml/llm-foundry 8c8dd48, scripts/train/benchmarking/README.md"
AUTOMODEL = "NVIDIA-NeMo/Automodel 36044ad, docs/performance-summary.mdx"
OTHERS = [
    (TORCHTITAN, "llama 8b", 1, 8192, 2, 1, "selective", True, 0, 6667),
    (TORCHTITAN, "llama 8b", 1, 8192, 2, 1, "selective", False, 0, 5762),
    (TORCHTITAN, "llama 8b", 16, 8192, 2, 1, "selective", True, 0, 6514),
    (FOUNDRY, "mpt 3b", 1, 4096, 5, 6, "none", True, 0, 20964),
    (FOUNDRY, "mpt 7b", 1, 2048, 6, 1, "none", True, 0, 10643),
    (FOUNDRY, "mpt 13b", 1, 2048, 2, 1, "none", True, 0, 4792),
    (FOUNDRY, "mpt 30b", 1, 4096, 1, 21, "full", True, 0, 1802),
    (AUTOMODEL, "qwen2.5 32b", 1, 4096, 2, 2, "full", True, 16, 2250),
]


def _mpt(width: int, layers: int) -> dict[str, object]:
    """Return the sizes of an MPT model as a Llama with as many weights."""
    return LLAMA_8B | {
        "hidden_size": width, "intermediate_size": width * 8 // 3, "num_hidden_layers": layers,
        "num_attention_heads": width // 128, "num_key_value_heads": width // 128,
        "vocab_size": 50368,
    }  # fmt: skip


MODELS = {
    "llama 8b": LLAMA_8B, "mpt 3b": _mpt(2560, 32), "mpt 7b": _mpt(4096, 32),
    "mpt 13b": _mpt(5120, 40), "mpt 30b": _mpt(7168, 48), "qwen2.5 32b": LLAMA_8B | {
        "hidden_size": 5120, "intermediate_size": 27648, "num_hidden_layers": 64,
        "num_attention_heads": 40, "num_key_value_heads": 8, "vocab_size": 152064},
}  # fmt: skip


def planner_of(config, document_tokens=4096.0, **given):
    given = settings(**BATCH | given)
    return make_planner(setup(config, given, compiled=True), document_tokens)


@pytest.mark.parametrize("cell", MEASURED)
def test_the_forecast_of_what_was_measured_is_what_was_measured(cell):
    shape, rank, width = MEASURED[cell]
    found = json.loads((RESULTS / f"{cell}.json").read_text())["compared"]["Stoker, tuned"]
    assert found["causal_mfu"] == SHARES[width]
    seen, lora = found["effective_length"], LORA | {"lora_r": rank} if rank else {}
    planner = planner_of(AutoConfig.for_model(**shape), seen, **lora)
    size = model_size(shape, rank)
    counted = size.flops(seen) - size.attention_flops(seen) / 2
    assert planner.step_flops("none") == pytest.approx(counted, rel=1e-3)
    speed = planner.tokens_per_s(planner.setup, "none")
    assert speed == pytest.approx(found["tokens_per_second"], rel=0.01)
    assert planner.speeds(planner.setup, "none") == (speed, speed), "one GPU waits for no other"


@pytest.mark.parametrize("case", OTHERS, ids=lambda case: f"{case[1]} on {8 * case[2]}")
def test_what_others_measured_on_several_gpus_is_in_the_range(case):
    _, model, nodes, length, rows, accumulation, recomputed, compiled, rank, measured = case
    lora = LORA | {"lora_r": rank} if rank else {}
    planner = planner_of(AutoConfig.for_model(**MODELS[model]), float(length), **lora)
    gpus = assumed_gpus(f"{nodes}x8xH100-80GB")
    run = on_gpus(planner, gpus, "fsdp2", rows, length, accumulation, compiled=compiled)
    slow, fast = (
        speed / gpus.world_size for speed in replace(planner, gpus=gpus).speeds(run, recomputed)
    )
    assert 0.98 * slow < measured < 1.03 * fast
    assert slow == pytest.approx(MULTI_GPU[0] / MULTI_GPU[1] * fast, rel=0.05)


def test_recomputation_is_counted():
    llama = planner_of(LLAMA, 64)
    whole = llama.step_flops("full") - llama.step_flops("none")
    assert whole == 2 * (llama.products.forward - 512 * 64) + 4 * 4 * 64 * 64 / 2
    assert llama.step_flops("selective") == llama.step_flops("none")


def on_gpus(planner, gpus, strategy, rows, length, accumulation, copies=1, **changes):
    """Return the planner's setup on these GPUs with these batches and copies of the states."""
    batch = {"sequence_length": length, "per_device_train_batch_size": rows}
    batch |= {"GPUs": gpus.world_size, "strategy": strategy, "copies": copies}
    run = with_changes(planner.setup, batch)
    whole = replace(run.settings.run, global_batch_size=rows * gpus.world_size * accumulation)
    return replace(run, settings=replace(run.settings, run=whole), **changes)


def test_gpus_that_wait_for_each_other_are_slower():
    planner = planner_of(AutoConfig.for_model(**LLAMA_8B))
    one = planner.tokens_per_s(planner.setup, "none")

    def per_gpu(strategy, gpus, rows=2, length=4096, accumulation=4, recomputed="none", **changes):
        run = on_gpus(planner, gpus, strategy, rows, length, accumulation, **changes)
        return replace(planner, gpus=gpus).tokens_per_s(run, recomputed) / gpus.world_size

    node, slow = assumed_gpus("8xH100-80GB"), assumed_gpus("8xRTX4090-24GB")
    nodes, short = assumed_gpus("8x8xH100-80GB"), {"rows": 1, "length": 2048}
    assert per_gpu("fsdp2", node) == pytest.approx(MULTI_GPU[1] * one)
    assert per_gpu("fsdp2", node, rows=1, length=256) < 0.5 * one
    assert per_gpu("fsdp2", slow, **short) < 0.7 * per_gpu("fsdp2", slow)
    assert per_gpu("fsdp2", nodes, **short) < per_gpu("fsdp2", node, **short)
    short["accumulation"] = 64
    copies = per_gpu("fsdp2", nodes, copies=8, **short)
    assert copies == pytest.approx(per_gpu("fsdp2", node, **short), rel=0.02), "once per step"
    assert per_gpu("fsdp2", nodes, copies=4, **short) < copies, "each copy is on two nodes"
    short["accumulation"] = 1
    assert per_gpu("fsdp2", nodes, copies=8, **short) < 0.8 * copies, "gradients do cross it"
    del short["accumulation"]
    once = per_gpu("ddp", slow, accumulation=1, **short)
    assert per_gpu("ddp", slow, accumulation=32, **short) > 1.3 * once
