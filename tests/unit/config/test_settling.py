"""Flags over recipes: what they make moot is a note, what nobody set is derived, null empties."""

import pytest
from command_lines import parse_training_settings

from utils.config.errors import ConfigurationError
from utils.config.settings import RULES
from utils.config.trainer_arguments import FineTuneConfig, PretrainConfig

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
    """Parse flags over a recipe, over BASE; as fine-tuning."""

    def start(recipe, *flags, training_class=FineTuneConfig):
        (tmp_path / "base.yaml").write_text(BASE)
        path = tmp_path / "recipe.yaml"
        path.write_text(f"extends: [base.yaml]\n{recipe}")
        return parse_training_settings(training_class, ["--config", str(path), *flags])

    return start


def moot(settings):
    """Return the settings that the notes call moot."""
    return {note.split()[0] for note in settings.notes if " has no effect: " in note}


@pytest.mark.parametrize(
    ("flags", "gone"),
    [
        (["--eval_strategy", "no"], EVALUATION),
        (["--eval_data", "null"], EVALUATION - {"eval_data"} | {"eval_strategy"}),
        (["--eval_data", "none"], EVALUATION - {"eval_data"} | {"eval_strategy"}),
        (["--eval_data=null"], EVALUATION - {"eval_data"} | {"eval_strategy"}),
        (["--eval_strategy", "epoch", "--load_best_model_at_end", "false"], {"eval_steps"}),
        (["--lr_scheduler_type", "cosine"], {"lr_scheduler_kwargs"}),
        (["--lr_scheduler_type", "constant"], {"lr_scheduler_kwargs", "warmup_steps"}),
        (["--num_train_epochs", "2"], {"max_steps"}),
        (["--init_from", "runs/a"], {"model_name_or_path"}),
        (["--model_config", "m.yaml"], {"model_name_or_path"}),
        (["--save_strategy", "no", "--load_best_model_at_end", "false"],
         {"save_steps", "save_best"}),
    ],
)  # fmt: skip
def test_one_flag_on_the_demos_recipe_is_enough(started, flags, gone):
    settings = started(DEMO, *flags)
    assert moot(settings) == gone
    assert all(not settings.values.changed(name) for name in gone)
    assert all(flags[0].partition("=")[0] in note for note in settings.notes if "no effect" in note)


def test_a_note_names_both_places(started):
    (note,) = started(DEMO, "--num_train_epochs", "2").notes
    assert note.startswith("max_steps 140 (")
    assert "recipe.yaml:4) has no effect: num_train_epochs 2 (--num_train_epochs)" in note


MOOT_OF_ITS_CAUSE = {  # setting of a recipe -> flag that makes it moot, beside those above
    "init_from: runs/a\nmodel_name_or_path: null\ninit_optimizer: true": "--model_name_or_path m",
    "use_peft: true\nlora_r: 4": "--use_peft false",
    "fp16: true\nuse_cpu: false\nbf16: null": "--use_cpu true --bf16 true",
    "dtype: bfloat16\nstochastic_rounding: true": "--dtype float32",
    "optim_states: int8": "--optim adafactor",
    "optim_args: a=1": "--optim_states int8",
    "gradient_checkpointing: true": "--activation_checkpointing none",
    "activation_checkpointing: full": "--gradient_checkpointing false",
    "dataloader_num_workers: 2\ndataloader_prefetch_factor: 4": "--dataloader_num_workers 0",
    "logging_steps: 7": "--logging_strategy epoch",
    "tf32: true\nuse_cpu: false\nbf16: null": "--use_cpu true",
}


@pytest.mark.parametrize(("recipe", "flags"), MOOT_OF_ITS_CAUSE.items())
def test_a_flag_leaves_out_what_it_makes_moot(no_accelerator, started, recipe, flags):
    name = recipe.rpartition("\n")[2].partition(":")[0]
    if name == "bf16":
        name = recipe.partition(":")[0]
    settings = started(recipe, *flags.split())
    assert name in moot(settings)
    assert not settings.values.changed(name)


def test_a_later_recipe_overrules_an_earlier_one_and_no_flag_is_overruled(tmp_path):
    later = tmp_path / "later.yaml"
    later.write_text("eval_strategy: no\n")
    (tmp_path / "base.yaml").write_text(BASE)
    (tmp_path / "recipe.yaml").write_text(f"extends: [base.yaml]\n{DEMO}")
    argv = ["--config", str(tmp_path / "recipe.yaml"), str(later)]
    settings = parse_training_settings(FineTuneConfig, argv)
    assert moot(settings) == EVALUATION
    with pytest.raises(ConfigurationError, match=r"eval_steps 5 \(--eval_steps\) has no effect"):
        parse_training_settings(FineTuneConfig, [*argv, "--eval_steps", "5"])


def test_within_one_source_it_stays_a_contradiction(started):
    with pytest.raises(ConfigurationError, match=r"eval_steps 70 .* has no effect"):
        started(DEMO.replace("eval_strategy: steps", "eval_strategy: no"))
    with pytest.raises(ConfigurationError, match="has no effect without use_peft"):
        started("lora_r: 4")  # nobody said use_peft: false
    with pytest.raises(ConfigurationError, match="are one setting"):
        started("", "--gradient_checkpointing", "true", "--activation_checkpointing", "none")


