"""Launches that would go wrong in silence are refused, in real processes."""

import subprocess
import sys

import pytest
from launching import ROOT, quiet_environment, run_processes, run_two_processes

SCRIPT = "tests/integration/tiny_trainer.py"
ARGS = ["--micro_batch_size", "2", "--output_dir"]

pytestmark = pytest.mark.slow


def assert_refused(output, message, folder):
    assert message in output, output[-4000:]
    assert "utils.config.errors.ConfigurationError" in output
    assert "RESULT" not in output
    assert not list(folder.glob("checkpoint-*"))


def test_two_processes_that_each_believe_they_are_alone_are_refused(tmp_path):
    # No GPU and no ACCELERATE_USE_CPU: accelerate connects nobody.
    done = run_two_processes("multi_gpu", SCRIPT, [*ARGS, str(tmp_path)], cpu_environment=False)
    assert done.returncode != 0
    assert_refused(done.stdout, "started 2 processes, but accelerate connected 1", tmp_path)


def test_a_strategy_that_becomes_plain_ddp_on_a_cpu_is_refused(tmp_path):
    done = run_two_processes(
        "fsdp2", SCRIPT, [*ARGS, str(tmp_path)], cpu_environment=False,
        env={"ACCELERATE_USE_CPU": "true"},
    )  # fmt: skip
    assert done.returncode != 0
    assert_refused(done.stdout, "asked for fsdp2, but accelerate runs ddp", tmp_path)


def test_several_cpu_processes_of_which_accelerate_starts_one_are_refused(tmp_path):
    command = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch", "--cpu"]
    done = subprocess.run(
        [*command, "--num_processes", "2", SCRIPT, *ARGS, str(tmp_path)],
        env=quiet_environment(), cwd=ROOT, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode != 0
    assert_refused(done.stdout + done.stderr, "starts only one with --cpu or use_cpu", tmp_path)


def test_one_process_through_the_launcher_is_not_refused(tmp_path):
    done = run_processes("cpu", SCRIPT, [*ARGS, str(tmp_path)], processes=1)
    assert done.returncode == 0, done.stdout[-4000:]
    assert "RESULT" in done.stdout
