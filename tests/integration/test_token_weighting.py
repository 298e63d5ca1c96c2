"""One loss over the loss-bearing tokens of a global batch, also where a rank has none of them."""

import math
from pathlib import Path

import numpy as np
import pytest
import tiny
import torch
from launching import run_two_processes
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments

import pretrain
import sft_train
from utils.callbacks.journal import read_journal
from utils.data.loader import PackedDataset
from utils.data.order import GlobalBatchSampler, SampleOrder
from utils.data.packing import plan_packing
from utils.data.token_dataset import open_token_dataset

pytestmark = pytest.mark.slow

STEPS = 8
T = 64
RUN = {
    "packing": "concat",
    "per_device_train_batch_size": 1,
    "max_steps": STEPS,
    "save_steps": STEPS,
    # Adam divides by the gradient's size: where that is rounding, so is the sign of the step.
    "adam_epsilon": 1e-4,
}


def train_lines(run: Path) -> list[dict]:
    return [line for line in read_journal(run / "metrics.jsonl") if line["event"] == "train"]


def chats_with_gaps(count: int) -> dict[str, list[list[int]]]:
    """Documents of 60 tokens that bear loss at their beginning and at their end, in turns.

    End to end, 114 tokens in a row bear none: more than fill a row of 64.
    """
    rows = [(tiny.documents(40, seed=seed, longest=61)[0] * 60)[:60] for seed in range(count)]
    early, late = [0] + [1] * 3 + [0] * 56, [0] * 57 + [1] * 3
    return {"input_ids": rows, "completion_mask": [early, late] * (count // 2)}


def tokens_by_micro_batch(data: Path) -> np.ndarray:
    """Loss-bearing tokens, (steps, micro-batches, ranks), of two ranks that take a row each."""
    dataset = open_token_dataset(data)
    rows = PackedDataset([dataset], [plan_packing(dataset.lengths, T, "concat")])
    order = SampleOrder([len(rows)], seed=42)
    sampler = GlobalBatchSampler(order, 4, 1, rank=0, world_size=2, total_steps=STEPS)
    counts = [
        int(rows.__getitems__([row])["loss_mask"].sum())
        for step in range(STEPS)
        for row in sampler.sequences_of_step(step).tolist()
    ]
    return np.array(counts).reshape(STEPS, 2, 2)


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return tiny.save(tmp_path_factory.mktemp("gaps") / "chats", chats_with_gaps(60))


@pytest.fixture(scope="module")
def kept(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("alone")


@pytest.mark.parametrize(
    "config",
    ["fsdp2", *(pytest.param(n, marks=pytest.mark.exhaustive) for n in ("multi_gpu", "zero2"))],
)
def test_ranks_without_a_loss_token_change_nothing(
    config, data, kept, fine_tuning, tmp_path, capsys
):
    counts = tokens_by_micro_batch(data)
    alone, run = kept / "run", tmp_path / "run"
    if not alone.exists():
        argv = fine_tuning(alone, **RUN | {"train_data": data, "per_device_train_batch_size": 4})
        assert sft_train.main(argv) == 0
    done = run_two_processes(config, "sft_train.py", fine_tuning(run, **RUN, train_data=data))
    assert done.returncode == 0, done.stdout[-3000:]
    ours, expected = train_lines(run), train_lines(alone)
    losses, norms = (
        max(abs(a[name] / b[name] - 1) for a, b in zip(ours, expected, strict=True))
        for name in ("loss", "grad_norm")
    )
    one, other = (load_file(path / "final/model.safetensors") for path in (run, alone))
    weights = max(float((one[name] - other[name]).abs().max()) for name in other)
    empty = int((counts == 0).sum()), int((counts.sum(axis=1) == 0).sum())
    with capsys.disabled():
        print(
            f"\n{config}: {empty[0]} of {counts.size} micro-batches and {empty[1]} of "
            f"{2 * STEPS} steps of a rank without a loss-bearing token; largest difference from "
            f"one rank: loss {losses:.1e}, gradient norm {norms:.1e} (both relative), weights "
            f"{weights:.1e}"
        )
    assert min(empty) > 0
    assert (counts.sum(axis=(1, 2)) > 0).all(), "that is the next test"
    assert losses < 1e-5
    assert norms < 1e-4
    assert weights < 1e-4


def test_a_global_batch_without_a_loss_token_moves_no_gradient(pretraining, tmp_path, capsys):
    """Fine-tuning refuses documents without a target; pretraining on masked data meets them."""
    count = 40
    columns = tiny.masked(tiny.documents(count, seed=4))
    for document in SampleOrder([count], seed=42).sequences(np.arange(4, 8)).tolist():
        columns["completion_mask"][document] = [0] * len(columns["input_ids"][document])
    data, run = tiny.save(tmp_path / "masked", columns), tmp_path / "run"
    argv = pretraining(run, train_data=data, packing="none", max_steps=4, save_steps=4)
    assert pretrain.main(argv) == 0
    told = "step 2: no token of the global batch is trained on, so its loss and gradient are 0"
    assert capsys.readouterr().out.count(told) == 1
    lines = train_lines(run)
    assert (lines[1]["loss"], lines[1]["grad_norm"]) == (0, 0)
    assert all(math.isfinite(line["loss"]) for line in lines)
    assert all(line["loss"] > 1 for line in lines[2:])


def test_what_the_plain_trainer_does_with_such_a_batch(workspace, tmp_path, capsys):
    """For the record: its loss is 0 / 0, and its filter of NaN logs that as 0; nothing is said."""
    rows = torch.tensor([(row * 9)[:30] for row in tiny.documents(16, seed=5)])
    labels = rows.clone()
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(workspace / "model.json"))
    arguments = TrainingArguments(
        output_dir=str(tmp_path / "plain"), max_steps=4, save_strategy="no", logging_steps=1,
        per_device_train_batch_size=4, use_cpu=True, report_to="none", disable_tqdm=True,
        train_sampling_strategy="sequential", logging_nan_inf_filter=False,
    )  # fmt: skip
    labels[4:8] = -100
    data = [{"input_ids": row, "labels": label} for row, label in zip(rows, labels, strict=True)]
    trainer = Trainer(model=model, args=arguments, train_dataset=data)
    trainer.train()
    logged = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    with capsys.disabled():
        print(f"\nplain Trainer without its filter of NaN, no target in step 2: logs {logged}")
    assert math.isnan(logged[1])
