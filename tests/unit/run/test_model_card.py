"""The model card repeats the run's records, without host names, folders or user names."""

import json
import shlex
from pathlib import Path

import pytest
import tiny
import yaml
from huggingface_hub import ModelCard

from utils.config.recipes import dump_yaml
from utils.data.token_dataset import describe_split, open_token_dataset
from utils.publish.model_card import RunCard, base_model, hub_name_of_source, public, shown_name

HOME = "/home/lovelace/llm"
SNAPSHOT = f"{HOME}/hub/datasets--HuggingFaceTB--smoltalk/snapshots/5feaf2f/train-0.parquet"


def make_run(run: Path, settings: dict, script: str = "sft_train.py", **start: object) -> Path:
    run.mkdir(parents=True)
    defaults = {"train_data": ["data/chats/train"], "max_steps": -1, "use_peft": False, "seed": 42}
    (run / "config.yaml").write_text(dump_yaml(defaults | settings))
    entry = {
        "argv": [f"{HOME}/{script}", "--train_data", f"{HOME}/chats=0.5", "--note", "a b"],
        "python": "3.12.1", "git": {"commit": "c0ffee", "dirty": True}, "slurm": None,
        "launch": {"strategy": "ddp", "world_size": 8, "hosts": ["node7"], "devices": ["H100"]},
        "script": script, "versions": {"torch": "2.13.0", "flash-attn": None}, **start,
    }  # fmt: skip
    content = {"format": 1, "run_id": "x", "starts": [entry]}
    (run / "provenance.json").write_text(json.dumps(content))
    lines = [
        {"event": "started", "step": 0},
        {"event": "train", "step": 10, "loss": 2.0, "step_time_s": 6.0, "tokens_seen": 1000},
        {"event": "train", "step": 20, "loss": 1.5, "step_time_s": 6.5, "tokens_seen": 2000},
        {"event": "eval", "step": 10, "split": "v", "eval_v_loss": 1.75, "eval_v_perplexity": 5.75},
        {"event": "eval", "step": 20, "split": "v", "eval_v_loss": 1.875, "eval_v_runtime": 3.0},
        {"event": "train", "step": 30, "loss": 9.0, "step_time_s": 9.0, "tokens_seen": 3000},
        {"event": "resumed", "step": 20},
    ]
    (run / "metrics.jsonl").write_text("\n".join(json.dumps(line | {"time": 0}) for line in lines))
    return run


@pytest.fixture
def dataset(tmp_path):
    path = tiny.save(tmp_path / "data", tiny.masked([[5, 6, 7, 8], [5, 6]]))
    describe_split(path, preparation={"sources": {"first_files": {SNAPSHOT: 1, "own.jsonl": 2}}})
    return open_token_dataset(path)


def read(directory: Path) -> ModelCard:
    text = (directory / "README.md").read_text()
    assert "/home" not in text
    assert "lovelace" not in text
    assert "node7" not in text
    return ModelCard(text)


