"""Settings that contradict each other, the launch or the machine are all reported at once."""

import re

import pytest
from command_lines import BOTH, EVALUATED, METRICS, parse, problems_of

from utils.config import refusals
from utils.config.settings import parse_fine_tuning

pytestmark = pytest.mark.usefixtures("started_alone")
LORA = {"model_config": None, "model_name_or_path": "m", "use_peft": "true"}
PLATEAU = {**EVALUATED, "lr_scheduler_type": "reduce_lr_on_plateau"}

CONTRADICTIONS = [
    ({"output_dir": None}, "output_dir is required: the directory of this run"),
    ({"model_config": None}, "no model: give model_name_or_path .* or model_config"),
    ({"use_peft": "true"}, "use_peft adapts existing weights: it does not go with model_config"),
    ({"init_optimizer": "true"}, r"init_optimizer true .* no effect: init_from null \(default\)"),
    ({"lora_r": "4"}, r"lora_r 4 .* has no effect: use_peft false \(default\): give --use_peft$"),
    ({"push_to_hub": "true", "hub_model_id": "me/x/y"}, "hub_model_id me/x/y .*: give OWNER/NAME"),
    ({"bf16": "true", "fp16": "true"}, ["fp16 true .* no effect: bf16", "needs a GPU, this run"]),
    ({"dtype": "float16"}, "dtype float16: weights in float16 cannot be trained"),
    ({"load_in_4bit": "true"}, r"load_in_4bit true \(--load_in_4bit\): .* set use_peft: true"),
    ({"bf16": "true", "use_cpu": None},
     "give --bf16 false .or --use_cpu true, to train on the CPU"),
    ({"eval_data": ["a.b=x"]}, "eval_data 'a.b=x': expected NAME=DIR"),
    ({**EVALUATED, "eval_steps": None, "save_strategy": "epoch"}, "eval_strategy .* needs eval_st"),
    ({**EVALUATED, "load_best_model_at_end": "true", "save_steps": "10"},
     f"load_best_model_at_end true .* needs metric_for_best_model: {METRICS}"),
    (PLATEAU, "lr_scheduler_type reduce_lr_on_plateau .* needs metric_for_best_model"),
    ({**EVALUATED, "save_strategy": "best", "metric_for_best_model": "a_loss"},
     "save_strategy best .* nothing at the end, .* give save_best: true beside save_steps"),
    ({**EVALUATED, "metric_for_best_model": "loss"},
     f"metric_for_best_model loss .*: no loss or perplexity of a split; give {METRICS}"),
    ({**EVALUATED, "metric_for_best_model": "eval_a_perplexity", "greater_is_better": "true"},
     "greater_is_better true .*: a lower loss or perplexity is better"),
    ({"learning_rate": "nan"}, "learning_rate nan .*: it must be above 0"),
    ({"dataloader_num_workers": "2000000000"}, "_workers 2000000000 .* and at most 1024"),
    ({"ddp_bucket_cap_mb": "-1"}, "ddp_bucket_cap_mb -1 .*: it must be at least 0 and below 2"),
    ({"max_steps": "0"}, "max_steps 0 .*: it must be at least 1, or -1 to go by num_train"),
    ({"lr_scheduler_type": "cosin"}, "lr_scheduler_type: expected one of linear, cosine, .* cosin"),
    ({"accept_changes": ["seed", "sed"]},
     r"accept_changes \(--accept_changes\): unknown setting sed: did you mean seed\?"),
    # A refusal by transformers also becomes a ConfigurationError.
    ({**EVALUATED, "load_best_model_at_end": "true", "save_steps": "15",
      "metric_for_best_model": "a_loss"}, "requires the saving steps to be a round multiple"),
    ({"model_config": None, "learning_rate": "-1", "early_stopping_patience": "2"},
     [r"early_stopping_patience 2 .* no effect: eval_data null \(default\)", "no model",
      "learning_rate -1"]),
    ({**PLATEAU, "metric_for_best_model": "a_loss", "warmup_steps": "5"},
     "warmup_steps 5 .* has no effect: lr_scheduler_type reduce_lr_on_plateau"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "messages"), CONTRADICTIONS, ids=[str(changes) for changes, _ in CONTRADICTIONS]
)
def test_contradictions_are_refused_one_line_each(no_accelerator, changes, messages):
    problems = problems_of(parse_fine_tuning, **changes)
    missing = "data/x: no such file or folder"  # said if a setting cannot be read
    problems = [problem for problem in problems if problem != missing]
    messages = [messages] if isinstance(messages, str) else messages
    assert len(problems) == len(messages), problems
    for message, problem in zip(messages, problems, strict=True):
        assert re.search(message, problem), problem


def test_a_missing_path_is_shown_beside_a_faulty_flag():
    problems = problems_of(learning_ratio="1")
    assert [problem.split(": ")[0] for problem in problems] == [
        "unknown setting --learning_ratio", "data/x",
    ]  # fmt: skip


def test_pretraining_refuses_what_only_fine_tuning_does():
    problems = problems_of(**LORA, on_overlong="drop")
    assert len(problems) == 2
    assert "pretrain.py trains every weight; LoRA is for sft_train" in problems[0]
    assert "on_overlong drop (--on_overlong): pretraining splits long documents" in problems[1]


def test_a_setting_whose_package_is_missing_is_refused(monkeypatch):
    monkeypatch.setattr(refusals, "is_installed", lambda _: False)
    bits = {"load_in_4bit": "true", "dtype": "float16"}
    problems = problems_of(parse_fine_tuning, **LORA, **bits, lm_eval_tasks="a")
    assert problems[0].endswith("is not installed: pip install 'lm_eval>=0.4.13,<0.5'")
    assert problems[1].endswith("is not installed: pip install bitsandbytes")


@BOTH
def test_a_dry_run_checks_a_recipe_for_gpus_on_a_machine_without(no_accelerator, parse_argv):
    settings = parse(parse_argv, bf16="true", tf32="true", use_cpu=None, dry_run="true")
    assert settings.training.device.type == "cpu"
    assert settings.training.bf16 is True
    assert settings.resolved["use_cpu"] is False, "the settings stay the user's"
    assert settings.resolved["tf32"] is True
