"""A sweep file becomes points: every combination once, each with a directory of its own."""

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from utils.config.errors import ConfigurationError
from utils.config.settings import parse_pretraining
from utils.submit import sweep as command
from utils.submit.sweep import flag_words, point_name, read_sweep

ROOT = Path(__file__).parents[3]


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
            "list: [{learning_rate: 7, warmup_steps: 3}]\n"
        )
    )
    assert [point.name for point in sweep.points] == [
        "learning_rate=0.001,seed=1",
        "learning_rate=0.001,seed=2",
        "learning_rate=2e-05,seed=1",
        "learning_rate=2e-05,seed=2",
        "learning_rate=7,warmup_steps=3",
    ]
    assert [point.index for point in sweep.points] == [0, 1, 2, 3, 4]
    assert sweep.arguments(sweep.points[3]) == [
        "pretrain.py", "--config", "recipes/pretrain/demo_cpu.yaml", "--max_steps=5",
        "--bf16=true", "--learning_rate=2e-05", "--seed=2",
        "--output_dir=runs/s/learning_rate=2e-05,seed=2",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("grid: {seed: [1]}\ngrids: {a: [1]}\n", r"yaml:4: grids: unknown key: a sweep has script"),
        ("grid: 3\n", r"yaml:3: grid: expected `setting: \[values\]`"),
        ("grid: {seed: 3}\n", r"yaml:3: grid: expected `setting"),
        ("grid: {seed: []}\n", "grid: a sweep needs a grid, a list of points, or both"),
        ("list: 3\n", "yaml:3: list: expected points"),
        ("list: [3]\n", "expected settings as `name: value`, not 3"),
        ("settings: {seed: 1}\n", "grid: a sweep needs a grid, a list of points, or both"),
        ("grid: {seed: [1, 2, 1]}\n", "point 2 is point 0 again: seed=1"),
        ("grid: {seed: [1]}\nlist: [{seed: '1'}]\n", "yaml:4: list: point 1 is point 0 again"),
        ("grid: {output_dir: [a]}\n", "output_dir: the sweep's output_dir holds a directory per"),
        ("settings: {dry_run: true}\ngrid: {seed: [1]}\n", "dry_run: slurm/submit.sh dry-runs"),
        ("settings: {seed: 1}\ngrid: {seed: [1]}\n", "seed: is among `settings` too"),
        ("grid: {eval_data: [[]]}\n", "an empty list cannot be given as a flag"),
        ("grid: {eval_data: [[a, -b]]}\n", "that begin with - cannot be given as flags"),
        ("grid: {'--seed': [1]}\n", "--seed: is not the name of a setting"),
        ("grid: {seed: [1]}\nconfig: 3\n", "yaml:4: config: expected recipe files"),
        ("grid: {seed: [1], seed: [2]}\n", "yaml:3: seed is given twice"),
    ],
)
def test_faults_are_named_with_their_line(sweep_file, text, message):
    with pytest.raises(ConfigurationError, match=message):
        read_sweep(sweep_file(text))


def test_all_faults_of_a_file_are_named_and_unreadable_files(sweep_file):
    with pytest.raises(ConfigurationError) as caught:
        read_sweep(sweep_file("scripts: a\ngrid: {output_dir: [a]}\n", rest="script: absent.py\n"))
    # scripts; no such script, no output_dir; the grid's
    assert len(caught.value.problems) == 4
    with pytest.raises(ConfigurationError, match="cannot read the sweep: No such file"):
        read_sweep("no/such/sweep.yaml")
    with pytest.raises(ConfigurationError, match=":1: not valid YAML"):
        read_sweep(sweep_file("{", rest=""))


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"lr": 1e-3, "seed": 2}, "lr=0.001,seed=2"),
        ({"bf16": True, "a": None}, "bf16=true,a=null"),
        ({"a": "x/../y"}, r"a=x_.._y~\w{8}"),
        ({"a": "$(touch x); *"}, r"a=__touch_x____~\w{8}"),
        ({"a": ""}, r"a=~\w{8}"),
        ({"a": ["x", "y"]}, r"a=x\+y~\w{8}"),
        ({"a": {"min_lr_rate": 0.1}}, r"a=__min_lr_rate___0.1_~\w{8}"),
        ({"a": "long" * 100}, r"a=(long)*lo~\w{8}"),
    ],
)
def test_names_are_safe(settings, name):
    import re

    assert re.fullmatch(name, point_name(settings))


VALUES = st.one_of(
    st.integers(), st.booleans(), st.none(), st.floats(allow_nan=False),
    st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=200),
    st.lists(st.sampled_from(["a", "b", "a+b", "a,b"]), min_size=1, max_size=3),
)  # fmt: skip
POINTS = st.dictionaries(st.sampled_from(["a", "b", "c"]), VALUES, min_size=1)


