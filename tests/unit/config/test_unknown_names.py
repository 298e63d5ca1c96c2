"""Unknown settings: another toolkit's name, a typing error, or nothing that could be meant."""

import pytest
from command_lines import parse, parse_training_settings, problems_of

from utils.config.errors import ConfigurationError
from utils.config.trainer_arguments import FineTuneConfig
from utils.config.unknown_names import OTHER_NAMES, unknown_name

pytestmark = pytest.mark.usefixtures("started_alone")


@pytest.fixture(scope="module")
def known():
    return parse(FineTuneConfig).values.declared


@pytest.mark.parametrize(
    ("flag", "said"),
    [
        ("dataset_name", "prepare_data.py --sources tokenizes it once, then train_data names"),
        ("max_eval_batches", "every evaluation reads all of its split"),
        ("use_liger", "the loss is fused"),
        ("epochs", "here it is --num_train_epochs"),
        ("lr", "here it is --learning_rate"),
        ("batch_size", "here it is --per_device_train_batch_size"),
        ("per_device_batch_size", "here it is --per_device_train_batch_size"),
        ("micro_batch_size", "here it is --per_device_train_batch_size"),
        ("max_seq_length", "here it is --sequence_length"),
        ("training.steps", "here it is --max_steps"),
        ("lora_rank", "here it is --lora_r"),
        ("warmup_ratio", "warmup_steps (below 1 it is a share of all steps)"),
        ("learning_rte", "did you mean --learning_rate?"),
        ("learningrate", "did you mean --learning_rate?"),
        ("save_step", "did you mean --save_steps?"),
        ("no_use_peft", "use --use_peft false"),
    ],
)
def test_what_was_meant_is_named(known, flag, said):
    assert f"unknown setting --{flag}: {said}" in unknown_name(f"--{flag}", flag, known).message


@pytest.mark.parametrize("name", ["train_batch", "device_eval_size", "save_data", "steps_eval"])
def test_likeness_alone_suggests_nothing(known, name):
    assert "did you mean" not in unknown_name(name, name, known).message


def test_other_names_are_none_of_ours_and_lead_to_one_of_ours(known):
    for name, ours in OTHER_NAMES.items():
        assert name not in known
        assert " " in ours or ours.partition(":")[0] in known, name


def test_a_name_of_prepare_data_is_not_answered_with_one_of_training():
    known = ["sources", "seed", "tokenizer_name_or_path"]
    assert "here it is --sources" in unknown_name("--dataset_name", "dataset_name", known).message
    assert "--help lists all" in unknown_name("--lr", "lr", known).message


def test_what_follows_from_an_unknown_name_is_not_listed():
    (problem,) = problems_of(train_data=None, dataset_name="d")
    assert "unknown setting --dataset_name" in problem
    (problem,) = problems_of(sequence_length=None, max_seq_length="5")
    assert "here it is --sequence_length" in problem
    (problem,) = problems_of(FineTuneConfig, sequence_length=None, max_length="5")
    assert "max_length cannot be set here" in problem
    (problem,) = problems_of(model_config=None, model_name="m")
    assert "here it is --model_name_or_path" in problem


def test_nothing_is_said_to_miss_where_a_recipe_could_not_be_read(tmp_path):
    with pytest.raises(ConfigurationError) as caught:
        parse_training_settings(FineTuneConfig, ["--config", str(tmp_path / "none.yaml")])
    (problem,) = caught.value.problems
    assert "cannot read the recipe" in problem
