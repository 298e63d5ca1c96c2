"""A run whose global batch grows: the stream of samples stays, and so does the exact resume."""

import json
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import tiny
from launching import run_processes
from transformers import Trainer

import pretrain
from utils.config.errors import ConfigurationError
from utils.config.settings import parse_pretraining
from utils.data.order import GlobalBatchSampler, SampleOrder, steps_for
from utils.training.trainer import PackedTrainer

SIZES = {0: 2, 2: 4, 4: 8}  # 28 samples in six steps
SEVERAL = Path(__file__).parent / "several_runs.py"
GROWING = {"global_batch_size": json.dumps(SIZES), "per_device_train_batch_size": 1}


@pytest.mark.slow
def test_ranks_and_resumes_train_as_one_uninterrupted_process(
    pretraining, pretrained, tmp_path, capfd
):
    """The checkpoints of steps 3 and 5 are inside a phase, that of step 4 is at its border."""
    settings = {**GROWING, "save_steps": 1, "save_total_limit": "null"}
    alone = pretrained(tmp_path / "alone", **settings)
    shown = capfd.readouterr().out
    for accumulation, tokens, first in ((2, 128, 1), (4, 256, 3), (8, 512, 5)):
        counted = f"x {accumulation} accumulation = {tokens} tokens/step, from step {first}"
        assert counted in shown
    assert "= 1,792 tokens with padding" in shown
    manifest = json.loads((alone / "checkpoint-6" / "manifest.json").read_text())
    assert manifest["checkpoint"]["samples"] == 28
    late = {"global_batch_size": '{"0": 2, "6": 4}'}
    small = pretrained(tmp_path / "small", **settings | late)
    assert "batch: the run has no step 7, and so never this size" in capfd.readouterr().out
    assert tiny.losses(alone)[:2] == tiny.losses(small)[:2]
    for step in (3, 4):
        cut = tiny.copied(alone, tmp_path / f"cut-{step}", step=step)
        pretrain.main(pretraining(cut, **settings))
        tiny.assert_same_run(cut, alone)
    with pytest.raises(ConfigurationError, match="its batch_warmup is"):
        pretrain.main(pretraining(cut, **settings | {"global_batch_size": 8}))
    sharded, cut = tmp_path / "fsdp2", tmp_path / "cut"
    plans = {"multi_gpu": [(tmp_path / "multi_gpu", None)]}
    plans["fsdp2"] = [(sharded, None), (cut, [str(sharded), 3])]
    for strategy, runs in plans.items():
        plan = [
            {"script": "pretrain", "argv": pretraining(run, **settings), "run": str(run), "cut": of}
            for run, of in runs
        ]
        (tmp_path / "plan.json").write_text(json.dumps(plan))
        run_processes(strategy, SEVERAL, [str(tmp_path / "plan.json")]).succeeded()
        assert tiny.losses(tmp_path / strategy) == pytest.approx(tiny.losses(alone), abs=2e-5)
    tiny.assert_same_run(cut, sharded)


@pytest.mark.slow
def test_a_resumed_run_keeps_its_sizes_and_says_which_samples_others_leave_out(
    pretraining, pretrained, tmp_path, capfd
):
    settings = {"save_steps": 1, "save_total_limit": "null", "per_device_train_batch_size": 1}

    def resumed(name: str, whole: Path, sizes: object, *accepted: str) -> tuple[Path, str]:
        cut = whole.with_name(name)
        if not cut.exists():
            tiny.copied(whole, cut, step=3)
        argv = pretraining(cut, **settings, global_batch_size=sizes)
        pretrain.main([*argv, *(["--accept_changes", *accepted] if accepted else [])])
        return cut, "".join(capfd.readouterr())

    growing = pretrained(tmp_path / "growing", **settings | GROWING)
    capfd.readouterr()
    cut, shown = resumed("same", growing, None)
    assert "batch_warmup" in shown
    assert "as the run in" in shown
    tiny.assert_same_run(cut, growing)
    _, shown = resumed("later", growing, '{"0": 2, "2": 4, "5": 8}', "batch_warmup")
    assert "samples. With" not in shown, "steps that are still to come"
    with pytest.raises(ConfigurationError, match="--accept_changes batch_warmup"):
        resumed("earlier", growing, '{"0": 2, "1": 4, "4": 8}')
    said = "batch: checkpoint-3 comes after 8 samples, and with these sizes of the global batch 10:"
    assert f"{said} the run leaves out 2 samples. With" in capfd.readouterr().out
    plain = pretrained(tmp_path / "plain", **settings, global_batch_size=4)
    capfd.readouterr()
    _, shown = resumed("larger", plain, 8, "global_batch_size")
    assert "leaves out 12 samples" in shown
    assert "goes on where it was: global_batch_size: {0: ..., 3: 8}" in shown
    accepted = ["global_batch_size", "batch_warmup"]
    cut, shown = resumed("goes_on", plain, '{"0": 4, "3": 8}', *accepted)
    assert "samples. With" not in shown
    manifest = json.loads((cut / "checkpoint-6" / "manifest.json").read_text())
    assert manifest["checkpoint"]["samples"] == 3 * 4 + 3 * 8
    _, shown = resumed("smaller", plain, 2, "global_batch_size")
    assert "repeats 6 samples" in shown


