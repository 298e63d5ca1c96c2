"""Steps that are not finite are found without waiting for the device, and all ranks agree."""

import json
import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from accelerate.state import PartialState
from torch import nn
from transformers import TrainerControl, TrainerState

from utils.callbacks.nonfinite import (
    FaultyStep,
    NonFiniteGuard,
    nonfinite_weights,
    write_step_report,
)
from utils.config.errors import NotFiniteError, SpikeError
from utils.data.loader import DocumentPart

ARGS = SimpleNamespace(device=torch.device("cpu"), process_index=0, ddp_timeout=60)


class Sampler:
    """A sampler of steps with three micro-batches of two sequences on each of two ranks."""

    micro_batch_size = 2

    def accumulation_at(self, _step: int) -> int:
        return 3

    def sequences_of_step(self, step: int) -> np.ndarray:
        return np.arange(step * 12, step * 12 + 12)


def documents_in(sequences: np.ndarray) -> list[DocumentPart]:
    """Return one document per sequence."""
    return [DocumentPart(Path("/data/x"), int(sequence), 0, 9) for sequence in sequences]


DATASET = SimpleNamespace(documents_in=documents_in)
LOADER = SimpleNamespace(batch_sampler=Sampler(), dataset=DATASET)


class Run:
    """Plays Trainer's steps with the guard."""

    def __init__(self, run: Path):
        PartialState()  # as Trainer does
        self.guard = NonFiniteGuard(run)
        self.state, self.control = TrainerState(), TrainerControl()
        self.event("on_train_begin", train_dataloader=LOADER)

    def event(self, name: str, **kwargs):
        getattr(self.guard, name)(ARGS, self.state, self.control, **kwargs)

    def step(self, *losses: float, norm: float | torch.Tensor | None = 1.0):
        self.event("on_step_begin")
        for loss in losses or (1.0, 1.0):
            self.guard.take_loss(torch.tensor(loss))
        self.guard.take_step(self.state.global_step, norm)
        self.state.global_step += 1


def test_a_norm_of_minus_1_is_deepspeeds_nan_and_ends_the_run_a_step_later(tmp_path):
    run = Run(tmp_path)
    run.guard.checks_gradients = False
    run.step(norm=math.inf)  # a loss scaler handles it
    run.guard.settle(nn.Linear(2, 2))
    assert not list(tmp_path.iterdir())
    run.guard.checks_gradients = True
    run.step(norm=-1.0)
    run.step()
    with pytest.raises(NotFiniteError, match=r"step 2: the gradient norm is not finite \(-1\.0\)"):
        run.event("on_step_begin")


class SlowDevice:
    """A device event that is not reached before the host waits for it."""

    passed = False

    def query(self) -> bool:
        return self.passed

    def synchronize(self) -> None:
        self.passed = True


def test_no_step_waits_for_the_device_and_a_save_does(tmp_path):
    run = Run(tmp_path)
    events: list[SlowDevice] = []

    def step(loss: float) -> None:
        run.step(loss)
        events.append(SlowDevice())
        number, values, _ = run.guard.pending.pop()
        run.guard.pending.append((number, values, events[-1]))

    for loss in (1.0, math.nan, 1.0):
        step(loss)
    assert not any(event.passed for event in events)
    events[0].passed = True
    step(1.0)
    assert [number for number, *_ in run.guard.pending] == [1, 2, 3]
    with pytest.raises(NotFiniteError, match="step 2: the loss"):
        run.guard.settle()
    assert all(event.passed for event in events)


@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_spoilt_weights_are_found_and_named(value):
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2)).to(torch.bfloat16)
    assert nonfinite_weights(model) == []
    with torch.no_grad():
        model[1].bias[1] = value
    assert nonfinite_weights(model) == ["1.bias"]
    model[1].bias.requires_grad_(False)
    assert nonfinite_weights(model) == [], "a frozen one is not this run's doing"
    assert nonfinite_weights(nn.Identity()) == []
    model[0].weight.ds_tensor = torch.tensor([1.0, value])  # ZeRO-3's shard
    assert nonfinite_weights(model) == ["0.weight"]


def test_the_report_names_the_earliest_step_of_any_rank(tmp_path):
    nan = {0: math.nan}
    found = [FaultyStep(0, 7, nan), FaultyStep(1, 6, {1: math.inf}), FaultyStep(0, 6, nan)]
    message = write_step_report(found, LOADER, tmp_path)
    cause = "step 7: the loss of rank 1 in micro-batch 2 is inf, and 1 more are not finite.\n"
    assert message.startswith(cause)
    facts = json.loads((tmp_path / "nonfinite-step-7.json").read_text())
    assert facts["losses"][0] == {"rank": 1, "micro_batch": 1, "loss": "Infinity"}
    # The step has 12 sequences from 72 on. A micro-batch of a rank has the sequences 4 *
    # micro-batch + 2 * rank and the next one.
    assert [entry["document"] for entry in facts["documents"]][:4] == [78, 79, 72, 73]
    message = write_step_report(
        [FaultyStep(0, 0, gradient_norm=math.nan)], LOADER, tmp_path / "gone"
    )
    assert "global batch: 0 of /data/x, 1 of /data/x, 2 of /data/x, 3 of /data/x, ... (" in message
    assert "the list of all could not be written: [Errno 2]" in message


def logged(run: Run, losses: list[float]) -> None:
    """Train a step for each loss, and log it as Trainer does."""
    for loss in losses:
        run.step(loss)
        line = {"loss": loss, "grad_norm": 1.0, "step": run.state.global_step}
        run.state.log_history.append(line)
        run.event("on_log", logs={"loss": loss})


def test_a_spike_ends_the_run_before_anything_is_saved_unless_it_is_off(tmp_path):
    for step in (10, 30):
        (tmp_path / f"checkpoint-{step}").mkdir()
    run = Run(tmp_path)
    logged(run, [2.0, 2.1] * 16 + [9.0, 9.0])
    run.guard.settle()
    run.guard.on_spike = "stop"
    run.event("on_log", logs={"eval_loss": 99.0})
    logged(run, [2.0, 2.1])
    run.guard.settle()
    with pytest.raises(SpikeError, match=r"step 37: loss 8, usually 2\.1: ") as caught:
        logged(run, [8.0, 2.0, 2.0])
    assert run.state.global_step == 38, "all ranks learn of a spike in the next step"
    assert caught.value.exit_code == 80
    message = str(caught.value)
    assert f"python status.py {tmp_path} --step 37 --json | head -n 4 >>skip.jsonl" in message
    assert "--skip_documents skip.jsonl --accept_changes skip_documents\n" in message
    with pytest.raises(SpikeError):
        run.guard.settle()
    assert not list(tmp_path.glob("nonfinite*"))


def test_a_loss_that_is_not_finite_wins_over_a_spike(tmp_path):
    run = Run(tmp_path)
    run.guard.on_spike = "stop"
    logged(run, [2.0] * 20)
    with pytest.raises(NotFiniteError, match="step 21: the loss of rank 0 in micro-batch 1 is nan"):
        logged(run, [math.nan, 2.0, 2.0])