@given(POINTS, POINTS)
def test_names_are_unique_short_and_safe_directories(first, second):
    def words(point):
        return [flag_words(*item) for item in point.items()]

    assert (point_name(first) == point_name(second)) == (words(first) == words(second))
    for name in (point_name(first), point_name(second)):
        assert len(name) < 140
        assert not set(name) - set(
            "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._+-=,~"
        )


def test_arguments_for_bash_end_with_nul_and_hold_anything(sweep_file, capsys):
    text = 'settings: {run_name: "a b\\n$(touch x)", project: "--odd"}\ngrid: {seed: [1]}\n'
    command.main(["point", sweep_file(text), "0"])
    assert capsys.readouterr().out.split("\0") == [
        "pretrain.py", "--run_name=a b\n$(touch x)", "--project=--odd", "--seed=1",
        "--output_dir=runs/s/seed=1", "",
    ]  # fmt: skip


def test_a_point_beyond_the_last_is_refused_with_their_number(sweep_file):
    with pytest.raises(ConfigurationError, match=r"has 2 points.*no point 2. Give --array=0-1"):
        command.main(["point", sweep_file("grid: {seed: [1, 2]}\n"), "2"])
    with pytest.raises(ConfigurationError, match="no point -1"):
        command.main(["point", sweep_file("grid: {seed: [1, 2]}\n"), "-1"])
    with pytest.raises(ConfigurationError, match=r"usage: python -m utils\.submit\.sweep"):
        command.main(["table", "a.yaml"])


def test_points_import_no_library_that_takes_seconds(sweep_file, tmp_path):
    program = (
        "import sys; from utils.submit.sweep import main; main(['points', sys.argv[1]]); "
        "sys.exit('transformers' in sys.modules or 'torch' in sys.modules)"
    )
    rest = f"script: pretrain.py\noutput_dir: {tmp_path}/s\n"
    file = sweep_file("grid: {seed: [1, 2]}\n", rest)
    done = subprocess.run([sys.executable, "-c", program, file], cwd=ROOT, check=False)
    assert done.returncode == 0


@pytest.mark.parametrize("path", sorted((ROOT / "recipes/sweep").glob("*.yaml")), ids=str)
def test_the_settings_of_every_point_of_a_shipped_sweep_exist(path):
    sweep = read_sweep(str(path))
    assert sweep.script == "pretrain.py"
    for point in sweep.points:
        settings = parse_pretraining([*sweep.arguments(point)[1:], "--dry_run"], "test")
        assert settings.training.output_dir == str(sweep.run_directory(point))


SWEEP_SCRIPT = """\
import os
from utils.config.errors import ConfigurationError

def main(argv):
    os.environ["LEFT"] = os.environ.get("LEFT", "") + "x"
    assert os.environ["LEFT"] == "x", "an earlier point changed the environment"
    print("12:00:00  as usual")
    print("12:00:00  WARNING  of the first")
    seed = next(word for word in argv if word.startswith("--seed="))
    if seed == "--seed=3":
        raise ConfigurationError(["shared fault", "own fault"])
    if "--grave=true" in argv:
        raise ConfigurationError("shared fault")
"""


@pytest.mark.parametrize(
    ("grave", "whose"), [("true", "every point"), ("false", "point 2 (seed=3)")]
)
def test_all_points_are_dry_run_and_their_faults_named_once(sweep_file, tmp_path, grave, whose):
    (tmp_path / "script.py").write_text(SWEEP_SCRIPT)
    settings = f"settings: {{grave: {grave}}}\ngrid: {{seed: [1, 2, 3]}}\n"
    sweep = read_sweep(sweep_file(settings, f"script: {tmp_path}/script.py\noutput_dir: r\n"))
    lines: list[str] = []
    with pytest.raises(ConfigurationError) as caught:
        command.check_points(sweep, lines.append)
    assert lines[1] == "12:00:00  as usual\n12:00:00  WARNING  of the first"
    assert lines[0::2] == ["point 0: seed=1", "point 1: seed=2"]
    assert lines[3] == "point 2: seed=3"
    assert caught.value.problems == [f"{whose}: shared fault", "point 2 (seed=3): own fault"]


def test_unfinished_points_are_those_without_a_final_model(sweep_file, tmp_path, capsys):
    rest = f"script: pretrain.py\noutput_dir: {tmp_path}/runs\n"
    file = sweep_file("grid: {seed: [1, 2, 3]}\n", rest)
    (tmp_path / "runs/seed=2/final").mkdir(parents=True)
    (tmp_path / "runs/seed=3").mkdir()
    (tmp_path / "runs/seed=3/config.yaml").touch()
    command.main(["unfinished", file])
    assert capsys.readouterr() == ("0,2", f"{file}: 2 of 3 points left to run\n")
    command.main(["points", file])
    assert capsys.readouterr().out.splitlines() == [
        "0\tseed=1\tnot started", "1\tseed=2\tfinished", "2\tseed=3\tstarted",
    ]  # fmt: skip
