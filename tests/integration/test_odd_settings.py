"""Every setting with odd values: the dry run refuses a value, or a start trains a step with it.

Each start is a forked process, so that earlier starts cannot affect it.
`make test` tries a sample of the settings, `--exhaustive` all.
"""

import json
import os
import shutil
import sys
import traceback

import pytest
from transformers import SchedulerType
from transformers.training_args import OptimizerNames

import pretrain
import sft_train
from utils.config.arguments import DataArguments, FineTuneConfig, ModelArguments, RunArguments
from utils.config.declarations import Declaration, declared_settings
from utils.config.errors import ExitCode
from utils.config.own_code import OwnCode
from utils.launch.script import _run_main

pytestmark = pytest.mark.slow

DECLARED = declared_settings((RunArguments, DataArguments, ModelArguments, OwnCode, FineTuneConfig))
# Settings that all cases use, or that start something elsewhere.
LEFT_OUT = {
    *("dry_run", "assume", "suggest", "output_dir", "train_data", "model_name_or_path"),
    *("model_config", "sequence_length", "push_to_hub", "lm_eval_tasks", "init_from"),
    *("resume_from_checkpoint", "tokenizer_name_or_path", "strategy", "hang_timeout_s"),
}
LENGTHS = {"max_steps", "num_train_epochs", "max_tokens"}  # accepted values may train for years
NUMBERS = "nan inf -inf -1 0 1 1e400 1e-400 0.5 1.5 2147483648 18446744073709551616 1e30 x"
WORDS = {
    dict: ["{}", '{"x": 1}', "[]", "{", '{"use_reentrant": true}', '{"use_reentrant": "x"}'],
    list: ["x", ["a", "b"], "", "[]", "[1]"],
    bool: ["true", "false", "x"],
    str: ["", "x", "a b", "é\u2028x", "../x", "x" * 5000, "1"],
}
ADAPTERS = ("lora_", "use_rslora", "use_dora", "use_peft", "load_in", "bnb_", "use_bnb")
SPLIT = {"metric_for_best_model": "a_loss"}
KEYWORDS = [
    {"power": "2"}, {"power": -1}, {"lr_end": 1}, {"num_cycles": 1e999}, {"min_lr": "x"},
    {"num_decay_steps": 100}, {"timescale": 0}, {"factor": 2}, {"num_warmup_steps": 3}, {"x": 1},
]  # fmt: skip
OPTIONS = [
    "0x10", "=", "a=b=c", "lr=5", "momentum=x", "momentum=-1", "momentum=0.9", "nesterov=true",
    "alpha=0.9", "eps=-1", "weight_decay=-1", "centered=x", "beta3=2", "block_size=0",
]  # fmt: skip


def odd_values(declaration: Declaration) -> list[object]:
    """Return all choices of a setting, or odd values that a user may write for its type."""
    if declaration.choices is not None:
        return [*(str(each).lower() for each in declaration.choices), "x", "", "null"]
    if {int, float} & set(declaration.origins):
        return [*NUMBERS.split(), "null"]
    kind = next(kind for kind in WORDS if kind in declaration.origins)
    return [*WORDS[kind], "null"]


SWEEP = {
    name: [{name: value} for value in odd_values(declaration)]
    for name, declaration in DECLARED.items()
    if name not in LEFT_OUT
}
SWEEP |= {
    f"optim_args of {optimizer}": [{"optim": optimizer, "optim_args": each} for each in OPTIONS]
    for optimizer in ("adamw_torch", "sgd", "rmsprop", "adagrad", "rmsprop_bnb", "ademamix")
}
SWEEP |= {
    f"lr_scheduler_kwargs of {kind.value}": [
        {**SPLIT, "lr_scheduler_type": kind.value, **change}
        for change in (
            *({"lr_scheduler_kwargs": json.dumps(each)} for each in KEYWORDS),
            {"learning_rate": 1e-8},
            {"warmup_steps": 1000},
        )
    ]
    for kind in SchedulerType
}
SAMPLE = {
    "optim": [{"optim": each} for each in ("sgd", "adafactor", "lomo", "galore_adamw")],
    "optim_args": [{"optim": "sgd", "optim_args": "momentum=0.9,nesterov=true"}],
    "schedule": [
        {"lr_scheduler_type": "warmup_stable_decay", "lr_scheduler_kwargs": '{"num_decay_steps":1}'}
    ],
    "recomputation": [
        {"activation_checkpointing": "full",
         "activation_checkpointing_kwargs": '{"use_reentrant": true, "every_n_layers": 2}'},
    ],
    "debug": [{"debug": "underflow_overflow", "compile": "false", "loss_head": "logits"}],
    "dataloader_num_workers": [{"dataloader_num_workers": "2147483648"}],
}  # fmt: skip


