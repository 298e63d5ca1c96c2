"""Steps that are not finite: seen without a wait for the device, named, agreed on by all ranks."""

import json
import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from accelerate.state import GradientState, PartialState
from torch import nn
from transformers import TrainerControl, TrainerState

from utils.callbacks import nonfinite
from utils.callbacks.nonfinite import NonFiniteGuard, guard_among
from utils.callbacks.nonfinite_report import Finding, named_documents, write_report
from utils.callbacks.weights import spoilt_weights
from utils.cluster.notes import read_notes
from utils.cluster.script import run_script
from utils.config.checks.nonfinite import check_nonfinite, check_skipping
from utils.config.errors import ConfigurationError, NotFiniteError
from utils.config.reading.declarations import declared_settings
from utils.config.reading.settings import SettingValues
from utils.config.run_arguments import RunArguments
from utils.config.trainer_arguments import PretrainConfig
from utils.data.packed_rows import DocumentPart
from utils.jobs.verdict import judge

ARGS = SimpleNamespace(device=torch.device("cpu"), process_index=0, ddp_timeout=60)


class Rows:
    """Rows that are documents of their own."""

    def documents_in_rows(self, rows: np.ndarray) -> list[DocumentPart]:
        return [DocumentPart(Path("/data/x"), int(row), 0, 9) for row in rows]


class Sampler:
    """Three micro-batches of two rows on each of two ranks, rows numbered as they come."""

    accumulation_steps, micro_batch_size = 3, 2

    def rows_of_step(self, step: int) -> np.ndarray:
        return np.arange(step * 12, step * 12 + 12)


LOADER = SimpleNamespace(batch_sampler=Sampler(), dataset=Rows())


class Run:
    """What Trainer does with the guard, step by step."""

    def __init__(self, run: Path, **settings):
        PartialState()  # as a Trainer makes it
        self.guard = NonFiniteGuard(run, **settings)
        self.state, self.control = TrainerState(), TrainerControl()
        self.state.stateful_callbacks = {}
        self.event("on_train_begin", train_dataloader=LOADER)

    def event(self, name: str, **kwargs):
        getattr(self.guard, name)(ARGS, self.state, self.control, **kwargs)

    def step(self, *losses: float, norm: float | torch.Tensor | None = 1.0, targets: int = 5):
        """Return whether the optimizer steps."""
        self.event("on_step_begin")
        for loss in losses or (1.0, 1.0):
            self.guard.take_loss(torch.tensor(loss), torch.tensor(targets))
        self.guard.take_step(self.state.global_step, norm)
        GradientState()._set_sync_gradients(True)
        self.event("on_pre_optimizer_step")
        stepped = GradientState().sync_gradients
        self.event("on_optimizer_step")
        assert GradientState().sync_gradients
        self.state.global_step += 1
        return stepped


def test_finite_steps_pass(tmp_path):
    run = Run(tmp_path)
    for _step in range(3):
        assert run.step(norm=None)
    run.guard.settle(nn.Linear(2, 2))
    assert run.guard.metrics() == {}
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("losses", "norm", "cause"),
    [
        ((1.0, math.nan), 1.0, "step 2: the loss of rank 0 in micro-batch 2 is NaN."),
        ((-math.inf, 1.0), 1.0, "step 2: the loss of rank 0 in micro-batch 1 is infinite."),
        ((1.0, 1.0), math.nan, "step 2: the gradient norm is NaN, though the losses are finite."),
        ((1.0, 1.0), torch.tensor(math.inf), "step 2: the gradient norm is infinite, though"),
        ((1.0, 1.0), -1.0, "step 2: the gradient norm is not finite, though"),  # DeepSpeed's word
    ],
)
def test_a_step_that_is_not_finite_ends_the_run_at_the_next_one(tmp_path, losses, norm, cause):
    run = Run(tmp_path)
    run.step()
    run.step(*losses, norm=norm)
    with pytest.raises(NotFiniteError) as caught:
        run.event("on_step_begin")
    assert cause in str(caught.value)
    assert caught.value.exit_code == 78
    assert len(caught.value.problems) == 1
    facts = json.loads((tmp_path / "nonfinite-step-2.json").read_text())
    spoilt = [place for place, loss in enumerate(losses) if not math.isfinite(loss)]
    expected = [12 + place * 4 + row for place in spoilt for row in (0, 1)] or list(range(12, 24))
    assert [entry["document"] for entry in facts["documents"]] == expected
    assert facts["documents_of"] == ("the micro-batches" if spoilt else "the global batch")
    assert not list(tmp_path.glob(".*"))


