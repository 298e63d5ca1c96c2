"""The training arguments and their checks: what is built, and every contradiction refused."""

import re
import warnings

import pytest
import torch

from utils.config import cpu_precision
from utils.config.arguments import DataArguments, ModelArguments
from utils.config.checks.contradictions import (
    FINE_TUNING_CHECKS,
    PRETRAINING_CHECKS,
    check_hardware,
)
from utils.config.checks.devices import missing_devices
from utils.config.errors import ConfigurationError, UnfitClusterError
from utils.config.reading.declarations import declared_settings
from utils.config.reading.parsing import parse_arguments
from utils.config.reading.settings import SettingValues
from utils.config.reading.strict_yaml import dump_yaml
from utils.config.run_arguments import RunArguments
from utils.config.trainer_arguments import FineTuneConfig, PretrainConfig

BASE = {
    "global_batch_size": "8",
    "sequence_length": "64",
    "train_data": "data/x",
    "model_config": "model.yaml",
    "use_cpu": "true",
}


@pytest.fixture(autouse=True)
def started_alone(monkeypatch, tmp_path):
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK", "ACCELERATE_MIXED_PRECISION"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(cpu_precision, "has_amx", lambda: False)
    monkeypatch.chdir(tmp_path)


def parse_training_settings(training_class, argv):
    checks = PRETRAINING_CHECKS if training_class is PretrainConfig else FINE_TUNING_CHECKS
    classes = (RunArguments, DataArguments, ModelArguments, training_class)
    return parse_arguments(classes, argv, checks=checks)


def words(changes):
    given = {**BASE, "output_dir": "runs/x", **changes}
    return [
        word
        for name, value in given.items()
        if value is not None
        for word in (f"--{name}", *(value if isinstance(value, list) else [value]))
    ]


def parse(training_class=PretrainConfig, **changes):
    return parse_training_settings(training_class, words(changes))


def problems_of(training_class=PretrainConfig, **changes):
    with pytest.raises(ConfigurationError) as caught:
        parse(training_class, **changes)
    return caught.value.problems


@pytest.fixture
def no_accelerator(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)


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


def test_memory_is_pinned_only_where_there_is_a_device_to_copy_to():
    training = parse(use_cpu=None).instances[3]
    assert training.dataloader_pin_memory is (training.device.type != "cpu")


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


EVALUATED = {"eval_data": ["a=data/a", "b=data/b"], "eval_strategy": "steps", "eval_steps": "10"}
METRICS = "one of eval_a_loss, eval_a_perplexity, eval_b_loss, eval_b_perplexity"

