"""Unknown settings: another toolkit's name, a typing error, or a refused setting."""

import dataclasses
import re

import pytest
from transformers import TrainingArguments
from trl import ModelConfig, SFTConfig

from utils.config.arguments import (
    DataArguments,
    FineTuneConfig,
    ModelArguments,
    PretrainConfig,
    RunArguments,
)
from utils.config.command_line import read_settings
from utils.config.declarations import declared_settings
from utils.config.errors import ConfigurationError
from utils.config.foreign_words import other_names, refused, unknown_name
from utils.config.own_code import OwnCode
from utils.config.preparation import PreparationArguments

CLASSES = (RunArguments, DataArguments, ModelArguments, OwnCode, FineTuneConfig)
KNOWN = declared_settings(CLASSES)


def test_what_was_meant_is_named():
    for flag, said in {
        "dataset_name": "train_data names your file; prepare_data.py --sources prepares",
        "per_device_batch_size": "here it is --per_device_train_batch_size",
        "warmup_ratio": r"warmup_steps \(below 1 it is a share of all steps\)",
        "learning_rte": r"did you mean --learning_rate\?",
        "no_bf16": "give --bf16 false",
        "device_eval_size": "--help all lists all settings",  # a similar name is not enough
        "max_epoch": "here it is --num_train_epochs",  # a typing error in another toolkit's name
        "max_lenght": "--max_length cannot be set here: set --sequence_length",
        "training.steps": "here it is --max_steps",
        "max_new_tokens": "here it is --sample_max_new_tokens",  # not max_tokens
        "mix_strategy": "train_data with weights",  # not strategy
        "val_set_size": "--validation_fraction holds",
        "tensor_model_parallel_size": "parallelism",
        "rope_scaling": "model_config",
        "n_layer": "here it is --model_config.num_hidden_layers",
        "optimizer.weight_decay": "here it is --weight_decay",
        "hf_token": "HF_TOKEN",
        # Names in LLaMA-Factory, axolotl, nanoGPT, torchtune and Lightning.
        "enable_activation_checkpointing": "here it is --activation_checkpointing",
    }.items():
        assert re.match(f"unknown setting --{flag}: .*{said}", unknown_name(f"--{flag}", KNOWN))
    preparation = ["sources", "seed", "tokenizer_name_or_path"]
    assert "--help all lists all" in unknown_name("--lr", preparation)


def names(argument_class):
    return {field.name for field in dataclasses.fields(argument_class)}


def test_refused_and_other_names_and_changed_defaults_are_those_of_the_libraries():
    assert refused().keys() <= names(SFTConfig) | names(ModelConfig)
    own = {
        *("compile", "init_from", "init_optimizer", "loss_head", "model_config", "save_dtype"),
        *("pad_embeddings_to_multiple_of", "model_config_overrides", "freeze", "train_only", "fp8"),
    }
    assert names(PretrainConfig) == names(TrainingArguments)
    assert names(FineTuneConfig) == names(SFTConfig)
    assert names(ModelArguments) == names(ModelConfig) | own
    added = names(SFTConfig) - names(TrainingArguments) - refused().keys() - {"packing"}  # our own
    assert added == {"activation_offloading", "router_aux_loss_coef"}, "refuse it, or see it act"
    assert KNOWN["packing"].owner is DataArguments
    tokens = [name for name in KNOWN if "token" in name and "tokenizer" not in name]
    own = ["max_tokens", "sample_max_new_tokens", "add_tokens"]
    assert tokens == own, "no Hub token is a setting"
    assert not refused().keys() & (names(PreparationArguments) | names(DataArguments))
    ours = {answer for answer in other_names().values() if answer.isidentifier()}
    assert ours <= {*KNOWN, "config"}
    # transformers' `debug` is a setting, but `debug: true` is not one of its values.
    assert other_names().keys() & (KNOWN.keys() | refused().keys()) == {"debug"}


def test_giving_a_refused_setting_is_answered_with_its_reason(tmp_path):
    path = tmp_path / "all.yaml"
    path.write_text("".join(f"{name}: 1\n" for name in refused()))
    with pytest.raises(ConfigurationError) as caught:
        read_settings(CLASSES, ["--config", str(path)])
    for line, (name, reason) in enumerate(refused().items(), 1):
        assert f"{path}:{line}: {name} cannot be set here: {reason}" in caught.value.problems


