"""One comparison in real processes, and the GPU cells at toy sizes in this process."""

import importlib
import math
import os
import re
from unittest import mock

import pytest
import torch
from accelerate.state import AcceleratorState
from transformers import Trainer
from transformers.trainer_callback import CallbackHandler

from benchmarks.cells.gpu import GPU_CELLS
from benchmarks.cells.kinds import OURS, STOKER, TUNED_STOKER, Baseline, TrainingCell
from benchmarks.cells.toy import toy
from benchmarks.comparisons import training
from benchmarks.comparisons.training import job_of, parity
from benchmarks.recording.job import STARTED_AT, CannotRunError
from benchmarks.workloads.first_loss import first_losses
from benchmarks.workloads.workload import LLAMA_11M, Workload, make_workload

pytestmark = pytest.mark.slow

ORIGINAL_STEP, ORIGINAL_STEP_END = Trainer.training_step, CallbackHandler.on_step_end
TOYS = {cell.name: toy(cell) for cell in GPU_CELLS}
LACKS = r"is not installed|no module named|needs? a GPU|needs a process|on a CPU"
# --compile does nothing here. So these two cells, one of each kind, leave out the compiled Stoker.
REPEATED = ("qwen3_600m_pretrain", "llama_8b_lora")
TRAINED = {name: cell for name, cell in TOYS.items() if isinstance(cell, TrainingCell)}
# These two cells differ from others only in shape and precision.
del TRAINED["llama_1b_pretrain"], TRAINED["llama_8b_sft"]


@pytest.fixture(autouse=True)
def a_process_of_its_own():
    """Undo a baseline's changes to its process before the next one."""
    variables = {STARTED_AT: "0", "HF_HUB_OFFLINE": "1"}
    # Other tests cover compilation. Here compiling would take longer than everything else.
    with torch._dynamo.config.patch(disable=True), mock.patch.dict(os.environ, variables):
        yield
    put_back()


def put_back():
    Trainer.training_step, CallbackHandler.on_step_end = ORIGINAL_STEP, ORIGINAL_STEP_END
    AcceleratorState._reset_state(reset_partial_state=True)


def train(cell, baseline, workload, scratch):
    """Train in this process as the baseline's process would."""
    put_back()
    module = importlib.import_module(f"benchmarks.baselines.{baseline.module}")
    scratch.mkdir()
    return module.train(job_of(cell, baseline, workload, scratch))


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in REPEATED else pytest.mark.exhaustive)
        for name in TRAINED
    ],
)
def test_everybody_trains_the_same_model(name, tmp_path):
    cell = TRAINED[name]
    (tmp_path / "workload").mkdir()
    workload = make_workload(cell.workload, tmp_path / "workload")
    outcomes = {}
    for number, baseline in enumerate(cell.baselines):
        if baseline.reason_not_to_run() or (baseline is TUNED_STOKER and cell.name in REPEATED):
            continue
        try:
            outcome = train(cell, baseline, workload, tmp_path / str(number))
        except CannotRunError as error:
            assert re.search(LACKS, str(error))  # noqa: PT017 - other baselines must run
            continue
        assert all(math.isfinite(loss) for loss in outcome.losses)
        assert outcome.window_tokens >= outcome.window_loss_tokens > 0
        assert len(outcome.losses) == len(outcome.step_s) + 1 == cell.steps
        assert bool(outcome.notes.get("kernels")) is cell.trace
        outcomes[baseline.name] = [outcome]
    assert len(outcomes) >= 2
    expected = {}
    if cell.workload.kind == "sft":
        firsts = {name: runs[0].first_documents for name, runs in outcomes.items()}
        assert all(firsts.values())
        expected = first_losses(workload, cell.precision, firsts)
    found = parity(cell, outcomes, expected)
    assert max(found["differences"].values()) <= found["limit"], found
    assert found["compared_steps"] == (3 if cell.workload.kind == "pretrain" else 1)
    # A toy cell has few documents, and the prompts' lengths are rounded to whole tokens.
    assert max(found["loss_share_differences"].values()) < 0.08, found


SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 200}
PLAIN = Baseline("plain loop", "plain_loop", tuned=False)
ABSENT = Baseline("absent", "absent", needs="no_such_package")


def test_a_comparison_of_toolkits(capsys):
    workload = Workload(LLAMA_11M | SMALL, sequence_length=64, documents=16)
    baselines = (STOKER, PLAIN, ABSENT)
    cell = TrainingCell("small", "Small", workload, "fp32", 2, baselines, steps=4, warmup_steps=2)
    result = training.hold(cell, repeats=1)
    assert result["not_run"] == {"absent": "no_such_package is not installed"}
    assert set(result["compared"]) == {OURS, "plain loop"}
    for measured in result["compared"].values():
        assert measured["tokens_per_second"] > 0
        assert measured["first_step_s"] > 0
        assert measured["peak_memory_bytes"] > 2**26
        assert len(measured["losses"]) == 4
        assert len(measured["step_s"]) == 3
    assert result["compared"][OURS]["notes"]["loss_head"]["name"] == "fused"
    assert result["parity"]["compared_steps"] == 4
    assert result["parity"]["differences"]["plain loop"] < 1e-5
    assert result["ratios"]["plain loop"]["median"] > 0
