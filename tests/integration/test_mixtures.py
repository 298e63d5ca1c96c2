"""Weighted datasets: a resume is as exact as with one dataset; shares hold over the whole run."""

import shutil
from pathlib import Path

import pytest
import tiny
from launching import run_processes

import pretrain

pytestmark = pytest.mark.slow

# Logs and saves are at different steps; the third source runs out within the first steps.
RUN = {
    "packing": "none", "max_steps": 12, "save_steps": 6, "logging_steps": 4,
    "per_device_train_batch_size": 1,
}  # fmt: skip
MIXTURE = ("tokens_seen/", "tokens_share/", "epochs/")


COUNTS = {"web": 90, "code": 60, "rare": 4}
LONGEST_AND_WEIGHT = {"web": (60, 3), "code": (20, 2), "rare": (30, 1)}


def mixture(run: Path) -> dict[int, dict[str, float]]:
    """Return the figures of the sources by step."""
    return {
        line["step"]: {key: line[key] for key in line if key.startswith(MIXTURE)}
        for line in tiny.train_lines(run)
    }


def test_a_cut_mixture_resumes_exactly_and_logs_its_shares(pretraining, tmp_path, capsys):
    whole, cut, of_two = tmp_path / "whole", tmp_path / "cut", tmp_path / "of_two"
    sources = []
    for name, (longest, weight) in LONGEST_AND_WEIGHT.items():
        rows = {"input_ids": tiny.documents(COUNTS[name], 7, longest)}
        sources.append(f"{tiny.save(tmp_path / name, rows)}={weight}")
    settings = RUN | {"train_data": sources}
    assert pretrain.main(pretraining(whole, **settings)) == 0
    told = "mixture: web 50.0% of the sequences (of the tokens 68.0%), code 33.3% of the sequ"
    assert told in capsys.readouterr().out, "the longest documents are those of web"
    shutil.copytree(whole, cut, ignore=shutil.ignore_patterns(".lock"))  # this process holds it
    tiny.cut(cut, step=6)
    assert pretrain.main(pretraining(cut, **settings)) == 0
    assert f"resuming from {cut}/checkpoint-6" in capsys.readouterr().out
    tiny.assert_same_run(cut, whole)
    figures = mixture(whole)
    assert mixture(cut) == figures
    assert list(figures) == [4, 8, 12]
    last = figures[12]
    assert set(last) == {f"{key}{name}" for key in MIXTURE for name in COUNTS}
    samples = {name: last[f"epochs/{name}"] * count for name, count in COUNTS.items()}
    assert sum(samples.values()) == 12 * 4
    assert last["epochs/rare"] > 1, "it ran out and was gone through again"
    seen = sum(last[f"tokens_seen/{name}"] for name in COUNTS)
    assert seen == tiny.train_lines(whole)[-1]["tokens_seen"]
    assert last["tokens_share/web"] == last["tokens_seen/web"] / seen

    # A run of two ranks resumes on one.
    argv = pretraining(of_two, **settings)
    done = run_processes("multi_gpu", "pretrain.py", argv)
    assert done.returncode == 0, done.stdout[-3000:]
    assert mixture(of_two) == figures, "each rank counts the global batches"
    tiny.cut(of_two, step=6)
    assert pretrain.main(argv) == 0
    assert mixture(of_two) == figures
    assert tiny.losses(of_two) == pytest.approx(tiny.losses(whole), abs=2e-5)
