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
from utils.config.declarations import REFUSED, declared_settings, other_names, unknown_name
from utils.config.errors import ConfigurationError
from utils.config.preparation import PreparationArguments

CLASSES = (RunArguments, DataArguments, ModelArguments, FineTuneConfig)
KNOWN = declared_settings(CLASSES)


def test_what_was_meant_is_named():
    for flag, said in {
        "dataset_name": "prepare_data.py --sources tokenizes it once, then train_data names",
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
        "add_tokens": "prepare_data.py --add_tokens",
        "min_lr": "lr_scheduler_type: cosine_with_min_lr",
        "tensor_model_parallel_size": "parallelism",
        "zero_stage": "strategy: fsdp2",
        "rope_scaling": "model_config",
        "hf_token": "HF_TOKEN",
        # Names in LLaMA-Factory, axolotl, nanoGPT, torchtune and Lightning.
        "cutoff_len": "here it is --sequence_length",
        "micro_batch_size": "here it is --per_device_train_batch_size",
        "max_iters": "here it is --max_steps",
        "enable_activation_checkpointing": "here it is --activation_checkpointing",
        "gradient_clip_val": "here it is --max_grad_norm",
    }.items():
        assert re.match(f"unknown setting --{flag}: .*{said}", unknown_name(f"--{flag}", KNOWN))
    preparation = ["sources", "seed", "tokenizer_name_or_path"]
    assert "--help all lists all" in unknown_name("--lr", preparation)


def names(argument_class):
    return {field.name for field in dataclasses.fields(argument_class)}


def test_refused_and_other_names_and_changed_defaults_are_those_of_the_libraries():
    assert REFUSED.keys() <= names(SFTConfig) | names(ModelConfig)
    own = {
        *("compile", "init_from", "init_optimizer", "loss_head", "model_config", "save_dtype"),
        "pad_embeddings_to_multiple_of",
    }
    assert names(PretrainConfig) == names(TrainingArguments)
    assert names(FineTuneConfig) == names(SFTConfig)
    assert names(ModelArguments) == names(ModelConfig) | own
    added = names(SFTConfig) - names(TrainingArguments) - REFUSED.keys() - {"packing"}  # our own
    assert added == {"activation_offloading", "router_aux_loss_coef"}, "refuse it, or see it act"
    assert KNOWN["packing"].owner is DataArguments
    tokens = [name for name in KNOWN if "token" in name and "tokenizer" not in name]
    assert tokens == ["max_tokens", "sample_max_new_tokens"], "no Hub token is a setting"
    assert not REFUSED.keys() & (names(PreparationArguments) | names(DataArguments))
    ours = {answer for answer in other_names().values() if answer.isidentifier()}
    assert ours <= KNOWN.keys()
    assert not other_names().keys() & (KNOWN.keys() | REFUSED.keys())


def test_giving_a_refused_setting_is_answered_with_its_reason(tmp_path):
    path = tmp_path / "all.yaml"
    path.write_text("".join(f"{name}: 1\n" for name in REFUSED))
    with pytest.raises(ConfigurationError) as caught:
        read_settings(CLASSES, ["--config", str(path)])
    for line, (name, reason) in enumerate(REFUSED.items(), 1):
        assert f"{path}:{line}: {name} cannot be set here: {reason}" in caught.value.problems
