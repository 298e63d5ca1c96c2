"""The first lines of the recipes have the current predictions for their hardware."""

import re

import pytest

from examples import recipe_forecasts as forecasts
from utils.config.recipes import read_recipes
from utils.config.strategy import assumed_gpus
from utils.plan.memory_estimate import GIB, count_parameters
from utils.plan.memory_plan import MEMORY_MARGIN

RECIPES = forecasts.recipes()
# A sample, because a recipe takes two seconds; it has LoRA, experts, several nodes and one GPU.
SAMPLE = ("qwen3_0_6b_full", "qwen3_8b_lora", "gpt_oss_20b_full", "llama_7b")


def test_every_recipe_for_gpus_has_a_prediction_that_fits_them():
    assert len(RECIPES) > 50
    for path in RECIPES:
        text = path.read_text()
        hardware, line = re.search(r"# Hardware: (.*)\n(.*)\n", text).groups()
        memory = r"# Predicted on (\d+ x \S+): (over )?(\d+) GiB a GPU.*"
        form = memory + r", ([\d,]+ to )?[\d,]+ tokens/s, .* for .*"
        found = re.fullmatch(form, line)
        assert found, f"{path.name}: run make figures"
        assert hardware.startswith(found[1])
        gpus = assumed_gpus(forecasts.hardware(text))
        assert int(found[3]) * MEMORY_MARGIN["cuda"] < gpus.memory_gib, path.name
        strategy = read_recipes([str(path)])[0].get("strategy")
        asked = "fsdp2" if "(FSDP2)" in hardware else "auto"
        assert (strategy.value if strategy else "auto") == asked, path.name


@pytest.mark.slow
@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, marks=[] if path.stem in SAMPLE else pytest.mark.exhaustive)
        for path in RECIPES
    ],
    ids=lambda path: path.stem,
)
def test_the_prediction_is_what_the_command_writes(path, monkeypatch):
    monkeypatch.chdir(forecasts.ROOT)
    line = forecasts.predicted_line(path)
    assert line in path.read_text(), "run make figures"
    assert forecasts.with_prediction(path.read_text(), line) == path.read_text()


def test_models_have_their_published_numbers_of_parameters():
    from transformers import AutoConfig

    published = {
        "Qwen/Qwen3-8B": 8_190_735_360, "meta-llama/Llama-3.1-8B": 8_030_261_248,
        "google/gemma-3-1b-it": 999_885_952, "openai/gpt-oss-20b": 20_914_757_184,
        "HuggingFaceTB/SmolLM2-135M": 134_515_008,
        "Qwen/Qwen3-30B-A3B": 30_532_122_624, "HuggingFaceTB/SmolLM3-3B": 3_075_098_624,
        "openai/gpt-oss-120b": 116_829_156_672,
    }  # fmt: skip
    # Billions of parameters: names of the models, and for Gemma 4 the documents of fairseq2, for
    # Ministral 3 (without the tower) those of Megatron-Bridge, for LFM 2.5 Unsloth's guide.
    rounded = {
        "google/gemma-4-31B-it": "30.7", "google/gemma-4-26B-A4B-it": "25.2",
        "google/gemma-4-E4B-it": "7.5", "mistralai/Ministral-3-3B-Instruct-2512-BF16": "3.4",
        "mistralai/Ministral-3-14B-Instruct-2512-BF16": "13.5", "zai-org/GLM-4.7-Flash": "30",
        "axolotl-ai-co/Mistral-Small-4-119B-2603-BF16": "119", "Qwen/Qwen3.5-27B": "27",
        "LiquidAI/LFM2.5-1.2B-Instruct": "1.17", "Qwen/Qwen3.5-35B-A3B": "35",
    }  # fmt: skip
    planner = forecasts.planner_of(next(p for p in RECIPES if p.stem == "qwen3_8b_full"))
    for name, count in published.items():
        config = AutoConfig.for_model(**forecasts.MODELS[name])
        assert count_parameters(planner.setup.settings.model, config)[0] == count, name
    for name, billions in rounded.items():
        config = AutoConfig.for_model(**forecasts.MODELS[name])
        count = count_parameters(planner.setup.settings.model, config)[0]
        decimals = len(billions.partition(".")[2])
        assert f"{count / 1e9:.{decimals}f}" == billions, name
    assert planner.setup.parameters == (published["Qwen/Qwen3-8B"],) * 2
    assert planner.gpus.memory_gib * GIB > 79 * GIB
