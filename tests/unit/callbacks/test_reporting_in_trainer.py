"""The hooks' contract with Trainer: events, order and keys of a real run."""

import contextlib
import logging

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
from transformers.trainer_callback import PrinterCallback, ProgressCallback
from transformers.utils import logging as transformers_logging

from utils.callbacks.journal import Journal
from utils.callbacks.journal_lines import read_journal
from utils.callbacks.memory import MemoryMonitor
from utils.callbacks.metrics import (
    MetricCallback,
    TerminalProgress,
    Throughput,
    remove_default_reporting,
    reporting_callbacks,
)
from utils.data.loader import TokenCounts

ROWS = [{"input_ids": torch.arange(8), "labels": torch.arange(8)} for _ in range(16)]


class Loader:
    """What Throughput reads, over a fixed list of batches; every global batch has 32 tokens."""

    wait_s = 0.0

    def __init__(self, loader):
        self.loader, self.dataset = loader, ROWS
        self.tokens_seen = TokenCounts(lambda _step: np.array([32]), ["all"])

    def __iter__(self):
        return iter(self.loader)

    def __len__(self):
        return len(self.loader)


class MeasuredTrainer(Trainer):
    def get_train_dataloader(self):
        return Loader(super().get_train_dataloader())

    def log(self, logs, start_time=None):
        if "loss" in logs:
            for callback in self.callback_handler.callbacks:
                if isinstance(callback, MetricCallback):
                    logs |= callback.metrics()
        super().log(logs, start_time)


def train(folder, is_terminal=False, disable_tqdm=True, resume=None, **changes):
    config = LlamaConfig(
        vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
        num_attention_heads=1, max_position_embeddings=8,
    )  # fmt: skip
    settings = {"max_steps": 4, "logging_steps": 2, "save_strategy": "steps", "save_steps": 3}
    args = TrainingArguments(
        output_dir=str(folder), per_device_train_batch_size=4, eval_strategy="steps", eval_steps=2,
        use_cpu=True, report_to="none", ignore_data_skip=True,
        disable_tqdm=disable_tqdm, **(settings | changes),
    )  # fmt: skip
    memory, speed = MemoryMonitor(), Throughput()
    trainer = MeasuredTrainer(
        model=LlamaForCausalLM(config),
        args=args,
        train_dataset=ROWS,
        eval_dataset={"held_out": ROWS[:4], "other": ROWS[:4]},
        callbacks=[memory, speed, Journal(folder, [memory])],
    )
    remove_default_reporting(trainer)
    for callback in reporting_callbacks(is_terminal):
        trainer.add_callback(callback)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    log = logging.getLogger("utils.callbacks.journal")
    records = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    log.addHandler(handler)
    level, log.level = log.level, logging.INFO
    with contextlib.redirect_stdout(None):
        train(folder)
    log.removeHandler(handler)
    log.setLevel(level)
    return folder, records


def test_a_run_is_in_the_journal_from_first_to_last(run):
    folder, _ = run
    events = [
        (line["event"], line.get("split"), line["step"])
        for line in read_journal(folder / "metrics.jsonl")
    ]
    assert events == [
        ("train", None, 2), ("eval", "held_out", 2), ("eval", "other", 2),
        ("train", None, 4), ("eval", "held_out", 4), ("eval", "other", 4),
        ("summary", None, 4),
    ]  # fmt: skip


def test_training_lines_carry_the_figures_of_every_callback(run):
    folder, _ = run
    first, last = [
        line for line in read_journal(folder / "metrics.jsonl") if line["event"] == "train"
    ]
    assert {"loss", "learning_rate", "grad_norm", "epoch", "time"} <= set(first)
    assert {"tokens_per_s", "step_time_s", "data_wait_s", "host_rss_gib"} <= set(first)
    assert first["first_step_time_s"] > 0
    assert "first_step_time_s" not in last
    assert (first["tokens_seen"], last["tokens_seen"]) == (64, 128)
    assert last["tokens_per_s"] == pytest.approx(32 / last["step_time_s"])
    assert [row["rank"] for row in last["memory_by_rank"]] == [0]


def test_people_get_one_line_per_event(run):
    _, messages = run
    kinds = [message.split(" ")[0] for message in messages]
    assert kinds == ["step", "memory", "eval", "eval", "step", "eval", "eval", "finished"]


def test_a_resumed_run_counts_on(run, tmp_path):
    folder, _ = run
    train(folder, resume=str(folder / "checkpoint-3"), max_steps=6)
    lines = [line for line in read_journal(folder / "metrics.jsonl") if line["event"] == "train"]
    assert [(line["step"], line["tokens_seen"]) for line in lines] == [(2, 64), (4, 128), (6, 192)]


@pytest.mark.parametrize("disable_tqdm", [True, False])
@pytest.mark.parametrize("is_terminal", [True, False])
def test_trainers_own_reporters_go_and_ours_stay(tmp_path, capsys, disable_tqdm, is_terminal):
    transformers_logging.disable_progress_bar()  # of its file writers
    trainer = train(tmp_path, is_terminal, disable_tqdm, max_steps=1, logging_steps=1)
    transformers_logging.enable_progress_bar()
    kinds = [type(callback) for callback in trainer.callback_handler.callbacks]
    assert PrinterCallback not in kinds
    assert ProgressCallback not in kinds
    assert (TerminalProgress in kinds) == is_terminal
    out, err = capsys.readouterr()
    assert "loss" not in out, "Trainer printed a log of its own"
    assert ("\r" in err) == is_terminal
