"""The journal: strict JSON, one series over all starts, one readable log line per event."""

import json
import logging
import math
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import TrainerControl, TrainerState

from utils.callbacks.journal import Journal, readable_line
from utils.host.journal_file import read_journal, strict_json


def write(folder, events, start_step=0, rank=0, max_steps=10, stopped=""):
    """Write one start of a run; `events` are (step, logs)."""
    checkpoints = SimpleNamespace(output_dir=folder, saves=[])
    memory = SimpleNamespace(by_rank=[{"rank": 0}], measure=lambda: None)
    stop = SimpleNamespace(stopped=bool(stopped), reason=stopped, limit_s=lambda: None)
    journal = Journal(checkpoints, memory, stop)
    state = TrainerState(
        global_step=start_step, max_steps=max_steps, is_world_process_zero=rank == 0
    )
    journal.on_train_begin(None, state, TrainerControl())
    for step, logs in events:
        state.global_step = step
        journal.on_log(None, state, TrainerControl(), logs=logs)
        if rank == 0:
            last = (folder / "metrics.jsonl").read_text().splitlines()[-1]
            assert json.loads(last)["step"] == step, "it is on disk as soon as it is logged"


def lines(folder):
    return [json.loads(text) for text in (folder / "metrics.jsonl").read_text().splitlines()]


def test_each_event_is_one_line_in_the_file_and_one_in_the_log(tmp_path, caplog):
    train = {"loss": 2.5, "epoch": 0.1}
    events = [
        (1, train), (2, {"eval_held_out_loss": 3.0}), (2, {"eval_loss": 3.0}),
        (3, {"train_runtime": 1.0, "train_loss": 2.0}),
    ]  # fmt: skip
    with caplog.at_level(logging.INFO, logger="utils.callbacks.journal"):
        write(tmp_path, events)
    first, train_line, *evaluations, summary = lines(tmp_path)
    assert (first["event"], first["step"], first["max_steps"]) == ("started", 0, 10)
    assert train_line["time"] > 1.7e9
    assert train_line == train | {
        "event": "train", "step": 1, "max_steps": 10, "time": train_line["time"],
        "memory_by_rank": [{"rank": 0}],
    }  # fmt: skip
    assert [(line["event"], line["split"]) for line in evaluations] == [
        ("eval", "held_out"), ("eval", None),
    ]  # fmt: skip
    assert all(line["memory_by_rank"] == [{"rank": 0}] for line in evaluations)
    assert "memory_by_rank" not in summary
    assert summary["event"] == "summary"
    kinds = [record.message.split()[0] for record in caplog.records]
    assert kinds == ["step", "eval", "eval", "finished"]
    write(tmp_path, [(3, {"train_runtime": 1.0})], start_step=3, stopped="SIGTERM")
    resumed, stop = lines(tmp_path)[-2:]
    assert (resumed["event"], stop["event"], stop["reason"]) == ("resumed", "stopped", "SIGTERM")


def test_neither_other_ranks_nor_a_run_that_lost_its_directory_write(tmp_path, monkeypatch, caplog):
    with caplog.at_level(logging.INFO):
        write(tmp_path, [(1, {"loss": 1.0})], rank=1)
    assert not (tmp_path / "metrics.jsonl").exists()
    assert not caplog.records
    write(tmp_path, [(1, {"loss": 1.0})])
    before = lines(tmp_path)
    monkeypatch.setattr(
        "utils.callbacks.journal.last_lost_lock_message", {tmp_path: "taken over"}.get
    )
    write(tmp_path, [(1, {"loss": 2.0})], start_step=1)
    assert lines(tmp_path) == before


def test_every_value_becomes_strict_json(tmp_path):
    values = {
        "nan": np.float32("nan"), "tensor": torch.tensor(float("-inf")), "count": np.int64(3),
        "half": torch.tensor(0.5), "list": [1.0, float("inf")], "none": None,
    }  # fmt: skip
    assert json.loads(strict_json(values)) == {
        "nan": "NaN", "tensor": "-Infinity", "count": 3, "half": 0.5, "list": [1.0, "Infinity"],
        "none": None,
    }  # fmt: skip
    write(tmp_path, [(1, {"loss": float("nan"), "grad_norm": float("inf")})])
    (line,) = read_journal(tmp_path / "metrics.jsonl")
    assert math.isnan(line["loss"])
    assert line["grad_norm"] == math.inf


