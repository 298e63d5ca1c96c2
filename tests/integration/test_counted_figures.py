"""Every count and rate in a run's journal agrees with the test's own counts."""

import math
import shutil
from collections import Counter, defaultdict
from pathlib import Path

import pytest
import tiny
import torch
from launching import run_two_processes

import pretrain
import sft_train
from utils.callbacks.journal import read_journal
from utils.data.packing import plan_packing
from utils.data.token_dataset import open_token_dataset
from utils.training.losses import EvaluationTotals
from utils.training.trainer import PackedTrainer

pytestmark = pytest.mark.slow

STEPS, BATCH, MOST = 6, 8, 7
LAYERS, WIDTH, INNER, KEYS = 2, 32, 64, 16  # sizes of the model in tiny.py


@pytest.fixture
def settings(workspace) -> dict[str, object]:
    """Return settings with two splits: one is evaluated in part, one has a padded last batch."""
    splits = [f"long={workspace / 'documents'}", f"short={workspace / 'short'}"]
    if not (workspace / "short").exists():
        tiny.save(workspace / "short", {"input_ids": tiny.documents(5, seed=4, longest=20)})
    return {
        "eval_data": splits, "eval_strategy": "steps", "eval_steps": 3, "max_steps": STEPS,
        "max_eval_sequences": MOST, "per_device_eval_batch_size": 3, "global_batch_size": BATCH,
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


def effective_length(directory: Path, sequence_length: int = 64) -> float:
    lengths = open_token_dataset(str(directory)).lengths.clip(max=sequence_length).astype(float)
    return float((lengths**2).sum() / lengths.sum())


def flops_per_token(seen: float, frozen_share: int = 6) -> float:
    """Count the model's FLOPs per token by hand: products of layers, of the head, of attention.

    frozen_share: FLOPs per weight and token, 6 for trained weights and 4 for frozen ones.
    """
    layer = 2 * WIDTH * WIDTH + 2 * WIDTH * KEYS + 3 * WIDTH * INNER
    products = LAYERS * layer + WIDTH * tiny.VOCABULARY
    return frozen_share * products + 12 * LAYERS * WIDTH * seen


@pytest.mark.parametrize("packing", ["best_fit", "none"])
def test_each_count_and_rate_of_a_run_and_of_its_evaluations(
    pretraining, workspace, settings, tmp_path, counted, packing
):
    run = tmp_path / "run"
    pretrain.main(pretraining(run, **settings, packing=packing))
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
    plan = plan_packing(open_token_dataset(str(workspace / "documents")).lengths, 64, packing)
    assert last["epoch"] == pytest.approx(STEPS * BATCH / plan.sequences)
    (end,) = lines_of(run, "summary")
    assert_rate(end, "train", STEPS * BATCH, STEPS)
    seen = effective_length(workspace / "documents")
    expected = flops_per_token(seen) * counted["train"]["tokens"]
    assert end["total_flos"] == pytest.approx(expected, rel=1e-6)


def test_a_resumed_run_says_what_this_start_and_what_the_run_did(
    pretraining, workspace, settings, tmp_path, counted, capsys
):
    whole = tmp_path / "whole"
    pretrain.main(pretraining(whole, **settings))
    run = shutil.copytree(whole, tmp_path / "run", ignore=shutil.ignore_patterns(".lock"))
    tiny.cut(run, step=3)
    capsys.readouterr()
    counted.clear()
    pretrain.main(pretraining(run, **settings))
    assert counted["train"]["sequences"] == STEPS // 2 * BATCH
    end, other = lines_of(run, "summary")[-1], lines_of(whole, "summary")[0]
    assert_rate(end, "train", STEPS // 2 * BATCH, STEPS // 2)
    assert end["total_flos"] == other["total_flos"]
    assert f"finished at step {STEPS}, resumed at step 3 after " in capsys.readouterr().out


def test_two_ranks_count_as_one(pretraining, workspace, settings, tmp_path, counted):
    one, two = tmp_path / "one", tmp_path / "two"
    pretrain.main(pretraining(one, **settings))
    argv = pretraining(two, **settings)
    done = run_two_processes("multi_gpu", "pretrain.py", argv)
    assert done.returncode == 0, done.stdout
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


def test_lora_counts_frozen_and_trained_weights(fine_tuning, workspace, tmp_path, counted):
    """A frozen weight counts 4 per token, an adapter's weight 6."""
    run = tmp_path / "run"
    argv = fine_tuning(
        run, use_peft=True, lora_r=4, lora_target_modules="q_proj", max_steps=2, logging_steps=1
    )
    assert sft_train.main(argv) == 0
    (end,) = lines_of(run, "summary")
    seen = effective_length(workspace / "chats")
    each = flops_per_token(seen, frozen_share=4) + 6 * LAYERS * 2 * WIDTH * 4
    assert end["total_flos"] == pytest.approx(each * counted["train"]["tokens"], rel=1e-6)


def test_experts_count_by_those_that_a_token_takes(pretraining, workspace, tmp_path, counted):
    run, config = tmp_path / "run", tmp_path / "experts.json"
    tiny.make_model_config(config, model_type="mixtral", num_local_experts=4, num_experts_per_tok=1)
    pretrain.main(pretraining(run, model_config=config, max_steps=2))
    (end,) = lines_of(run, "summary")
    seen = effective_length(workspace / "documents")
    each = flops_per_token(seen)  # routers are not counted, as docs/metrics.md says
    assert end["total_flos"] == pytest.approx(each * counted["train"]["tokens"], rel=1e-6)


def test_an_evaluation_without_a_loss_token_says_so(caplog):
    figures = EvaluationTotals(torch.device("cpu")).figures("eval_chat")
    assert figures["eval_chat_tokens"] == 0
    assert math.isnan(figures["eval_chat_loss"])
    assert "eval_chat: not one loss token" in caplog.text
