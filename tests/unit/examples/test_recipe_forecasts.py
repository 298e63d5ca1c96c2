"""The first lines of the recipes have the current predictions for their hardware."""

import re

import pytest

from examples import recipe_forecasts as forecasts
from utils.config.recipes import read_recipes
from utils.config.strategy import assumed_gpus
from utils.plan.memory_estimate import GIB, count_parameters
from utils.plan.memory_plan import MARGIN

RECIPES = forecasts.recipes()
# A sample, because a recipe takes two seconds; it has LoRA, experts, several nodes and one GPU.
SAMPLE = ("qwen3_0_6b_full", "qwen3_8b_lora", "gpt_oss_20b_full", "llama_7b")


def test_every_recipe_for_gpus_has_a_prediction_that_fits_them():
    assert len(RECIPES) > 50
    for path in RECIPES:
        text = path.read_text()
        hardware, line = re.search(r"# Hardware: (.*)\n(.*)\n", text).groups()
        form = r"# Predicted on (\d+ x \S+): (over )?(\d+) GiB a GPU.*, [\d,]+ tokens/s, .* for .*"
        found = re.fullmatch(form, line)
        assert found, f"{path.name}: run make figures"
        assert hardware.startswith(found[1])
        gpus = assumed_gpus(forecasts.hardware(text))
        assert int(found[3]) * MARGIN["cuda"] < gpus.memory_gib, path.name
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
        "HuggingFaceTB/SmolLM2-135M": 134_515_008, "microsoft/phi-4": 14_659_507_200,
        "mistralai/Mistral-Small-24B-Instruct-2501": 23_572_403_200,
        "Qwen/Qwen3-30B-A3B": 30_532_122_624, "HuggingFaceTB/SmolLM3-3B": 3_075_098_624,
        "allenai/OLMo-2-1124-7B-Instruct": 7_298_617_344,
    }  # fmt: skip
    planner = forecasts.planner_of(next(p for p in RECIPES if p.stem == "qwen3_8b_full"))
    for name, count in published.items():
        config = AutoConfig.for_model(**forecasts.MODELS[name])
        assert count_parameters(planner.setup.settings.model, config)[0] == count, name
    assert planner.setup.parameters == (published["Qwen/Qwen3-8B"],) * 2
    assert planner.gpus.memory_gib * GIB > 79 * GIB
