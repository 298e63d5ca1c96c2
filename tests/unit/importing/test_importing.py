"""Keys and values of other toolkits' published configs become recipes that our parsers accept."""

import copy
import functools
import json
import operator
import re

import pytest
import torch
import yaml
from transformers.utils.chat_template_utils import render_jinja_template

from utils.config.declarations import declared_settings
from utils.config.errors import ConfigurationError
from utils.config.own_code import load_own
from utils.config.preparation import (
    PreparationArguments,
    check_preparation,
    parse_preparation,
    parse_sources,
)
from utils.config.recipes import YamlError
from utils.config.settings import parse_fine_tuning, parse_pretraining
from utils.importing.__main__ import CHANGED, main, recipe_texts
from utils.importing.conversion import convert
from utils.importing.toolkits import OFF, UNKNOWN_KEY

ALPACA = [{"path": "tatsu-lab/alpaca", "type": "alpaca", "split": "train[:20%]"}]
MESSAGES = [{
    "path": "mlabonne/FineTome-100k", "type": "chat_template", "field_messages": "conversations",
    "message_property_mappings": {"role": "from", "content": "value"}, "name": "default",
    "revision": "refs/convert/parquet",
}]  # fmt: skip
AXOLOTL = {
    "base_model": "NousResearch/Meta-Llama-3-8B", "micro_batch_size": 2, "sequence_len": 4096,
    "gradient_accumulation_steps": 4, "num_epochs": 4, "learning_rate": 2e-4, "bf16": "auto",
    "lr_scheduler": "cosine", "warmup_ratio": 0.1, "gradient_checkpointing": True,
    "optimizer": "adamw_bnb_8bit", "weight_decay": 0.0, "evals_per_epoch": 4, "tf32": False,
    "saves_per_epoch": 1, "output_dir": "./outputs/out", "val_set_size": 0.05,
    "wandb_project": None, "special_tokens": {"pad_token": "<|end_of_text|>"},
}  # fmt: skip
FACTORY = {
    "model_name_or_path": "Qwen/Qwen3-4B-Instruct-2507", "stage": "sft", "cutoff_len": 2048,
    "template": "qwen3_nothink", "dataset": "identity,alpaca_en", "bf16": True,
    "per_device_train_batch_size": 1, "gradient_accumulation_steps": 8, "learning_rate": 1e-4,
    "num_train_epochs": 3.0, "warmup_ratio": 0.1, "save_steps": 500, "report_to": "none",
    "output_dir": "saves/qwen3-4b/sft", "preprocessing_num_workers": 16, "plot_loss": True,
}  # fmt: skip
TRL = {
    "model_name_or_path": "HuggingFaceTB/SmolLM3-3B-Base", "torch_dtype": "bfloat16",
    "dataset_mixture": {"datasets": [
        {"id": "HuggingFaceTB/smoltalk2", "config": "Mid", "split": "reasoning_r1", "weight": 1.0},
        {"id": "HuggingFaceTB/smoltalk2", "config": "SFT", "split": "everyday", "weight": 0.5},
    ]}, "chat_template": "{% for message in messages %}{{ message.content }}{% endfor %}",
    "max_length": 32768, "packing": True, "gradient_accumulation_steps": 2, "save_total_limit": 1,
    "lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr_rate": 0.1},
    "per_device_train_batch_size": 1, "push_to_hub": True, "output_dir": "data/mid", "bf16": True,
}  # fmt: skip
LORA = {"adapter": "lora", "lora_r": 32, "lora_alpha": 16, "lora_target_linear": True}
SAME = {"packing": "none", "activation_checkpointing": "full", "bf16": True}