def test_what_asks_before_saving_hears_of_it_at_once(tmp_path):
    run = Run(tmp_path)
    run.step(math.nan)
    with pytest.raises(NotFiniteError, match="step 1: the loss"):
        run.guard.settle()


class SlowDevice:
    """An event of a device that has not come so far; to wait for it is counted."""

    waits = 0

    def __init__(self, passed: bool = False):
        self.passed = passed

    def record(self) -> None:
        """Nothing."""

    def query(self) -> bool:
        return self.passed

    def synchronize(self) -> None:
        SlowDevice.waits += 1
        self.passed = True


def test_no_step_waits_for_the_device_and_a_save_does(tmp_path, monkeypatch):
    run = Run(tmp_path)
    monkeypatch.setattr(SlowDevice, "waits", 0)
    events: list[SlowDevice] = []

    def step(loss: float) -> None:
        run.step(loss)
        events.append(SlowDevice())
        last = run.guard.on_their_way.pop()
        run.guard.on_their_way.append(nonfinite._StepFigures(last.step, last.values, events[-1]))

    for loss in (1.0, math.nan, 1.0):
        step(loss)
    assert SlowDevice.waits == 0
    events[0].passed = True
    step(1.0)
    assert [figures.step for figures in run.guard.on_their_way] == [1, 2, 3]
    with pytest.raises(NotFiniteError, match="step 2: the loss"):
        run.guard.settle()
    assert SlowDevice.waits == 3


def test_a_step_is_skipped_counted_and_named(tmp_path, caplog):
    caplog.set_level("INFO")
    run = Run(tmp_path, on_nonfinite="skip", limit=2)
    assert "every step waits for the device before its optimizer step; 0 of at" in caplog.text
    assert run.step()
    assert not run.step(math.nan, 1.0)
    assert run.guard.metrics() == {"nonfinite_steps": 1}
    assert run.step()
    assert not run.step(1.0, 1.0, norm=math.inf)
    assert "step 2 skipped (1 of at most 2), weights and optimizer left as they w" in caplog.text
    assert "step 4 skipped (2 of at most 2)" in caplog.text
    assert {path.name for path in tmp_path.iterdir()} == {
        "nonfinite-step-2.json", "nonfinite-step-4.json",
    }  # fmt: skip
    with pytest.raises(NotFiniteError, match="NaN; 2 steps were skipped before, and nonfinite_li"):
        run.step(math.nan)


def test_the_count_goes_with_the_checkpoints(tmp_path):
    first = Run(tmp_path, on_nonfinite="skip", limit=1)
    first.step(math.nan)
    kept = json.loads(json.dumps(first.state.stateful_callbacks))
    second = Run(tmp_path)
    second.state.stateful_callbacks = kept
    second.event("on_train_begin", train_dataloader=LOADER)
    assert second.guard.metrics() == {"nonfinite_steps": 1}, "whatever is done from now on"


def test_gradients_that_a_loss_scaler_deals_with_are_not_judged(tmp_path):
    run = Run(tmp_path)
    run.guard.judges_gradients = False
    run.step(norm=math.inf)
    run.guard.settle()
    run.step(math.nan, norm=1.0)
    with pytest.raises(NotFiniteError, match="step 2: the loss"):
        run.guard.settle()


def test_a_global_batch_without_a_loss_bearing_token_is_told_of(tmp_path, caplog):
    run = Run(tmp_path)
    run.step(targets=3)
    run.step(0.0, 0.0, norm=0.0, targets=0)
    run.guard.settle()
    assert caplog.text.count("has no loss-bearing token") == 1
    assert "step 2: the global batch has no loss-bearing token, so its loss" in caplog.text


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_spoilt_weights_are_found_by_name(dtype, value):
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2)).to(dtype)
    assert spoilt_weights(model) == []
    with torch.no_grad():
        model[1].bias[1] = value
    assert spoilt_weights(model) == ["1.bias"]
    model[1].bias.requires_grad_(False)
    assert spoilt_weights(model) == [], "a frozen one is not this run's doing"
    assert spoilt_weights(nn.Identity()) == []


