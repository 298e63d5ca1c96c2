"""A run's settings: flags override recipes, missing ones are derived, config.yaml stores all."""

import os
import re
import warnings

import pytest
import torch
from command_lines import BOTH, parse

from utils.config import precision
from utils.config.errors import ConfigurationError
from utils.config.recipes import dump_yaml
from utils.config.rules import RULES
from utils.config.settings import parse_fine_tuning, parse_pretraining

pytestmark = pytest.mark.usefixtures("started_alone")

BASE = """
output_dir: runs/x
model_name_or_path: m
train_data: [data/x]
sequence_length: 64
global_batch_size: 2
use_cpu: true
bf16: false
"""
DEMO = """
per_device_train_batch_size: 2
max_steps: 140
lr_scheduler_type: cosine_with_min_lr
lr_scheduler_kwargs: {min_lr_rate: 0.1}
warmup_steps: 10
eval_data: [heldout=data/heldout]
eval_strategy: steps
eval_on_start: true
eval_steps: 70
save_steps: 70
save_best: true
load_best_model_at_end: true
metric_for_best_model: eval_heldout_loss
greater_is_better: false
"""
EVALUATION = {
    "eval_data", "eval_steps", "eval_on_start", "load_best_model_at_end", "save_best",
    "metric_for_best_model", "greater_is_better",
}  # fmt: skip


@pytest.fixture
def started(tmp_path):
    """Return a function that parses flags and a recipe that extends BASE, for fine-tuning."""

    def start(recipe, *flags):
        (tmp_path / "base.yaml").write_text(BASE)
        path = tmp_path / "recipe.yaml"
        path.write_text(f"extends: [base.yaml]\n{recipe}")
        return parse_fine_tuning(["--config", str(path), *flags], "").values

    return start


def moot(values):
    """Return the settings that have no effect according to the notes."""
    return {note.split()[0] for note in values.notes if " has no effect: " in note}


def test_a_flag_disables_settings_that_it_makes_ineffective(no_accelerator, started):
    for flags, gone in {
        "--eval_strategy no": EVALUATION,
        "--eval_data none": EVALUATION - {"eval_data"} | {"eval_strategy"},
        "--lr_scheduler_type cosine": {"lr_scheduler_kwargs"},
        "--lr_scheduler_type constant": {"lr_scheduler_kwargs", "warmup_steps"},
        "--num_train_epochs 2": {"max_steps"},
        "--max_tokens 1B": {"max_steps"},
        "--save_strategy no --load_best_model_at_end false": {"save_steps", "save_best"},
    }.items():
        values = started(DEMO, *flags.split())
        assert moot(values) == gone
        assert not any(values.changed(name) for name in gone)
        flag = flags.split()[0]
        assert all(flag in note for note in values.notes if "no effect" in note)
    for recipe, flag in {
        "use_peft: true\nlora_r: 4": "--use_peft false",
        "gradient_checkpointing: true": "--activation_checkpointing none",
        "activation_checkpointing_kwargs: {a: 1}": "--gradient_checkpointing false",
        "use_cpu: false\nbf16: null\ntf32: true": "--use_cpu true",
    }.items():
        name = recipe.rpartition("\n")[2].partition(":")[0]
        values = started(recipe, *flag.split())
        assert name in moot(values)
        assert not values.changed(name)
    assert {name for cause, _, moot in RULES for name in (cause, *moot.split())} <= values.keys()


def test_raw_chats_take_the_place_of_a_recipes_data_and_held_out_split(started, tmp_path):
    raw = tmp_path / "mine.jsonl"
    raw.write_text('{"messages": []}\n')
    recipe = "train_data: [data/x/train]\neval_data: [validation=data/x/validation]\n"
    values = started(recipe, "--train_data", str(raw), "--validation_fraction", "0.1")
    assert values["eval_data"] == [f"validation={raw}"]
    with pytest.raises(
        ConfigurationError, match=r"recipe.yaml:\d\): --validation_fraction 0.05 ho"
    ):
        started(recipe, "--train_data", str(raw))


def test_a_setting_that_only_the_optimizer_ignores_stays_as_a_run_recorded_it(started):
    values = started("optim: sgd\nadam_beta1: 0.5\n")
    assert values["adam_beta1"] == 0.5, "a run begun with both resumes"


