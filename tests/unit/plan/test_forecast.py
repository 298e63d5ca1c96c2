"""The forecast repeats measured speeds and counts FLOPs like benchmarks/hardware/flops.py."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from planned import GEMMA, LLAMA, MIXTRAL, settings, setup
from transformers import AutoConfig

from benchmarks.cells.shapes import GPT2_124M, LLAMA_1B, LLAMA_8B, QWEN3_600M
from benchmarks.hardware.flops import model_size
from utils.config.settings import parse_fine_tuning
from utils.config.strategy import assumed_gpus
from utils.plan.forecast import SHARES, exchanged_bytes, make_planner
from utils.plan.memory_plan import changed

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


def test_windows_experts_and_recomputation_are_counted():
    llama, gemma, mixtral = (planner_of(config, 64) for config in (LLAMA, GEMMA, MIXTRAL))
    whole = llama.step_flops("full") - llama.step_flops("none")
    assert whole == 2 * (llama.products.forward - 512 * 64) + 4 * 4 * 64 * 64 / 2
    assert llama.step_flops("selective") == llama.step_flops("none")
    # Two layers see 16 tokens, two all 64.
    scores = gemma.step_flops("none") - 6 * gemma.products.forward
    assert scores == 12 * (2 * 64 * 16 + 2 * 64 * 64) / 2
    # Two of four experts, each of three products of 64 x 64, in two layers.
    dense = mixtral.products.forward - 2 * (2 * 3 * 64 * 64)
    assert dense == 2 * (2 * 64 * 64 + 2 * 64 * 32) + 512 * 64


def test_gpus_that_wait_for_each_other_are_slower():
    planner = planner_of(AutoConfig.for_model(**LLAMA_8B))
    one = planner.tokens_per_s(planner.setup, "none")

    def per_gpu(strategy, gpus, rows=2, length=4096, accumulation=4, recomputed="none", **changes):
        ranks = gpus.world_size
        batch = {"sequence_length": length, "per_device_train_batch_size": rows}
        run = changed(planner.setup, batch | {"GPUs": ranks, "strategy": strategy})
        whole = replace(run.settings.run, global_batch_size=rows * ranks * accumulation)
        run = replace(run, settings=replace(run.settings, run=whole), **changes)
        return replace(planner, gpus=gpus).tokens_per_s(run, recomputed) / ranks

    node, slow = assumed_gpus("8xH100-80GB"), assumed_gpus("8xRTX4090-24GB")
    nodes, short = assumed_gpus("8x8xH100-80GB"), {"rows": 1, "length": 2048}
    assert per_gpu("fsdp2", node) == pytest.approx(0.87 * one)
    assert per_gpu("fsdp2", node, rows=1, length=256) < 0.5 * one
    assert per_gpu("fsdp2", slow) == pytest.approx(165.2 / 989 * per_gpu("fsdp2", node))
    assert per_gpu("fsdp2", slow, **short) < 0.7 * per_gpu("fsdp2", slow)
    assert per_gpu("fsdp2", nodes, **short) < per_gpu("fsdp2", node, **short)
    once = per_gpu("ddp", slow, accumulation=1, **short)
    assert per_gpu("ddp", slow, accumulation=32, **short) > 1.3 * once
    for change in ({"compiled": False}, {"recomputed": "selective"}):
        assert per_gpu("fsdp2", node, **change) < per_gpu("fsdp2", node)
    float32 = planner_of(planner.setup.config, bf16="false")
    assert float32.tokens_per_s(float32.setup, "none") < one
    frozen = replace(planner.setup, parameters=(planner.setup.parameters[0], 10))
    few, many = (
        exchanged_bytes(changed(each, {"strategy": "ddp"}), 8) for each in (frozen, planner.setup)
    )
    assert few < many
    assert exchanged_bytes(planner.setup, 1) == (0, 0)