@pytest.fixture
def ending(tmp_path, workspace, base_model, pretraining, fine_tuning):
    """Return a function for the endings of a dry run and a start of one step, with its output."""

    def forked(main, argv: list[str]) -> int:
        process = os.fork()
        if process == 0:
            code = 99
            try:
                log = os.open(tmp_path / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
                for stream in (1, 2):
                    os.dup2(log, stream)
                # pytest's own streams do not write to these descriptors.
                sys.stdout, sys.stderr = (
                    os.fdopen(stream, "w", buffering=1, closefd=False) for stream in (1, 2)
                )
                code = _run_main(lambda: main(argv), None, announced=False)
            except BaseException:
                traceback.print_exc()
            os._exit(code)
        return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])

    def attempt(name: str, changes: dict[str, object]) -> tuple[int, int | None, str]:
        run = tmp_path / "run"
        shutil.rmtree(run, ignore_errors=True)
        adapted = name.startswith(ADAPTERS)
        steps = {"max_steps": 1, "save_steps": 1, "eval_steps": 1, "max_eval_sequences": 2}
        steps |= {"use_cpu": "true", "eval_data": f"a={workspace}/heldout"}
        if adapted:
            steps |= {"use_peft": "true", "lora_target_modules": ["q_proj", "v_proj"]}
            steps |= {"eval_data": f"a={workspace}/chats_heldout"}
        if name in LENGTHS:
            del steps["max_steps"]
        main, argv_of = (sft_train.main, fine_tuning) if adapted else (pretrain.main, pretraining)
        argv = argv_of(run, **{**steps, **changes})
        (tmp_path / "log").write_text("")
        dry = forked(main, [*argv, "--dry_run", "true"])
        assert not run.exists(), "a dry run writes nothing"
        start = forked(main, argv) if dry == 0 and name not in LENGTHS else None
        return dry, start, (tmp_path / "log").read_text(errors="replace")

    return attempt


def check(ending, cases: dict[str, list[dict[str, object]]], name: str) -> None:
    faults = []
    for changes in cases[name]:
        dry, start, log = ending(name, changes)
        # A loss may become infinite, which a dry run cannot know.
        sound = dry == ExitCode.REFUSED or (dry, start) in ((0, 0), (0, ExitCode.NOT_FINITE))
        if not (sound or (dry == 0 and name in LENGTHS)) or "Traceback" in log:
            faults.append(f"{changes}: dry run {dry}, start {start}: {log[-1500:]}")
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize("name", SAMPLE)
def test_what_a_dry_run_accepts_starts(name, ending):
    check(ending, SAMPLE, name)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", SWEEP)
def test_no_setting_ends_in_a_traceback(name, ending):
    check(ending, SWEEP, name)


def test_every_optimizer_and_schedule_is_in_the_sweep():
    tried = {case.get("optim") for case in SWEEP["optim"]}
    assert {each.value for each in OptimizerNames} <= tried
    assert {f"lr_scheduler_kwargs of {kind.value}" for kind in SchedulerType} <= SWEEP.keys()
    assert DECLARED.keys() >= LEFT_OUT | LENGTHS
    assert len(SWEEP) > 110
