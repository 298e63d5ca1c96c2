"""The importer lists first what changes weights, data or evaluation, and nothing else."""

import re
from pathlib import Path

import pytest
import yaml
from test_importing import ALPACA, AXOLOTL, FACTORY, LORA, TRL
from transformers.utils.chat_template_utils import render_jinja_template

from utils.importing.__main__ import CHANGED, main
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
