"""Recipes, and the training commands of docs/running.md and docs/howto.md, pass a dry run.

`make test` tries one recipe of each kind, `--exhaustive` all.
"""

import re
import shlex
from pathlib import Path

import pytest
import tiny
import yaml
from transformers import AutoConfig, AutoModelForCausalLM

import pretrain
import sft_train
from examples import recipe_forecasts
from utils.config.strategy import assumed_gpus

ROOT = Path(__file__).parents[2]
MAINS = {"pretrain.py": pretrain.main, "sft_train.py": sft_train.main}
RECIPES = [
    (script, path.relative_to(ROOT))
    for script, room in (("pretrain.py", "pretrain"), ("sft_train.py", "sft"))
    for path in sorted((ROOT / "recipes" / room).glob("*.yaml"))
]

pytestmark = pytest.mark.slow


def stand_ins(script: str, recipe: dict, workspace: Path, model: Path) -> list[str]:
    """Return flags that replace a recipe's data and models by tiny ones."""
    documents = "documents" if script == "pretrain.py" else "chats"
    settings: dict[str, object] = {
        "train_data": workspace / documents,
        "tokenizer_name_or_path": workspace / "tokenizer",
    }
    if "eval_data" in recipe:
        names = [entry.split("=")[0] for entry in recipe["eval_data"]]
        settings["eval_data"] = [f"{name}={workspace / documents}" for name in names]
    if "model_name_or_path" in recipe:
        settings["model_name_or_path"] = model
    if "init_from" in recipe:
        settings["init_from"] = model
        if "model_config" in recipe:
            settings["model_config"] = model / "config.json"
    return tiny.flags(**settings)


@pytest.fixture(scope="module")
def long_model(workspace: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a model directory with enough positions for any recipe."""
    directory = tmp_path_factory.mktemp("long")
    sizes = {"max_position_embeddings": 1 << 20, "num_attention_heads": 8}
    tiny.make_model_config(directory / "config.json", **sizes)
    config = AutoConfig.from_pretrained(directory)
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    return directory


def one_of_each_kind() -> list:
    """Return all recipes; only the first one of a script, form and set of keys is always tried."""
    cases, seen = [], set()
    for script, path in RECIPES:
        keys = frozenset(yaml.safe_load((ROOT / path).read_text()))
        kind = (script, path.stem.rpartition("_")[2], keys)
        marks = [pytest.mark.exhaustive] if kind in seen else []
        cases.append(pytest.param(script, path, marks=marks))
        seen.add(kind)
    return cases


@pytest.mark.parametrize(("script", "recipe"), one_of_each_kind(), ids=str)
def test_a_recipe_passes_a_dry_run_on_its_hardware(
    script, recipe, workspace, long_model, tmp_path, capsys
):
    text = (ROOT / recipe).read_text()
    content = yaml.safe_load(text)
    gpus = recipe_forecasts.hardware(text) if "GiB a GPU" in text else None
    ranks = assumed_gpus(gpus).world_size if gpus else 1
    MAINS[script](
        [
            *("--config", str(ROOT / recipe), "--dry_run"),
            *stand_ins(script, content, workspace, long_model),
            *tiny.flags(output_dir=tmp_path / "run", sequence_length=16 if ranks > 8 else 64),
            *tiny.flags(global_batch_size=max(8, ranks), assume=gpus),
            *tiny.flags(per_device_train_batch_size=8 // ranks or 1),
        ]
    )
    shown = capsys.readouterr().out
    assert "tokens/step" in shown
    strategy = content.get("strategy", "single" if ranks == 1 else "ddp")
    assert f"processes: {ranks}, strategy {strategy}" in shown
    assert gpus is None or "forecast: " in shown
    assert "GiB a device" in shown
    assert not (tmp_path / "run").exists()


# These commands need a network, a GPU or an earlier run.
NOT_TRIED = (
    "recipes/",
    "--load_in_4bit",
    "--resume_from_checkpoint",
    "--print_config",
    "--help",
    "--callbacks",
)


def test_the_training_commands_of_howto_pass_a_dry_run(
    workspace, long_model, tmp_path, monkeypatch, capsys
):
    """Run each command in a folder whose paths lead to tiny data and a tiny model."""
    monkeypatch.chdir(tmp_path)
    for name in ("data/chats/train", "data/code/train", "data/chats/validation"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).symlink_to(workspace / "chats")
    (tmp_path / "data/corpus").mkdir()
    (tmp_path / "data/corpus/train").symlink_to(workspace / "documents")
    for name in ("Qwen/Qwen3-0.6B-Base", "runs/my-run", "models/mine"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).symlink_to(long_model)
    recipe = yaml.safe_load(
        (ROOT / "docs/running.md").read_text().split("```yaml")[1].split("```")[0]
    )
    recipe |= {
        "sequence_length": 64,
        "global_batch_size": 8,
        "output_dir": "runs/new",
        "num_train_epochs": 3,
    }
    recipe |= {"tokenizer_name_or_path": str(workspace / "tokenizer")}
    (tmp_path / "my_run.yaml").write_text(yaml.safe_dump(recipe))
    page = (ROOT / "docs" / "howto.md").read_text()
    lines = re.findall(r"^python ((?:sft_train|pretrain)\.py .*)", page, re.MULTILINE)
    lines = [line for line in lines if not any(word in line for word in NOT_TRIED)]
    assert len(lines) > 25
    for line in lines:
        short = re.sub("16384|65536", "64", line).replace("1000", "1")  # the data is small
        script, *words = shlex.split(short)
        MAINS[script]([*words, *([] if "--dry_run" in words else ["--dry_run"])])
        assert "tokens/step" in capsys.readouterr().out, line
