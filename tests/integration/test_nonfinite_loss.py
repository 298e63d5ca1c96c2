"""A loss or gradient that is not finite is found on any rank, named, and never saved."""

import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
import tiny
import torch
from launching import run_processes
from poisoned_run import POISON, compute_loss_poisoned
from transformers import Trainer

import pretrain
from utils.config.errors import NotFiniteError
from utils.data.order import SampleOrder

pytestmark = pytest.mark.slow

POISONED_RUN = Path(__file__).with_name("poisoned_run.py")
DOCUMENTS = 60
STEP = 4  # the spoilt one of 6 steps; steps 2, 4 and 6 are saved
# One document per row, two micro-batches of two rows per step.
RUN = {"packing": "none", "save_steps": 2, "max_steps": 6, "lr_scheduler_type": "cosine"}


ORDER = SampleOrder([DOCUMENTS], seed=42).sequences(np.arange(24)).reshape(6, 4)  # by step
BATCH = ORDER[STEP - 1]
SPOILT = int(BATCH[3])  # the step's last row: on one rank in micro-batch 2, on two on rank 1


@pytest.fixture(scope="module")
def poisoned(tmp_path_factory) -> Path:
    rows = tiny.documents(DOCUMENTS, seed=5, longest=40)
    rows[SPOILT][1] = POISON
    return tiny.save(tmp_path_factory.mktemp("poisoned") / "documents", {"input_ids": rows})


@pytest.fixture
def start(pretraining, poisoned, monkeypatch):
    """Return a function that starts a run in this process; the spoilt document acts by `kind`."""
    real = Trainer.compute_loss

    def start(run: Path, kind: str | None, **changes: object) -> int:
        spoilt = compute_loss_poisoned(real, kind) if kind else real
        monkeypatch.setattr(Trainer, "compute_loss", spoilt)
        return pretrain.main(pretraining(run, **RUN | {"train_data": poisoned} | changes))

    return start


def kept(run: Path) -> list[str]:
    return sorted(path.name for path in run.glob("*checkpoint-*"))


def documents(run: Path, step: int = STEP) -> set[int]:
    report = json.loads((run / f"nonfinite-step-{step}.json").read_text())
    return {entry["document"] for entry in report["documents"]}


CAUSES = {
    "nan": "step 4: the loss of rank 0 in micro-batch 2 is nan",
    "inf_gradient": "step 4: the gradient norm is not finite",
}


@pytest.mark.parametrize("kind", CAUSES)
def test_a_run_ends_before_anything_of_a_spoilt_step_is_kept(kind, start, tmp_path, poisoned):
    run = tmp_path / "run"
    with pytest.raises(NotFiniteError, match=CAUSES[kind]) as caught:
        start(run, kind)
    assert caught.value.exit_code == 78
    assert kept(run) == ["checkpoint-2"]
    assert not (run / "final").exists()
    with pytest.raises(NotFiniteError, match=CAUSES[kind]):
        start(run, kind)  # the run resumes and reaches the batch again
    expected = set(BATCH.tolist()) if kind == "inf_gradient" else set(BATCH[2:].tolist())
    assert documents(run) == expected
    named = ", ".join(f"{document} of {poisoned}" for document in sorted(expected))
    assert f"{named} (all of them: {run}/nonfinite-step-4.json)" in str(caught.value)
    for help_ in ("--accept_changes train_data", "--learning_rate", f"{run} --step 4"):
        assert help_ in str(caught.value)
    last = tiny.train_lines(run)[-1]
    assert last["step"] == STEP
    assert math.isfinite(float(last["loss"])) == (kind == "inf_gradient")
    (tmp_path / "skip").write_text(f"{poisoned} {SPOILT}\n")
    past = {"skip_documents": tmp_path / "skip", "accept_changes": "skip_documents"}
    assert start(run, kind, **past) == 0
    assert all(map(math.isfinite, tiny.losses(run)))


@pytest.mark.parametrize("step", [STEP, 6])
def test_weights_that_an_update_spoils_are_not_saved_or_exported(
    step, start, tmp_path, monkeypatch
):
    """Spoil weights at a saved step, and at the last step, which is exported without a save."""
    real = torch.optim.AdamW.step

    def overflow(self, closure=None):
        real(self, closure)
        weight = self.param_groups[0]["params"][0]
        if self.state[weight]["step"] == step:
            with torch.no_grad():
                weight.view(-1)[3] = math.inf

    monkeypatch.setattr(torch.optim.AdamW, "step", overflow)
    run = tmp_path / "run"
    changes = {} if step == STEP else {"save_strategy": "no", "save_steps": None}
    with pytest.raises(NotFiniteError, match=rf"step {step}: the weight model\."):
        start(run, None, **changes)
    assert kept(run) == (["checkpoint-2"] if step == STEP else [])
    assert not (run / "final").exists()
    assert documents(run, step) == set(ORDER[step - 1].tolist())


def test_an_evaluation_waits_for_the_verdict(start, tmp_path, heldout, capsys):
    """Otherwise two ranks would learn of the spoilt step after the evaluation, a step later."""
    with pytest.raises(NotFiniteError):
        start(tmp_path / "run", "nan", **heldout | {"eval_steps": 4})
    assert "eval heldout" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("config", "kind", "cause"),
    [
        ("fsdp2", "inf_loss", "step 4: the loss of rank 1 in micro-batch 2 is inf"),
        ("zero2", "inf_gradient", "step 4: the gradient norm is not finite"),
    ],
)
def test_what_one_of_two_ranks_finds_ends_both(
    config, kind, cause, pretraining, poisoned, tmp_path
):
    """Ranks learn of the spoilt step one step later. Nothing is saved at either step."""
    run = tmp_path / "run"
    settings = {"train_data": poisoned, "per_device_train_batch_size": 1, "save_steps": 3}
    argv = pretraining(run, **RUN | settings)
    done = run_processes(config, POISONED_RUN, argv, {"STOKER_TEST_POISON": kind})
    shown = done.stdout
    assert done.codes == (78, 78), shown[-4000:]
    assert shown.count("not finite:") == 1
    assert len(re.findall(cause, shown)) == 1, shown[-3000:]
    assert documents(run) == ({SPOILT} if kind == "inf_loss" else set(BATCH.tolist()))
    assert kept(run) == ["checkpoint-3"]
    assert not (run / "final").exists()
    assert tiny.train_lines(run)[-1]["step"] == STEP + 1