CONTRADICTIONS = [
    ({"output_dir": None}, "output_dir is required: the directory of this run"),
    ({"model_config": None}, r"no model: give model_name_or_path .* or model_config"),
    ({"model_name_or_path": "m"}, "both model_name_or_path m .* and model_config model.yaml"),
    ({"model_revision": "v2"}, "model_revision v2 .* has no effect on a model from scratch"),
    ({"lora_r": "4"}, r"lora_r 4 \(--lora_r\) has no effect without use_peft: true"),
    ({"use_rslora": "true"}, "use_rslora True .* has no effect without use_peft"),
    (
        {"bf16": "true", "fp16": "true", "use_cpu": None},
        ["bf16 True .* and fp16 True .*: choose one", "fp16 needs a GPU", "bf16 needs a GPU"],
    ),
    ({"dtype": "float16"}, "dtype float16: weights in float16 cannot be trained"),
    ({"optim_states": "int8", "optim": "sgd"}, "optim_states int8 .* not for optim sgd"),
    ({"optim_states": "int8", "optim_args": "a=1"}, "optim_args a=1 .* has no effect with optim_s"),
    (
        {"optim_states": "bfloat16", "fp16": "true", "use_cpu": None, "dry_run": "true"},
        "optim_states bfloat16 .* knows nothing of the loss scaler of fp16",
    ),
    (
        {"stochastic_rounding": "true"},
        r"stochastic_rounding True .* no effect on weights in float32 \(dtype null\): set dtype",
    ),
    (
        {"stochastic_rounding": "true", "dtype": "bfloat16", "bf16": "true"},
        r"stochastic_rounding True .* goes without mixed precision \(bf16 True",
    ),
    ({"fp16": "true"}, r"fp16 needs a GPU, on the CPU \(use_cpu\): leave it out"),
    ({"tf32": "true"}, r"tf32 needs an NVIDIA GPU, on the CPU \(use_cpu\): leave it out"),
    (
        {"bf16": "true", "use_cpu": None},
        "bf16 needs a GPU, and no accelerator is visible here: .* add use_cpu: true",
    ),
    ({"bf16_full_eval": "true", "use_cpu": None}, "bf16_full_eval needs a GPU"),
    ({"train_data": ["a=x"]}, "train_data 'a=x': expected DIR or DIR=weight"),
    ({"train_data": ["a=2", "b"]}, "weights to some datasets and none to b"),
    ({"train_data": ["a", "a"]}, "train_data names a twice"),
    ({"eval_data": ["x"]}, "eval_data 'x': expected NAME=DIR"),
    ({"eval_data": ["a=x", "a=y"]}, "eval_data names 'a' twice"),
    ({"eval_data": ["a=x"]}, r"eval_data is given \(--eval_data\) but never evaluated: set"),
    ({"eval_strategy": "epoch"}, r"eval_strategy epoch \(--eval_strategy\) needs eval_data"),
    ({"eval_on_start": "true"}, "eval_on_start True .* needs eval_data NAME=DIR"),
    ({**EVALUATED, "eval_steps": None}, "eval_strategy steps .* needs eval_steps"),
    ({"eval_steps": "5"}, r"eval_steps 5 \(--eval_steps\) has no effect: eval_strategy is no"),
    ({"save_steps": "5", "save_strategy": "no"}, "save_steps 5 .* save_strategy is no"),
    ({"logging_steps": "5", "logging_strategy": "epoch"}, "logging_strategy is epoch"),
    (
        {**EVALUATED, "load_best_model_at_end": "true", "save_steps": "10"},
        f"load_best_model_at_end True .* needs metric_for_best_model: {METRICS}",
    ),
    (
        {**EVALUATED, "save_best": "true"},
        f"save_best True .* needs metric_for_best_model: {METRICS}",
    ),
    (
        {"save_best": "true", "metric_for_best_model": "eval_a_loss"},
        [r"save_best True \(--save_best\) needs an eval_strategy", "no such metric is logged"],
    ),
    (
        {**EVALUATED, "save_strategy": "best", "metric_for_best_model": "a_loss"},
        "save_strategy best .* nothing at the end: .* Give save_best: true beside save_steps",
    ),
    (
        {
            **EVALUATED,
            "metric_for_best_model": "a_loss",
            "save_strategy": "no",
            "save_minutes": "5",
            "save_best": "true",
        },
        [
            "save_minutes 5 .* has no effect: save_strategy is no",
            "save_best True .* has no effect: save_strategy is no",
        ],
    ),
    ({"save_minutes": "-1"}, "save_minutes -1 .*: it must be at least 0"),
    (
        {**EVALUATED, "lr_scheduler_type": "reduce_lr_on_plateau"},
        "lr_scheduler_type reduce_lr_on_plateau .* needs metric_for_best_model",
    ),
    (
        {"load_best_model_at_end": "true", "metric_for_best_model": "eval_a_loss"},
        [
            "load_best_model_at_end True .* needs an eval_strategy",
            "no such metric is logged; give the loss of a split in eval_data",
        ],
    ),
    (
        {**EVALUATED, "metric_for_best_model": "loss"},
        f"metric_for_best_model loss .*: no such metric is logged; give {METRICS}",
    ),
    (
        {**EVALUATED, "metric_for_best_model": "eval_a_perplexity"},
        "a lower perplexity is better: add greater_is_better: false",
    ),
    (
        {**EVALUATED, "metric_for_best_model": "a_loss", "greater_is_better": "true"},
        "greater_is_better True .*: a lower loss is better",
    ),
    ({"hang_timeout_s": "-1"}, "hang_timeout_s -1.* .*: it must be at least 0"),
    ({"hang_timeout_s": "inf"}, "hang_timeout_s inf.*: it must be at least 0"),
    ({"global_batch_size": "0"}, "global_batch_size 0 .*: it must be at least 1"),
    ({"per_device_train_batch_size": "0"}, "per_device_train_batch_size 0 .*: it must be"),
    ({"sequence_length": "1"}, "sequence_length 1 .*: it must be at least 2"),
    ({"learning_rate": "0"}, "learning_rate 0 .*: it must be above 0"),
    ({"learning_rate": "nan"}, "learning_rate nan .*: it must be above 0"),
    ({"learning_rate": "inf"}, "learning_rate inf .*: it must be above 0"),
    ({"adam_beta2": "1"}, "adam_beta2 1 .*: it must be at least 0 and below 1"),
    ({"seed": "-1"}, r"seed -1 .*: it must be at least 0 and at most 4.29497e\+09"),
    ({"save_total_limit": "0"}, "save_total_limit 0 .*: it must be at least 2"),
    ({"max_steps": "0"}, "max_steps 0 .*: it must be at least 1, or -1 to go by num_train"),
    ({"max_steps": "-5"}, "max_steps -5 .*: it must be at least 1"),
    (
        {"lr_scheduler_type": "constant", "warmup_steps": "10"},
        "warmup_steps 10 .* has no effect: use constant_with_warmup",
    ),
    (
        {"lr_scheduler_kwargs": '{"min_lr": 1}'},
        "lr_scheduler_kwargs: linear takes no 'min_lr'; it takes: none",
    ),
    (
        {"lr_scheduler_type": "constant", "lr_scheduler_kwargs": '{"min_lr": 1}'},
        "constant takes no 'min_lr'",
    ),
    (
        {"lr_scheduler_type": "cosine_with_min_lr"},
        "cosine_with_min_lr needs lr_scheduler_kwargs with min_lr or min_lr_rate",
    ),
    (
        {
            "lr_scheduler_type": "cosine_with_min_lr",
            "lr_scheduler_kwargs": '{"min_lr": 1, "min_lr_rate": 1}',
        },
        "cosine_with_min_lr needs lr_scheduler_kwargs with min_lr or min_lr_rate",
    ),
    (
        {"lr_scheduler_type": "warmup_stable_decay"},
        r"warmup_stable_decay needs lr_scheduler_kwargs: \{num_decay_steps: ...\}",
    ),
    (
        {
            "lr_scheduler_type": "warmup_stable_decay",
            "lr_scheduler_kwargs": '{"num_decay_steps": 5, "decay": 1}',
        },
        "warmup_stable_decay takes no 'decay'; it takes: num_decay_steps, .*min_lr_ratio",
    ),
    (
        {"gradient_checkpointing": "true", "activation_checkpointing": "false"},
        "gradient_checkpointing True .* and activation_checkpointing False .* are one setting",
    ),
    (
        {"activation_checkpointing": "some"},
        "activation_checkpointing: invalid choice: 'some'",
    ),
    (
        {"activation_checkpointing": "auto", "activation_checkpointing_kwargs": '{"offload": 1}'},
        "activation_checkpointing_kwargs .* goes with activation_checkpointing: full alone",
    ),
    (
        {
            "activation_checkpointing": "full",
            "activation_checkpointing_kwargs": '{"selective": true}',
        },
        "activation_checkpointing_kwargs .*: activation_checkpointing: selective says so",
    ),
    (
        {"dataloader_prefetch_factor": "2"},
        "dataloader_prefetch_factor 2 .* has no effect without dataloader_num_workers",
    ),
    (
        {"dataloader_persistent_workers": "true"},
        "dataloader_persistent_workers True .* has no effect without dataloader_num_workers",
    ),
    (
        {"global_batch_size": "12"},
        "global_batch_size 12 does not divide over 1 rank .*: use global_batch_size 8 or 16, or "
        r"per_device_train_batch_size 6 \(this process was started alone\)",
    ),
    ({"use_peft": "true"}, "use_peft adapts existing weights: it does not go with model_config"),
    (
        {"model_config": None, "model_name_or_path": "m", "init_from": "runs/a"},
        "both model_name_or_path m .* and init_from runs/a .* give the weights",
    ),
    ({"init_optimizer": "true"}, "init_optimizer True .* has no effect without init_from"),
    (
        {"init_optimizer": "true", "init_from": "runs/a", "use_peft": "true"},
        "init_optimizer True .* does not go with use_peft",
    ),
    (
        {"accept_changes": ["seed", "sead"]},
        r"accept_changes \(--accept_changes\): no setting sead: did you mean seed\?",
    ),
]


