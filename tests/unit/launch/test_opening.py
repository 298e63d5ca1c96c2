"""The first line, --version and the short help of each script, before heavy imports."""

import re
import shlex
import subprocess
import sys
from importlib.metadata import version

import pytest
from launching import ROOT, quiet_environment

from utils.config.errors import ExitCode
from utils.config.preparation import parse_preparation
from utils.config.settings import parse_fine_tuning, parse_pretraining
from utils.launch.opening import opening_line
from utils.launch.script import run_script

SCRIPTS = ("pretrain", "sft_train", "prepare_data", "chat", "report")
# A package torch whose import says so and ends the process.
IMPORTED = (
    "import os, sys\nsys.stderr.write('torch is imported\\n')\nsys.stderr.flush()\nos._exit(9)"
)


def answer(monkeypatch, capsys, *words: str, usage: str | None = None):
    monkeypatch.setattr(sys, "argv", ["/somewhere/script.py", *words])
    code = run_script(lambda: 5, usage)
    return code, capsys.readouterr()


def test_version_names_the_commit_and_the_packages(monkeypatch, capsys):
    code, shown = answer(monkeypatch, capsys, "--version")
    assert (code, shown.err) == (ExitCode.DONE, "")
    assert re.match(
        r"stoker \d+\.\d+\.\d+( \(commit [0-9a-f]{12}(, with changes)?\))?\n", shown.out
    )
    for name in ("torch", "transformers", "trl"):
        assert f"\n{name} {version(name)}\n" in shown.out
    monkeypatch.setenv("RANK", "1")
    assert answer(monkeypatch, capsys, "--version") == (0, ("", ""))


def test_a_script_without_arguments_shows_examples_and_is_refused(monkeypatch, capsys):
    code, shown = answer(monkeypatch, capsys, usage="Does it.\n\n    python script.py x\n")
    assert (code, shown.out) == (ExitCode.REFUSED, "")
    assert shown.err.startswith("Does it.\n\n    python script.py x\n")
    assert "python script.py --help" in shown.err
    assert answer(monkeypatch, capsys, "x", usage="Does it.")[0] == 5
    assert answer(monkeypatch, capsys)[0] == 5, "status.py works without arguments"


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_examples_of_a_script_are_three_commands_that_it_accepts(script, monkeypatch):
    monkeypatch.chdir(ROOT)
    text = (ROOT / f"{script}.py").read_text().replace("\\\n", " ")
    examples = re.findall(rf"^    \S+ ({script}\.py .*?)(?:  +#.*)?$", text, re.MULTILINE)
    examples = [each.partition("  # ")[0] for each in examples]
    assert len(examples) >= 3
    parse = {"pretrain": parse_pretraining, "sft_train": parse_fine_tuning}.get(script)
    for example in examples:
        words = shlex.split(example.removesuffix(" --dry_run"))[1:]
        if parse is not None:
            parse([*words, "--dry_run"], "")
        elif script == "prepare_data":
            parse_preparation(words, "")


@pytest.mark.parametrize(
    ("script", "words", "line"),
    [
        ("sft_train", "--train_data D --model_name_or_path M", "M"),
        ("pretrain", "--config {recipe} --seed 2", "{recipe}, output in runs/of-the-recipe"),
        ("prepare_data", "--sources a b --output_dir data/x", "a b, output in data/x"),
        ("chat", "runs/x --greedy", "runs/x"),
    ],
)  # fmt: skip
def test_the_first_line_comes_before_torch_is_imported(script, words, line, tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("output_dir: runs/of-the-recipe\n")
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").write_text(IMPORTED)
    words, line = (text.format(recipe=recipe) for text in (words, line))
    shown = {}
    for rank in ("0", "1"):
        done = subprocess.run(
            [sys.executable, ROOT / f"{script}.py", *words.split()],
            env=quiet_environment({"PYTHONPATH": str(tmp_path), "RANK": rank}),
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        shown[rank] = done.stderr.splitlines()
    assert re.fullmatch(rf"\d\d:\d\d:\d\d  {script}\.py: {re.escape(line)}", shown["0"][0])
    assert not any(f"{script}.py: " in each for each in shown["1"]), "rank 0 alone says it"
    if script != "prepare_data":
        assert shown["0"][1:] == shown["1"] == ["torch is imported"]


def test_faulty_words_are_left_to_the_script():
    line = opening_line("pretrain.py", ["--config", "none.yaml", "x", "--seed"])
    assert line.endswith("pretrain.py: none.yaml x")
