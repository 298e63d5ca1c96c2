"""lm_eval on a finished model: its arguments, its results, and failures that harm no run.

A stand-in takes the arguments of lm_eval 0.4.13. A table lists how each argument takes its values.
"""

import json
import logging
import os

import pytest
from forked_ranks import ROOT, STRATEGIES
from launching import run_processes

from utils.config.errors import ConfigurationError
from utils.publish import evaluate
from utils.publish.hub import files_to_publish
from utils.run.finish import run_or_warn

pytestmark = pytest.mark.slow

STAND_IN = """
import argparse, json, os, pathlib, psutil, sys, time
parser = argparse.ArgumentParser(allow_abbrev=False)
parser.add_argument("command", choices=["run"])
for name, count in {"model": None, "tasks": "*", "model_args": "+", "output_path": None,
                    "limit": None, "batch_size": None, "apply_chat_template": "?"}.items():
    parser.add_argument(f"--{name}", nargs=count)
given = parser.parse_args()
others = [name for name in os.environ if name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")
          or name.startswith(("ACCELERATE_", "FSDP_"))]
assert not others, f"lm_eval would wait for other ranks: {others}"
(model,) = given.model_args
files = sorted(path.name for path in pathlib.Path(model.removeprefix("pretrained=")).iterdir())
assert {"config.json", "model.safetensors", "tokenizer.json"} <= set(files)
if "broken" in given.tasks:
    sys.exit("ConnectionError: Couldn't reach the data on the Hub")
time.sleep(float(os.environ.get("STAND_IN_S", "0")))
print("|the table|", given.tasks)

ranks = psutil.Process(os.getppid()).parent().children()
print("ranks:", sum(rank.status() != psutil.STATUS_ZOMBIE for rank in ranks))
path = pathlib.Path(given.output_path) / "model" / "results_2026-11-25.json"
path.parent.mkdir()
figures = {"alias": "a", "acc,none": 0.25, "acc_stderr,none": 0.125, "acc_norm,none": 0.5}
path.write_text(json.dumps({
    "results": {task: figures for task in given.tasks}, "n-shot": {given.tasks[0]: 5},
    "config": {"limit": float(given.limit or 0)}, "lm_eval_version": "0.4.13"}))
"""


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    package = tmp_path / "packages" / "lm_eval"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text(STAND_IN)
    monkeypatch.syspath_prepend(package.parent)
    found = os.pathsep.join([str(package.parent), os.environ.get("PYTHONPATH", "")])
    monkeypatch.setenv("PYTHONPATH", found)
    return package.parent


@pytest.fixture
def finished(tmp_path):
    final = tmp_path / "run" / "final"
    final.mkdir(parents=True)
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (final / name).touch()
    (final / "README.md").write_text("---\nlicense: mit\n---\n\n# run\n")
    return tmp_path / "run"


def test_a_run_on_two_ranks_evaluates_its_model_and_all_wait(stand_in, pretraining, tmp_path):
    run = tmp_path / "run"
    argv = pretraining(run, max_steps=1, save_steps=5, lm_eval_tasks=["counting", "other"])
    folders = os.pathsep.join([os.environ["PYTHONPATH"], str(ROOT), str(STRATEGIES)])
    environment = {"STAND_IN_S": "3", "PYTHONPATH": folders}
    shown = run_processes("multi_gpu", "pretrain.py", argv, environment).succeeded()
    assert "|the table| ['counting', 'other']\nranks: 2\n" in shown
    assert set(json.loads((run / "lm_eval.json").read_text())["results"]) == {"counting", "other"}
    assert json.loads((run / ".lock" / "owner-1").read_text())["left"]


def test_flags_reach_lm_eval_and_its_results_the_card(stand_in, finished, capfd):
    argv = [str(finished), "--tasks", "a", "b", "--limit", "7", "--apply_chat_template"]
    assert evaluate.main(argv) == 0
    assert "|the table| ['a', 'b']" in capfd.readouterr().out
    card = files_to_publish(finished, "me/x")["README.md"].decode()
    assert "By lm-evaluation-harness 0.4.13, with --limit 7." in card
    assert "| a | 5 | acc (none) | 0.2500 | 0.1250 |\n| a | 5 | acc_norm (none) |" in card
    assert card.count("| b |") == 2
    assert "acc_stderr" not in card


def test_what_fails_says_what_to_type_and_fails_no_run(finished, stand_in, caplog, capfd):
    with pytest.raises(ConfigurationError, match="run --model dummy --tasks broken --limit 1"):
        evaluate.main([str(finished), "--tasks", "broken"])
    with caplog.at_level(logging.WARNING):
        run_or_warn("lm_eval_tasks", evaluate, [str(finished), "--tasks", "broken"])
    assert "lm_eval_tasks: the run is complete, but this failed: lm_eval ended" in caplog.text
    assert f"Again: python -m utils.publish.evaluate {finished} --tasks broken" in caplog.text
    assert "Couldn't reach the data on the Hub" in capfd.readouterr().err
    assert not (finished / "lm_eval.json").exists()
    with pytest.raises(ConfigurationError, match="has no final/"):
        evaluate.main([str(finished.parent), "--tasks", "a"])


def test_without_lm_eval_the_command_says_how_to_get_it(finished, monkeypatch):
    monkeypatch.setattr(evaluate, "is_installed", lambda _: False)
    with pytest.raises(ConfigurationError, match=r"pip install 'lm_eval>=0\.4"):
        evaluate.main([str(finished), "--tasks", "a"])