def test_two_durations_in_one_recipe_are_logged(started):
    settings = started("max_steps: 5\nnum_train_epochs: 2")
    assert settings.notes[0].startswith("num_train_epochs 2")
    assert "has no effect: max_steps 5" in settings.notes[0]


def test_the_rules_are_about_settings_that_exist(started):
    declared = started("").values
    for rule in RULES:
        assert {rule.cause, *rule.moot} <= declared.keys()


@pytest.mark.parametrize(
    ("recipe", "flags", "ranks", "sizes"),
    [
        ("global_batch_size: 4", "", 1, (4, 4)),  # Trainer's micro-batch is 8
        ("global_batch_size: 12", "", 1, (12, 6)),
        ("global_batch_size: 4", "", 2, (4, 2)),
        ("global_batch_size: 64", "", 1, (64, 8)),
        ("global_batch_size: 64\nper_device_train_batch_size: 8", "", 16, (64, 4)),
        ("per_device_train_batch_size: 2", "--global_batch_size 1", 1, (1, 1)),
    ],
)
def test_the_micro_batch_follows_from_the_global_one(
    started, monkeypatch, recipe, flags, ranks, sizes
):
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    monkeypatch.setattr("utils.config.checks.missing_devices", lambda *_: None)
    values = started(recipe, *flags.split(), "--dry_run", "true").values
    assert (values["global_batch_size"], values["per_device_train_batch_size"]) == sizes


def test_the_global_batch_follows_from_the_micro_batch(tmp_path):
    argv = ["--output_dir", "r", "--model_name_or_path", "m", "--train_data", "d"]
    argv += ["--sequence_length", "8"]
    settings = parse_training_settings(
        PretrainConfig, [*argv, "--per_device_train_batch_size", "3"]
    )
    assert settings.values["global_batch_size"] == 3
    assert settings.instances[0].global_batch_size == 3
    (note,) = settings.notes
    assert note.startswith("global_batch_size 3: per_device_train_batch_size 3 (--per_device_train")
    with pytest.raises(ConfigurationError, match="global_batch_size is required"):
        parse_training_settings(PretrainConfig, argv)


def test_sizes_of_one_source_that_do_not_divide_are_refused(started):
    with pytest.raises(ConfigurationError, match="global_batch_size 12 does not divide"):
        started("global_batch_size: 12\nper_device_train_batch_size: 8")


def test_when_and_by_what_to_judge_is_derived(started):
    values = started("eval_data: [a=x]\nsave_steps: 20\nsave_best: true").values
    names = "eval_strategy", "eval_steps", "metric_for_best_model"
    assert [values[name] for name in names] == ["steps", 20, "eval_a_loss"]
    values = started("eval_data: [a=x]\nmetric_for_best_model: eval_a_perplexity").values
    assert values["greater_is_better"] is False
    assert started("eval_data: [a=x]\nsave_strategy: epoch").values["eval_strategy"] == "epoch"
    assert started("eval_data: [a=x]\neval_on_start: true").values["eval_strategy"] == "no"


@pytest.mark.parametrize(
    ("recipe", "name", "value"),
    [
        ("eval_data: null", "eval_data", []),
        ("eval_data:", "eval_data", []),
        ("max_steps: null", "max_steps", -1),
        ("weight_decay: null", "weight_decay", 0),
        ("use_peft: null", "use_peft", False),
        ("accept_changes: null", "accept_changes", []),
        ("eval_strategy: null", "eval_strategy", "no"),
        ("lr_scheduler_kwargs: null", "lr_scheduler_kwargs", None),
    ],
)
def test_null_empties_what_has_a_default_of_nothing(started, recipe, name, value):
    assert started(recipe).values[name] == value
    assert started("", f"--{name}", "null").values[name] == value


def test_null_is_refused_where_it_would_mean_some_value(started):
    with pytest.raises(ConfigurationError, match="it cannot be null; leave it out for 2e-05"):
        started("learning_rate: null")


def test_a_split_without_a_name_is_named_by_its_folder(started):
    settings = started("eval_data: [data/Held-Out]\nsave_best: true")
    assert settings.instances[1].eval_splits == {"held_out": "data/Held-Out"}
    assert settings.values["metric_for_best_model"] == "eval_held_out_loss"


def test_a_flag_without_a_value_is_true_or_says_what_it_takes(started):
    assert started("", "--bf16", "--use_peft").values["bf16"] is True
    with pytest.raises(ConfigurationError, match="--packing: expected one of best_fit, concat, n"):
        started("", "--packing")
    with pytest.raises(ConfigurationError, match=r"--eval_data: expected .* null empties it"):
        started("", "--eval_data")


def test_a_recipe_without_its_flag_is_all_that_is_wrong():
    with pytest.raises(ConfigurationError) as caught:
        parse_training_settings(FineTuneConfig, ["my.yaml", "--lr", "1"])
    assert caught.value.problems == [
        "unexpected argument 'my.yaml': give it as --config my.yaml",
        "unknown setting --lr: here it is --learning_rate",
    ]