@pytest.mark.parametrize(
    ("changes", "messages"), CONTRADICTIONS, ids=[str(changes) for changes, _ in CONTRADICTIONS]
)
def test_contradictions_are_refused_one_line_each(no_accelerator, changes, messages):
    problems = problems_of(FineTuneConfig, **changes)
    messages = [messages] if isinstance(messages, str) else messages
    assert len(problems) == len(messages), problems
    for message, problem in zip(messages, problems, strict=True):
        assert re.search(message, problem), problem


@pytest.mark.parametrize(
    "changes",
    [
        {**EVALUATED, "metric_for_best_model": "a_loss", "load_best_model_at_end": "true",
         "save_steps": "20"},
        {**EVALUATED, "metric_for_best_model": "eval_b_perplexity", "greater_is_better": "false"},
        {"eval_data": ["a=x"], "eval_on_start": "true"},
        {"lr_scheduler_type": "warmup_stable_decay",
         "lr_scheduler_kwargs": '{"num_decay_steps": 5, "min_lr_ratio": 0.1}'},
        {"lr_scheduler_type": "reduce_lr_on_plateau", "metric_for_best_model": "eval_a_loss",
         "lr_scheduler_kwargs": '{"patience": 3}', **EVALUATED},
        {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": '{"min_lr": 1e-6}'},
        {"dataloader_num_workers": "1", "dataloader_prefetch_factor": "4"},
        {"bf16": "true"},
        {"max_steps": "5"},
        {"save_total_limit": "null"},
        {"train_data": ["a=1", "b=2"]},
    ],
)  # fmt: skip
def test_settings_that_agree_are_accepted(changes):
    parse(**changes)


def test_lora_settings_act_with_use_peft():
    changes = {"model_config": None, "model_name_or_path": "m", "use_peft": "true", "lora_r": "4"}
    _, _, model, _ = parse(FineTuneConfig, **changes, lora_target_modules=["q_proj", "v_proj"])
    assert (model.lora_r, model.lora_target_modules) == (4, ["q_proj", "v_proj"])


def test_pretraining_refuses_what_only_fine_tuning_does():
    changes = {"model_config": None, "model_name_or_path": "m", "use_peft": "true"}
    problems = problems_of(**changes, on_overlong="drop")
    assert len(problems) == 2
    assert "pretrain.py trains every weight; LoRA is for sft_train" in problems[0]
    assert "on_overlong drop (--on_overlong): pretraining splits long documents" in problems[1]
    parse(FineTuneConfig, on_overlong="drop")


def test_the_ranks_of_the_launch_count():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WORLD_SIZE", "3")
        (problem,) = problems_of()
    assert "global_batch_size 8 does not divide over 3 ranks of 8 sequences each" in problem
    assert "started alone" not in problem


def test_all_contradictions_are_shown_together():
    problems = problems_of(
        model_config=None, learning_rate="-1", global_batch_size="12", eval_strategy="epoch"
    )
    assert len(problems) == 4


def test_what_transformers_itself_refuses_is_a_configuration_error():
    (problem,) = problems_of(
        **EVALUATED, load_best_model_at_end="true", save_steps="15", metric_for_best_model="a_loss"
    )
    assert "requires the saving steps to be a round multiple of the evaluation steps" in problem


@pytest.mark.parametrize("training_class", [PretrainConfig, FineTuneConfig])
def test_a_dry_run_checks_a_recipe_for_gpus_on_a_machine_without(no_accelerator, training_class):
    settings = parse(training_class, bf16="true", tf32="true", use_cpu=None, dry_run="true")
    training = settings.instances[3]
    assert training.device.type == "cpu"
    assert training.bf16 is True
    assert settings.as_dict()["use_cpu"] is False, "the settings stay the user's"
    assert settings.as_dict()["tf32"] is True


@pytest.mark.parametrize(("use_cpu", "faults"), [(False, 0), (True, 2)])
def test_half_precision_is_refused_beside_an_accelerator_only_if_it_is_not_used(
    monkeypatch, use_cpu, faults
):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    given = {"fp16": True, "tf32": True, "use_cpu": use_cpu}
    values = SettingValues(declared_settings([RunArguments, PretrainConfig]), given, {})
    assert len(list(check_hardware(values))) == faults


TORCHRUN = {"TORCHELASTIC_RUN_ID": "none", "LOCAL_WORLD_SIZE": "4"}


@pytest.mark.parametrize(
    ("environment", "visible_gpus", "message"),
    [
        (
            TORCHRUN | {"LOCAL_RANK": "0", "CUDA_VISIBLE_DEVICES": "0,1"},
            2,
            r"has 4 processes .*local rank 0\), but torch sees 2 GPUs \(CUDA_VISIBLE_DEVICES=0,1\)",
        ),
        (TORCHRUN, 1, r"torch sees 1 GPU \(CUDA_VISIBLE_DEVICES is not set\).*--gpus-per-node"),
        ({"LOCAL_WORLD_SIZE": "4", "LOCAL_RANK": "2"}, 2, r"local rank 2\), but torch sees 2"),
    ],
)
def test_more_processes_than_gpus_are_refused(monkeypatch, environment, visible_gpus, message):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible_gpus)
    with pytest.raises(UnfitClusterError, match=message) as caught:
        parse(use_cpu=None)
    assert caught.value.exit_code == 69


