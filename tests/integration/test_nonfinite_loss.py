"""A loss or gradient that is not finite: on whichever rank, it is found, named, and never kept."""

import hashlib
import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
import tiny
import torch
from launching import run_two_processes
from poisoned_run import POISON, compute_loss_poisoned
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments

import pretrain
from utils.callbacks.journal_file import read_journal
from utils.config.errors import ConfigurationError, ExitCode, NotFiniteError
from utils.data.order import SampleOrder

pytestmark = pytest.mark.slow

POISONED_RUN = Path(__file__).with_name("poisoned_run.py")
KINDS = ("nan", "inf_loss", "inf_gradient")
DOCUMENTS = 60
STEP = 4  # of 6, saved after 2, 4 and 6: the spoilt step is one of those that are saved
# One document a row, two micro-batches of two rows a step.
RUN = {"packing": "none", "save_steps": 2, "max_steps": 6, "lr_scheduler_type": "cosine"}


def order(step: int) -> np.ndarray:
    """The documents of a step (from 1), (micro-batches, rows); of two ranks (.., 2, rows)."""
    samples = np.arange((step - 1) * 4, step * 4)
    return SampleOrder([DOCUMENTS], seed=42).global_rows(samples)


BATCH = order(STEP)
SPOILT = int(BATCH[3])  # the last row of its step: micro-batch 2 of one rank, rank 1 of two


@pytest.fixture(scope="module")
def poisoned(tmp_path_factory) -> Path:
    rows = tiny.documents(DOCUMENTS, seed=5, longest=40)
    rows[SPOILT][1] = POISON
    return tiny.save(tmp_path_factory.mktemp("poisoned") / "documents", {"input_ids": rows})


@pytest.fixture
def start(pretraining, poisoned, monkeypatch):
    """Start a run in this process whose spoilt document does what `kind` says."""
    real = Trainer.compute_loss

    def start(run: Path, kind: str | None, **changes: object) -> int:
        monkeypatch.setattr(
            Trainer, "compute_loss", compute_loss_poisoned(real, kind) if kind else real
        )
        return pretrain.main(pretraining(run, **RUN | {"train_data": poisoned} | changes))

    return start


def kept(run: Path) -> list[str]:
    return sorted(path.name for path in run.glob("*checkpoint-*"))


def report(run: Path, step: int = STEP) -> dict:
    return json.loads((run / f"nonfinite-step-{step}.json").read_text())


def documents(run: Path) -> set[int]:
    return {entry["document"] for entry in report(run)["documents"]}


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


CAUSES = {
    "nan": "step 4: the loss of rank 0 in micro-batch 2 is NaN",
    "inf_loss": "step 4: the loss of rank 0 in micro-batch 2 is infinite",
    "inf_gradient": "step 4: the gradient norm is (NaN|infinite), though the losses are finite",
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_ends_before_anything_of_a_spoilt_step_is_kept(kind, start, tmp_path, poisoned):
    run = tmp_path / "run"
    with pytest.raises(NotFiniteError, match=CAUSES[kind]) as caught:
        start(run, kind)
    assert caught.value.exit_code == 78
    assert kept(run) == ["checkpoint-2"]
    assert not (run / "final").exists()
    expected = set(BATCH.tolist()) if kind == "inf_gradient" else set(BATCH[2:].tolist())
    assert documents(run) == expected
    named = ", ".join(map(str, sorted(expected)))
    assert f"{named} of {poisoned} (all of them: {run}/nonfinite-step-4.json)" in str(caught.value)
    for help_ in ("--accept_changes train_data", "--on_nonfinite skip", "--learning_rate"):
        assert help_ in str(caught.value)
    last = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()][-1]
    assert last["step"] == STEP
    assert (last["loss"] in ("NaN", "Infinity")) == (kind != "inf_gradient")


def test_the_same_command_meets_the_batch_again_and_can_then_skip_it(start, tmp_path):
    run, through = tmp_path / "run", tmp_path / "through"
    with pytest.raises(NotFiniteError):
        start(run, "nan")
    with pytest.raises(NotFiniteError, match="step 4: the loss"):
        start(run, "nan")
    assert start(run, "nan", on_nonfinite="skip") == ExitCode.DONE
    assert start(through, "nan", on_nonfinite="skip") == ExitCode.DONE
    for name in ("final", "checkpoint-6"):
        weights = f"{name}/model.safetensors"
        assert (run / weights).read_bytes() == (through / weights).read_bytes()