# A config, changes to it, then expected lines (None: no such line) of training and data recipe.
PUBLISHED = {
    "axolotl full": (
        AXOLOTL, {"datasets": ALPACA, "sample_packing": True},
        {"global_batch_size": 64, "packing": None, "eval_steps": 0.0625, "save_strategy": "epoch",
         "optim_states": "int8", "bf16": True, "dtype": None, "use_peft": None, "lora_r": None,
         "lr_scheduler_type": "cosine", "warmup_steps": 0.1, "num_train_epochs": 4.0,
         "eval_data": ["data/made/validation"], "report_to": None},
        {"sources": [
            {"path": "tatsu-lab/alpaca", "format": "made_format.py:alpaca", "weight": 0.2}],
         "validation_fraction": 0.05, "sequence_length": 4096, "on_overlong": "drop"},
    ),
    "axolotl lora": (
        AXOLOTL, {**LORA, "datasets": MESSAGES, "load_in_8bit": True, "evals_per_epoch": None},
        {**SAME, "use_peft": True, "dtype": "bfloat16", "lora_r": 32, "lora_dropout": 0.0,
         "load_in_4bit": None},
        {"sources": [{"path": "mlabonne/FineTome-100k", "subset": "default",
                      "revision": "refs/convert/parquet"}]},
    ),
    "axolotl qlora fsdp": (
        AXOLOTL, {**LORA, "adapter": "qlora", "load_in_4bit": True, "datasets": ALPACA,
                  "fsdp": ["full_shard"], "fsdp_config": {"fsdp_offload_params": True},
                  "lora_target_modules": ["q_proj", "v_proj"], "optimizer": "paged_adamw_32bit"},
        {"load_in_4bit": True, "use_bnb_nested_quant": True, "strategy": "fsdp2",
         "lora_target_modules": ["q_proj", "v_proj"], "optim_states": None}, {},
    ),
    "axolotl zero3": (
        AXOLOTL, {"datasets": [{"path": "json", "data_files": "my.jsonl", "type": "completion",
                                "field": "body"}],
                  "deepspeed": "deepspeed_configs/zero3_bf16_cpuoffload_all.json",
                  "cosine_min_lr_ratio": 0.1, "val_set_size": 0},
        {"strategy": "zero3", "optim_states": None, "lr_scheduler_type": "cosine_with_min_lr",
         "lr_scheduler_kwargs": {"min_lr_rate": 0.1}, "eval_data": None, "eval_steps": None},
        {"sources": [{"path": "my.jsonl", "format": "text", "columns": {"body": "text"}}]},
    ),
    "axolotl pretraining": (
        AXOLOTL, {"pretraining_dataset": [{"path": "allenai/c4", "name": "en", "type": "pretrain"}],
                  "max_steps": 100, "wandb_project": "mine", "val_set_size": None},
        {"report_to": ["wandb"], "max_steps": 100, "packing": None},
        {"sources": [{"path": "allenai/c4", "subset": "en", "format": "text",
                      "max_tokens": 28_835_840}],
         "sequence_length": None, "on_overlong": None},
    ),
    "llamafactory lora": (
        FACTORY, {"lora_rank": 8, "lora_target": "q_proj,v_proj", "quantization_bit": 4},
        {**SAME, "use_peft": True, "lora_r": 8, "lora_alpha": 16, "load_in_4bit": True,
         "lora_target_modules": ["q_proj", "v_proj"], "save_steps": 500, "eval_data": None},
        {"sources": ["sources/identity", {"path": "llamafactory/alpaca_en", "format": "alpaca"}],
         "on_overlong": "truncate", "num_proc": 16},
    ),
    "llamafactory full": (
        FACTORY, {"finetuning_type": "full", "deepspeed": "examples/deepspeed/ds_z0_config.json",
                  "pure_bf16": True, "bf16": None, "disable_gradient_checkpointing": True},
        {"strategy": "multi_gpu", "dtype": "bfloat16", "stochastic_rounding": True, "bf16": None,
         "activation_checkpointing": None, "use_peft": None}, {},
    ),
    "trl mixture": (
        TRL, {"report_to": ["wandb"]},
        {"packing": None, "dtype": "bfloat16", "save_total_limit": 2, "global_batch_size": 16,
         "activation_checkpointing": "full"},
        {"sources": [
            {"path": "HuggingFaceTB/smoltalk2", "subset": "Mid", "split": "reasoning_r1"},
            {"path": "HuggingFaceTB/smoltalk2", "subset": "SFT", "split": "everyday",
             "weight": 0.5}]},
    ),
    "trl splits": (
        {**TRL, "dataset_mixture": None},
        {"dataset_name": "trl-lib/Capybara", "dataset_test_split": "test", "eval_strategy": "epoch",
         "optim": "paged_adamw_8bit", "load_in_4bit": True, "use_peft": True},
        {"eval_data": ["data/made/heldout"], "optim_states": "int8", "load_in_4bit": True},
        {"sources": ["trl-lib/Capybara"],
         "eval_sources": [{"name": "heldout", "path": "trl-lib/Capybara", "split": "test"}]},
    ),
}  # fmt: skip


