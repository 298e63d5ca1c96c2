"""With deterministic kernels a resumed run equals the uninterrupted one, on a GPU if there is one.

On a CPU all used kernels are deterministic without the setting, so it must change nothing. On a GPU
these tests are the proofs of docs/exactness.md, with eager and with compiled layers.
"""

import shutil
import subprocess
import sys

import pytest
import torch
from launching import ROOT
from resumed_runs import Case, cut, outcome

pytestmark = pytest.mark.slow

ON_GPU = torch.cuda.is_available()
GPU = (
    pytest.mark.gpu,
    pytest.mark.skipif(not ON_GPU, reason="needs an NVIDIA GPU"),
)
CUTS = (2, 5) if ON_GPU else (3,)
# torch's own varlen kernel for GPUs has no dropout.
DROPOUT = 0.0 if ON_GPU else 0.1


@pytest.mark.parametrize(
    ("kind", "compiled"),
    [
        pytest.param("pretrain", False, marks=() if ON_GPU else pytest.mark.exhaustive),
        pytest.param("sft", False, marks=GPU),
        pytest.param("pretrain", True, marks=GPU),
        pytest.param("sft", True, marks=GPU),
    ],
)
def test_resumed_equals_uninterrupted_under_full_determinism(kind, compiled, models, tmp_path):
    """Use new processes, because cuBLAS reads its setting for determinism when it is loaded."""
    case = Case("single", kind, DROPOUT, 1, 0)
    changes = {"full_determinism": True, "compile": compiled, "bf16": ON_GPU}

    def start(run):
        argv = case.argv(models, run, **changes)
        command = [sys.executable, f"{case.script}.py", *argv]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
        return done.stdout

    whole = tmp_path / "whole"
    start(whole)
    expected = outcome(whole)
    for step in CUTS:
        run = tmp_path / f"cut-{step}"
        cut(whole, step, run)
        assert f"resuming from {run}/checkpoint-{step}" in start(run)
        assert outcome(run) == expected
        shutil.rmtree(run)
