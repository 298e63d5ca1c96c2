"""A refusal is printed below the traceback with which torchrun and `accelerate launch` end."""

import subprocess
import sys

import pytest
from launching import CONFIGS, ROOT, free_port, quiet_environment

pytestmark = pytest.mark.slow

SCRIPT = """
import os, sys, time
from utils.config.errors import ConfigurationError
from utils.launch.script import run_script

def main():
    rank, trouble = os.environ.get("RANK", "0"), sys.argv[1]
    if trouble == "all":
        raise ConfigurationError(["learning_rate -1: it must be above 0", "no model"])
    if rank == trouble:
        raise {"0": KeyError("lost"), "1": OSError(28, "No space left on device", "ckpt")}[rank]
    time.sleep(60)

sys.exit(run_script(main))
"""
REFUSED = [
    "configuration error (2 problems):", "- learning_rate -1: it must be above 0", "- no model",
]  # fmt: skip
TORCHRUN = ["-m", "torch.distributed.run", "--nproc_per_node=2"]
ACCELERATE = ["-m", "accelerate.commands.accelerate_cli", "launch"]
SEVERAL = [*ACCELERATE, "--config_file", str(CONFIGS / "cpu.yaml"), "--num_processes=2"]
ONE = [*ACCELERATE, "--config_file", str(CONFIGS / "single_gpu.yaml")]


@pytest.mark.parametrize(
    ("launcher", "trouble", "said"),
    [
        (TORCHRUN, "all", REFUSED),
        (TORCHRUN, "1", ["rank 1  storage error: ", "No space left on device, writing ckpt"]),
        (TORCHRUN, "0", ["KeyError: 'lost' ("]),
        (SEVERAL, "all", REFUSED),
        (ONE, "all", REFUSED),
    ],
    ids=["torchrun", "torchrun rank 1", "torchrun unforeseen", "accelerate", "accelerate of one"],
)
def test_what_went_wrong_is_in_the_last_lines(launcher, trouble, said, tmp_path):
    (script := tmp_path / "script.py").write_text(SCRIPT)
    words = [*launcher, str(script), trouble]
    if launcher is not ONE:
        at = words.index(launcher[-1])
        words.insert(at, f"--{'master' if launcher is TORCHRUN else 'main_process'}_port")
        words.insert(at + 1, str(free_port()))
    done = subprocess.run(
        [sys.executable, *words], check=False, env=quiet_environment(), cwd=ROOT,
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 1, "the launchers' own code"
    lines = [line for line in done.stderr.splitlines() if set(line) != {"="}]
    last = lines[-len(said) :] if said is REFUSED else lines[-1:] * len(said)
    assert all(text in line for text, line in zip(said, last, strict=True)), done.stderr
    assert "Traceback" not in "\n".join(last)
    assert "Traceback" in "\n".join(lines[: -len(said)]), "the launcher's own is above"
