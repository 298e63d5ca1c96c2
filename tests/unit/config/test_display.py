"""The three forms of `--help`, and `--print_config`, which prints a recipe of the same run."""

import re
from pathlib import Path

import pytest
from command_lines import BASE, BOTH, parse

from utils.config.arguments import DataArguments, FineTuneConfig, ModelArguments, RunArguments
from utils.config.declarations import declared_settings, help_file
from utils.config.errors import Answer, ConfigurationError
from utils.config.own_code import OwnCode
from utils.config.preparation import PreparationArguments, parse_preparation
from utils.config.settings import parse_fine_tuning, parse_pretraining
from utils.launch.script import run_script

ROOT = Path(__file__).parents[3]
SHORT = [name for names in help_file()["short"].values() for name in names.split()]


@pytest.fixture
def helped(capsys):
    def text(parse_argv, *argv):
        with pytest.raises(SystemExit) as left:
            parse_argv(argv, "What it does.")
        assert left.value.code == 0
        return capsys.readouterr().out

    return text


@BOTH
def test_help_fits_two_screens_and_help_all_has_every_setting(parse_argv, helped):
    short, everything = helped(parse_argv, "--seed", "x", "-h"), helped(parse_argv, "--help", "all")
    lines = short.splitlines()
    assert len(lines) <= 96
    assert max(map(len, lines)) <= 100
    flags, own = (
        re.findall(r"^  --(\w+)", short, re.M),
        [each.split()[0] for each in help_file()["flags"]],
    )
    tuning = ["use_peft", "lora_r", "lora_alpha", "load_in_4bit", "on_overlong"]
    left_out = tuning if parse_argv is parse_pretraining else []
    assert flags == [name for name in SHORT if name not in left_out] + own
    assert 25 <= len(flags) <= 45
    assert set(SHORT) < set(re.findall(r"^  --(\w+)", everything, re.M)), "each is a setting"
    for text in (short, everything):
        for part in ("What it does.", "(required)", "(default: 42)", "--config RECIPE.yaml"):
            assert part in text
    assert re.match(r"All 1\d\d settings: --help all", lines[-1])
    assert not re.search(
        r"--(gradient_accumulation_steps|hub_token|deepspeed|max_length)\b", everything
    )


def test_help_explains_a_topic(helped):
    text = helped(parse_fine_tuning, "--help", "lora", "seed")
    assert text.startswith("LoRA and QLoRA train adapters")
    flags = re.findall(r"^ *--(\w+)", text, re.M)
    assert flags[:3] == ["use_peft", "lora_r", "lora_alpha"]
    assert flags[-1] == "seed", "a topic and a setting in one call"
    assert "for most data (default: 16)" in " ".join(text.split())
    assert "--validation_fraction NUMBER" in helped(parse_preparation, "--help", "data")
    with pytest.raises(ConfigurationError, match=r"topics: data$"):
        parse_preparation(["--help", "lora"])


def test_each_setting_of_a_library_has_a_text_of_ours_and_each_topic_has_settings():
    classes = (RunArguments, DataArguments, ModelArguments, FineTuneConfig, OwnCode)
    classes = (*classes, PreparationArguments)
    declared, texts = declared_settings(classes), help_file()["texts"]
    for name, text in (texts["libraries"] | texts["stoker"]).items():
        owner, _, plain = name.rpartition(".")
        assert owner or declared[plain].help == text
    for name, declaration in declared.items():
        assert len(declaration.help.split()) > 2, name
        assert not re.search(r"Whether|\bvalue\.$|Defaults to", declaration.help), name
    assert len(texts["libraries"]) > 60
    for content in help_file()["topics"].values():
        assert set(content["settings"].split()) <= set(declared)


def test_the_pages_that_help_names_speak_of_the_setting():
    for page, names in help_file()["pages"].items():
        text = (ROOT / page).read_text()
        missing = [name for name in names.split() if not re.search(rf"(`|--){name}\b", text)]
        assert not missing, page


