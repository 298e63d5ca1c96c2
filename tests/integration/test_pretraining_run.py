"""Whole pretraining runs: their results, and settings that must not change the numbers."""

import json
import shutil
from pathlib import Path

import datasets
import huggingface_hub
import pytest
import tiny
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

import pretrain
from utils.callbacks.progress import Progress
from utils.checkpoints.files import read_manifest
from utils.data.packing import plan_packing
from utils.data.token_dataset import open_token_dataset

pytestmark = pytest.mark.slow

# Warm-up, plateau and decay, as shares of the learning rate.
SCHEDULE = {
    "lr_scheduler_type": "warmup_stable_decay",
    "lr_scheduler_kwargs": '{"num_decay_steps": 2, "decay_type": "linear"}',
    "warmup_steps": 2,
}
RATES = [0.0, 0.5, 1.0, 1.0, 1.0, 0.5]


@pytest.fixture(scope="module")
def whole(pretrained, tmp_path_factory) -> Path:
    """Run six uninterrupted steps."""
    return pretrained(tmp_path_factory.mktemp("shared") / "whole", **SCHEDULE)


@pytest.fixture
def copied(whole, tmp_path) -> Path:
    return tiny.copied(whole, tmp_path / "run")


def counted_calls(monkeypatch) -> list[str]:
    """Return a list to which calls that tokenize, map or download add their names."""
    calls: list[str] = []

    def counted(name: str, real):
        return lambda *args, **kwargs: calls.append(name) or real(*args, **kwargs)

    for owner, names in {
        PreTrainedTokenizerFast: "_encode_plus __call__ encode tokenize apply_chat_template",
        datasets.Dataset: "map filter",
        huggingface_hub: "hf_hub_download snapshot_download",
    }.items():
        for name in names.split():
            monkeypatch.setattr(owner, name, counted(name, getattr(owner, name)))
    return calls


def test_a_run_leaves_a_model_that_plain_transformers_loads(
    pretrained, heldout, workspace, tmp_path, monkeypatch
):
    """final/ is the best model. Training tokenizes, maps and downloads nothing."""
    calls = counted_calls(monkeypatch)
    settings = heldout | {
        "eval_steps": 2, "eval_on_start": "true", "max_steps": 20, "save_steps": 10,
        "load_best_model_at_end": "true", "metric_for_best_model": "eval_heldout_loss",
    }  # fmt: skip
    run = pretrained(tmp_path / "run", **settings)
    assert calls == []
    datasets.load_from_disk(str(workspace / "documents")).map(lambda row: row)
    PreTrainedTokenizerFast.from_pretrained(workspace / "tokenizer")("t1 t2")
    assert {"map", "__call__"} <= set(calls), "the counters count"
    model = AutoModelForCausalLM.from_pretrained(run / "final")
    assert model.config.use_cache
    assert model.config._attn_implementation == "sdpa"
    assert len(AutoTokenizer.from_pretrained(run / "final")) == tiny.VOCABULARY
    evaluated = tiny.evaluations(run, "heldout")
    assert sorted(evaluated) == list(range(0, 21, 2))
    assert evaluated[20] < evaluated[0] - 0.5
    # An evaluation equals the mean over tokens of documents evaluated one by one.
    expected = tiny.plain_loss(model, {"input_ids": tiny.documents(31, seed=1)})
    assert min(evaluated.values()) == pytest.approx(expected, abs=1e-5)
    assert not list(run.rglob("training_args.bin"))


def test_a_full_evaluation_in_bf16_rounds_no_weight_of_the_finished_model(
    pretrained, heldout, tmp_path, capsys
):
    """Trainer alone would cast the weights in place for the evaluation after the last step."""
    settings = {**heldout, "eval_on_start": True, "use_cpu": True, "max_steps": 2}
    plain = pretrained(tmp_path / "plain", **settings)
    full = pretrained(tmp_path / "full", **settings, bf16_full_eval=True)
    shown = capsys.readouterr().out
    assert "evaluation as training (bf16_full_eval" in shown
    assert "  accuracy " in shown
    assert sorted(tiny.evaluations(plain, "heldout")) == [0, 2]
    assert tiny.evaluations(plain, "heldout") == tiny.evaluations(full, "heldout")
    tiny.assert_same_run(full, plain)


def test_packing_does_not_change_the_loss_of_the_same_documents(pretrained, workspace, tmp_path):
    """A step over all documents has the same loss and gradient, packed or one per sequence."""
    results = {}
    lengths = open_token_dataset(str(workspace / "documents")).lengths
    for name in ("best_fit", "none"):
        changes = {"packing": name, "max_steps": 1, "per_device_train_batch_size": 1}
        changes["global_batch_size"] = plan_packing(lengths, 64, name).sequences
        (line,) = tiny.train_lines(pretrained(tmp_path / name, **changes))
        results[name] = (line["loss"], line["grad_norm"])
    assert results["none"] == pytest.approx(results["best_fit"], abs=2e-5)


