"""A command imports what it needs: seconds of every start."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

NEVER = {"matplotlib", "scipy", "sklearn", "tensorboard", "torch.utils.tensorboard", "wandb"}
FINE_TUNING_ALONE = {"trl.trainer.sft_trainer", "trl.trainer.utils"}
TRAINING_ALONE = {"datasets", "deepspeed", "transformers.trainer", "utils.training.trainer"}
FORBIDDEN = {
    "help": NEVER | FINE_TUNING_ALONE | TRAINING_ALONE | {"pyarrow", "utils.planning"},
    "dry run": NEVER | FINE_TUNING_ALONE | TRAINING_ALONE | {"pandas", "utils.runs.finish"},
    "start": NEVER | FINE_TUNING_ALONE,
}
# One process for all: each command imports what the one before did, and more.
COMMANDS = """
import contextlib, json, sys
import pretrain

argv = sys.argv[1:]
imported = {}
with contextlib.redirect_stdout(sys.stderr):
    with contextlib.suppress(SystemExit):
        pretrain.main(["--help"])
    imported["help"] = list(sys.modules)
    assert pretrain.main([*argv, "--dry_run", "true"]) == 0
    imported["dry run"] = list(sys.modules)
    assert pretrain.main(argv) == 0
    imported["start"] = list(sys.modules)
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
    assert "torch" in imported["help"]  # the test does look
    assert {"transformers.trainer", "utils.runs.finish"} <= set(imported["start"])