def test_help_explains_one_setting(helped):
    text = helped(parse_fine_tuning, "--help", "learning_rate", "--eval_steps", "9")
    assert "--learning_rate NUMBER" in text
    assert "(default: 2e-05)" in text
    assert re.search(r"a setting of +trl\n", text)
    assert "--eval_steps" not in text, "a flag ends the words"
    text = " ".join(helped(parse_fine_tuning, "--help", "eval-steps", "save_minutes").split())
    assert "no effect with some values of eval_data, eval_strategy" in text
    assert "a setting of Stoker no effect with some values of save_strategy documents docs/" in text
    optimizer = helped(parse_fine_tuning, "--help", "optim")
    assert "adamw_torch, adamw_torch_fused" in optimizer
    assert max(map(len, optimizer.splitlines())) <= 100
    with pytest.raises(ConfigurationError) as caught:
        parse_fine_tuning(["--help", "lr", "checkpoint", "hub_token", "saveminutes"], "")
    assert [re.findall("learning_rate|activation_checkpointing_kwargs|save_minutes|HF_TOKEN", text)
            for text in caught.value.problems] == [
        ["learning_rate"], ["activation_checkpointing_kwargs"], ["HF_TOKEN"], ["save_minutes"],
    ]  # fmt: skip
    assert "--merge INTEGER" in helped(parse_preparation, "--help"), "few are all shown"
    assert "--columns VALUE" in helped(parse_preparation, "--help", "columns")


@BOTH
def test_a_printed_config_is_a_recipe_of_the_same_values(parse_argv, tmp_path, started_alone):
    (tmp_path / "base.yaml").write_text("learning_rate: 1e-3\nsave_steps: 20\nseed: 42\n")
    (tmp_path / "run.yaml").write_text(
        "extends: base.yaml\neval_data: [a=x y, b]\neval_steps: 5\nrun_name: 'no'\n"
        "lr_scheduler_type: cosine_with_min_lr\nlr_scheduler_kwargs: {min_lr: 1e-5}\n"
    )
    for more in ({}, {"eval_strategy": "no"}):
        given = {"config": "run.yaml", "save_steps": "30", **more}
        settings = parse(parse_argv, dry_run="true", **given)
        for word in ([], "all"):
            with pytest.raises(Answer) as answer:
                parse(parse_argv, print_config=word, **given)
            text = answer.value.text
            (tmp_path / "printed.yaml").write_text(text)
            again = parse_argv(["--config", "printed.yaml", "--dry_run"], "")
            assert again.resolved == settings.resolved
            assert re.search(r"^learning_rate: 0.001 +# base.yaml:1$", text, re.M)
            assert re.search(r"^save_steps: 30 +# --save_steps$", text, re.M)
            assert ("# hang_timeout_s: 600" in text) is ("seed: 42" in text) is (word == "all")
        assert not more or "# eval_steps 5 (run.yaml:3) has no effect: eval_strategy no" in text
        assert more or re.search(
            r"^# eval_strategy: steps +# eval_data a=x y b .* given$", text, re.M
        )
        assert more or re.search(r"^eval_steps: 5 +# run.yaml:3$", text, re.M)
        assert re.search(r"^# +num_train_epochs: 3 +# default", text, re.M) or word != "all"
    assert "# learning_rate" not in text
    assert "# weight_decay: 0.0 " in text


def test_printing_needs_sound_settings_starts_nothing_and_shows_no_secret(capsys, monkeypatch):
    with pytest.raises(ConfigurationError) as caught:
        parse(print_config="every", seed="-1")
    assert len(caught.value.problems) == 2
    token = "hf_" + "x" * 30
    monkeypatch.setenv("SOME_API_KEY", "secret-value")
    argv = [word for name, value in BASE.items() for word in (f"--{name}", value)]
    argv += ["--tokenizer_name_or_path", f"{token} secret-value", "--print_config"]
    assert run_script(lambda: parse_pretraining(argv, "")) == 0
    out = capsys.readouterr().out
    shown = r"^tokenizer_name_or_path: \*\*\* \*\*\* +# --tokenizer_name_or_path$"
    assert re.search(shown, out, re.M)
    assert token not in out
