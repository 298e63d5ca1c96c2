"""The training arguments: what they are by default, in the help, and written out again."""

import re
import warnings

import pytest
from command_lines import parse, parse_training_settings

from utils.config.recipes import dump_yaml
from utils.config.trainer_arguments import FineTuneConfig, PretrainConfig

pytestmark = pytest.mark.usefixtures("started_alone")


@pytest.mark.parametrize("training_class", [PretrainConfig, FineTuneConfig])
def test_the_defaults_are_those_of_the_libraries_except_where_said(training_class):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run, data, model, training = parse(training_class)
    assert (run.global_batch_size, run.dry_run, run.hang_timeout_s) == (8, False, 600)
    assert (data.sequence_length, data.packing, data.eval_splits) == (64, "best_fit", {})
    assert [source.directory for source in data.train_sources] == ["data/x"]
    assert (model.dtype, model.attn_implementation) == (None, "auto")
    assert training.output_dir == "runs/x"
    assert training.logging_nan_inf_filter is False
    assert training.logging_steps == 10
    assert training.report_to == []
    assert (training.bf16, training.fp16) == (False, False)
    assert training.activation_checkpointing is False
    assert training.gradient_checkpointing is False
    assert training.remove_unused_columns is False
    assert training.ddp_find_unused_parameters is False
    assert training.include_num_input_tokens_seen == "no"
    assert training.dataloader_pin_memory is False
    assert training.average_tokens_across_devices is True
    assert training.num_train_epochs == 3


def test_fine_tuning_neither_truncates_nor_prepares_data_in_trl():
    training = parse(FineTuneConfig).instances[3]
    assert training.max_length is None
    assert training.dataset_kwargs == {"skip_prepare_dataset": True}
    assert training.packing is False
    assert training.learning_rate == 2e-5


def test_our_packing_is_the_only_packing():
    _, data, _, training = parse(FineTuneConfig, packing="none")
    assert (data.packing, training.packing) == ("none", False)


def test_written_settings_give_the_same_run_again(tmp_path):
    first = parse(
        FineTuneConfig,
        eval_data=["a=data/a"],
        eval_strategy="epoch",
        lr_scheduler_type="cosine_with_min_lr",
        lr_scheduler_kwargs='{"min_lr_rate": 0.1}',
        run_name="1e-4",
    )
    (tmp_path / "config.yaml").write_text(dump_yaml(first.as_dict()))
    second = parse_training_settings(FineTuneConfig, ["--config", "config.yaml"])
    assert second.as_dict() == first.as_dict()
    assert second.changed() == first.changed()
    assert second.instances[3].to_dict() == first.instances[3].to_dict()


@pytest.mark.parametrize("training_class", [PretrainConfig, FineTuneConfig])
def test_help_works_for_every_inherited_setting(capsys, training_class):
    with pytest.raises(SystemExit):
        parse_training_settings(training_class, ["--help"])
    text = capsys.readouterr().out
    assert text.index("--global_batch_size") < text.index("--learning_rate")
    assert not re.search(r"--(gradient_accumulation_steps|hub_token|deepspeed|max_length)\b", text)


def test_lora_settings_act_with_use_peft():
    changes = {"model_config": None, "model_name_or_path": "m", "use_peft": "true", "lora_r": "4"}
    _, _, model, _ = parse(FineTuneConfig, **changes, lora_target_modules=["q_proj", "v_proj"])
    assert (model.lora_r, model.lora_target_modules) == (4, ["q_proj", "v_proj"])


def test_float16_weights_may_carry_adapters():
    changes = {"model_config": None, "model_name_or_path": "m", "use_peft": "true"}
    assert parse(FineTuneConfig, **changes, dtype="float16").instances[2].dtype == "float16"