def test_short_unpacked_documents_are_padded_to_the_longest_of_a_micro_batch(
    pretrained, tmp_path, capsys, monkeypatch
):
    """Then sequence_length changes no bit. The longest possible micro-batch is tried first."""
    shapes, begin_batch = [], Progress.begin_batch
    monkeypatch.setattr(
        Progress,
        "begin_batch",
        lambda self, batch: [shapes.append(batch["input_ids"].shape[1]), begin_batch(self, batch)],
    )
    data = tiny.save(tmp_path / "data", {"input_ids": tiny.documents(40, seed=4)})
    settings = {"train_data": data, "packing": "none", "max_steps": 4, "save_steps": 2}
    short = pretrained(tmp_path / "short", **settings, sequence_length=64)
    whole = pretrained(tmp_path / "whole", **settings, sequence_length=128)
    assert "padding: each micro-batch to its longest document, in steps" in capsys.readouterr().out
    assert max(shapes) == 128
    assert shapes.count(128) == 1
    tiny.assert_same_run(whole, short)
    copied = tiny.copied(whole, tmp_path / "run", step=2)
    pretrained(copied, **settings, sequence_length=128)
    tiny.assert_same_run(copied, whole)


def test_a_run_resumes_exactly_from_the_newest_whole_checkpoint(whole, copied, pretrained, capsys):
    shutil.rmtree(copied / "final")
    (copied / "checkpoint-6" / "manifest.json").unlink()
    pretrained(copied, **SCHEDULE)
    shown = capsys.readouterr().out
    assert "checkpoint-6 was not committed" in shown
    assert "set aside as incomplete.checkpoint-6" in shown
    tiny.assert_same_run(copied, whole)
    sources = [start["resumed_from"] for start in tiny.starts(copied)]
    assert sources == [None, f"{copied}/checkpoint-3"]
    counts = [read_manifest(run / "checkpoint-6").tokens for run in (whole, copied)]
    assert counts[0] == counts[1] > read_manifest(whole / "checkpoint-3").tokens


def test_a_resumed_run_logs_and_saves_at_its_new_steps(copied, pretrained):
    """Trainer alone would keep logging_steps and save_steps of the checkpoint's start."""
    changes = {"logging_steps": 2, "save_steps": 1, "save_total_limit": 9}
    pretrained(tiny.cut(copied, step=3), **SCHEDULE, **changes)
    assert [line["step"] for line in tiny.train_lines(copied)] == [1, 2, 3, 4, 6]
    assert {path.name[-1] for path in copied.glob("checkpoint-*")} == {"3", "4", "5", "6"}


def test_what_a_run_records(whole, copied, pretrained, tmp_path, capsys):
    """Check the facts in checkpoints and journal. config.yaml is a recipe of the same run."""
    manifest, record = read_manifest(whole / "checkpoint-6"), tiny.starts(whole)[0]
    assert (manifest.step, manifest.samples, manifest.world_size) == (6, 24, 1)
    assert manifest.run_id == json.loads((whole / "provenance.json").read_text())["run_id"]
    assert manifest.fingerprints["data"] == record["data"]
    assert manifest.versions == record["versions"]
    lines = tiny.train_lines(whole)
    assert [line["learning_rate"] / 1e-2 for line in lines] == pytest.approx(RATES, abs=0.01)
    for line in lines:
        assert {"tokens_seen", "host_rss_gib", "host_peak_rss_gib", "memory_by_rank"} <= line.keys()
    for line in lines[1:]:  # no rate includes the first step
        assert line["tokens_per_s"] > 0
        assert line["step_time_s"] > line["data_wait_s"] >= 0
    seen = [line["tokens_seen"] for line in lines]
    assert seen == sorted(seen)
    assert 0.8 * 6 * 4 * 64 < seen[-1] == manifest.tokens <= 6 * 4 * 64
    config, again = whole / "config.yaml", tmp_path / "again"
    saved = yaml.safe_load(config.read_text())
    assert (saved["global_batch_size"], saved["max_steps"]) == (4, 6)
    pretrain.main(tiny.flags(config=config, output_dir=again, save_total_limit=2, save_steps=2))
    tiny.assert_same_run(again, whole)
    kept = sorted(path.name for path in again.glob("checkpoint-*"))
    assert kept == ["checkpoint-4", "checkpoint-6"]
    # Another start changes nothing in a finished run.
    before = {path: path.stat().st_mtime_ns for path in copied.rglob("final/*")}
    pretrained(copied, **SCHEDULE)
    assert "is finished: nothing is left to do" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in copied.rglob("final/*")} == before


def test_epochs_are_those_of_the_data(pretrained, heldout, tmp_path):
    settings = heldout | {
        "num_train_epochs": 2, "max_steps": -1, "global_batch_size": 16, "eval_strategy": "epoch",
        "eval_steps": None, "save_strategy": "epoch", "save_steps": None,
    }  # fmt: skip
    run = pretrained(tmp_path / "run", **settings)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert tiny.train_lines(run)[-1]["epoch"] == pytest.approx(2.0, abs=0.15)
    assert [int(line["epoch"]) for line in lines if line["event"] == "eval"] == [1, 2]
    assert len(list(run.glob("checkpoint-*"))) == 2


def test_every_attention_computes_the_same_losses(pretrained, tmp_path):
    losses = []
    for name in ("packed_varlen", "sdpa", "eager"):
        run = pretrained(tmp_path / name, attn_implementation=name, max_steps=3)
        assert tiny.starts(run)[0]["attention"]["name"] == name
        losses.append(tiny.losses(run))
    assert losses[1] == pytest.approx(losses[0], abs=1e-5)
    assert losses[2] == pytest.approx(losses[0], abs=1e-5)
