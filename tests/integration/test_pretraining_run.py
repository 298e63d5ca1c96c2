"""Whole pretraining runs in this process: what comes out, and what must not change the numbers."""

import json
from pathlib import Path

import pytest
import tiny
import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import pretrain
from utils.callbacks.journal import read_journal
from utils.checkpoints.manifest import read_manifest

pytestmark = pytest.mark.slow


def test_a_run_leaves_a_model_that_plain_transformers_loads(pretraining, workspace, tmp_path):
    run = tmp_path / "run"
    pretrain.main(
        pretraining(
            run,
            eval_data=f"heldout={workspace / 'heldout'}",
            eval_strategy="steps",
            eval_steps=2,
            eval_on_start="true",
            max_steps=20,
            save_steps=10,
            load_best_model_at_end="true",
            metric_for_best_model="eval_heldout_loss",
        )
    )
    model = AutoModelForCausalLM.from_pretrained(run / "final")
    tokenizer = AutoTokenizer.from_pretrained(run / "final")
    assert model.config.use_cache
    assert model.config._attn_implementation == "sdpa"
    assert len(tokenizer) == tiny.VOCABULARY
    evaluated = tiny.evaluations(run, "heldout")
    assert sorted(evaluated) == list(range(0, 21, 2))
    assert evaluated[20] < evaluated[0] - 0.5
    # The best model was kept: its plain loss is the best of the journal.
    assert _plain_loss(model, tiny.documents(31, seed=1)) == pytest.approx(
        min(evaluated.values()), abs=1e-4
    )
    assert not list(run.rglob("training_args.bin"))


def test_evaluation_is_the_mean_over_the_tokens_of_documents_one_by_one(
    pretraining, workspace, tmp_path
):
    run = tmp_path / "run"
    heldout = f"heldout={workspace / 'heldout'}"
    pretrain.main(pretraining(run, eval_data=heldout, eval_strategy="steps", eval_steps=6))
    model = AutoModelForCausalLM.from_pretrained(run / "final")
    expected = _plain_loss(model, tiny.documents(31, seed=1))
    assert tiny.evaluations(run, "heldout")[6] == pytest.approx(expected, abs=1e-5)


def _plain_loss(model: torch.nn.Module, documents: list[list[int]]) -> float:
    """The oracle: each document alone, unpacked and unpadded, through the model's own loss."""
    total, targets = 0.0, 0
    with torch.no_grad():
        for document in documents:
            ids = torch.tensor([document])
            total += model(input_ids=ids, labels=ids).loss.item() * (len(document) - 1)
            targets += len(document) - 1
    return total / targets


def test_a_full_evaluation_in_bf16_rounds_no_weight_of_the_finished_model(
    pretraining, workspace, tmp_path, capsys
):
    """Trainer would cast them in place for the evaluation after the last step."""
    made = {}
    for full in (False, True):
        run = tmp_path / str(full)
        changes = {"eval_data": f"heldout={workspace / 'heldout'}", "eval_on_start": True}
        argv = pretraining(run, **changes, use_cpu=True, max_steps=2, bf16_full_eval=full)
        assert pretrain.main(argv) == 0
        made[full] = (
            load_file(run / "final" / "model.safetensors"),
            tiny.evaluations(run, "heldout"),
        )
    assert "evaluation computes as training does" in capsys.readouterr().out
    (plain, expected), (full, evaluated) = made[False], made[True]
    assert sorted(evaluated) == [0, 2]
    assert evaluated == expected
    assert all(torch.equal(value, full[key]) for key, value in plain.items())


def test_accumulation_does_not_change_the_losses(pretraining, tmp_path):
    for micro_batch in (1, 2, 4):
        pretrain.main(
            pretraining(tmp_path / str(micro_batch), per_device_train_batch_size=micro_batch)
        )
    reference = tiny.losses(tmp_path / "4")
    assert len(reference) == 6
    assert tiny.losses(tmp_path / "2") == pytest.approx(reference, abs=1e-5)
    assert tiny.losses(tmp_path / "1") == pytest.approx(reference, abs=1e-5)


def test_packing_does_not_change_the_loss_of_the_same_documents(pretraining, tmp_path):
    """One step over all documents, packed or one per sequence, has one loss and one gradient."""
    results = {}
    for name in ("best_fit", "none"):
        sequences = _sequences(pretraining, tmp_path / f"dry-{name}", name)
        run = tmp_path / name
        pretrain.main(
            pretraining(
                run,
                packing=name,
                global_batch_size=sequences,
                per_device_train_batch_size=1,
                max_steps=1,
            )
        )
        line = json.loads((run / "metrics.jsonl").read_text().splitlines()[1])
        results[name] = (line["loss"], line["grad_norm"])
    assert results["none"] == pytest.approx(results["best_fit"], abs=2e-5)


