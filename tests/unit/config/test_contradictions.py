"""Settings that contradict each other: every one refused, in a line of its own."""

import re

import pytest
from command_lines import EVALUATED, METRICS, parse, problems_of

from utils.config.checks import FINE_TUNING_CHECKS, PRETRAINING_CHECKS
from utils.config.trainer_arguments import FineTuneConfig

pytestmark = pytest.mark.usefixtures("started_alone")

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
    ({"eval_data": ["a.b=x"]}, "eval_data 'a.b=x': expected NAME=DIR"),
    ({"eval_data": ["a=x", "a=y"]}, "eval_data names 'a' twice"),
    (
        {"eval_data": ["a=x"], "eval_strategy": "no"},
        r"eval_data is given \(--eval_data\) but never evaluated: set",
    ),
    ({"eval_strategy": "epoch"}, r"eval_strategy epoch \(--eval_strategy\) needs eval_data"),
    ({"eval_on_start": "true"}, "eval_on_start True .* needs eval_data NAME=DIR"),
    (
        {**EVALUATED, "eval_steps": None, "save_strategy": "epoch"},
        "eval_strategy steps .* needs eval_steps",
    ),
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
        {**EVALUATED, "metric_for_best_model": "eval_a_perplexity", "greater_is_better": "true"},
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
        {"global_batch_size": "12", "per_device_train_batch_size": "8"},
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


def test_pretraining_refuses_what_only_fine_tuning_does():
    changes = {"model_config": None, "model_name_or_path": "m", "use_peft": "true"}
    problems = problems_of(**changes, on_overlong="drop")
    assert len(problems) == 2
    assert "pretrain.py trains every weight; LoRA is for sft_train" in problems[0]
    assert "on_overlong drop (--on_overlong): pretraining splits long documents" in problems[1]
    parse(FineTuneConfig, on_overlong="drop")


def test_all_contradictions_are_shown_together():
    problems = problems_of(
        model_config=None, learning_rate="-1", global_batch_size="12", eval_strategy="epoch",
        per_device_train_batch_size="8",
    )  # fmt: skip
    assert len(problems) == 4


def test_what_transformers_itself_refuses_is_a_configuration_error():
    (problem,) = problems_of(
        **EVALUATED, load_best_model_at_end="true", save_steps="15", metric_for_best_model="a_loss"
    )
    assert "requires the saving steps to be a round multiple of the evaluation steps" in problem


def test_every_check_runs_without_faults_on_good_settings_and_reads_no_file():
    values = parse().values
    assert [line for check in PRETRAINING_CHECKS for line in check(values)] == []
    values = parse(FineTuneConfig).values
    assert [line for check in FINE_TUNING_CHECKS for line in check(values)] == []