def test_all_starts_read_as_one_series_without_duplicates(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(tmp_path, [(0, {"eval_loss": 9.0}), (1, {"loss": 9.0})])  # the next start begins anew
    write(tmp_path, [(step, {"loss": float(step)}) for step in (1, 2, 3, 4, 5)])
    with path.open("a") as file:
        file.write('{"event": "train", "st')  # killed here; the last checkpoint is of step 3
    before = path.read_text()
    splits = [(3, {"eval_a_loss": 1.0}), (3, {"eval_b_loss": 2.0})]
    write(tmp_path, splits, start_step=3)
    write(tmp_path, [*splits, (4, {"loss": 4.5}), (5, {"loss": 5.5})], start_step=3)
    assert path.read_text().startswith(before), "nothing is rewritten"
    series = [(line["step"], line.get("loss", line.get("split"))) for line in read_journal(path)]
    assert series == [(1, 1.0), (2, 2.0), (3, 3.0), (3, "a"), (3, "b"), (4, 4.5), (5, 5.5)]


TRAIN = {
    "event": "train", "step": 120, "max_steps": 8000, "loss": 3.4121, "learning_rate": 2.9e-4,
    "grad_norm": 0.81, "tokens_per_s": 12_400.0, "step_time_s": 0.41, "data_wait_s": 0.002,
    "tokens_seen": 5,
}  # fmt: skip
ON_A_GPU = {
    "mfu": 0.4131, "memory_peak_gib": 62.14, "memory_free_gib": 12.31, "tokens_per_s": 9_412_400.0,
    "memory_by_rank": [
        {"rank": rank, "host": "n2", "memory_peak_gib": gib} for rank, gib in [(3, 62.14), (4, 56)]
    ],
}  # fmt: skip
FIRST = {"data_wait_s": 0.0123, "first_step_time_s": 41.23, "graphs_compiled": 2}
SLOWEST = {"event": "train", "step": 5, "max_steps": 9, "step_time_s": 1.0, "slowest_rank": 3,
           "slowest_host": "n2"}  # fmt: skip
SHARES = "step 5/9       1 s/step  eta 4s"
FIGURES = "step  120/8000  loss  3.4121  lr 2.90e-04  grad   0.810  "


@pytest.mark.parametrize(
    ("line", "limit_s", "text"),
    [
        (TRAIN, None, FIGURES + "   12,400 tokens/s    0.41 s/step  eta 53m51s"),
        (TRAIN | ON_A_GPU, 11_100, FIGURES + "9,412,400 tokens/s  MFU 41.3%    0.41 s/step  "
         "memory 62.1 GiB (rank 3 on n2)  12.3 free  eta 53m51s (time limit 3h05m)"),
        (TRAIN | FIRST, None, FIGURES + "   12,400 tokens/s    0.41 s/step  eta 53m51s  "
         "waits for data 3%  first step 41.2 s  compiled 2 graphs meanwhile"),
        (TRAIN | {"remaining_s": 3600.0}, None,
         FIGURES + "   12,400 tokens/s    0.41 s/step  eta 1h00m"),
        (TRAIN | {"step": 8000}, 60, FIGURES.replace(" 120/", "8000/")
         + "   12,400 tokens/s    0.41 s/step"),
        ({"event": "train", "step": 1, "max_steps": 8000, "loss": math.nan}, 60,
         "step    1/8000  loss     nan"),
        ({"event": "eval", "split": "a", "step": 5, "eval_a_loss": 3.2, "eval_a_perplexity": 24.53},
         60, "eval a  loss  3.2000  perplexity 24.53  (step 5)"),
        ({"event": "eval", "split": "a", "step": 5, "eval_a_loss": math.nan,
          "eval_a_perplexity": math.inf}, 60, "eval a  loss     nan  (step 5)"),
        ({"event": "summary", "step": 800, "train_runtime": 271.0, "train_loss": 2.5},
         60, "finished at step 800 after 4m31s  mean loss 2.5000"),
        (SLOWEST | {"slowest_cost": 0.03}, None, SHARES),
        (SLOWEST | {"slowest_cost": 0.08}, None,
         f"{SHARES}  rank 3 on n2 is slowest: the others wait 8% of a step for it"),
    ],
)  # fmt: skip
def test_an_event_is_one_readable_line(line, limit_s, text):
    assert readable_line(line, limit_s) == text


def test_a_node_that_is_slowest_in_ten_logs_and_five_minutes_is_noted_once(tmp_path, monkeypatch):
    ledger = tmp_path / "nodes.jsonl"
    monkeypatch.setenv("STOKER_LEDGER", str(ledger))
    memory = SimpleNamespace(by_rank=[{"rank": rank, "host": f"n{rank}"} for rank in range(2)])
    checkpoints = SimpleNamespace(output_dir=tmp_path, saves=[])
    state = TrainerState(global_step=1, max_steps=9, is_world_process_zero=True)

    def noted(*logs: tuple[int, float], every: float = 60.0) -> list[dict]:
        stop = SimpleNamespace(stopped=False, reason="", limit_s=lambda: None)
        journal = Journal(checkpoints, memory, stop, gpus=["GPU-0", "GPU-1"])
        ledger.write_text("")
        for at, (rank, cost) in enumerate(logs):
            monkeypatch.setattr(time, "monotonic", lambda: at * every)  # noqa: B023
            figures = {"loss": 1.0, "slowest_rank": rank, "slowest_cost": cost}
            journal.on_log(None, state, TrainerControl(), logs=figures)
        return [json.loads(line) for line in ledger.read_text().splitlines() if line]

    (fault,) = noted(*[(1, 0.11)] * 25)
    assert (fault["node"], fault["kind"], fault["gpu"]) == ("n1", "slow", "GPU-1")
    assert fault["cause"] == "rank 1 is slowest: the others wait 11% of a step for it"
    assert noted(*[(1, 0.09)] * 25) == [], "less than a tenth of a step"
    assert noted(*[(1, 0.5)] * 25, every=12.0) == [], "for less than five minutes"
    again = [*[(1, 0.5)] * 25, (0, 0.0)] * 9
    assert [fault["node"] for fault in noted(*again)] == ["n1"], "once a start"
    assert noted(*[(1, 0.5)] * 9, (0, 0.5), *[(1, 0.5)] * 9) == [], "not in a row"
    assert len(noted((0, 0.5), *[(1, 0.5)] * 10)) == 1
    monkeypatch.setenv("STOKER_SLOW_SHARE", "0")
    assert noted(*[(1, 0.5)] * 25) == []