@pytest.fixture
def made(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    (tmp_path / "data/dataset_info.json").write_text(
        '{"alpaca_en": {"hf_hub_url": "llamafactory/alpaca_en"}}'
    )

    def write(config):
        (tmp_path / "made.yaml").write_text(yaml.safe_dump(config))
        return tmp_path / "made.yaml"

    return write


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_config_becomes_two_recipes(name, made, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    base, changes, run, data = PUBLISHED[name]
    found = convert(made({**base, **changes}), gpus=8)
    assert found.kind == name.split()[0]
    texts = recipe_texts(found, tmp_path / "ours")
    (tmp_path / "ours").mkdir()
    recipes = {}
    for file, text in texts.items():
        file.write_text(text)
        if file.suffix == ".yaml":
            plain = text.replace(f"{tmp_path}/ours/made_format.py:", "made_format.py:")
            recipes[file.stem] = yaml.safe_load(plain)
    for recipe, expected in ((recipes["made"], run), (recipes["made_data"], data)):
        assert {key: recipe.get(key) for key in expected} == expected
    path = str(tmp_path / "ours/made_data.yaml")
    check_preparation(given := parse_preparation(["--config", path]))
    assert parse_sources(given)
    assert set(recipes["made_data"]) <= declared_settings((PreparationArguments,)).keys()
    assert set(recipes["made"]) <= set(found.declared)
    parse = parse_pretraining if "pretraining" in name else parse_fine_tuning
    settings = parse(["--config", str(tmp_path / "ours/made.yaml"), "--dry_run"], "")
    assert settings.values.rank("global_batch_size") == 1


def test_what_has_no_counterpart_is_listed_with_the_reason(made, tmp_path):
    config = {**AXOLOTL, **LORA, "datasets": ALPACA, "made_up": 3, "off_here": False,
              "qat": {"a": 1}, "trust_remote_code": True, "tokens": {"bos_token": "<s>"},
              "fsdp_config": {"offload_params": True}, "dp_replicate_size": 2}  # fmt: skip
    found = convert(made(config))
    assert {"made_up", "qat", "datasets.split"} <= {k for ks in found.changes.values() for k in ks}
    reasons = {key: why for why, keys in {**found.notes, **found.changes}.items() for key in keys}
    assert reasons["made_up"] == UNKNOWN_KEY
    exact = "load_dataset(..., split='train[:20%]').save_to_disk('sources/slice')"
    assert exact in reasons["datasets.split"]
    assert reasons["off_here"] == OFF
    assert reasons["trust_remote_code"] == "code that comes with a model is not run"
    assert reasons["qat"] == "another method: this run trains without it"
    assert reasons["dp_replicate_size"].startswith("strategy: hsdp in place of fsdp2")
    assert {"lora_target_linear", "special_tokens", "tokens", "offload"} <= reasons.keys()
    text = recipe_texts(found, tmp_path)[tmp_path / "made.yaml"]
    assert f"#   made_up: {UNKNOWN_KEY}\n" in text
    assert "global_batch_size: 8 " in text
    assert "# 2 x 4 accumulation x 1 GPU(s)" in text
    assert "# base_model\n" in text
    template = recipe_texts(convert(made(TRL)), tmp_path)
    assert template[tmp_path / "made.jinja"] == TRL["chat_template"]
    assert "chat_template: " in template[tmp_path / "made_data.yaml"]
    given = convert(made({**TRL, "chat_template": None, "chat_template_path": "./a.jinja"}))
    assert given.data["chat_template"] == "./a.jinja"


BELOW = "Below is an instruction that describes a task. Write a response that appropriately "
BELOW += "completes the request.\n\n"


@pytest.mark.parametrize(
    ("name", "alone", "with_system", "trained"),
    [
        ("default", "Human: a</s>\nAssistant:b</s>\n",
         "System: S</s>\nHuman: a</s>\nAssistant:b</s>\n", "b</s>\n"),
        ("alpaca", f"{BELOW}### Instruction:\na\n\n### Response:\nb</s>\n\n",
         "S### Instruction:\na\n\n### Response:\nb</s>\n\n", "b</s>\n\n"),
    ],
)  # fmt: skip
def test_llamafactorys_own_templates_are_written(name, alone, with_system, trained, made, tmp_path):
    """The texts are those of its Template (src/llamafactory/data/template.py)."""
    texts = recipe_texts(convert(made({**FACTORY, "template": name})), tmp_path)
    template = texts[tmp_path / "made.jinja"]
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    system = {"role": "system", "content": "S"}
    for chat, expected in ((turns, alone), ([system, *turns], with_system)):
        (text,), (spans,) = render_jinja_template(
            [chat], chat_template=template, return_assistant_tokens_mask=True, eos_token="</s>"
        )
        assert text == expected
        assert [text[slice(*span)] for span in spans] == [trained]


# unfrozen_parameters of axolotl's examples/mistral4/fft-text.yml, mixtral.yml and dbrx, and of the
# documentation of freeze_layers_except; LLaMA-Factory's examples/train_freeze of v1.
@pytest.mark.parametrize(
    ("config", "trained", "frozen", "said"),
    [
        (["model.language_model.*", "lm_head.*"], "model.language_model.norm.weight lm_head.weight",
         "model.vision_tower.norm.weight", "unfrozen_parameters"),
        (["^lm_head.weight$", "model.layers.4[4-9]+.block_sparse_moe.gate"],
         "lm_head.weight model.layers.45.block_sparse_moe.gate.weight",
         "model.lm_head.weight model.layers.4.block_sparse_moe.gate.weight lm_headXweight", ""),
        (["^model.embed_tokens.weight$[:32000]"], "model.embed_tokens.weight",
         "model.embed_tokens.bias", "whole weights are trained"),
        ({"freeze_trainable_layers": -2, "freeze_trainable_modules": "self_attn,mlp"},
         "layers.0.mlp layers.1.self_attn", "layers.2.mlp layers.0", ""),
        ({}, "layers.LAST", "", "write each of the model's last 2 layers for LAST"),
    ],
)  # fmt: skip
def test_frozen_layers_are_those_of_the_config(config, trained, frozen, said, made, tmp_path):
    if isinstance(config, list):
        config = {**AXOLOTL, "datasets": ALPACA, "unfrozen_parameters": config}
    else:
        config = {**FACTORY, "finetuning_type": "freeze", **config}
    found = convert(made(config))
    ours, _ = found.run["train_only"]
    assert "use_peft" not in found.run
    for names, expected in ((trained, True), (frozen, False)):
        for name in names.split():
            matches = any(name == each or re.fullmatch(each, name) for each in ours)
            assert matches is expected, (name, ours)
    assert said in recipe_texts(found, tmp_path)[tmp_path / "made.yaml"]


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({**AXOLOTL, "datasets": ALPACA, "rl": "dpo"}, "rl: dpo: supervised"),
        ({**AXOLOTL, "datasets": ALPACA, "reward_model": True}, "reward_model: supervised"),
        (AXOLOTL, "no dataset is named"),
        ({**FACTORY, "finetuning_type": "oft"}, "finetuning_type: oft: supervised"),
        ({**FACTORY, "finetuning_type": "freeze", "use_llama_pro": True}, "cannot be added here"),
        ({**FACTORY, "stage": "pt"}, "pretrain.py trains every weight"),
        ({**TRL, "beta": 0.1}, "beta: supervised"),
        ({**TRL, "reward_funcs": ["accuracy"]}, "reward_funcs: supervised"),
        ({**AXOLOTL, "datasets": ALPACA, "num_epochs": "many"}, "a value is of no type that axol"),
        ({**AXOLOTL, "datasets": [{"path": "a", "shards": "x"}]}, "a value is of no type that"),
        ({"a": 1}, "none of the keys that"),
        ({"model": "m", "model_class": "llm", "micro_batch_size": 1}, "v1 is not converted"),
        (["a"], "expected settings as"),
    ],
)
def test_another_kind_of_training_is_refused(config, said, made, capsys):
    with pytest.raises((ConfigurationError, YamlError), match=said):
        convert(path := made(config))
    assert main([str(path)]) == 2
    assert said in capsys.readouterr().err