def test_a_later_recipe_overrules_an_earlier_one_and_no_flag_is_overruled(started, tmp_path):
    (note,) = started(DEMO, "--num_train_epochs", "2").notes
    assert note.startswith("max_steps 140 (")
    assert "recipe.yaml:4) has no effect: num_train_epochs 2 (--num_train_epochs)" in note
    later = tmp_path / "later.yaml"
    later.write_text("eval_strategy: no\n")
    argv = ["--config", str(tmp_path / "recipe.yaml"), str(later)]
    assert moot(parse_fine_tuning(argv, "").values) == EVALUATION
    assert moot(parse_fine_tuning([*argv, "--eval_steps", "5"], "").values) == EVALUATION
    # Within a single source the contradiction with load_best_model_at_end stays an error.
    with pytest.raises(ConfigurationError, match=r"load_best_model_at_end true .* has no effect"):
        started(DEMO.replace("eval_strategy: steps", "eval_strategy: no"))
    for limit in ("max_steps: 5", "max_tokens: 5B"):
        note = started(f"{limit}\nnum_train_epochs: 2").notes[0]
        assert re.search(f"num_train_epochs 2 .* has no effect: {limit.replace(':', '')}", note)
    with pytest.raises(ConfigurationError, match=r"max_tokens 5B .* has no effect: max_steps 5 "):
        started("max_steps: 5\nmax_tokens: 5B")


def test_an_ineffective_setting_within_one_source_is_logged(no_accelerator, started):
    gone = {"eval_data", "eval_steps", "save_best"}
    flags = "--eval_data data/x --eval_strategy no --eval_steps 5 --save_best"
    recipe = "eval_data: data/x\neval_strategy: no\neval_steps: 5\nsave_best: true\n"
    for values in (started("", *flags.split()), started(recipe)):
        assert moot(values) == gone
        assert not any(values.changed(name) for name in gone)


def test_one_batch_size_follows_from_the_other(started, monkeypatch):
    for recipe, flags, ranks, sizes in (
        ("global_batch_size: 4", "", 1, (4, 4)),  # Trainer's micro-batch is 8
        ("global_batch_size: 12", "", 1, (12, 6)),
        ("global_batch_size: 4", "", 2, (4, 2)),
        ("global_batch_size: 64\nper_device_train_batch_size: 8", "", 16, (64, 4)),
        ("per_device_train_batch_size: 2", "--global_batch_size 1", 1, (1, 1)),
        ("global_batch_size: 8\nper_device_train_batch_size: 3", "", 1, (8, 3)),  # refused later
    ):
        monkeypatch.setenv("WORLD_SIZE", str(ranks))
        values = started(recipe, *flags.split(), "--dry_run", "true")
        assert (values["global_batch_size"], values["per_device_train_batch_size"]) == sizes
    monkeypatch.delenv("WORLD_SIZE")
    values = parse(global_batch_size=None, per_device_train_batch_size="3").values
    assert values["global_batch_size"] == 3
    (note,) = values.notes
    assert note.startswith("global_batch_size 3: per_device_train_batch_size 3 (--per_device_train")
    values = parse(global_batch_size=None).values
    assert (values["global_batch_size"], values.notes) == (None, []), "derived from the data later"


def test_evaluation_and_best_model_are_derived(no_accelerator, started):
    values = started("eval_data: [data/Held-Out]\nsave_steps: 20\nsave_best: true")
    names = "eval_strategy", "eval_steps", "metric_for_best_model"
    assert [values[name] for name in names] == ["steps", 20, "eval_held_out_loss"]
    values = started("eval_data: [a=x]\nmetric_for_best_model: eval_a_perplexity")
    assert values["greater_is_better"] is False
    assert started("eval_data: [a=x]\nsave_strategy: epoch")["eval_strategy"] == "epoch"
    # Without save_best Trainer would load the best saved model, but report a better figure.
    best = "eval_data: [data/held-out]\nload_best_model_at_end: true\nsave_steps: 20\n"
    assert started(f"{best}eval_steps: 10")["save_best"] is True
    assert started(f"{best}eval_steps: 20")["save_best"] is False
    assert started(f"{best}eval_steps: 10\nsave_best: false")["save_best"] is False
    by_epoch = "eval_strategy: epoch\nsave_strategy: epoch"
    assert started(best.replace("save_steps: 20", by_epoch))["save_best"] is False