def test_a_card_of_each_kind_of_run(dataset, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    base = tmp_path / "hub" / "models--Qwen--Qwen3-8B" / "snapshots" / "b968826d"
    base.mkdir(parents=True)
    terms = "license: other\nlicense_name: qwen\nlicense_link: https://example.org/LICENSE"
    (base / "README.md").write_text(f"---\n{terms}\nbase_model: Qwen/Other\n---\nSecret sauce")
    settings = {"model_name_or_path": str(base), "use_peft": True, "lora_r": 8, "bf16": True}
    run = make_run(tmp_path / "runs" / "one", settings)
    adapter, final = tmp_path / "adapter", tmp_path / "final"
    for directory in (adapter, final):
        directory.mkdir()
        (directory / "chat_template.jinja").touch()
    (adapter / "adapter_config.json").write_text("{}")
    monkeypatch.setenv("SOME_API_KEY", "Why is the sky")
    RunCard(adapter, shown_name(run, "adapter"), run, 10, [dataset]).write()
    RunCard(final, shown_name(run, "final"), run, 20, [dataset]).write()
    found = [read(adapter), read(final)]
    for card, library, relation in zip(
        found, ("peft", "transformers"), ("adapter", "finetune"), strict=True
    ):
        assert card.data.to_dict() == {
            "base_model": "Qwen/Qwen3-8B", "base_model_relation": relation,
            "datasets": ["HuggingFaceTB/smoltalk"], "library_name": library, "license": "other",
            "license_name": "qwen", "license_link": "https://example.org/LICENSE",
            "pipeline_tag": "text-generation", "tags": ["stoker", "sft", "lora"],
        }  # fmt: skip
        for line in (
            "| `data/chats/train` | 2 | 6 | 66.7% of the tokens | `HuggingFaceTB/smoltalk`, "
            "`own.jsonl` |", "| `lora_r` | 8 |", "| `bf16` | true |", "at commit c0ffee, with",
            "--num_processes 8 sft_train.py --train_data chats=0.5 --note 'a b'",
            "accelerate_configs/multi_gpu.yaml", "Python 3.12.1, torch 2.13.0.", "*** blue?",
        ):  # fmt: skip
            assert line in card.text
        assert "Secret sauce" not in card.text
    assert "--lora-modules mine=runs/one/adapter" in found[0].text
    assert "vllm serve runs/one/final\n" in found[1].text
    # Each figure is from its own step.
    assert "| time of the steps | 1m00s on 8 x H100 (ddp) |" in found[0].text
    assert "| `eval_v_loss` | 1.7500 |\n| `eval_v_perplexity` | 5.7500 |" in found[0].text
    assert "2m05s" in found[1].text
    assert "| 1.5000 |\n| `eval_v_loss` | 1.8750 |\n\n" in found[1].text, "step 30 was undone"
    # The model card of the next stage names the same base model.
    stage = {"init_from": "runs/one", "model_name_or_path": None}
    origin = {"path": str(run / "checkpoint-10")}
    second = make_run(tmp_path / "runs" / "two", stage, weights_from=origin)
    assert base_model(second) == base_model(run)
    assert base_model(run)[0] == "Qwen/Qwen3-8B"


def test_an_adapter_that_its_base_does_not_take_names_the_merged_model(dataset, tmp_path):
    run, adapter = make_run(tmp_path / "run", {"use_peft": True}), tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text('{"modules_to_save": ["lm_head"]}')
    RunCard(adapter, "run/adapter", run, 20, [dataset]).write()
    text = read(adapter).text
    assert "use the run's merged model, `final/`" in text
    assert "PeftModel" not in text
    assert "vllm serve" not in text
    assert "python chat.py run/adapter" in text


def test_a_model_from_scratch_has_no_base_and_one_from_a_folder_no_link(dataset, tmp_path):
    settings = {"model_config": "model.json", "model_name_or_path": None}
    made = make_run(tmp_path / "a", settings, "pretrain.py", model_config={"model_type": "llama"})
    (tmp_path / "mine").mkdir()
    settings = {"model_name_or_path": str(tmp_path / "mine")}
    for run, said, tags in (
        (made, "A llama trained from random weights on the documents", ["stoker", "pretraining"]),
        (make_run(tmp_path / "b", settings), "All weights of `mine` were", ["stoker", "sft"]),
    ):
        RunCard(tmp_path, "x/final", run, 20, [dataset]).write()
        card = read(tmp_path)
        assert said in card.text
        assert '"The sky is"' in card.text, "it has no chat template"
        assert card.data.to_dict().keys().isdisjoint({"base_model", "license"})
        assert card.data.tags == tags
        assert yaml.safe_load(card.data.to_yaml())["datasets"] == ["HuggingFaceTB/smoltalk"]


def test_paths_lose_their_folders_and_addresses_stay():
    for given, shown in (
        ("--a /x/y/z=0.5 b=/x/y", "--a z=0.5 b=y"),
        ("runs/a/final https://huggingface.co/a/b [a](docs/x.md)", None),
        (shlex.join(["/my data/x"]), "'my data/x'"),
    ):
        assert public(given) == (given if shown is None else shown)
    assert hub_name_of_source("hf://datasets/a/b@main/c.parquet") == hub_name_of_source(
        "hf://datasets/a/b/c"
    )
    assert hub_name_of_source("x/models--a--b/snapshots/1/c") is None
