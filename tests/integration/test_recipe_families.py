"""Each model family of the recipes trains three steps with its recipe and a small model.

The tests keep a recipe's settings that decide what is trained and how, and reduce sizes.
"""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import trials
from facts import POSITIONS
from published_models import MODELS
from transformers import AutoConfig, AutoTokenizer

import pretrain
import sft_train
from utils.model.architecture import causal_lm_class
from utils.model.config import config_from_file

pytestmark = pytest.mark.slow
RECIPES = Path(__file__).parents[2] / "recipes"
PUBLISHED = {model.name: model for model in MODELS}
# Prefix of a family's recipe names -> a model of the family.
FAMILIES = {
    "gemma3": "google/gemma-3-4b-it",
    "gemma4_26b": "google/gemma-4-26B-A4B",
    "gemma4_31b": "google/gemma-4-31B-it",
    "gemma4_e": "google/gemma-4-E2B-it",
    "glm4_7_flash": "zai-org/GLM-4.7-Flash",
    "gpt_oss": "openai/gpt-oss-20b",
    "granite4_h": "ibm-granite/granite-4.0-h-tiny",
    "granite4_micro": "ibm-granite/granite-4.0-micro",
    "lfm2_5": "LiquidAI/LFM2.5-1.2B-Instruct",
    "llama3": "meta-llama/Llama-3.1-8B-Instruct",
    "ministral3": "mistralai/Ministral-3-8B-Instruct-2512-BF16",
    "mistral_small4": "mistralai/Mistral-Small-4-119B-2603",
    "nemotron3_nano": "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B",
    "olmo3": "allenai/Olmo-3-1025-7B",
    "qwen3": "Qwen/Qwen3-8B",
    "qwen3_30b_a3b": "Qwen/Qwen3-30B-A3B",
    "qwen3_5": "Qwen/Qwen3.5-27B",
    "qwen3_5_35b_a3b": "Qwen/Qwen3.5-35B-A3B",
    "qwen3_6": "Qwen/Qwen3.5-27B",
    "qwen3_6_35b_a3b": "Qwen/Qwen3.5-35B-A3B",
    "smollm2": "HuggingFaceTB/SmolLM2-135M",
    "smollm3": "HuggingFaceTB/SmolLM3-3B",
}
SMALL = {
    "sequence_length": 64, "global_batch_size": 4, "per_device_train_batch_size": 2, "max_steps": 3,
    "logging_steps": 1, "use_cpu": True, "compile": False,
}  # fmt: skip
ALWAYS = ("gemma3_4b_full", "qwen3_8b_qlora", "qwen3_8b_continued")
TRIED = [
    *("gemma3_4b_full", "gpt_oss_20b_full", "llama3_1_8b_full", "olmo3_7b_full"),
    *("qwen3_8b_full", "qwen3_30b_a3b_full", "qwen3_5_4b_full", "smollm2_135m_full"),
    *("smollm3_3b_full", "ministral3_8b_full", "lfm2_5_1_2b_full", "granite4_micro_full"),
    *("gemma3_12b_lora", "qwen3_30b_a3b_lora", "llama3_3_70b_qlora", "qwen3_8b_qlora"),
    *("gemma4_26b_a4b_lora", "gemma4_31b_lora", "gemma4_e2b_full", "gemma4_e4b_lora"),
    *("glm4_7_flash_lora", "granite4_h_tiny_lora", "mistral_small4_119b_lora"),
    *("nemotron3_nano_lora", "qwen3_5_35b_a3b_lora", "qwen3_6_27b_lora", "qwen3_6_35b_a3b_lora"),
    "qwen3_8b_continued",
]


def family_of(recipe: str) -> str:
    """Return the longest family name that the recipe's name begins with."""
    return max((name for name in FAMILIES if recipe.startswith(name)), key=len)


def test_every_recipe_is_of_a_family_that_is_tried():
    names = {path.stem for path in (RECIPES / "sft").glob("*.yaml")} - {"demo_cpu"}
    assert {*map(family_of, names)} == {*map(family_of, TRIED)} == FAMILIES.keys()


@pytest.fixture(scope="session")
def data(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("recipe_data")
    trials.prepare(root)
    return root


def cut_model(name: str, directory: Path) -> Path:
    """Save random weights of a small version of a published model, with its tokenizer."""
    model = PUBLISHED[name]
    trials._make_tokenizer(model, directory)
    path = directory / "config.json"
    path.write_text(json.dumps(model.small_config()))
    config = config_from_file(path, AutoTokenizer.from_pretrained(directory))
    torch.manual_seed(0)
    causal_lm_class(config)(config).bfloat16().save_pretrained(directory)
    (directory / "generation_config.json").write_text(json.dumps(model.small_generation()))
    return directory


@pytest.mark.parametrize(
    "recipe",
    [pytest.param(name, marks=[] if name in ALWAYS else pytest.mark.exhaustive) for name in TRIED],
)
def test_a_recipe_trains_a_small_model_of_its_family(recipe, data, tmp_path, capsys):
    base, run = cut_model(FAMILIES[family_of(recipe)], tmp_path / "base"), tmp_path / "run"
    (file,) = RECIPES.glob(f"*/{recipe}.yaml")
    script, trained = (sft_train, "chats") if file.parent.name == "sft" else (pretrain, "documents")
    settings = SMALL | {
        "config": file, "output_dir": run, "model_name_or_path": base,
        "train_data": data / trained, "eval_data": f"heldout={data / trained}",
    }  # fmt: skip
    assert script.main(tiny.flags(**settings)) == 0
    losses = [*tiny.losses(run), *tiny.evaluations(run, "heldout").values()]
    assert len(losses) >= 4
    assert all(0 < loss < 2 * math.log(trials.VOCABULARY) for loss in losses), losses
    model_class: Any = causal_lm_class(AutoConfig.from_pretrained(base))
    final, info = model_class.from_pretrained(run / "final", output_loading_info=True)
    assert not any(info.values())
    assert final.dtype == torch.bfloat16
    assert final.config.get_text_config().max_position_embeddings == POSITIONS
    before = model_class.from_pretrained(base).state_dict()
    assert any(not value.equal(before[name]) for name, value in final.state_dict().items())
    assert (run / "adapter").exists() == recipe.endswith("lora")
    assert ("are kept in nf4" in capsys.readouterr().out) == recipe.endswith("_qlora")
