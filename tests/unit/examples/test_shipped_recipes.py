"""The recipes go together with my_chats.yaml, and LoRA has the settings of the source it cites."""

from pathlib import Path

import pytest

from examples import recipe_forecasts as forecasts
from utils.config.recipes import read_recipes
from utils.config.settings import parse_fine_tuning

SFT = Path(__file__).parents[3] / "recipes" / "sft"
MY_CHATS = SFT / "base" / "my_chats.yaml"
BASES = [SFT / "base" / f"{kind}.yaml" for kind in ("full", "lora", "qlora")]
RECIPES = sorted(SFT.glob("*.yaml"))
ADAPTERS = [path for path in RECIPES if path.stem.endswith("lora")]


def values_of(*paths: Path) -> dict:
    entries, _ = read_recipes([str(path) for path in paths])
    return {name: entry.value for name, entry in entries.items()}


@pytest.mark.parametrize("path", [*BASES, *RECIPES], ids=lambda path: path.stem)
def test_my_chats_goes_on_top_of(path, monkeypatch):
    monkeypatch.chdir(forecasts.ROOT)
    text = path.read_text()
    argv = ["--config", str(path), str(MY_CHATS), "--dry_run"]
    if forecasts.HARDWARE.search(text):
        argv += ["--assume", forecasts.hardware(text)]
    if path in BASES:
        argv += ["--model_name_or_path", "Qwen/Qwen3-8B", "--assume", "1xH100-80GB"]
    if path == BASES[0]:
        argv += ["--learning_rate", "1e-5"]
    settings = parse_fine_tuning(argv, "")
    training = settings.training
    assert settings.data.train_data == ["data/my-chats/train"]
    assert (training.num_train_epochs, training.max_steps) == (2, -1)
    assert (training.load_best_model_at_end, training.metric_for_best_model) == (False, None)
    assert settings.run.global_batch_size is None, "the number of chats decides"
    assert training.per_device_train_batch_size == 1, "which divides every batch"


@pytest.mark.parametrize("path", ADAPTERS, ids=lambda path: path.stem)
def test_lora_has_the_settings_of_lora_without_regret(path):
    """Schulman et al., "LoRA Without Regret", 2025: alpha, learning rate, batch and layers."""
    values = values_of(path)
    assert values["lora_alpha"] == 32
    assert values["global_batch_size"] * values["sequence_length"] <= 65_536
    assert "lora_target_modules" not in values, "the default is every linear layer"
    assert values["lora_r"] == (64 if "Rank " not in path.read_text() else values["lora_r"])
    whole = path.with_name(f"{path.stem.rpartition('_')[0]}_full.yaml")
    if whole.exists():
        rate = float(values_of(whole)["learning_rate"])
        assert float(values["learning_rate"]) == pytest.approx(10 * rate)
    if path.stem.endswith("_qlora"):
        lora = values_of(path.with_name(path.name.replace("_qlora", "_lora")))
        for name in ("lora_r", "lora_alpha", "learning_rate", "lr_scheduler_type", "lora_dropout"):
            assert values[name] == lora[name], name
