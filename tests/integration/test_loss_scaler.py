"""A loss scaler goes on where it was: its scale and how long it has held belong to a run's state.

Accelerate makes one for float16 on a GPU. Here each Accelerator gets torch's scaler for CPUs, which
scales the loss and takes the scale off the gradients as the one for GPUs does.
"""

import pytest
import torch
from accelerate import Accelerator
from provoked_runs import STEPS, Provoke, assert_the_same, touch

from utils.config.errors import ExitCode

pytestmark = pytest.mark.slow

SCALER = f"checkpoint-{STEPS}/scaler.pt"


@pytest.fixture
def scaled_losses(monkeypatch):
    """Let every Accelerator scale losses, to twice the scale after each third step."""
    make = Accelerator.__init__

    def with_a_scaler(accelerator, *args, **kwargs):
        make(accelerator, *args, **kwargs)
        accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=3)

    monkeypatch.setattr(Accelerator, "__init__", with_a_scaler)


def test_a_resumed_run_scales_as_the_uninterrupted_one(scaled_losses, start, tmp_path):
    whole, run = tmp_path / "whole", tmp_path / "run"
    assert start(whole) == ExitCode.DONE
    assert start(run, Provoke("on_step_begin", 4, touch("STOP"))) == ExitCode.STOPPED
    assert start(run) == ExitCode.DONE
    assert_the_same(run, whole)
    states = [torch.load(folder / SCALER, weights_only=True) for folder in (run, whole)]
    assert states[0] == states[1]
    assert (states[1]["scale"], states[1]["_growth_tracker"]) == (4.0 * 2**2, STEPS % 3)
