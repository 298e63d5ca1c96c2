"""Settings that do not exist here: another toolkit's name, a typing error, or a refused one."""

import dataclasses

import pytest
from command_lines import problems_of
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
from utils.config.settings import parse_fine_tuning
from utils.config.unknown_names import (
    OTHER_NAMES,
    REFUSED_FINE_TUNING_SETTINGS,
    REFUSED_MODEL_SETTINGS,
    REFUSED_TRAINING_SETTINGS,
    unknown_name,
)

pytestmark = pytest.mark.usefixtures("started_alone")
KNOWN = declared_settings((RunArguments, DataArguments, ModelArguments, FineTuneConfig))


@pytest.mark.parametrize(
    ("flag", "said"),
    [
        ("dataset_name", "prepare_data.py --sources tokenizes it once, then train_data names"),
        ("per_device_batch_size", "here it is --per_device_train_batch_size"),
        ("warmup_ratio", "warmup_steps (below 1 it is a share of all steps)"),
        ("learning_rte", "did you mean --learning_rate?"),
        ("device_eval_size", "--help lists all settings"),  # likeness alone suggests nothing
    ],
)
def test_what_was_meant_is_named(flag, said):
    assert f"unknown setting --{flag}: {said}" in unknown_name(f"--{flag}", flag, KNOWN)


def test_other_names_are_none_of_ours_and_lead_to_one_of_ours():
    assert not OTHER_NAMES.keys() & KNOWN.keys()
    ours = {answer for answer in OTHER_NAMES.values() if answer.isidentifier()}
    assert len(ours) > 20
    assert ours <= KNOWN.keys()
    preparation = ["sources", "seed", "tokenizer_name_or_path"]
    assert "here it is --sources" in unknown_name("--dataset_name", "dataset_name", preparation)
    assert "--help lists all" in unknown_name("--lr", "lr", preparation)


@pytest.mark.parametrize(
    ("missing", "given"),
    [
        ("train_data", "dataset_name"),
        ("sequence_length", "max_seq_length"),
        ("sequence_length", "max_length"),  # refused, with what to use
    ],
)
def test_what_an_unknown_name_stands_for_is_not_called_missing(missing, given):
    (problem,) = problems_of(parse_fine_tuning, **{missing: None, given: "5"})
    assert given in problem


def names(argument_class):
    return {field.name for field in dataclasses.fields(argument_class)}


def test_refused_settings_and_changed_defaults_exist_in_the_libraries():
    # trust_remote_code is SFTConfig's alone among the training settings.
    assert REFUSED_TRAINING_SETTINGS.keys() - names(TrainingArguments) == {"trust_remote_code"}
    assert REFUSED_FINE_TUNING_SETTINGS.keys() <= names(SFTConfig)
    assert REFUSED_MODEL_SETTINGS.keys() <= names(ModelConfig)
    own = {"compile", "init_from", "init_optimizer", "loss_head", "model_config", "save_dtype"}
    assert names(PretrainConfig) == names(TrainingArguments)
    assert names(FineTuneConfig) == names(SFTConfig)
    assert names(ModelArguments) == names(ModelConfig) | own
    added = names(SFTConfig) - names(TrainingArguments) - REFUSED_FINE_TUNING_SETTINGS.keys()
    assert added == {"activation_offloading", "router_aux_loss_coef"}, "refuse it, or see it act"
    assert not [name for name in KNOWN if "token" in name and "tokenizer" not in name]


def test_giving_a_refused_setting_is_answered_with_its_reason(tmp_path):
    # fine-tuning has a --packing of ours in place of TRL's
    refused = REFUSED_FINE_TUNING_SETTINGS | REFUSED_MODEL_SETTINGS
    refused.pop("packing")
    path = tmp_path / "all.yaml"
    path.write_text("".join(f"{name}: 1\n" for name in refused))
    flags = [word for name in refused for word in (f"--{name}", "1")]
    with pytest.raises(ConfigurationError) as caught:
        read_settings((DataArguments, ModelArguments, FineTuneConfig), ["--config", str(path)])
    for line, (name, reason) in enumerate(refused.items(), 1):
        assert f"{path}:{line}: {name} cannot be set here: {reason}" in caught.value.problems
    with pytest.raises(ConfigurationError) as caught:
        read_settings((DataArguments, ModelArguments, FineTuneConfig), flags)
    for name, reason in refused.items():
        assert f"--{name} cannot be set here: {reason}" in caught.value.problems