def test_names_of_a_config_stay_in_comments(made, tmp_path):
    datasets = [{"path": "a", "type": "x\noutput_dir: elsewhere"}, {"path": "b", "type": "alpaca"}]
    path = made({**AXOLOTL, "datasets": datasets, "k\ncallbacks: [their.py:Code]\n#": 1})
    path = path.rename(tmp_path / 'a""" + code.yaml')
    code, *_, recipe = recipe_texts(convert(path), tmp_path).values()
    assert "callbacks: [their.py:Code] #: unknown here" in recipe
    assert yaml.safe_load(recipe)["output_dir"] == "outputs/a-code"
    assert "callbacks" not in yaml.safe_load(recipe)
    compile(code, "a", "exec")
    made({**FACTORY, "dataset": 5})
    assert main([str(tmp_path / "made.yaml")]) == 0


def test_recipes_are_printed_or_written_and_none_is_overwritten(made, tmp_path, capsys):
    path = str(made(FACTORY))
    assert main([path]) == 0
    out = capsys.readouterr().out
    assert out.startswith("# ---- made_data.yaml\n# Made from made.yaml of llamafactory:\n")
    assert "# ---- made.yaml\n" in out
    arguments = [path, "--output_dir", str(tmp_path / "new"), "--gpus", "2"]
    assert main(arguments) == 0
    new = tmp_path / "new"
    said = capsys.readouterr().out
    assert said.startswith(f"{new}/made_data.yaml\n{new}/made.yaml\n\n{CHANGED}\n  ")
    assert said.endswith(
        f"\nNext:\n  python prepare_data.py --config {new}/made_data.yaml\n"
        f"  python sft_train.py --config {new}/made.yaml\n"
    )
    text = (tmp_path / "new/made.yaml").read_text()
    assert f"python sft_train.py --config {tmp_path / 'new/made.yaml'}\n" in text
    assert "global_batch_size: 16 " in text
    assert main(arguments) == 2
    assert "already there" in capsys.readouterr().err