@pytest.mark.parametrize(("shards", "copies"), [(False, False), (True, False), (True, True)])
def test_fsdp2_adds_the_gradients_of_each_micro_batch_over_the_shards(shards, copies, monkeypatch):
    """Otherwise a rank would hold the gradients of all weights."""
    done: list[object] = []

    @contextmanager
    def no_sync(model):
        done.append("apart")
        yield

    trainer = object.__new__(PackedTrainer)
    trainer.sampler, trainer.sums_replicas = SimpleNamespace(grows=True), copies
    trainer.accelerator = SimpleNamespace(no_sync=no_sync, sync_gradients=True, is_fsdp2=shards)
    monkeypatch.setattr(Trainer, "training_step", lambda *given: done.append(given[2]) or 1)
    model = SimpleNamespace(set_requires_all_reduce=done.append)
    assert trainer.training_step(model, ["a", "b"]) == 2
    together = [False, "a", True, "b"] if copies else ["a", "b"]
    assert done == (together if shards else ["apart", "a", "b"])


@pytest.mark.parametrize("weights", [None, [0.3, 0.7]])
def test_batches_are_cut_from_the_same_stream_on_any_ranks_from_any_step(weights):
    order, steps = SampleOrder([101, 30], seed=4, weights=weights), 9
    ranks = [GlobalBatchSampler(order, SIZES, 1, rank, 2, steps) for rank in range(2)]
    turns = zip(*map(list, ranks), strict=True)
    seen = [row for turn in turns for rows in turn for row in rows]
    assert seen == order.sequences(np.arange(2 * 2 + 2 * 4 + 5 * 8)).tolist()
    whole, sampler = list(ranks[0]), ranks[0]
    for step in range(steps):
        before, after = sampler.samples_before(step), sampler.samples_before(step + 1)
        assert sampler.sequences_of_step(step).tolist() == seen[before:after]
        assert len(seen[before:after]) == sampler.size_at(step) == 2 * sampler.accumulation_at(step)
        sampler.start_step = step
        assert list(sampler) == whole[before // 2 :]
    assert len(sampler) == len(whole)
    for samples, steps in ((1, 1), (4, 2), (4.5, 3), (12, 4), (13, 5), (28, 6), (29, 7)):
        assert steps_for(samples, SIZES) == steps


def test_a_recipe_and_a_flag_give_the_same_sizes_and_others_are_refused(tmp_path, monkeypatch):
    recipe = tmp_path / "growing.yaml"
    recipe.write_text("global_batch_size: {0: 64, 2000: 128}\n")
    base = tiny.flags(train_data="d", model_config="m", output_dir="o", sequence_length=64)
    for flags in (["--config", recipe], ["--global_batch_size", '{"0": 64, "2000": 128}']):
        settings = parse_pretraining([*base, *map(str, flags)], "")
        assert settings.run.global_batch_size == 128
        assert settings.run.batch_warmup == {"0": 64, "2000": 128}
    one_size = ["--config", str(recipe), "--global_batch_size", "32"]
    assert parse_pretraining([*base, *one_size], "").run.batch_warmup is None
    recorded = tmp_path / "config.yaml"
    recorded.write_text("global_batch_size: 128\nbatch_warmup: {0: 64, 2000: 128}\n")
    one_size[1] = str(recorded)
    assert parse_pretraining([*base, *one_size], "").run.batch_warmup is None
    settings = parse_pretraining([*base, "--global_batch_size", '{"0": 6, "9": 16}'], "")
    assert settings.training.per_device_train_batch_size == 2, "which divides both"
    wrong = (
        {}, {"1": 64}, {"-5": 32, "0": 64}, {"0": 4, "00": 8}, {"0": 64, "9": 32},
        {"0": 0, "9": 32}, {"0": "64"}, {"0": 1, "x": 2},
    )  # fmt: skip
    for sizes in wrong:
        with pytest.raises(ConfigurationError, match="expected rising sizes by first step"):
            parse_pretraining([*base, "--global_batch_size", json.dumps(sizes)], "")
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    with pytest.raises(ConfigurationError, match=r"batch_warmup .* DEEPSPEED sums .* multi_gpu"):
        parse_pretraining([*base, "--config", str(recipe)], "")
