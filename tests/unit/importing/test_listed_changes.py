"""The importer lists first what changes weights, data or evaluation, and nothing else."""

import re
from pathlib import Path

import pytest
import yaml
from test_importing import ALPACA, AXOLOTL, FACTORY, LORA, TRL
from transformers.utils.chat_template_utils import render_jinja_template

from utils.importing.__main__ import CHANGED, main, recipe_texts
from utils.importing.conversion import convert
from utils.importing.toolkits import DATA

CHAT = [{"path": "a", "type": "chat_template"}]
MUON = {**AXOLOTL, "datasets": CHAT, "optimizer": "muon", "learning_rate": 0.02, "bf16": None}
FULL = {**AXOLOTL, "datasets": CHAT, "bf16": None}
PATTERN = r"model.language_model.layers.[\d]+.(mlp|self_attn).(up|down|gate|q|k|v|o)_proj"


@pytest.fixture
def made(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def write(config):
        (tmp_path / "made.yaml").write_text(yaml.safe_dump(config))
        return tmp_path / "made.yaml"

    return write


def changes(found):
    """Return {key: how the training differs}."""
    return {key: why for why, keys in found.changes.items() for key in keys}


@pytest.mark.parametrize(
    ("config", "gpus", "differs"),
    [
        ({**MUON, "fsdp_config": {"offload_params": False}, "fsdp_version": 2}, 1, True),
        ({**MUON, "dp_shard_size": 2}, 1, True),
        (MUON, 8, True),  # axolotl's build_parallelism_config makes a mesh of all ranks
        (MUON, 1, False),
        ({**FACTORY, "finetuning_type": "full", "use_muon": True}, 8, False),
    ],
)
def test_the_learning_rate_of_distributed_muon_does_not_carry_over(config, gpus, differs, made):
    found = convert(made(config), gpus=gpus)
    assert found.run["optim"][0] == "muon"
    assert ("learning_rate" in changes(found)) is differs


@pytest.mark.parametrize(
    ("given", "modules"),
    [
        ("q_proj|v_proj", ["q_proj", "v_proj"]),
        ("q_proj, v_proj", ["q_proj", "v_proj"]),
        (PATTERN, [r".*layers.[\d]+.(mlp|self_attn).(up|down|gate|q|k|v|o)_proj"]),
    ],
)
def test_a_pattern_of_lora_modules_is_a_line(given, modules, made):
    found = convert(made({**FULL, **LORA, "lora_target_modules": given}))
    assert found.run["lora_target_modules"][0] == modules
    name = "model.layers.3.mlp.up_proj"  # the text model alone
    assert given != PATTERN or re.fullmatch(modules[0], name)


# A config, keys that are listed first, keys that are notes, lines of the training and data recipe.
LISTED = {
    "a lost loss": ({**TRL, "label_smoothing_factor": 0.1, "dataset_name": "d"},
                    {"label_smoothing_factor"}, set(), {}, {}),
    "no loss is lost": ({**TRL, "loss_type": "nll", "average_tokens_across_devices": True},
                        set(), {"loss_type", "average_tokens_across_devices"}, {}, {}),
    "a refused value": ({**FULL, "model_config": {"output_router_logits": True}},
                        {"model_config"}, set(), {"model_config": None}, {}),
    "a lost best model": ({**TRL, "load_best_model_at_end": True},
                          {"load_best_model_at_end"}, set(), {}, {}),
    "new tokens": ({**FACTORY, "new_special_tokens": "<a>,<b>", "resize_vocab": True},
                   set(), {"resize_vocab"}, {}, {"add_tokens": ["<a>", "<b>"]}),
    "a number of documents": (
        {**FACTORY, "val_size": 20, "eval_strategy": "epoch", "load_best_model_at_end": True},
        {"val_size"}, set(),
        {"eval_data": ["data/made/validation"], "load_best_model_at_end": True},
        {"validation_fraction": 20}),
    "none is evaluated": (
        {**TRL, "dataset_mixture": {**TRL["dataset_mixture"], "test_split_size": 1000, "seed": 0}},
        {"test_split_size"}, {"dataset_mixture.seed"}, {"eval_data": None},
        {"validation_fraction": None}),
    "false alarms": (
        {**FULL, "lora_on_cpu": True, "streaming_multipack_buffer_size": 9, "ray_num_workers": 4,
         "test_value": True, "trust_remote_code": True}, set(),
        {"lora_on_cpu", "streaming_multipack_buffer_size", "ray_num_workers", "test_value"}, {},
        {}),
    "folders of LLaMA-Factory": (
        {**FACTORY, "dataset_dir": "REMOTE:llamafactory/demo_data", "tokenized_path": "saves/t"},
        {"identity"}, {"tokenized_path"}, {"train_data": ["data/made/train"]}, {}),
    "a placeholder": ({**FULL, "hub_model_id": "<your-hub-model-id>"}, set(), {"hub_model_id"},
                      {"push_to_hub": None, "hub_model_id": None}, {}),
    "wrapped": ({**TRL, "packing_strategy": "wrapped"}, set(), set(),
                {"packing": "concat"}, {}),
    "text": ({**TRL, "dataset_text_field": "text"}, set(), {"dataset_text_field"}, {}, {}),
    "answers": ({**TRL, "dataset_mixture": None, "dataset_name": "d", "eval_strategy": "epoch",
                 "assistant_only_loss": True}, set(), set(), {}, {}),
    "the best model": (
        {**FULL, "metric_for_best_model": "eval_loss", "early_stopping_patience": 3}, set(), set(),
        {"metric_for_best_model": "eval_validation_loss"}, {}),
    "the best of two splits": (
        {**FULL, "early_stopping_patience": 3, "test_datasets": CHAT}, {"early_stopping_patience"},
        set(), {"metric_for_best_model": "eval_heldout_loss"}, {}),
    "prompts are trained on": ({**TRL, "completion_only_loss": False}, {"completion_only_loss"},
                               set(), {}, {}),
    "columns": ({**TRL, "dataset_mixture": {"datasets": [
        {"id": "a", "columns": ["messages", "chat_template_kwargs"]},
        {"id": "b", "columns": ["messages", "label"]}]}}, {"dataset_mixture.columns"}, set(), {},
        {}),
}  # fmt: skip
USUAL = {"template", "assistant_only_loss: false"}


@pytest.mark.parametrize("name", LISTED)
def test_what_alters_weights_data_or_evaluation_is_listed_first(name, made):
    config, first, notes, run, data = LISTED[name]
    found = convert(made(config))
    named = changes(found)
    expected = USUAL if name not in ("text", "answers") else {"template"}
    assert named.keys() - expected - {"identity", "alpaca_en"} == first - {"identity"}
    assert ("assistant_only_loss: false" in named) is (
        found.kind == "trl" and name not in ("text", "answers")
    )
    assert notes <= {key for keys in found.notes.values() for key in keys}
    assert "packing_strategy" not in {key for keys in found.notes.values() for key in keys}
    assert {key: found.run.get(key, (None,))[0] for key in run} == run
    assert {key: found.data.get(key) for key in data} == data
    assert not any("()" in why for why in (*found.notes, *found.changes))


def test_a_forgotten_number_of_gpus_is_said(made, tmp_path, capsys):
    path = str(made({**FULL, "datasets": ALPACA}))
    for number, config in enumerate((FULL, {**FULL, "batch_size": 16})):
        made(config)
        for flags, said in (([], not number), (["--gpus", "1"], False)):
            folder = str(tmp_path / f"{number}{len(flags)}")
            assert main([path, "--output_dir", folder, *flags]) == 0
            listed = capsys.readouterr().out.partition(CHANGED)[2]
            assert ("global_batch_size: counted for 1 GPU: give --gpus N" in listed) is said


def test_chatml_prints_what_axolotl_prints():
    """Its template is src/axolotl/utils/chat_templates/templates/chatml.jinja."""
    theirs = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    )
    ours = (Path(__file__).parents[3] / DATA["templates"]["axolotl"]["chatml"]).read_text()
    roles = ("system", "user", "assistant", "user", "assistant")
    chat = [{"role": role, "content": f"text {n}"} for n, role in enumerate(roles)]
    texts, spans = zip(*(
        render_jinja_template([chat], chat_template=each, return_assistant_tokens_mask=True)
        for each in (f"{theirs}{{% endfor %}}", ours)
    ), strict=True)  # fmt: skip
    assert texts[0] == texts[1]
    trained = [texts[1][0][slice(*span)] for span in spans[1][0]]
    assert trained == ["text 2<|im_end|>", "text 4<|im_end|>"]