# Configs with keys that were once dropped, expected lines of both recipes, and some noted keys.
NESTED = {
    "axolotl": (
        {"base_model": "m", "micro_batch_size": 2, "batch_size": 16, "bf16": True,
         "bfloat16": True, "sequence_len": 512, "learning_rate": 1e-4, "adapter": "lora",
         "lora_r": 8, "load_in_8bit": True, "lora_target_linear": True, "optimizer": "adamw_torch",
         "dataset_processes": 4, "dataset_num_proc": 8, "warmup_ratio": 0.1, "val_set_size": 0,
         "chat_template": "chatml", "wandb_project": None, "strict": False, "unheard_of": "x",
         "fsdp": ["full_shard"], "gradient_checkpointing_kwargs": {"use_reentrant": False},
         "fsdp_config": {"offload_params": False, "activation_checkpointing": True},
         "datasets": [{
             "path": "a", "type": "chat_template", "name": "sub", "split": "train[:10%]",
             "field_messages": "talk", "shards": 4, "shards_idx": 1, "chat_template": "llama3",
             "message_property_mappings": {"role": "speaker", "content": "text", "name": "who"},
             "roles": {"user": ["u"], "assistant": ["a"]}, "roles_to_train": ["a"],
             "train_on_eos": "turn", "train_on_eot": "last", "drop_system_message": True,
             "split_thinking": True, "field_thinking": "why", "template_thinking_key": "think",
             "message_field_training": "train", "message_field_training_detail": "detail",
             "field_tools": "functions", "ds_type": "json", "preprocess_shards": 2,
             "input_transform": "f", "temperature": 1.0, "trust_remote_code": False,
             "revision": "main", "unheard_of": None,
         }, {"path": "b", "type": {
             "field_instruction": "question", "format": "{instruction}", "system_prompt": "Be.",
             "no_input_format": "{instruction}"}, "conversation": "chatml"}]},
        {"global_batch_size": 16, "per_device_train_batch_size": 2, "strategy": "fsdp2",
         "activation_checkpointing": "full", "bf16": True},
        {"sources": [
            {"path": "a", "subset": "sub", "revision": "main", "weight": 0.1,
             "columns": {"talk": "messages", "functions": "tools", "speaker": "role",
                         "text": "content", "why": "reasoning_content", "u": "user",
                         "a": "assistant"}},
            {"path": "b", "format": "prompt_1"}]},
        ("drop_system_message", "roles_to_train", "split_thinking", "shards", "chat_template",
         "message_property_mappings.name", "message_field_training_detail"),
    ),
    "llamafactory": (
        {"model_name_or_path": "m", "stage": "sft", "finetuning_type": "full", "template": "qwen3",
         "dataset": "chats", "cutoff_len": None, "enable_thinking": False, "packing": False,
         "neat_packing": True, "lora_rank": 8, "max_samples": 10, "mask_history": True,
         "warmup_steps": 20, "warmup_ratio": 0.1, "lr_scheduler_type": "constant",
         "default_system": "Be brief.", "tool_format": "qwen", "interleave_probs": "0.5,0.5"},
        {"packing": None, "warmup_steps": None, "lr_scheduler_type": "constant", "lora_r": None,
         "sequence_length": 8192, "num_train_epochs": None},
        {"chat_template_kwargs": {"enable_thinking": False},
         "sources": [{"columns": {"talk": "messages", "sys": "system", "helper": "assistant"}}]},
        ("chats.num_samples", "chats.tags.function_tag"),
    ),
    "trl": (
        {"model_name_or_path": "m", "dataset_name": "d", "max_length": None, "packing": True,
         "packing_strategy": "bfd", "eval_strategy": "epoch", "dataset_config": "c",
         "torch_dtype": "bfloat16", "dtype": "float32", "lora_r": 8, "report_to": None,
         "dataset_test_split": None, "bf16": False, "gradient_checkpointing": False},
        {"sequence_length": 8192, "eval_data": ["data/made/heldout"], "dtype": "float32",
         "bf16": False, "activation_checkpointing": None},
        {"eval_sources": [{"name": "heldout", "path": "d", "subset": "c", "split": "test"}]}, (),
    ),
    "trl mixture": (
        {"model_name_or_path": "m", "max_length": 64, "dataset_name": "ignored",
         "dataset_test_split": "test", "datasets": [
             {"path": "a", "name": "sub", "split": "train", "columns": ["messages"],
              "data_dir": "x"}]},
        {"eval_data": None, "sequence_length": 64}, {"eval_sources": None}, (),
    ),
}  # fmt: skip
INFO = {"chats": {
    "file_name": "chats.json", "formatting": "sharegpt", "num_samples": 100, "folder": "f",
    "columns": {"messages": "talk", "system": "sys", "images": "pictures"},
    "tags": {"role_tag": "role", "content_tag": "content", "user_tag": "user",
             "assistant_tag": "helper", "function_tag": "call"},
}}  # fmt: skip