def _sequences(pretraining, output_dir: Path, packing: str) -> int:
    """How many sequences the packing makes, from the data itself."""
    from utils.data.packing import plan_packing
    from utils.data.token_dataset import open_token_dataset

    argv = pretraining(output_dir)
    data = argv[argv.index("--train_data") + 1]
    return plan_packing(open_token_dataset(data).lengths, 64, packing).sequences


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_a_resumed_run_equals_the_uninterrupted_one(pretraining, workspace, tmp_path, dropout):
    config = tiny.make_model_config(tmp_path / "model.json", attention_dropout=dropout)
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    pretrain.main(pretraining(whole, model_config=config))
    pretrain.main(pretraining(cut, model_config=config))
    _undo_after(cut, step=3)
    pretrain.main(pretraining(cut, model_config=config))
    assert tiny.losses(cut) == tiny.losses(whole)
    for name in ("final/model.safetensors", "checkpoint-6/model.safetensors"):
        assert (cut / name).read_bytes() == (whole / name).read_bytes()
    starts = json.loads((cut / "provenance.json").read_text())["starts"]
    assert [start["resumed_from"] for start in starts] == [None, str(cut / "checkpoint-3")]


def _undo_after(run: Path, step: int) -> None:
    """Make it look as if the run had died after its checkpoint of `step`."""
    import shutil

    shutil.rmtree(run / "final")
    for checkpoint in run.glob("checkpoint-*"):
        if int(checkpoint.name.split("-")[1]) > step:
            shutil.rmtree(checkpoint)


@pytest.mark.parametrize(
    ("lost", "words", "aside"),
    [
        ("manifest.json", "checkpoint-6 was not committed", "incomplete.checkpoint-6"),
        (
            "optimizer.pt",
            "checkpoint-6 is damaged (optimizer.pt is missing)",
            "damaged.checkpoint-6",
        ),
    ],
)
def test_what_is_no_whole_checkpoint_is_set_aside(
    lost, words, aside, pretraining, tmp_path, capsys
):
    run, whole = tmp_path / "run", tmp_path / "whole"
    pretrain.main(pretraining(whole))
    pretrain.main(pretraining(run))
    (run / "checkpoint-6" / lost).unlink()
    pretrain.main(pretraining(run))
    shown = capsys.readouterr().out
    assert words in shown
    assert f"set aside as {aside}" in shown
    assert f"resuming from {run}/checkpoint-3" in shown
    assert tiny.losses(run) == tiny.losses(whole)
    assert [start["resumed_from"] for start in tiny.starts(run)] == [None, f"{run}/checkpoint-3"]


def test_a_checkpoint_says_what_it_is(pretraining, workspace, tmp_path):
    run = tmp_path / "run"
    pretrain.main(pretraining(run, save_total_limit=2, save_steps=2))
    assert sorted(path.name for path in run.glob("checkpoint-*")) == [
        "checkpoint-4",
        "checkpoint-6",
    ]
    manifest = read_manifest(run / "checkpoint-6")
    assert (manifest.step, manifest.samples, manifest.world_size) == (6, 24, 1)
    last = read_journal(run / "metrics.jsonl")
    assert manifest.tokens == [line["tokens_seen"] for line in last if "tokens_seen" in line][-1]
    facts = json.loads((run / "provenance.json").read_text())
    assert manifest.run_id == facts["run_id"]
    assert manifest.fingerprints["data"] == facts["starts"][0]["data"]
    assert manifest.versions == facts["starts"][0]["versions"]


def test_tokens_count_over_all_starts(pretraining, tmp_path):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    pretrain.main(pretraining(whole))
    pretrain.main(pretraining(cut))
    _undo_after(cut, step=3)
    pretrain.main(pretraining(cut))
    counts = [read_manifest(run / "checkpoint-6").tokens for run in (whole, cut)]
    assert counts[0] == counts[1] > read_manifest(whole / "checkpoint-3").tokens


def test_a_finished_run_is_left_alone(pretraining, tmp_path, capsys):
    run = tmp_path / "run"
    pretrain.main(pretraining(run))
    before = {path: path.stat().st_mtime_ns for path in (run / "final").iterdir()}
    pretrain.main(pretraining(run))
    assert "is finished: nothing is left to do" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in (run / "final").iterdir()} == before


