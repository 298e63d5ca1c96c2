"""Proof 6: the time for the digests of a 1 GB checkpoint, in a run's saves and at its start."""

import itertools
import json
import os
import statistics
import time
from pathlib import Path

import pytest
import tiny
from torch.serialization import set_crc32_options

import pretrain
from utils.checkpoints import files
from utils.checkpoints.discovery import checkpoint_problems
from utils.checkpoints.store import Checkpoints
from utils.config.errors import ExitCode
from utils.host.journal_file import read_journal

pytestmark = pytest.mark.slow

# 82 million parameters of 12 bytes each: a float32 weight and two states of AdamW.
MODEL = {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 6}
ROUNDS, WARM_UP = 24, 1  # many rounds, because a single round varies by 10 %
REPEATS = 9
# Kinds of saves: ours; torch's, with a CRC-32 per tensor; and without any checksum.
KINDS = ("digests", "crc32", "no checksums")
ORDERS = list(itertools.permutations(KINDS))


def kind_of(step: int) -> str:
    """Return the kind of save for a step. Each round has every kind, in varying order."""
    number, place = divmod(step - 1, len(KINDS))
    return ORDERS[number % len(ORDERS)][place]


def let_saves_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make each save use the kind of its step, and begin after the last save is on the disk."""
    real, begin = files.file_digests, Checkpoints.begin
    saving = 0

    def computed_or_not(paths, *threads):
        return real(paths, *threads) if kind_of(saving) == "digests" else ["0" * 64 for _ in paths]

    def noted(checkpoints, step):
        nonlocal saving
        saving = step
        set_crc32_options(kind_of(step) == "crc32")
        os.sync()
        return begin(checkpoints, step)

    monkeypatch.setattr(files, "file_digests", computed_or_not)
    monkeypatch.setattr(Checkpoints, "begin", noted)


@pytest.mark.exhaustive
def test_what_digests_add_to_a_save(pretraining, tmp_path, monkeypatch, figures):
    """Time every kind of save in turn in one run; then time the verification."""
    model, run = tmp_path / "model.json", tmp_path / "run"
    tiny.make_model_config(model, **MODEL, num_key_value_heads=4)
    steps = len(KINDS) * (WARM_UP + ROUNDS) + 1
    argv = pretraining(
        run, model_config=model, max_steps=steps, save_steps=1, save_total_limit=2,
        global_batch_size=1, per_device_train_batch_size=1, learning_rate=1e-5,
    )  # fmt: skip
    let_saves_differ(monkeypatch)
    assert pretrain.main(argv) == ExitCode.DONE
    lines = [line for line in read_journal(run / "metrics.jsonl") if line["event"] == "save"]
    took: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for line in lines[len(KINDS) * WARM_UP : -1]:
        took[kind_of(line["step"])].append(line["stall_s"])
    median_s = {kind: statistics.median(seconds) for kind, seconds in took.items()}
    # The extra time of the save with digests, relative to the other saves of the same round.
    added = {
        kind: statistics.median(a / b - 1 for a, b in zip(took["digests"], took[kind], strict=True))
        for kind in KINDS[1:]
    }
    assert kind_of(steps) == "digests", "or the last checkpoint cannot be verified"
    verified_s, verified_cpu_s = verifications(run, steps)
    figures("verification_cost").update(
        checkpoint_gb=round(lines[0]["size_bytes"] / 1e9, 3),
        saves_of_each_kind=ROUNDS,
        save_with_digests_s=round(median_s["digests"], 2),
        save_with_crc32_of_torch_s=round(median_s["crc32"], 2),
        save_without_checksums_s=round(median_s["no checksums"], 2),
        digests_instead_of_crc32_add=round(added["crc32"], 4),
        digests_alone_add=round(added["no checksums"], 4),
        verification_at_start_s=round(verified_s, 2),
        verification_at_start_share_of_a_save=round(verified_s / median_s["digests"], 4),
        verification_at_start_cpu_s=round(verified_cpu_s, 2),
        **{f"each_save_with_{kind}_s": [round(s, 3) for s in took[kind]] for kind in KINDS},
    )
    assert max(added.values()) < 0.05, took


def verifications(run: Path, step: int) -> tuple[float, float]:
    """Time the verification of a checkpoint in the page cache: seconds and CPU seconds."""
    run_id = json.loads((run / "provenance.json").read_text())["run_id"]
    checkpoint = run / f"checkpoint-{step}"
    cpu_begun = time.process_time()
    took = []
    for _ in range(REPEATS):
        begun = time.perf_counter()
        assert not checkpoint_problems(checkpoint, step, run_id)
        took.append(time.perf_counter() - begun)
    return statistics.median(took), (time.process_time() - cpu_begun) / REPEATS