def leaves(value, path=()):
    """Yield path and value of each innermost value in nested mappings and lists of mappings."""
    inner = value.items() if isinstance(value, dict) else ()
    if isinstance(value, list) and any(isinstance(each, dict) for each in value):
        inner = enumerate(value)
    for key, each in inner:
        yield from leaves(each, (*path, key))
    if not inner:
        yield path, value


def changed(config, path, value):
    """Return a copy of the config with another value at a path, or without the key."""
    config = copy.deepcopy(config)
    at = functools.reduce(operator.getitem, path[:-1], config)
    at[path[-1]] = value
    if value is None:
        del at[path[-1]]
    return config


def outcome(convert_config, config):
    """Return the lines of both recipes and the keys of all notes."""
    found = convert_config(config)
    keys = {key for keys in (*found.notes.values(), *found.changes.values()) for key in keys}
    return (found.run, found.data_recipes(), found.template), keys


def unaccounted(convert_config, config):
    """Yield the keys that have no note and whose value does not influence a recipe."""
    lines, named = outcome(convert_config, config)
    for path, value in leaves(config):
        words = [str(word) for word in path if not isinstance(word, int)]
        if any(key.split(".")[0] in words and key.split(".")[-1] in words for key in named):
            continue
        if words[-1] in lines[0] and lines[0][words[-1]][0] == value:
            continue
        other = value + 1 if type(value) in (int, float) else f"{value}x"
        others = (None, not value if isinstance(value, bool) else other)
        for other in others:
            try:
                if outcome(convert_config, changed(config, path, other))[0] != lines:
                    break
            except (ConfigurationError, YamlError, ValueError, TypeError):
                break
        else:
            yield ".".join(map(str, path))


