import json
import logging
import math

import numpy as np
import pytest
import torch
from transformers import TrainerControl, TrainerState

from utils.callbacks.journal import Journal, event_of, split_of, valid_json
from utils.callbacks.journal_lines import read_journal
from utils.callbacks.metrics import MetricCallback


def write(folder, events, start_step=0, rank=0, sources=(), max_steps=10):
    """One start of a run: `events` are (step, logs)."""
    journal = Journal(folder, sources)
    state = TrainerState(
        global_step=start_step, max_steps=max_steps, is_world_process_zero=rank == 0
    )
    journal.on_train_begin(None, state, TrainerControl())
    for step, logs in events:
        journal.on_step_begin(None, state, TrainerControl())
        state.global_step = step
        journal.on_step_end(None, state, TrainerControl())
        journal.on_log(None, state, TrainerControl(), logs=logs)
    journal.on_train_end(None, state, TrainerControl())


def lines(folder):
    return [json.loads(text) for text in (folder / "metrics.jsonl").read_text().splitlines()]


def test_each_event_is_one_line_with_step_and_time(tmp_path):
    write(tmp_path, [(1, {"loss": 2.5, "epoch": 0.1}), (2, {"eval_held_out_loss": 3.0})])
    started, train, evaluation = lines(tmp_path)
    assert (started["event"], started["step"], started["max_steps"]) == ("started", 0, 10)
    assert (train["event"], train["step"], train["loss"], train["epoch"]) == ("train", 1, 2.5, 0.1)
    assert train["time"] > 1.7e9
    assert (evaluation["event"], evaluation["split"]) == ("eval", "held_out")


def test_a_line_is_on_disk_as_soon_as_it_is_logged(tmp_path):
    journal = Journal(tmp_path)
    state = TrainerState(global_step=0, max_steps=3, is_world_process_zero=True)
    journal.on_train_begin(None, state, TrainerControl())
    state.global_step = 1
    journal.on_log(None, state, TrainerControl(), logs={"loss": 1.0})
    assert [line["event"] for line in lines(tmp_path)] == ["started", "train"]


def test_a_run_that_lost_its_directory_leaves_the_journal_to_the_next_one(tmp_path, monkeypatch):
    write(tmp_path, [(1, {"loss": 1.0})])
    before = lines(tmp_path)
    losses = {tmp_path: "it was taken over by process 7 on n2."}
    monkeypatch.setattr("utils.callbacks.journal.known_loss", losses.get)
    write(tmp_path, [(2, {"loss": 1.0})], start_step=1)
    assert lines(tmp_path) == before


@pytest.mark.parametrize(
    ("value", "written"),
    [
        (float("nan"), "NaN"),
        (float("inf"), "Infinity"),
        (float("-inf"), "-Infinity"),
        (np.float32("nan"), "NaN"),
        (torch.tensor(float("inf")), "Infinity"),
        (np.int64(3), 3),
        (torch.tensor(0.5), 0.5),
        ([1.0, float("nan")], [1.0, "NaN"]),
        (None, None),
    ],
)
def test_every_value_becomes_strict_json(value, written):
    text = json.dumps(valid_json({"x": value}), allow_nan=False)
    assert json.loads(text) == {"x": written}


def test_a_loss_that_is_not_finite_comes_back_as_a_number(tmp_path):
    write(tmp_path, [(1, {"loss": float("nan"), "grad_norm": float("inf")})])

    def refuse(constant):
        raise AssertionError(f"not JSON: {constant}")

    for text in (tmp_path / "metrics.jsonl").read_text().splitlines():
        json.loads(text, parse_constant=refuse)
    (line,) = read_journal(tmp_path / "metrics.jsonl")
    assert math.isnan(line["loss"])
    assert line["grad_norm"] == math.inf


def test_a_resumed_run_reads_as_one_series_without_duplicates(tmp_path):
    # Crash after step 5; the last checkpoint is of step 3.
    write(tmp_path, [(step, {"loss": float(step)}) for step in (1, 2, 3, 4, 5)])
    before = (tmp_path / "metrics.jsonl").read_text()
    write(tmp_path, [(step, {"loss": step + 0.5}) for step in (4, 5, 6)], start_step=3)
    assert (tmp_path / "metrics.jsonl").read_text().startswith(before), "nothing is rewritten"
    series = [(line["step"], line["loss"]) for line in read_journal(tmp_path / "metrics.jsonl")]
    assert series == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 4.5), (5, 5.5), (6, 6.5)]