def test_shards_are_looked_at_where_they_are():
    model = nn.Linear(2, 2, bias=False)
    model.weight.ds_tensor = torch.tensor([1.0, math.inf])  # as ZeRO-3 keeps it
    assert spoilt_weights(model) == ["weight"]


def test_weights_name_the_last_step(tmp_path):
    run = Run(tmp_path)
    run.step()
    run.step()
    model = nn.Linear(1, 1)
    with torch.no_grad():
        model.weight.fill_(math.inf)
    words = r"step 2: 1 of the weights are not finite after it \(weight\), though"
    with pytest.raises(NotFiniteError, match=words):
        run.guard.settle(model)
    facts = json.loads((tmp_path / "nonfinite-step-2.json").read_text())
    assert facts["weights"] == ["weight"]


def test_the_earliest_step_of_any_rank_is_the_one_to_name(tmp_path):
    found = [
        Finding(0, 7, {0: math.nan}),
        Finding(1, 6, {1: math.inf}),
        Finding(0, 6, {0: math.nan}),
    ]
    report = write_report(found, LOADER, tmp_path)
    assert report.step == 7
    assert "loss of rank 1 in micro-batch 2 is infinite, the loss of rank 0 in m" in report.cause
    facts = json.loads((tmp_path / "nonfinite-step-7.json").read_text())
    assert facts["losses"][0] == {"rank": 1, "micro_batch": 1, "loss": "Infinity"}
    # Row 4 * micro-batch + 2 * rank and the next one, of the 12 from 72 on.
    assert [entry["document"] for entry in facts["documents"]] == [78, 79, 72, 73]


def test_many_losses_and_documents_are_counted_not_listed(tmp_path):
    report = write_report([Finding(0, 0, dict.fromkeys(range(2), math.nan))], LOADER, tmp_path)
    assert "documents of the micro-batches: 0, 1, 4, 5 of /data/x" in report.documents
    parts = [DocumentPart(Path("/a"), number % 20, 0, 1) for number in range(40)]
    assert named_documents(parts) == "0, 1, 2, 3, 4, 5, 6, 7 of /a; and 12 more"
    found = [Finding(rank, 0, {0: math.nan}) for rank in range(2)] * 3
    assert "(and those of 2 more micro-batches)" in write_report(found, LOADER, tmp_path).cause


def test_a_list_that_cannot_be_written_hides_nothing(tmp_path):
    report = write_report([Finding(0, 0, {0: math.nan})], LOADER, tmp_path / "gone")
    assert "the list of all could not be written: [Errno 2]" in report.stopped()
    assert "step 1: the loss of rank 0" in report.stopped()


def test_skipping_is_refused_where_it_cannot_be_done():
    check_skipping(False, "bf16")
    with pytest.raises(ConfigurationError, match="does not go with DeepSpeed, whose optimizer"):
        check_skipping(True, "bf16")
    with pytest.raises(ConfigurationError, match="does not go with mixed_precision fp16"):
        check_skipping(False, "fp16")


def test_the_guard_is_found_among_callbacks(tmp_path):
    guard = NonFiniteGuard(tmp_path)
    assert guard_among([SimpleNamespace(), guard]) is guard


def test_the_script_ends_with_its_code_and_the_launcher_calls_it_failed(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setenv("STOKER_NOTES_DIR", str(tmp_path))
    monkeypatch.setenv("RANK", "0")

    def main() -> int:
        raise NotFiniteError("step 2: the loss of rank 0 in micro-batch 1 is NaN.\nlook there")

    assert run_script(main) == 78
    shown = capsys.readouterr().err
    assert shown.startswith("not finite (1 problem):\n  - step 2: the loss of rank 0")
    verdict = judge(read_notes(tmp_path))
    assert verdict.exit_code == 78
    assert "failed: step 2: the loss of rank 0 in micro-batch 1 is NaN." in verdict.text


def test_settings_that_contradict_each_other_are_refused():
    def problems(**given: object) -> list[str]:
        declared = declared_settings([RunArguments, PretrainConfig])
        given = {"global_batch_size": 1} | given
        return list(check_nonfinite(SettingValues(declared, given, {})))

    assert problems() == problems(on_nonfinite="skip", nonfinite_limit=9) == []
    assert "has no effect without on_nonfinite: skip" in problems(nonfinite_limit=9)[0]
    assert "does not go with fp16" in problems(on_nonfinite="skip", fp16=True)[0]