@pytest.mark.parametrize("name", NESTED)
def test_every_key_is_converted_or_named(name, made, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    config, run, data, notes = NESTED[name]
    (tmp_path / "data/dataset_info.json").write_text(json.dumps(INFO))
    assert not list(unaccounted(lambda each: convert(made(each), name.split()[0]), config))
    found = convert(made(config), name.split()[0])
    assert {key: found.run.get(key, (None,))[0] for key in run} == run
    every = (*found.notes.values(), *found.changes.values())
    named = {key.partition(".")[2] for keys in every for key in keys}
    assert set(notes) <= named
    for key, expected in data.items():
        if key != "sources":
            assert found.data.get(key) == expected
            continue
        sources = [entry for recipe in found.data_recipes() for entry in recipe["sources"]]
        for entry, lines in zip(sources, expected, strict=True):
            assert {line: entry.get(line) for line in lines} == lines


def test_batch_size_of_axolotl_is_the_total_in_either_order(made):
    rest = {"base_model": "m", "datasets": ALPACA}
    for sizes, micro in (
        ({"micro_batch_size": 2, "batch_size": 16}, 2),
        ({"batch_size": 16, "micro_batch_size": 2}, 2),
        ({"batch_size": 16, "gradient_accumulation_steps": 2}, 2),
    ):
        found = convert(made({**rest, **sizes}), gpus=4)
        assert found.run["global_batch_size"][0] == 16
        assert found.run["per_device_train_batch_size"][0] == micro
    assert any("gradient_accumulation_steps" in keys for keys in found.notes.values())


@pytest.mark.parametrize(
    ("extra", "held_out"),
    [
        ({"eval_strategy": "epoch", "dataset_test_split": "valid"}, "valid"),
        ({"dataset_test_split": "test"}, None),
        ({}, None),
    ],
)
def test_trl_evaluates_on_test_where_it_evaluates(extra, held_out, made):
    found = convert(
        made({"dataset_name": "d", "max_length": 64, "model_name_or_path": "m", **extra})
    )
    splits = [each["split"] for each in found.data.get("eval_sources", [])]
    assert splits == ([held_out] if held_out else [])


# Prompts of axolotl 067b021 (src/axolotl/prompters.py, prompt_strategies/): the text before
# the answer of a row without an input, and of one with an input.
ROW = {"instruction": "Add.", "output": "3", "question": "Add.", "answer": "3", "system": "Be."}
TASK = "Below is an instruction that describes a task"
ALPACA_TEXTS = (
    f"{TASK}. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\nAdd.\n\n### Response:\n",
    f"{TASK}, paired with an input that provides further context. Write a response that "
    "appropriately completes the request.\n\n### Instruction:\nAdd.\n\n### Input:\n1 2\n\n"
    "### Response:\n",
)
RENDERED = {
    "alpaca": ALPACA_TEXTS,
    "alpaca:chat": (
        f"SYSTEM: {TASK}. Write a response that appropriately completes the request.\n"
        "USER: Add.\nASSISTANT:",
        f"SYSTEM: {TASK}, paired with an input that provides further context. Write a response "
        "that appropriately completes the request.\nUSER: Add.\n1 2\nASSISTANT:",
    ),
    "alpaca_chat.load_qa": (
        "SYSTEM: Below is an instruction from a USER that describes a task. The ASSISTANT writes a "
        "response that appropriately and concisely completes the request.\n\n\n"
        "USER: Add.\nASSISTANT:",
    ) * 2,
    "alpaca_w_system.load_instruct": (
        "Be.\n\n### Instruction:\nAdd.\n\n### Response:\n",
        "Be.\n\n### Instruction:\nAdd.\n\n### Input:\n1 2\n\n### Response:\n",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", RENDERED)
@pytest.mark.parametrize("trains_on_prompts", [False, True])
def test_the_prompt_of_a_type_is_that_of_axolotl(kind, trains_on_prompts, made, tmp_path):
    config = {**AXOLOTL, "datasets": [{"path": "a.jsonl", "type": kind}]}
    found = convert(made({**config, "train_on_inputs": trains_on_prompts}))
    file, *_ = texts = recipe_texts(found, tmp_path)
    file.write_text(texts[file])
    (source,) = found.data["sources"]
    function = load_own(source["format"])
    for row, prompt in zip((ROW, ROW | {"input": "1 2"}), RENDERED[kind], strict=True):
        pieces = [(each["text"], each["label"]) for each in function(row)["segments"]]
        assert pieces == [(prompt, trains_on_prompts), ("3", True)]
        assert function(row)["special_tokens"] is True


def test_a_prompt_of_the_config_is_kept(made, tmp_path):
    kind = {"field_instruction": "question", "field_output": "answer", "system_prompt": "Hm {x}.",
            "format": "[INST] {instruction} {input} [/INST]", "system_format": "<<{system}>>\n",
            "no_input_format": "[INST] {instruction} [/INST]"}  # fmt: skip
    found = convert(made({**AXOLOTL, "datasets": [{"path": "a", "type": kind}]}))
    file, *_ = texts = recipe_texts(found, tmp_path)
    file.write_text(texts[file])
    function = load_own(found.data["sources"][0]["format"])
    row = {key: ROW[key] for key in ("question", "answer")}
    assert function(row)["segments"][0]["text"] == "<<Hm {x}.>>\n[INST] Add. [/INST]"
    assert function(row | {"input": "1"})["segments"][0]["text"].endswith("[INST] Add. 1 [/INST]")


# Datasets and other keys, then lines of the data recipe and keys of `changes`.
CHAT = {"path": "a", "type": "chat_template"}
DIFFERING = {
    "Qwen3": ([CHAT], {"base_model": "Qwen/Qwen3-32B"},
              {"chat_template_kwargs": {"enable_thinking": False}}, {"enable_thinking: false"}),
    "Qwen3 without thinking": ([CHAT], {"base_model": "Qwen/Qwen3-4B-Instruct-2507"},
                               {"chat_template_kwargs": {}}, set()),
    "same values": ([{**CHAT, "roles_to_train": ["assistant"], "train_on_eos": "turn"}],
                    {"train_on_inputs": False, "chat_template": "tokenizer_default"}, {}, set()),
    "other masks": ([{**CHAT, "roles_to_train": ["assistant", "user"], "train_on_eos": "last"}],
                    {"train_on_inputs": True, "chat_template": "llama3"}, {},
                    {"datasets.roles_to_train", "datasets.train_on_eos", "train_on_inputs",
                     "chat_template"}),
    "ChatML": ([CHAT], {"base_model": "Qwen/Qwen3-32B", "chat_template": "chatml"},
               {"chat_template": "recipes/chat_templates/chatml.jinja"}, set()),
    "input_output": ([{"path": "a", "type": "input_output"}], {},
                     {"sources": [{"path": "a", "format": "segments"}]}, set()),
    "tokenized": ([{"path": "a", "type": None}], {},
                  {"sources": [{"path": "a", "format": "tokens"}]}, set()),
    "unknown": ([{"path": "a", "type": "jeopardy"}], {}, {"sources": ["a"]}, {"datasets.type"}),
    "a slice": ([{**CHAT, "split": "train[:500]"}], {}, {}, {"datasets.split"}),
    "8 bits": ([CHAT], {**LORA, "load_in_8bit": True}, {}, {"load_in_8bit"}),
    "no 8 bits": ([CHAT], {**LORA, "load_in_8bit": False}, {}, set()),
}  # fmt: skip


@pytest.mark.parametrize("name", DIFFERING)
def test_what_changes_the_training_is_told_apart(name, made):
    datasets, others, lines, keys = DIFFERING[name]
    found = convert(made({**AXOLOTL, **LORA, "datasets": datasets, **others}))
    assert {key: found.data.get(key) for key in lines} == lines
    assert {key for keys in found.changes.values() for key in keys} == keys
    assert found.run["output_dir"][0] == "outputs/made", "many configs have ./outputs/out"


def test_a_flag_replaces_the_setting_of_a_source(tmp_path, caplog):
    caplog.set_level("INFO")
    recipe = tmp_path / "a.yaml"
    source = {"path": "a", "format": "alpaca", "columns": {"q": "instruction"}, "weight": 2}
    recipe.write_text(yaml.safe_dump({"sources": [source, "b"], "output_dir": "o",
                                      "tokenizer_name_or_path": "t"}))  # fmt: skip
    given = ["--config", str(recipe)]
    plain, _ = parse_sources(parse_preparation(given))
    assert (plain.format, plain.columns) == ("alpaca", (("q", "instruction"),))
    flags = ["--format", "text", "--columns", "body=text"]
    found = parse_sources(parse_preparation([*given, *flags]))
    assert [(each.format, each.columns, each.weight) for each in found] == [
        ("text", (("body", "text"),), 2), ("text", (("body", "text"),), 1.0),
    ]  # fmt: skip
    assert "--format text replaces format of sources: alpaca" in caplog.text
    with pytest.raises(ConfigurationError, match=r"with python -m utils\.importing \S+\.yaml"):
        parse_fine_tuning(["--config", _axolotl(tmp_path)], "")


def _axolotl(folder):
    (folder / "axolotl.yaml").write_text(yaml.safe_dump({**AXOLOTL, "datasets": ALPACA}))
    return str(folder / "axolotl.yaml")
