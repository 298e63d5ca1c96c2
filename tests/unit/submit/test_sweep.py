"""A sweep file becomes points: every combination once, each with its own directory."""

import pytest
from launching import ROOT

from utils.config.errors import ConfigurationError
from utils.config.settings import parse_pretraining
from utils.submit import sweep as command
from utils.submit.sweep import point_name, read_sweep


@pytest.fixture(autouse=True)
def _in_the_repository(monkeypatch):
    monkeypatch.chdir(ROOT)


@pytest.fixture
def sweep_file(tmp_path):
    def write(text: str, rest: str = "script: pretrain.py\noutput_dir: runs/s\n") -> str:
        path = tmp_path / "sweep.yaml"
        path.write_text(rest + text)
        return str(path)

    return write


def test_a_grid_is_every_combination_the_last_setting_fastest(sweep_file):
    sweep = read_sweep(
        sweep_file(
            "config: [recipes/pretrain/demo_cpu.yaml]\n"
            "settings: {max_steps: 5, bf16: true}\n"
            "grid: {learning_rate: [1.0e-3, 2.0e-5], seed: [1, 2]}\n"
        )
    )
    assert list(sweep.points) == [
        "learning_rate=0.001,seed=1",
        "learning_rate=0.001,seed=2",
        "learning_rate=2e-05,seed=1",
        "learning_rate=2e-05,seed=2",
    ]
    assert list(sweep.points.values())[3] == [
        "pretrain.py", "--config", "recipes/pretrain/demo_cpu.yaml", "--max_steps=5",
        "--bf16=true", "--learning_rate=2e-05", "--seed=2",
        "--output_dir=runs/s/learning_rate=2e-05,seed=2",
    ]  # fmt: skip


def test_all_faults_are_named_with_their_line(sweep_file):
    for text, message in [
        ("grid: {seed: [1]}\ngrids: {a: [1]}\n", r"yaml:4: grids: unknown key: a sweep has script"),
        ("grid: {seed: []}\n", r"yaml:3: grid: expected `setting: \[values\]`"),
        ("grid: {model_config: [a/b, a_b]}\n", "model_config=a_b: two points would have this"),
        (f"grid: {{run_name: [{'x' * 200}]}}\n", "or the name is too long"),
        ("settings: {dry_run: true}\ngrid: {seed: [1]}\n", "dry_run: the sweep sets it"),
        ("settings: {seed: 3}\ngrid: {seed: [1]}\n", "seed: is among `settings` too"),
        ("grid: {eval_data: [[a, -b]]}\n", "an empty list, .* or entries that begin with -"),
        ("grid: {seed: [1], seed: [2]}\n", "yaml:3: not valid YAML: seed is given twice"),
    ]:
        with pytest.raises(ConfigurationError, match=message):
            read_sweep(sweep_file(text))
    with pytest.raises(ConfigurationError) as caught:
        read_sweep(sweep_file("scripts: a\ngrid: {output_dir: [a]}\n", rest="script: absent.py\n"))
    # the unknown key, the absent script, no output_dir, and output_dir in the grid
    assert len(caught.value.problems) == 4


def test_arguments_for_bash_end_with_nul_and_hold_anything_names_are_safe(sweep_file, capsys):
    text = 'settings: {run_name: "a b\\n$(touch x)", project: "--odd"}\ngrid: {seed: [1]}\n'
    command.main(["point", sweep_file(text), "0"])
    assert capsys.readouterr().out.split("\0") == [
        "pretrain.py", "--run_name=a b\n$(touch x)", "--project=--odd", "--seed=1",
        "--output_dir=runs/s/seed=1", "",
    ]  # fmt: skip
    settings = {"bf16": True, "a": "$(touch x)/../y", "b": ["x", "y"]}
    assert point_name(settings) == "bf16=true,a=__touch_x__.._y,b=x+y"


@pytest.mark.parametrize("path", sorted((ROOT / "recipes/sweep").glob("*.yaml")), ids=str)
def test_the_settings_of_every_point_of_a_shipped_sweep_exist(path):
    sweep = read_sweep(str(path))
    for name, words in sweep.points.items():
        settings = parse_pretraining([*words[1:], "--dry_run"], "test")
        assert settings.training.output_dir == str(sweep.output_dir / name)


SWEEP_SCRIPT = """\
import os
from utils.config.errors import ConfigurationError

def main(argv):
    os.environ["LEFT"] = os.environ.get("LEFT", "") + "x"
    assert os.environ["LEFT"] == "x", "an earlier point changed the environment"
    print("12:00:00  as usual")
    print("12:00:00  WARNING  of the first")
    seed = next(word for word in argv if word.startswith("--seed="))
    own_fault = ["own fault"] if seed == "--seed=3" else []
    raise ConfigurationError(["shared fault", *own_fault])
"""


def test_all_points_are_dry_run_and_their_faults_named_once(sweep_file, tmp_path, capsys):
    (tmp_path / "script.py").write_text(SWEEP_SCRIPT)
    script = f"script: {tmp_path}/script.py\noutput_dir: r\n"
    sweep = read_sweep(sweep_file("grid: {seed: [1, 2, 3]}\n", script))
    with pytest.raises(ConfigurationError) as caught:
        command.check_points(sweep)
    assert capsys.readouterr().out.splitlines() == [
        "point 0: seed=1", "12:00:00  as usual", "12:00:00  WARNING  of the first",
        "point 1: seed=2", "point 2: seed=3",
    ]  # fmt: skip
    assert caught.value.problems == ["every point: shared fault", "seed=3: own fault"]