def test_old_names_of_checkpointing_are_read(started):
    for old in ("gradient_checkpointing: true", "gradient_checkpointing: false"):
        values = started(f"activation_checkpointing: selective\n{old}")
        assert values["activation_checkpointing"] == "selective"
        assert moot(values) == {"gradient_checkpointing"}
    values = started("gradient_checkpointing: true\ngradient_checkpointing_kwargs: {a: 1}")
    assert values["activation_checkpointing"] is True
    assert values["activation_checkpointing_kwargs"] == {"a": 1}


def test_null_resets_a_setting_with_an_empty_default(started):
    defaults = {"eval_data": [], "max_steps": -1, "eval_strategy": "no", "use_peft": False}
    for name, value in defaults.items():
        assert started(f"{name}: null")[name] == value
        assert started("", f"--{name}", "null")[name] == value
    with pytest.raises(ConfigurationError, match="it cannot be null; leave it out for 2e-05"):
        started("learning_rate: null")


@BOTH
def test_the_defaults_are_those_of_the_libraries_except_where_said(parse_argv):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        training = parse(parse_argv).training
    for name in (
        "logging_nan_inf_filter", "bf16", "fp16", "activation_checkpointing",
        "gradient_checkpointing", "remove_unused_columns", "ddp_find_unused_parameters",
        "dataloader_pin_memory",
    ):  # fmt: skip
        assert getattr(training, name) is False, name
    assert training.average_tokens_across_devices is True
    if parse_argv is parse_fine_tuning:  # TRL must not truncate, pack or prepare data
        assert (training.max_length, training.packing) == (None, False)
        assert training.dataset_kwargs == {"skip_prepare_dataset": True}


DRY = {"use_cpu": None, "dry_run": "true"}


def test_a_recipe_for_gpus_runs_on_a_cpu_that_was_asked_for_by_the_launch(
    monkeypatch, started_alone
):
    with pytest.raises(ConfigurationError, match="use_cpu"):
        parse(use_cpu=None, bf16="true")
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    settings = parse(use_cpu=None, bf16="true")
    assert settings.training.use_cpu


@pytest.mark.usefixtures("amx")
@pytest.mark.parametrize(
    ("changes", "environment", "bf16"),
    [
        ({}, {}, True),
        ({"dtype": "bfloat16"}, {}, False),  # weights in bfloat16 already compute in bfloat16
        (DRY, {}, True),  # on a login node, for a GPU of unknown kind
        (DRY | {"dtype": "bfloat16"}, {}, False),
        ({"use_cpu": None}, {"WORLD_SIZE": "1", "ACCELERATE_USE_FSDP": "true"}, False),
        (DRY, {"WORLD_SIZE": "2"}, True),
        (DRY, {"WORLD_SIZE": "2", "ACCELERATE_USE_CPU": "true"}, True),
        # The accelerate config only decides if the settings do not.
        ({}, {"ACCELERATE_MIXED_PRECISION": "bf16"}, True),
        ({"bf16": "false", "dry_run": "true"}, {"ACCELERATE_MIXED_PRECISION": "bf16"}, False),
    ],
)
def test_precision_that_is_left_open(changes, environment, bf16, monkeypatch, tmp_path):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    settings = parse(**changes, tokenizer_name_or_path="1e-4",
                     lr_scheduler_kwargs='{"num_cycles": 1}',
                     lr_scheduler_type="cosine_with_restarts")  # fmt: skip
    assert settings.resolved["bf16"] is bf16
    assert settings.training.mixed_precision == ("bf16" if bf16 else "no")
    by_launch = "ACCELERATE_MIXED_PRECISION" in environment
    assert ("ACCELERATE_MIXED_PRECISION" in os.environ) is by_launch, "nothing is left set"
    overruled = "mixed_precision bf16 of the accelerate config has no effect: bf16 false (--bf16)"
    assert (overruled in settings.values.notes) is (by_launch and not bf16)
    if bf16:
        on_cpu = precision.FAST_CPU if settings.values.on_cpu else precision.FAST_GPU
        assert settings.values.source("bf16") == (precision.BY_LAUNCH if by_launch else on_cpu)
    # The stored settings, used as a recipe, give the same settings again on any machine.
    monkeypatch.setattr(precision, "has_fast_bf16", lambda: False)
    (tmp_path / "config.yaml").write_text(dump_yaml(settings.resolved))
    again = parse_pretraining(["--config", "config.yaml"], "")
    assert again.resolved == settings.resolved
    assert again.training.to_dict() == settings.training.to_dict()
    if environment:
        return
    assert parse().training.mixed_precision == "no"
    # With an accelerator the user decides, unless the run is to be on the CPU.
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(precision, "has_fast_bf16", lambda: True)
    assert parse(use_cpu="true").resolved["bf16"] is True
    assert parse(**DRY).resolved["bf16"] is False


