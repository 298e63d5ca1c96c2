"""Proof 6: what the digests of a checkpoint of 1 GB cost, in saves of a run and at its start."""

import contextlib
import json
import os
import statistics
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import tiny
import torch
import transformers

import pretrain
from utils.callbacks.journal_file import read_journal
from utils.checkpoints import digests, files
from utils.checkpoints.discovery import checkpoint_problems
from utils.checkpoints.files import list_files
from utils.checkpoints.store import Checkpoints
from utils.config.errors import ExitCode

pytestmark = pytest.mark.slow

# 82 million parameters, 12 bytes each: float32 weights and the two states of AdamW.
MODEL = {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 6}
PAIRS, WARM_UP = 24, 1  # a single pair is off by a tenth either way
REPEATS = 9
SETTINGS = {
    "global_batch_size": 1, "per_device_train_batch_size": 1, "save_total_limit": 2,
    "learning_rate": 1e-5,
}  # fmt: skip


def has_digests(step: int) -> bool:
    """Which saves compute them: of each pair one, in turn the first and the second."""
    pair, place = divmod(step - 1, 2)
    return place == pair % 2


@contextlib.contextmanager
def digests_in_every_other_save(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let the others write zeros instead; each save begins when the one before is on the disk."""
    real, begin = files.file_digests, Checkpoints.begin
    saving = 0

    def computed_or_not(paths):
        return real(paths) if has_digests(saving) else ["0" * 64 for _ in paths]

    def noted(checkpoints, step, best):
        nonlocal saving
        saving = step
        os.sync()
        return begin(checkpoints, step, best)

    with monkeypatch.context() as patches:
        patches.setattr(files, "file_digests", computed_or_not)
        patches.setattr(Checkpoints, "begin", noted)
        yield


def interval_of_median(values: Sequence[float]) -> list[float]:
    """95 % of the medians of samples drawn from these values, with replacement, are within."""
    drawn = np.random.default_rng(0).choice(values, (10_000, len(values)))
    return [round(float(end), 4) for end in np.quantile(np.median(drawn, axis=1), [0.025, 0.975])]


def plain_trainer_saves(model: Path, directory: Path, saves: int) -> list[float]:
    """Seconds that each save of plain Trainer takes with the same model and settings."""
    config = transformers.AutoConfig.from_pretrained(model)
    rows = [{"input_ids": torch.arange(64), "labels": torch.arange(64)}] * saves
    args = transformers.TrainingArguments(
        output_dir=str(directory), max_steps=saves, save_steps=1, save_total_limit=2,
        per_device_train_batch_size=1, use_cpu=True, report_to=[], disable_tqdm=True,
    )  # fmt: skip
    taken: list[float] = []

    class Timed(transformers.Trainer):
        def _save_checkpoint(self, model, trial):
            os.sync()
            taken.append(timed(lambda: super(Timed, self)._save_checkpoint(model, trial)))

    model = transformers.AutoModelForCausalLM.from_config(config)
    Timed(model=model, args=args, train_dataset=rows).train()
    return taken


def timed(action) -> float:
    begun = time.perf_counter()
    action()
    return time.perf_counter() - begun


@pytest.mark.exhaustive
def test_what_digests_add_to_a_save(pretraining, tmp_path, monkeypatch, figures):
    """Saves with and without them in turn, in one run; then what reads them, and plain Trainer."""
    model, run = tmp_path / "model.json", tmp_path / "run"
    tiny.make_model_config(model, **MODEL, num_key_value_heads=4)
    steps = 2 * (WARM_UP + PAIRS)
    argv = pretraining(run, model_config=model, max_steps=steps, save_steps=1, **SETTINGS)
    with digests_in_every_other_save(monkeypatch):
        assert pretrain.main(argv) == ExitCode.DONE
    lines = [line for line in read_journal(run / "metrics.jsonl") if line["event"] == "save"]
    took = {line["step"]: line["stall_s"] for line in lines}
    pairs = [(step, step + 1) for step in range(2 * WARM_UP + 1, steps, 2)]
    with_s = [took[step] for pair in pairs for step in pair if has_digests(step)]
    without_s = [took[step] for pair in pairs for step in pair if not has_digests(step)]
    shares = [a / b - 1 for a, b in zip(with_s, without_s, strict=True)]

    last = next(step for step in (steps, steps - 1) if has_digests(step))
    checkpoint = run / f"checkpoint-{last}"
    run_id = json.loads((run / "provenance.json").read_text())["run_id"]
    cpu_begun = time.process_time()
    verified = [timed(lambda: problems(checkpoint, last, run_id)) for _ in range(REPEATS)]
    verification_cpu_s = (time.process_time() - cpu_begun) / REPEATS
    plain_s = plain_trainer_saves(model, tmp_path / "plain", WARM_UP + REPEATS)[WARM_UP:]

    save_s, verification_s = statistics.median(without_s), statistics.median(verified)
    share, interval = statistics.median(shares), interval_of_median(shares)
    figures("verification_cost").update(
        checkpoint_gb=round(lines[0]["size_bytes"] / 1e9, 3),
        pairs_of_saves=PAIRS,
        save_without_digests_s=round(save_s, 2),
        save_with_digests_s=round(statistics.median(with_s), 2),
        digests_share_of_save=round(share, 4),
        digests_share_of_save_low=interval[0],
        digests_share_of_save_high=interval[1],
        verification_at_start_s=round(verification_s, 2),
        verification_at_start_share_of_a_save=round(verification_s / save_s, 4),
        verification_at_start_cpu_s=round(verification_cpu_s, 2),
        plain_trainer_save_s=round(statistics.median(plain_s), 2),
        each_share=[round(value, 3) for value in shares],
    )
    assert share < 0.05, shares


def problems(checkpoint: Path, step: int, run_id: str) -> None:
    assert checkpoint_problems(checkpoint, step, run_id) == []


def test_each_part_is_hashed_once_and_two_at_a_time(pretraining, tmp_path, monkeypatch):
    """By a save, and by the start that finds it: the first two parts wait for each other."""
    part_bytes = 2**15
    monkeypatch.setattr(digests, "PART_BYTES", part_bytes)
    real, hashed, counting = digests._part, [], threading.Lock()
    two = threading.Barrier(2)

    def part(path, begin):
        with counting:
            hashed.append((path, begin))
            waits = len(hashed) <= 2
        if waits:
            two.wait(timeout=60)
        return real(path, begin)

    monkeypatch.setattr(digests, "_part", part)
    run = tmp_path / "run"
    checkpoint = run / "checkpoint-6"
    for _ in range(2):  # the second start finds a finished run
        hashed.clear()
        assert pretrain.main(pretraining(run, save_steps=6)) == ExitCode.DONE
        sizes = {name: (checkpoint / name).stat().st_size for name in list_files(checkpoint)}
        parts = [
            (checkpoint / name, begin)
            for name, size in sizes.items()
            for begin in range(0, size, part_bytes)
        ]
        assert len(parts) > len(sizes), "some file has several"
        assert Counter(hashed) == Counter(parts)
