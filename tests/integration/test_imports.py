"""A command imports only what it needs, which saves seconds at every start."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

NEVER = {"matplotlib", "scipy", "sklearn", "tensorboard", "torch.utils.tensorboard", "wandb"}
FINE_TUNING_ALONE = {"trl.trainer.sft_trainer", "trl.trainer.utils"}
TRAINING_ALONE = {"datasets", "deepspeed", "transformers.trainer", "utils.training.trainer"}
# A dry run imports the libraries that check its optimizer; Trainer imports datasets and so pandas.
REHEARSAL = {"datasets", "transformers.trainer"}
FORBIDDEN = {
    "help": NEVER | FINE_TUNING_ALONE | TRAINING_ALONE | {"pyarrow", "utils.plan"},
    "dry run": NEVER | FINE_TUNING_ALONE | (TRAINING_ALONE - REHEARSAL) | {"utils.run.finish"},
    "start": NEVER | FINE_TUNING_ALONE,
}
# One process runs all commands in turn, because each imports more than the one before.
COMMANDS = """
import contextlib, json, sys
import pretrain

imported = {}
with contextlib.redirect_stdout(sys.stderr):
    for name, arguments in (("help", ["--help"]), ("dry run", ["--dry_run"]), ("start", [])):
        with contextlib.suppress(SystemExit):
            assert pretrain.main([*sys.argv[1:], *arguments]) == 0
        imported[name] = list(sys.modules)
print(json.dumps(imported))
"""


def test_a_command_imports_what_it_needs(pretraining, tmp_path):
    argv = pretraining(tmp_path / "run", max_steps=1)
    done = subprocess.run(
        [sys.executable, "-c", COMMANDS, *argv],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    imported = json.loads(done.stdout)
    found = {name: sorted(FORBIDDEN[name].intersection(imported[name])) for name in FORBIDDEN}
    assert found == {name: [] for name in FORBIDDEN}
    assert "torch" in imported["help"]  # this proves that the test sees imports
    assert {"transformers.trainer", "utils.run.finish"} <= set(imported["start"])


def test_the_benchmarks_of_a_run_are_refused_before_the_slow_imports():
    check = "import sys, utils.publish.evaluate; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0