def test_a_run_that_starts_over_undoes_everything_before(tmp_path):
    write(tmp_path, [(0, {"eval_loss": 9.0}), (1, {"loss": 1.0})])
    write(tmp_path, [(0, {"eval_loss": 9.0})])
    assert [line["step"] for line in read_journal(tmp_path / "metrics.jsonl")] == [0]


def test_an_evaluation_repeated_at_the_resumed_step_counts_once(tmp_path):
    splits = [{"eval_a_loss": 1.0}, {"eval_b_loss": 2.0}]
    write(tmp_path, [(3, logs) for logs in splits])
    write(tmp_path, [(3, logs) for logs in splits], start_step=3)
    assert [line["split"] for line in read_journal(tmp_path / "metrics.jsonl")] == ["a", "b"]


def test_a_line_cut_off_by_a_kill_spoils_no_other(tmp_path):
    write(tmp_path, [(step, {"loss": float(step)}) for step in (1, 2, 3)])
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"event": "train", "st')
    write(tmp_path, [(2, {"loss": 2.0})], start_step=1)
    assert [line["step"] for line in read_journal(tmp_path / "metrics.jsonl")] == [1, 2]


def test_a_stopped_run_ends_with_its_own_event(tmp_path):
    journal = Journal(tmp_path, stopped=lambda: True)
    state = TrainerState(global_step=3, max_steps=9, is_world_process_zero=True)
    journal.on_train_begin(None, state, TrainerControl())
    journal.on_log(None, state, TrainerControl(), logs={"train_runtime": 1.0})
    assert [line["event"] for line in lines(tmp_path)] == ["resumed", "stopped"]


def test_other_ranks_write_and_say_nothing(tmp_path, caplog):
    with caplog.at_level(logging.INFO):
        write(tmp_path, [(1, {"loss": 1.0})], rank=1)
    assert not (tmp_path / "metrics.jsonl").exists()
    assert not caplog.records


class Source(MetricCallback):
    def details(self):
        return {"memory_by_rank": [{"rank": 0}]}

    def report(self):
        return "memory: fine"


def test_sources_add_details_to_the_file_and_a_remark_to_the_log(tmp_path, caplog):
    with caplog.at_level(logging.INFO, logger="utils.callbacks.journal"):
        write(tmp_path, [(1, {"loss": 1.0}), (1, {"eval_loss": 1.0})], sources=[Source()])
    _, train, evaluation = lines(tmp_path)
    assert train["memory_by_rank"] == [{"rank": 0}]
    assert "memory_by_rank" not in evaluation
    assert [record.message for record in caplog.records].count("memory: fine") == 1


def test_the_figures_of_a_step_are_one_readable_line(tmp_path, caplog):
    logs = {"loss": 3.4121, "learning_rate": 2.9e-4, "grad_norm": 0.81, "tokens_per_s": 12_400.0}
    logs |= {"step_time_s": 0.41, "data_wait_s": 0.01, "tokens_seen": 5, "epoch": 0.1}
    with caplog.at_level(logging.INFO, logger="utils.callbacks.journal"):
        write(tmp_path, [(120, logs)], max_steps=800)
    (line,) = [record.message for record in caplog.records]
    assert line.startswith(
        "step 120/800  loss 3.4121  lr 2.90e-04  grad 0.810   12.4k tok/s  0.41 s/step  wait 0.01 s"
    )
    assert "  eta " in line


@pytest.mark.parametrize(
    ("logs", "event", "split"),
    [
        ({"loss": 1.0}, "train", None),
        ({"eval_loss": 1.0, "eval_runtime": 1.0}, "eval", None),
        ({"eval_my_code_loss": 1.0, "eval_my_code_runtime": 1.0}, "eval", "my_code"),
        ({"train_runtime": 1.0, "train_loss": 2.0}, "summary", None),
    ],
)
def test_events_and_splits_are_told_from_trainers_keys(logs, event, split):
    assert event_of(logs) == event
    if event == "eval":
        assert split_of(logs) == split