def test_the_saved_settings_are_a_recipe_of_the_same_run(pretraining, tmp_path):
    pretrain.main(pretraining(tmp_path / "first"))
    config = tmp_path / "first" / "config.yaml"
    pretrain.main(["--config", str(config), "--output_dir", str(tmp_path / "second")])
    assert tiny.losses(tmp_path / "second") == tiny.losses(tmp_path / "first")
    saved = yaml.safe_load(config.read_text())
    assert saved["global_batch_size"] == 4
    assert saved["max_steps"] == 6


def test_epochs_are_those_of_the_data(pretraining, workspace, tmp_path):
    run = tmp_path / "run"
    argv = pretraining(
        run,
        num_train_epochs=2,
        max_steps=-1,
        global_batch_size=16,
        eval_data=f"heldout={workspace / 'heldout'}",
        eval_strategy="epoch",
        save_strategy="epoch",
    )
    drop = argv.index("--save_steps")
    pretrain.main(argv[:drop] + argv[drop + 2 :])
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    train = [line for line in lines if line["event"] == "train"]
    assert train[-1]["epoch"] == pytest.approx(2.0, abs=0.15)
    evaluated = [line["epoch"] for line in lines if line["event"] == "eval"]
    assert [int(epoch) for epoch in evaluated] == [1, 2]
    assert len(list(run.glob("checkpoint-*"))) == 2


def test_training_tokenizes_maps_and_downloads_nothing(
    pretraining, workspace, tmp_path, monkeypatch
):
    import datasets
    import huggingface_hub
    from transformers import PreTrainedTokenizerFast

    calls: list[str] = []

    def count(owner: object, name: str) -> None:
        real = getattr(owner, name)

        def counted(*args, **kwargs):
            calls.append(name)
            return real(*args, **kwargs)

        monkeypatch.setattr(owner, name, counted)

    for name in ("_encode_plus", "__call__", "encode", "tokenize", "apply_chat_template"):
        count(PreTrainedTokenizerFast, name)
    for name in ("map", "filter"):
        count(datasets.Dataset, name)
    for name in ("hf_hub_download", "snapshot_download"):
        count(huggingface_hub, name)
    pretrain.main(pretraining(tmp_path / "run", max_steps=2))
    assert calls == []
    # The counters count: the same calls outside of a run are seen.
    datasets.load_from_disk(str(workspace / "documents")).map(lambda row: row)
    PreTrainedTokenizerFast.from_pretrained(workspace / "tokenizer")("t1 t2")
    assert "map" in calls
    assert "__call__" in calls


def test_every_attention_computes_the_same_losses(pretraining, tmp_path):
    reference = None
    for name in ("packed_varlen", "sdpa", "eager"):
        run = tmp_path / name
        pretrain.main(pretraining(run, attn_implementation=name, max_steps=3))
        provenance = json.loads((run / "provenance.json").read_text())
        assert provenance["starts"][0]["attention"]["name"] == name
        reference = reference or tiny.losses(run)
        assert tiny.losses(run) == pytest.approx(reference, abs=1e-5)


@pytest.mark.parametrize(
    ("schedule", "rates"),
    [
        (
            {
                "lr_scheduler_type": "cosine_with_min_lr",
                "lr_scheduler_kwargs": '{"min_lr_rate": 0.5}',
            },
            [1.0, 0.97, 0.88, 0.75, 0.63, 0.53],
        ),
        (
            {
                "lr_scheduler_type": "warmup_stable_decay",
                "lr_scheduler_kwargs": '{"num_decay_steps": 2, "decay_type": "linear"}',
                "warmup_steps": 2,
            },
            [0.0, 0.5, 1.0, 1.0, 1.0, 0.5],
        ),
    ],
    ids=["cosine with minimum", "warmup-stable-decay"],
)
def test_schedules_are_trainers(schedule, rates, pretraining, tmp_path):
    run = tmp_path / "run"
    pretrain.main(pretraining(run, **schedule))
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    seen = [line["learning_rate"] / 1e-2 for line in lines if line["event"] == "train"]
    assert seen == pytest.approx(rates, abs=0.01)


def test_every_training_log_holds_speed_and_memory(pretraining, tmp_path):
    run = tmp_path / "run"
    pretrain.main(pretraining(run))
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    train = [line for line in lines if line["event"] == "train"]
    for line in train:
        assert {"tokens_seen", "host_rss_gib", "host_peak_rss_gib", "memory_by_rank"} <= line.keys()
    for line in train[1:]:  # the first step stands alone, it is in no rate
        assert line["tokens_per_s"] > 0
        assert line["step_time_s"] > line["data_wait_s"] >= 0
    seen = [line["tokens_seen"] for line in train]
    assert seen == sorted(seen)
    assert 0.8 * 6 * 4 * 64 < seen[-1] <= 6 * 4 * 64
