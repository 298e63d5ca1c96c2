"""The forecast repeats measured speeds and counts FLOPs like benchmarks/hardware/flops.py."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from planned import GEMMA, LLAMA, MIXTRAL, settings
from transformers import AutoConfig

from benchmarks.cells.shapes import GPT2_124M, LLAMA_1B, LLAMA_8B, QWEN3_600M
from benchmarks.hardware.flops import model_size
from utils.config.assumed import assumed_gpus
from utils.config.settings import parse_fine_tuning
from utils.data.packing import plan_packing
from utils.model.flops import effective_length
from utils.plan.forecast import (
    SHARES,
    ModelProducts,
    Step,
    exchanged_bytes,
    model_products,
    tokens_per_s,
)

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results" / "gpu"
ONE_H200 = assumed_gpus("1xH200-141GB")
STEP = Step(2, 4, 4096, 4096.0, "none", compiled=True, bf16=True)
# Measured runs: shape, rank of LoRA, width.
MEASURED = {
    "gpt2_124m": (GPT2_124M, 0, 768),
    "qwen3_600m_sft": (QWEN3_600M, 0, 1024),
    "llama_1b_pretrain": (LLAMA_1B, 0, 2048),
    "llama_8b_lora": (LLAMA_8B, 16, 4096),
}


def products_of(shape, rank=0) -> ModelProducts:
    given = settings(parse_fine_tuning, model_config=None, model_name_or_path="m")
    if rank:
        given = settings(
            parse_fine_tuning, model_config=None, model_name_or_path="m", use_peft="true",
            lora_r=rank, lora_target_modules="all-linear",
        )  # fmt: skip
    return model_products(given.model, AutoConfig.for_model(**shape))


@pytest.mark.parametrize("cell", MEASURED)
def test_the_forecast_of_what_was_measured_is_what_was_measured(cell):
    shape, rank, width = MEASURED[cell]
    found = json.loads((RESULTS / f"{cell}.json").read_text())["compared"]["Stoker, tuned"]
    assert found["causal_mfu"] == SHARES[width]
    products, seen = products_of(shape, rank), found["effective_length"]
    size = model_size(shape, rank)
    counted = size.flops(seen) - size.attention_flops(seen) / 2
    assert products.step_flops(seen, "none") == pytest.approx(counted, rel=1e-3)
    speed = tokens_per_s(products, replace(STEP, document_tokens=seen), "single", ONE_H200)
    assert speed == pytest.approx(found["tokens_per_second"], rel=0.01)


def test_windows_experts_and_recomputation_are_counted():
    llama, gemma, mixtral = (
        model_products(settings().model, config) for config in (LLAMA, GEMMA, MIXTRAL)
    )
    whole = llama.step_flops(64, "full") - llama.step_flops(64, "none")
    assert whole == 2 * (llama.forward - llama.head) + 4 * 4 * 64 * 64 / 2
    assert llama.step_flops(64, "selective") == llama.step_flops(64, "none")
    # Two layers see 16 tokens, two all 64.
    scores = gemma.step_flops(64, "none") - 6 * gemma.forward
    assert scores == 12 * (2 * 64 * 16 + 2 * 64 * 64) / 2
    # Two of four experts, each of three products of 64 x 64, in two layers.
    dense = mixtral.forward - 2 * (2 * 3 * 64 * 64)
    assert dense == 2 * (2 * 64 * 64 + 2 * 64 * 32) + 512 * 64


def test_gpus_that_wait_for_each_other_are_slower():
    products = products_of(LLAMA_8B)
    node, slow = assumed_gpus("8xH100-80GB"), assumed_gpus("8xRTX4090-24GB")
    nodes = assumed_gpus("8x8xH100-80GB")

    def per_gpu(strategy, gpus, **changes):
        step = replace(STEP, **changes)
        return tokens_per_s(products, step, strategy, gpus) / gpus.world_size

    one = per_gpu("single", ONE_H200)
    assert per_gpu("fsdp2", node) == pytest.approx(0.87 * one)
    assert per_gpu("fsdp2", node, rows=1, length=256) < 0.5 * one
    short = {"rows": 1, "length": 2048}
    assert per_gpu("fsdp2", slow) == pytest.approx(165.2 / 989 * per_gpu("fsdp2", node))
    assert per_gpu("fsdp2", slow, **short) < 0.7 * per_gpu("fsdp2", slow)
    assert per_gpu("fsdp2", nodes, **short) < per_gpu("fsdp2", node, **short)
    once = per_gpu("ddp", slow, accumulation=1, **short)
    assert per_gpu("ddp", slow, accumulation=32, **short) > 1.3 * once
    for change in ({"compiled": False}, {"bf16": False}, {"recomputed": "selective"}):
        assert per_gpu("fsdp2", node, **change) < per_gpu("fsdp2", node)
    frozen = replace(products, parameters=(products.parameters[0], 10))
    assert exchanged_bytes(frozen, "ddp", 8) < exchanged_bytes(products, "ddp", 8)
    assert exchanged_bytes(products, "fsdp2", 1) == (0, 0)


def test_documents_are_as_long_as_their_tokens_see_them():
    plan = plan_packing(np.array([10, 30]), 64)
    assert effective_length([plan], np.ones(1)) == (100 + 900) / 40
