"""Every count and rate in a run's journal agrees with the test's own counts."""

import math
from collections import Counter, defaultdict
from pathlib import Path

import pytest
import tiny
import torch
from launching import run_processes

from utils.data.packing import plan_packing
from utils.data.token_dataset import open_token_dataset
from utils.host.journal_file import read_journal
from utils.training.losses import EvaluationTotals
from utils.training.trainer import PackedTrainer

pytestmark = pytest.mark.slow

STEPS, BATCH, MOST = 6, 8, 7


@pytest.fixture
def settings(workspace) -> dict[str, object]:
    """Return settings with two splits: one is evaluated in part, one has a padded last batch."""
    splits = [f"long={workspace / 'documents'}", f"short={workspace / 'short'}"]
    if not (workspace / "short").exists():
        tiny.save(workspace / "short", {"input_ids": tiny.documents(5, seed=4, longest=20)})
    return {
        "eval_data": splits, "eval_steps": 3, "max_steps": STEPS, "max_eval_sequences": MOST,
        "per_device_eval_batch_size": 3, "global_batch_size": BATCH,
        "per_device_train_batch_size": 2, "logging_steps": 2,
    }  # fmt: skip


@pytest.fixture
def counted(monkeypatch) -> dict[str, Counter[str]]:
    """Count the model's inputs: under "train", or under the prefix of the evaluated split."""
    found: dict[str, Counter[str]] = defaultdict(Counter)

    def count(name: str, batch: dict[str, torch.Tensor]) -> None:
        tokens = batch["sequence_tokens"]
        found[name] += Counter(
            batches=1, sequences=int((tokens > 0).sum()), tokens=int(tokens.sum()),
            loss_tokens=int(batch["loss_mask"].sum()),
        )  # fmt: skip

    train, predict = PackedTrainer.training_step, PackedTrainer.prediction_step
    evaluate = PackedTrainer.evaluation_loop

    def training_step(self, model, inputs, *args, **kwargs):
        count("train", inputs)
        return train(self, model, inputs, *args, **kwargs)

    def prediction_step(self, model, inputs, *args, **kwargs):
        count(self.prefix_of_test, inputs)
        return predict(self, model, inputs, *args, **kwargs)

    def evaluation_loop(self, *args, metric_key_prefix, **kwargs):
        self.prefix_of_test = metric_key_prefix
        found[metric_key_prefix] = Counter()
        return evaluate(self, *args, metric_key_prefix=metric_key_prefix, **kwargs)

    monkeypatch.setattr(PackedTrainer, "training_step", training_step)
    monkeypatch.setattr(PackedTrainer, "prediction_step", prediction_step)
    monkeypatch.setattr(PackedTrainer, "evaluation_loop", evaluation_loop)
    return found


def assert_rate(line: dict, prefix: str, samples: int, steps: int) -> None:
    """Check that each logged rate, times the logged time, is the count up to rounding."""
    runtime = line[f"{prefix}_runtime"]
    for name, count in (("samples", samples), ("steps", steps)):
        rate = line[f"{prefix}_{name}_per_second"]
        assert abs(rate * runtime - count) <= rate * 5e-5 + runtime * 5e-4 + 1e-6, (prefix, name)


def lines_of(run: Path, event: str) -> list[dict]:
    return [line for line in read_journal(run / "metrics.jsonl") if line["event"] == event]


def flops_per_token(lengths) -> float:
    """Count the FLOPs of the model in tiny.py by hand: products of layers, head and attention."""
    layers, width, inner, keys = 2, 32, 64, 16
    layer = 2 * width * width + 2 * width * keys + 3 * width * inner
    seen = float((lengths**2).sum() / lengths.sum())  # mean length, weighted by tokens
    return 6 * (layers * layer + width * tiny.VOCABULARY) + 12 * layers * width * seen


@pytest.mark.parametrize("packing", ["best_fit", "none"])
def test_each_count_and_rate_of_a_run_of_its_evaluations_and_of_its_resume(
    pretrained, workspace, settings, tmp_path, counted, capsys, packing
):
    settings["packing"] = packing
    run = pretrained(tmp_path / "run", **settings)
    assert counted["train"]["batches"] == STEPS * BATCH // 2
    assert counted["train"]["sequences"] == STEPS * BATCH
    assert counted["eval_long"]["sequences"] == MOST
    assert counted["eval_short"]["sequences"] < MOST
    splits = lines_of(run, "eval")
    assert [(line["step"], line["split"]) for line in splits] == [
        (step, split) for step in (3, 6) for split in ("long", "short")
    ]
    for line in splits:
        prefix = f"eval_{line['split']}"
        own = counted[prefix]
        assert_rate(line, prefix, own["sequences"], own["batches"])
        assert line[f"{prefix}_tokens"] == own["loss_tokens"]
    *_, last = lines_of(run, "train")
    assert last["tokens_seen"] == counted["train"]["tokens"]
    lengths = open_token_dataset(str(workspace / "documents")).lengths
    plan = plan_packing(lengths, 64, packing)
    assert last["epoch"] == pytest.approx(STEPS * BATCH / plan.sequences)
    (end,) = lines_of(run, "summary")
    assert_rate(end, "train", STEPS * BATCH, STEPS)
    expected = flops_per_token(lengths.astype(float)) * counted["train"]["tokens"]
    assert end["total_flos"] == pytest.approx(expected, rel=1e-6)

    tiny.cut(run, step=3)
    capsys.readouterr()
    counted.clear()
    pretrained(run, **settings)
    assert counted["train"]["sequences"] == STEPS // 2 * BATCH
    resumed = lines_of(run, "summary")[-1]
    assert_rate(resumed, "train", STEPS // 2 * BATCH, STEPS // 2)
    assert resumed["total_flos"] == end["total_flos"]
    assert f"finished at step {STEPS}, resumed at step 3 after " in capsys.readouterr().out


def test_two_ranks_count_as_one(pretraining, pretrained, settings, tmp_path, counted):
    one, two = pretrained(tmp_path / "one", **settings), tmp_path / "two"
    run_processes("multi_gpu", "pretrain.py", pretraining(two, **settings)).succeeded()
    for line in lines_of(two, "eval"):
        prefix = f"eval_{line['split']}"
        samples = counted[prefix]["sequences"]
        assert_rate(line, prefix, samples, math.ceil(samples / (2 * 3)))
        assert line[f"{prefix}_tokens"] == counted[prefix]["loss_tokens"]
    (end,), (alone,) = lines_of(two, "summary"), lines_of(one, "summary")
    assert_rate(end, "train", STEPS * BATCH, STEPS)
    assert end["total_flos"] == alone["total_flos"]
    *_, last = lines_of(two, "train")
    assert last["tokens_seen"] == counted["train"]["tokens"]


def test_an_evaluation_without_a_loss_token_says_so(caplog):
    figures = EvaluationTotals(torch.device("cpu")).figures("eval_chat")
    assert figures["eval_chat_tokens"] == 0
    assert math.isnan(figures["eval_chat_loss"])
    assert "eval_chat: not one loss token" in caplog.text