# Configs of several datasets, then train_data, eval_data and the sources of each data recipe.
TWO_KINDS = [*CHAT, {"path": "b.jsonl", "type": "alpaca"}, {"path": "c", "type": "chat_template"}]
MIXED = {"mix_strategy": "interleave_over", "interleave_probs": "0.3,0.7", "val_size": 0}
APART = {
    "chats and prompts": (
        {**FULL, "datasets": TWO_KINDS, "chat_template_kwargs": {"a": 1},
         "test_datasets": [{"path": "d", "type": "alpaca"}]},
        ["data/made/train", "data/made-2/train"],
        ["data/made-2/heldout", "data/made/validation", "validation_2=data/made-2/validation"],
        [["a", "c"], ["b.jsonl"]],
    ),
    "a mixture": (
        {**FACTORY, **MIXED}, ["data/made/train=0.3", "data/made-2/train=0.7"], None,
        [["sources/identity"], ["sources/alpaca_en"]],
    ),
    "an even mixture": (
        {**FACTORY, "mix_strategy": "interleave_under"},
        ["data/made/train=1", "data/made-2/train=1"], None,
        [["sources/identity"], ["sources/alpaca_en"]],
    ),
    "joined": ({**FACTORY, "mix_strategy": "concat"}, ["data/made/train"], None,
               [["sources/identity", "sources/alpaca_en"]]),
}  # fmt: skip