A100, V100 = (8, 0), (7, 0)
LORA = {"dtype": "bfloat16", "use_peft": "true", "model_config": None, "model_name_or_path": "m"}


@pytest.mark.usefixtures("no_accelerator")
@pytest.mark.parametrize(
    ("capability", "changes", "bf16", "recomputed"),
    [
        (A100, {}, True, "auto"),
        (V100, {}, False, None),
        (None, {"assume": "8xH100-80GB"}, True, "auto"),
        (V100, {"assume": "8x48GB"}, True, "auto"),
        (A100, {"assume": "8xV100-32GB"}, False, None),
        (A100, {"bf16": "false"}, False, "auto"),
        (A100, {"fp16": "true"}, False, "auto"),
        (A100, {"dtype": "bfloat16"}, False, "auto"),
        (A100, LORA, True, "auto"),
        (A100, {"activation_checkpointing": "none"}, True, "none"),
        (A100, {"activation_offloading": "true"}, True, None),
        (A100, {"use_cpu": "true"}, False, None),
        (None, {}, True, "auto"),
        (None, {"strategy": "cpu"}, False, None),
    ],
)
def test_a_gpu_that_multiplies_in_bf16_does_so_by_default(
    capability, changes, bf16, recomputed, monkeypatch
):
    monkeypatch.setattr(precision, "gpu_capability", lambda: capability)
    values = parse(parse_fine_tuning, **DRY | changes).values
    assert (values["bf16"], values["activation_checkpointing"]) == (bf16, recomputed)
    told, off = [], []
    if bf16:
        told, off = ["bf16 true"], ["--bf16 false"]
    if recomputed == "auto":
        told.append(f"{precision.RECOMPUTED} auto")
        off.append(f"--{precision.RECOMPUTED} none")
    off = f"off: {', '.join(off)}"
    if capability is None and "assume" not in changes:
        off += "; this machine has no GPU, a dry run of training on its CPU has --use_cpu true"
    line = [f"{', '.join(told)}: {precision.FAST_GPU} ({off})"] if told else []
    assert [note for note in values.notes if precision.FAST_GPU in note] == line


@pytest.mark.usefixtures("no_accelerator")
def test_a_run_keeps_the_precision_that_it_began_with(monkeypatch, tmp_path):
    """A run that began on a CPU or an old GPU must not become another run on a new GPU."""
    monkeypatch.setattr(precision, "gpu_capability", lambda: A100)
    run = tmp_path / "runs" / "x"
    run.mkdir(parents=True)

    def chosen(**changes):
        values = parse(**DRY | changes).values
        notes = [note for note in values.notes if "as this run began" in note]
        return (values["bf16"], values["activation_checkpointing"]), notes

    (run / "config.yaml").write_text("bf16: false\nactivation_checkpointing: null\n")
    (run / "provenance.json").write_text('{"starts": []}')
    assert chosen() == ((True, "auto"), []), "no start came to a run"
    (run / "provenance.json").write_text('{"starts": [{}]}')
    kept, notes = chosen()
    assert kept == (False, None)
    assert notes == [
        "bf16 false (as this run began); a new run here has true",
        "activation_checkpointing null (as this run began); a new run here has auto",
    ]
    elsewhere = {"output_dir": "runs/y", "resume_from_checkpoint": "runs/x/checkpoint-3"}
    assert chosen(**elsewhere)[0] == (False, None)
    assert chosen(bf16="true", activation_checkpointing="full") == ((True, "full"), [])
    assert chosen(output_dir="runs/y") == ((True, "auto"), [])
    (run / "provenance.json").write_text('{"starts": [{"changed": {"bf16": true}}]}')
    monkeypatch.setattr(precision, "gpu_capability", lambda: V100)
    assert chosen()[0] == (True, None), "a change that was accepted stays"
