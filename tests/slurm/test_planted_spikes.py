"""A planted spike, from the job that stops at it to the job that trains past it."""

import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tiny
from launching import ROOT
from training_jobs import raw_journal

import status
from utils.data.order import SampleOrder

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("idle")]

STEP, STEPS, BATCH, PLANTED = 60, 70, 8, 4
DOCUMENTS, LENGTH = STEPS * BATCH, 40
TWO_NODES, ONE = ("--nodes=2", "--gpus-per-node=2"), {"STOKER_PROCESSES_PER_NODE": "1"}


@pytest.fixture(scope="module")
def planted(jobs) -> set[int]:
    """Make a dataset in which some documents of one step have other tokens; return their rows.

    All others are random tokens of a small vocabulary, so that the loss is soon flat.
    """
    order = SampleOrder([DOCUMENTS], seed=42).sequences(np.arange(STEP * BATCH))
    rows = set(order[-PLANTED:].tolist())
    random = np.random.default_rng(0)
    documents = random.integers(2, 18, (DOCUMENTS, LENGTH))
    for row in rows:
        documents[row] = random.integers(18, tiny.VOCABULARY, LENGTH)
    tiny.save(jobs.files / "planted", {"input_ids": documents.tolist()})
    return rows


def test_a_spike_stops_the_job_and_is_traced_and_left_out(jobs, slurm, planted, capsys):
    def show(*flags: str) -> str:
        assert status.main([str(run), *flags]) == 0
        return capsys.readouterr().out

    run, skip = jobs.files / "spike", jobs.files / "skip.jsonl"
    settings = {
        "train_data": jobs.files / "planted", "eval_data": None, "eval_strategy": None,
        "eval_steps": None, "packing": "none", "max_steps": STEPS, "learning_rate": 1e-2,
        "lr_scheduler_type": "constant", "on_spike": "stop", "global_batch_size": BATCH,
    }  # fmt: skip
    job = jobs.submit(run, *TWO_NODES, env=ONE, **settings)
    assert slurm.wait(job) == "FAILED", job.output()
    assert "failed with exit code 80, not requeued" in job.output()
    assert f"loss spike: step {STEP}: loss " in job.output()
    assert max(line["step"] for line in raw_journal(run)) <= STEP + 1
    saved = {int(path.name.partition("-")[2]) for path in run.glob("checkpoint-*")}
    assert max(saved) == STEP - 10

    spikes = show("--spikes").splitlines()
    assert any(line.startswith(f"step {STEP}: loss ") for line in spikes)
    shown = show("--step", str(STEP)).splitlines()
    assert shown[0].endswith(f"losses under checkpoint-{STEP - 10} on cpu")
    named = [int(line.split(",")[0].rsplit(" ", 1)[1]) for line in shown[1::2]]
    assert len(named) == BATCH
    assert set(named[:PLANTED]) == planted, "the highest losses come first"
    (choose,) = (line.split(": ", 1)[1] for line in spikes if "head -n 4" in line)
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    command = choose.replace("skip.jsonl", str(skip))
    subprocess.run(["bash", "-euc", command], check=True, cwd=ROOT, env=environment)

    settings |= {"skip_documents": skip, "accept_changes": "skip_documents"}
    job = jobs.submit(run, *TWO_NODES, env=ONE, **settings)
    assert slurm.wait(job) == "COMPLETED", job.output()
    first, second = tiny.starts(run)
    assert second["resumed_from"] == f"{run}/checkpoint-{STEP - 10}"
    assert (first["skip_documents"], second["skip_documents"]["documents"]) == ({}, len(planted))
    losses = {line["step"]: line["loss"] for line in tiny.train_lines(run)}
    assert len(losses) == STEPS
    assert losses[STEP] < 1.2 * losses[STEP - 1]
    assert all(map(math.isfinite, losses.values()))
    assert ": loss " not in show("--spikes")