@pytest.mark.parametrize("name", APART)
def test_datasets_that_one_recipe_cannot_hold_are_prepared_apart(name, made, tmp_path, capsys):
    config, train_data, eval_data, paths = APART[name]
    found = convert(made(config))
    assert found.run["train_data"][0] == train_data
    assert found.run.get("eval_data", (None,))[0] == eval_data
    texts = recipe_texts(found, tmp_path / "ours")
    data = [yaml.safe_load(text) for file, text in texts.items() if "_data" in file.name]
    named = [[e["path"] if isinstance(e, dict) else e for e in each["sources"]] for each in data]
    assert named == paths
    assert all(each["tokenizer_name_or_path"] == data[0]["tokenizer_name_or_path"] for each in data)
    is_mixed = "mix_strategy" in changes(found)
    assert is_mixed is ("mixture" in name)
    if name == "chats and prompts":
        assert [each.get("chat_template_kwargs") for each in data] == [{"a": 1}, None]
        assert [len(each.get("eval_sources", ())) for each in data] == [0, 1]
        assert data[1]["sources"][0]["format"] == f"{tmp_path}/ours/made_format.py:alpaca"
    assert main([str(tmp_path / "made.yaml"), "--output_dir", str(tmp_path / "out")]) == 0
    said = capsys.readouterr().out
    assert said.count("python prepare_data.py --config") == len(paths)


STREAM = {**FULL, "datasets": None, "pretraining_dataset": [{"path": "allenai/c4", "name": "en"}],
          "max_steps": 100, "val_set_size": None}  # fmt: skip


def test_a_stream_is_prepared_for_its_steps_alone(made):
    found = convert(made(STREAM), gpus=2)
    tokens = 100 * (2 * 4 * 2) * 4096
    assert tokens < found.data["sources"][0]["max_tokens"] <= 1.1 * tokens + 1
    (source,) = convert(made({**STREAM, "max_steps": None})).data["sources"]
    assert "max_tokens" not in source


@pytest.mark.parametrize(
    ("config", "order", "packing", "listed"),
    [
        ({"curriculum_sampling": True, "sample_packing": True}, "sequential", None, False),
        ({"curriculum_sampling": True}, "sequential", "none", False),
        ({"curriculum_sampling": True, "datasets": ALPACA * 2, "sample_packing": True},
         "sequential", None, True),
        ({"curriculum_sampling": True, "datasets": ALPACA * 2, "sample_packing": True,
          "shuffle_merged_datasets": False}, "sequential", None, False),
        ({"sample_packing_sequentially": True, "sample_packing": True}, None, "in_order", False),
        ({"shuffle_merged_datasets": False, "sample_packing": True}, None, None, False),
        ({**STREAM, "shuffle_merged_datasets": False}, "sequential", None, False),
    ],
)  # fmt: skip
def test_the_order_of_a_curriculum_stays(config, order, packing, listed, made):
    found = convert(made({**FULL, **config}))
    assert found.run.get("order", (None,))[0] == order
    assert found.run.get("packing", (None,))[0] == packing
    assert ("curriculum_sampling" in changes(found)) is listed
    assert "sample_packing_sequentially" not in changes(found)


def test_reinit_weights_trains_the_configuration_of_the_model(made, tmp_path, capsys):
    path = made({**STREAM, "base_model": "Qwen/Qwen2.5-0.5B", "reinit_weights": True})
    found = convert(path)
    assert "model_name_or_path" not in found.run
    assert found.run["model_config"][0] == "models/Qwen2.5-0.5B/config.json"
    assert found.data["tokenizer_name_or_path"] == "Qwen/Qwen2.5-0.5B"
    assert main([str(path), "--output_dir", str(tmp_path / "out")]) == 0
    command = "hf download Qwen/Qwen2.5-0.5B config.json --local-dir models/Qwen2.5-0.5B\n"
    assert f"Next:\n  {command}" in capsys.readouterr().out


def test_files_of_a_dataset_of_the_hub_are_downloaded_first(made, tmp_path, capsys):
    files = {"path": "org/chats", "data_files": ["a.jsonl", "b.jsonl"], "type": "chat_template"}
    found = convert(path := made({**FULL, "datasets": [files]}))
    assert found.data["sources"] == ["sources/org/chats/a.jsonl", "sources/org/chats/b.jsonl"]
    assert main([str(path), "--output_dir", str(tmp_path / "out")]) == 0
    command = "hf download org/chats a.jsonl --repo-type dataset --local-dir sources/org/chats\n"
    assert f"Next:\n  {command}" in capsys.readouterr().out


def test_a_second_key_of_a_setting_is_listed_if_it_differs(made):
    found = convert(made({**FULL, **LORA, "peft": {"loftq_config": {"loftq_bits": 4}}}))
    assert changes(found)["peft"] == "other keys decide use_peft"
