"""Refused settings: each exists in the pinned libraries, is no flag, and says what to use."""

import dataclasses

import pytest
from transformers import HfArgumentParser, TrainingArguments
from trl import ModelConfig, SFTConfig

from utils.config.arguments import DataArguments, ModelArguments
from utils.config.command_line import SettingsParser, parse_arguments
from utils.config.declarations import declared_settings
from utils.config.errors import (
    REFUSED_FINE_TUNING_SETTINGS,
    REFUSED_MODEL_SETTINGS,
    REFUSED_TRAINING_SETTINGS,
    ConfigurationError,
)
from utils.config.trainer_arguments import FineTuneConfig, PretrainConfig


def names(argument_class):
    return {field.name for field in dataclasses.fields(argument_class)}


def test_every_refused_setting_still_exists_in_the_libraries():
    # SFTConfig's alone among the training settings; transformers has no such flag.
    assert REFUSED_TRAINING_SETTINGS.keys() - names(TrainingArguments) == {"trust_remote_code"}
    assert REFUSED_FINE_TUNING_SETTINGS.keys() <= names(SFTConfig)
    assert REFUSED_MODEL_SETTINGS.keys() <= names(ModelConfig)


def test_every_changed_default_still_exists_in_the_libraries():
    own = {
        "compile", "init_from", "init_optimizer", "loss_head", "model_config", "save_dtype",
    }  # fmt: skip
    assert names(PretrainConfig) == names(TrainingArguments)
    assert names(FineTuneConfig) == names(SFTConfig)
    assert names(ModelArguments) == names(ModelConfig) | own


KNOWN_SFT_SETTINGS = {"activation_offloading", "router_aux_loss_coef"}


def test_every_setting_that_trl_adds_is_refused_or_known_to_act():
    added = names(SFTConfig) - names(TrainingArguments)
    assert added - REFUSED_FINE_TUNING_SETTINGS.keys() == KNOWN_SFT_SETTINGS


def test_tokens_are_no_settings():
    for training_class in (PretrainConfig, FineTuneConfig):
        declared = declared_settings([training_class])
        assert not [name for name in declared if "token" in name and name != "eos_token"]


@pytest.mark.parametrize(
    ("training_class", "refused"),
    [
        (PretrainConfig, REFUSED_TRAINING_SETTINGS | REFUSED_MODEL_SETTINGS),
        (FineTuneConfig, REFUSED_FINE_TUNING_SETTINGS | REFUSED_MODEL_SETTINGS),
    ],
)
def test_giving_one_is_refused_with_its_reason_as_flag_and_in_a_recipe(
    training_class, refused, tmp_path
):
    # fine-tuning has a --packing of ours in place of TRL's
    refused = {name: reason for name, reason in refused.items() if name != "packing"}
    path = tmp_path / "all.yaml"
    path.write_text("".join(f"{name}: 1\n" for name in refused))
    flags = [word for name in refused for word in (f"--{name}", "1")]
    with pytest.raises(ConfigurationError) as caught:
        parse_arguments(
            (DataArguments, ModelArguments, training_class), ["--config", str(path), *flags]
        )
    for line, (name, reason) in enumerate(refused.items(), 1):
        assert f"--{name} cannot be set here: {reason}" in caught.value.problems
        assert f"{path}:{line}: {name} cannot be set here: {reason}" in caught.value.problems


def test_the_hooks_of_hf_argument_parser_that_we_use_exist():
    assert "dtype" in HfArgumentParser._add_dataclass_arguments.__code__.co_varnames
    assert HfArgumentParser._parse_dataclass_field.__code__.co_varnames[:2] == ("parser", "field")
    parser = SettingsParser([PretrainConfig], None, None)
    field = next(f for f in dataclasses.fields(PretrainConfig) if f.name == "learning_rate")
    assert parser.read(["--learning-rate", "1e-3"]).values == {"learning_rate": 1e-3}
    assert field.type in (float, "float"), "the library's own field is left as it is"