# Commands and recipes of projects that train with Hydra, nanoGPT's configs or a `distributed:`
# section, and what to write instead. Each form was found in a published guide.
FOREIGN_WORDS = {
    "model.num_heads=42": "here it is --model_config.num_attention_heads 42",
    "data.batch_size=32": "here it is --per_device_train_batch_size 32",
    "data.context_size=2048": "here it is --sequence_length 2048",
    "+experiment=train_7b.yaml": "here it is --config train_7b.yaml",
    "optimizer.weight_decay=0.1": "here it is --weight_decay 0.1",
    "optimizer.gradient_accumulation_steps=8": "global_batch_size",
    "device=gpu": "slurm/launch_node.sh SCRIPT",
    "loader.nonsense=3": "--help all lists all settings",
}
FOREIGN_FLAGS = {
    "--config_path a.yaml": "here it is --config a.yaml",
    "--config-name=small": "--config FILE.yaml for a recipe",
    "--multirun lr=1e-4,3e-4": "slurm/submit.sh slurm/sweep_job.sh FILE.yaml",
    "--dataset_path data/a": "here it is --train_data data/a",
    "-n 2": "slurm/launch_node.sh SCRIPT",
    "-c a.yaml": "here it is --config a.yaml",
    "-l INFO": "here it is --log_level info",
    "--timeout 1800": "here it is --ddp_timeout 1800",
    "--quantization_bit 8": "here it is --load_in_4bit$",  # 8 is no value of it
}
SECTIONS = """\
optimizer: {max_iters: 300000, grad_clip: 1.0}
lr: {learning_rate: 8e-5, min_lr: 8e-6, warmup_iters: 1000, decay_lr: true}
system: {dtype: float16, data_workers: 64}
distributed: {strategy: auto, backend: nccl, timeout: 1800, find_unused_parameters: false}
batch_size_per_device: 8
"""
ANSWERS = """\
batch_size_per_device: here it is per_device_train_batch_size: 8
optimizer.max_iters: here it is max_steps: 300000
optimizer.grad_clip: here it is max_grad_norm: 1
lr.learning_rate: here it is learning_rate: 8e-05
lr.min_lr: lr_scheduler_type: cosine_with_min_lr, with lr_scheduler_kwargs: {min_lr: 1e-5}
lr.warmup_iters: here it is warmup_steps: 1000
lr.decay_lr: lr_scheduler_type: cosine decays the rate to 0, constant keeps it
system.dtype: here it is dtype: float16
system.data_workers: here it is dataloader_num_workers: 64
distributed.strategy: here it is strategy: auto
distributed.backend: here it is ddp_backend: nccl
distributed.timeout: here it is ddp_timeout: 1800
distributed.find_unused_parameters: here it is ddp_find_unused_parameters: false
""".splitlines()


def test_words_of_other_projects_are_answered_with_what_to_type(tmp_path):
    (path := tmp_path / "theirs.yaml").write_text(SECTIONS)
    with pytest.raises(ConfigurationError) as caught:
        read_settings(CLASSES, ["--config", str(path), *FOREIGN_WORDS])
    problems = caught.value.problems
    for word, answer in FOREIGN_WORDS.items():
        name = word.partition("=")[0]
        (found,) = (each for each in problems if each.startswith(f"unknown setting --{name}:"))
        assert answer in found
    found = [each.partition(" unknown setting ")[2] for each in problems if "theirs.yaml" in each]
    assert sorted(found) == sorted(ANSWERS)
    for flag, answer in FOREIGN_FLAGS.items():
        with pytest.raises(ConfigurationError) as caught:
            read_settings(CLASSES, flag.split())
        assert any(re.search(answer, each) for each in caught.value.problems), flag


def test_a_dot_sets_one_value_of_a_mapping(tmp_path, monkeypatch):
    (path := tmp_path / "a.yaml").write_text(
        "lr_scheduler_kwargs: {min_lr: 1.0, num_cycles: 2}\n"
        "model_config: {num_hidden_layers: 2, rope_parameters: {factor: 2}}\n"
    )
    flags = "--lr_scheduler_kwargs.min_lr 1e-5 --model_config.rope_parameters.rope_type linear"
    argv = ["--config", str(path), *flags.split(), "--model_config", "llama.yaml"]
    values = read_settings((ModelArguments, PretrainConfig), [*argv, "--log-level", "DEBUG"])
    assert values["lr_scheduler_kwargs"] == {"min_lr": 1e-5, "num_cycles": 2}
    assert values["model_config_overrides"] == {
        "num_hidden_layers": 2, "rope_parameters": {"factor": 2, "rope_type": "linear"},
    }  # fmt: skip
    assert values["model_config"] == "llama.yaml"
    assert values["log_level"] == "debug"
    words = ["--config", str(path), "learning_rate=3e-4", "seed=3", "--train_data", "a=1", "b=2"]
    words += ["--sequence_length", "8"]
    values = read_settings((DataArguments, ModelArguments, PretrainConfig), words, checks=())
    assert (values["learning_rate"], values["seed"], values["train_data"]) == (
        3e-4, 3, ["a=1", "b=2"],
    )  # fmt: skip
    (point := tmp_path / "lr=1e-3" / "seed=2").mkdir(parents=True)
    (point / "config.yaml").write_text("model_config.head_dim: 4\nmodel_config.hidden_size: 8\n")
    monkeypatch.chdir(point.parent)  # the name of a sweep's point is no override
    for word in ("seed=2/config.yaml", str(point / "config.yaml")):
        values = read_settings((ModelArguments,), ["--config", word, "--model_config.head_dim=2"])
        assert values["model_config_overrides"] == {"head_dim": 2, "hidden_size": 8}
    whole = ["--lr_scheduler_kwargs", '{"min_lr": 3}', "--lr_scheduler_kwargs.num_cycles", "1"]
    assert read_settings((PretrainConfig,), whole)["lr_scheduler_kwargs"] == {
        "min_lr": 3, "num_cycles": 1,
    }  # fmt: skip