@pytest.mark.parametrize(
    "changes", [{"use_cpu": "true"}, {"use_cpu": None, "dry_run": "true"}], ids=["cpu", "dry run"]
)
def test_gpus_do_not_matter_where_none_is_used(monkeypatch, no_accelerator, changes):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    assert parse(**changes).instances[3].device.type == "cpu"


@pytest.mark.parametrize(
    ("environment", "visible_gpus"),
    [
        (TORCHRUN, 4),
        (TORCHRUN | {"ACCELERATE_USE_CPU": "True"}, 1),
        ({}, 1),
        ({"LOCAL_WORLD_SIZE": "4", "LOCAL_RANK": "0"}, 1),  # each task of srun sees its own
    ],
)
def test_processes_that_have_their_gpu_are_not(environment, visible_gpus):
    assert missing_devices(environment, visible_gpus) is None


def test_float16_weights_may_carry_adapters():
    changes = {"model_config": None, "model_name_or_path": "m", "use_peft": "true"}
    assert parse(FineTuneConfig, **changes, dtype="float16").instances[2].dtype == "float16"


def test_every_check_runs_without_faults_on_good_settings_and_reads_no_file():
    values = parse().values
    assert [line for check in PRETRAINING_CHECKS for line in check(values)] == []
    values = parse(FineTuneConfig).values
    assert [line for check in FINE_TUNING_CHECKS for line in check(values)] == []
